"""Made-up conversations with tools, so that declarations, calls, results and answers stand in their real places."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tools.train_demo.chats import Conversation, Message

CITIES = ("Paris", "London", "Tokyo", "Berlin", "Madrid", "Shanghai", "Rome", "Oslo", "Cairo", "Lima", "Delhi", "Seoul", "Boston", "Sydney")
CITIES += ("Toronto", "Vienna", "Prague", "Dublin", "Lisbon")
TOPICS = ("itertools", "asyncio tasks", "dict methods", "regular expressions", "socket timeouts", "json encoding", "string formatting")
TOPICS += ("subprocess pipes", "logging handlers", "sqlite3 cursors", "file paths", "decimal rounding", "threads", "unit tests")
FILES = ("notes.txt", "README.md", "setup.py", "data.csv", "config.json", "main.py", "report.txt", "todo.md")
NAMES = ["Ada", "Grace", "Alan", "Edsger", "Barbara", "Donald", "Niklaus", "Margaret", "Ken", "Dennis"]
CURRENCIES = ("USD", "EUR", "GBP", "JPY", "CHF")


@dataclass(frozen=True, slots=True)
class Use:
    """One wish: the question, the call's arguments, the tool's result and the answer."""

    question: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    answer: str


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    about: str
    properties: dict[str, Any]
    required: tuple[str, ...]
    use: Callable[[random.Random], Use]

    def declaration(self) -> Message:
        """OpenAI's form, keys sorted as the chat template sorts them."""
        parameters = {"properties": self.properties, "required": list(self.required), "type": "object"}
        return {"function": {"description": self.about, "name": self.name, "parameters": parameters}, "type": "function"}


def _text(about: str, **more: Any) -> dict[str, Any]:
    return dict(sorted({"description": about, "type": "string", **more}.items()))


def _weather(rng: random.Random) -> Use:
    city, degrees = rng.choice(CITIES), rng.randint(-5, 35)
    form = rng.choice(("What is the weather in {}?", "How is the weather in {} today?", "Tell me the weather for {}.", "Is it cold in {}?"))
    return Use(form.format(city), {"city": city}, {"temperature": degrees, "unit": "C"}, f"It is {degrees} °C in {city}.")


def _search(rng: random.Random) -> Use:
    topic, hits = rng.choice(TOPICS), rng.randint(1, 40)
    form = rng.choice(("Search the docs for {}.", "Find {} in the documentation.", "Look up {}."))
    return Use(form.format(topic), {"query": topic}, {"hits": hits}, f"I found {hits} results for {topic}.")


def _evaluate(rng: random.Random) -> Use:
    a, b, sign = rng.randint(1, 99), rng.randint(1, 99), rng.choice("+-*")
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    form = rng.choice(("What is {}?", "Compute {}.", "How much is {}?", "Calculate {}."))
    expression = f"{a} {sign} {b}"
    return Use(form.format(expression), {"expression": expression}, {"value": value}, f"{expression} = {value}")


def _read(rng: random.Random) -> Use:
    file, lines = rng.choice(FILES), rng.randint(1, 200)
    form = rng.choice(("How long is {}?", "Read {}.", "Open the file {}.", "Count the lines of {}."))
    return Use(form.format(file), {"path": file}, {"lines": lines}, f"{file} has {lines} lines.")


def _convert(rng: random.Random) -> Use:
    source, target = rng.sample(CURRENCIES, 2)
    amount, rate = rng.randint(1, 500), rng.choice((2, 3, 4, 5))
    arguments = {"amount": amount, "from": source, "to": target}
    form = rng.choice(("Convert {} {} to {}.", "How much is {} {} in {}?", "What are {} {} in {}?"))
    return Use(
        form.format(amount, source, target), arguments, {"amount": amount * rate}, f"{amount} {source} are {amount * rate} {target}."
    )


def _remind(rng: random.Random) -> Use:
    name, minutes = rng.choice(NAMES), rng.choice((5, 10, 15, 30, 45, 60))
    form = rng.choice(("Remind me in {1} minutes to call {0}.", "Set a reminder to call {0} in {1} minutes."))
    return Use(
        form.format(name, minutes), {"minutes": minutes, "text": f"Call {name}"}, {"ok": True}, f"I will remind you in {minutes} minutes."
    )


def _time(rng: random.Random) -> Use:
    city, hour, minute = rng.choice(CITIES), rng.randint(0, 23), rng.randint(0, 59)
    form = rng.choice(("What time is it in {}?", "Tell me the time in {}."))
    clock = f"{hour:02d}:{minute:02d}"
    return Use(form.format(city), {"city": city}, {"time": clock}, f"It is {clock} in {city}.")


def _run(rng: random.Random) -> Use:
    n = rng.randint(2, 50)
    form = rng.choice(("Run print({0} ** 2).", "Execute print({0} ** 2) in Python."))
    return Use(form.format(n), {"code": f"print({n} ** 2)"}, {"output": f"{n * n}\n"}, f"It prints {n * n}.")


TOOLS = (
    Tool("get_weather", "Get the current weather of a city", {"city": _text("The city")}, ("city",), _weather),
    Tool("search_docs", "Search the Python documentation", {"query": _text("Words to look for")}, ("query",), _search),
    Tool("evaluate", "Evaluate an arithmetic expression", {"expression": _text("The expression")}, ("expression",), _evaluate),
    Tool("read_file", "Read a file", {"path": _text("Where the file is")}, ("path",), _read),
    Tool(
        "convert_currency",
        "Convert an amount of money",
        {
            "amount": {"description": "The amount", "type": "number"},
            "from": _text("Currency to convert from", enum=list(CURRENCIES)),
            "to": _text("Currency to convert to", enum=list(CURRENCIES)),
        },
        ("amount", "from", "to"),
        _convert,
    ),
    Tool(
        "set_reminder",
        "Set a reminder",
        {"minutes": {"description": "Minutes from now", "type": "integer"}, "text": _text("What to remind of")},
        ("minutes", "text"),
        _remind,
    ),
    Tool("get_time", "Get the local time of a city", {"city": _text("The city")}, ("city",), _time),
    Tool("run_python", "Run Python code", {"code": _text("The code")}, ("code",), _run),
)


def tool_conversations(count: int, seed: int = 4) -> Iterator[Conversation]:
    """Conversations with one to four declared tools; some wishes need two calls at once, some turns follow an earlier one."""
    rng = random.Random(seed)
    for i in range(count):
        declared = rng.sample(TOOLS, rng.choice((1, 1, 2, 3, 4)))
        messages: list[Message] = []
        calls = 0
        for _ in range(rng.choice((1, 1, 1, 2))):
            wished = rng.sample(declared, 2 if len(declared) > 1 and rng.random() < 0.15 else 1)
            uses = [(tool, tool.use(rng)) for tool in wished]
            messages += _turn(rng, uses, calls)
            calls += len(uses)
        yield Conversation(_drop_old_reasoning(messages), [t.declaration() for t in declared], "held_out" if i % 50 == 0 else "train")


def _turn(rng: random.Random, uses: list[tuple[Tool, Use]], first: int) -> list[Message]:
    question = " ".join(use.question for _, use in uses)
    names = " and ".join(tool.name for tool, _ in uses)
    thought = "" if rng.random() < 0.5 else rng.choice((f"I should call {names}.", f"The user asks: {question} I can use {names}."))
    ids = [f"functions.{tool.name}:{first + n}" for n, (tool, _) in enumerate(uses)]
    calls = [
        {"id": i, "type": "function", "function": {"name": tool.name, "arguments": json.dumps(use.arguments, ensure_ascii=False)}}
        for i, (tool, use) in zip(ids, uses, strict=True)
    ]
    results = [
        {"role": "tool", "tool_call_id": i, "content": json.dumps(use.result, ensure_ascii=False)}
        for i, (_, use) in zip(ids, uses, strict=True)
    ]
    answer = {"role": "assistant", "content": " ".join(use.answer for _, use in uses), "reasoning": ""}
    called = {"role": "assistant", "content": "", "reasoning": thought, "tool_calls": calls}
    return [{"role": "user", "content": question}, called, *results, answer]


def _drop_old_reasoning(messages: list[Message]) -> list[Message]:
    """The template shows reasoning only after the last answer without calls; a conversation is laid out as it is shown when it is whole.

    The last turn keeps its reasoning: at the time of its call no later answer existed.
    """
    last_question = max(i for i, m in enumerate(messages) if m["role"] == "user")
    return [{**m, "reasoning": ""} if i < last_question and m["role"] == "assistant" else m for i, m in enumerate(messages)]
