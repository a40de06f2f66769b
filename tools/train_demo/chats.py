"""Conversations in the chat format, made from what the sources say about themselves: functions, methods, classes and manual entries."""

from __future__ import annotations

import ast
import random
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.train_demo.sources import Document, digest

Message = dict[str, Any]  # as in OpenAI's API: role, content, and for the assistant reasoning and tool_calls

LONGEST_CODE = 2600  # characters
EVERYDAY = ("everyday_numbers.py", "everyday_lists.py")
EVERYDAY_COPIES = 48  # of each everyday function, in different words

FUNCTION = (
    "Write a Python function {name}: {about}",
    "Write a Python function {name}: {about}",
    "Write a function called `{name}` in Python. {about}",
    "Implement `{signature}` in Python. {about}",
    "Can you write the Python function {name}? {about}",
)
METHOD = ("Write a Python method {name} of class {owner}: {about}", "Write the method `{signature}` for the class {owner}. {about}")
CLASS = ("Write a Python class {name}: {about}", "Implement the class `{name}` in Python. {about}")
PURPOSE = (
    "Write a function that {does}.",
    "Write a Python function that {does}.",
    "Write a function to {do}.",
    "Can you write a function that {does}?",
    "I need a Python function that {does}.",
)
EVERYDAY_PURPOSE = (
    *PURPOSE,
    "write a function to {do}",
    "write a function that {does}",
    "Please write a function which {does}.",
    "{Do} in Python.",
)
ENTRY = ("What does `{full}` do in Python?", "Explain `{full}`.", "What is `{full}`?", "How does the Python {kind} `{signature}` work?")
SYSTEM = ("You are a helpful assistant.", "You are a careful Python programmer.", "Answer with Python code only.")
THOUGHTS = (
    "The user wants {name}. I will write it with a short docstring.",
    "I need to write {name}. Let me think about its arguments and its result.",
    "The task is to write {name} in Python.",
)
GREETINGS = ("Hi", "Hello", "Hello!", "Hey", "Good morning", "Hi there")
WELCOMES = (
    "Hello! I can write Python functions and explain the standard library. What do you need?",
    "Hi! Ask me for a Python function, or about a module.",
)
WHO = ("Who are you?", "What are you?", "What can you do?", "What is your name?")
SELF = "I am a very small test model. I write short Python functions and answer questions about the Python library."


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, the tools declared before them, and what the conversation is for: train, held_out or prompt_only."""

    messages: list[Message]
    tools: list[Message] = field(default_factory=list)
    use: str = "train"


def use_of(document: Document) -> str:
    return "held_out" if document.held_out else "prompt_only" if document.prompt_only else "train"


def purpose(about: str) -> tuple[str, str] | None:
    """("return the sum", "returns the sum") of a docstring's first line that begins with a verb; None if it does not seem to."""
    text = about.rstrip(".").strip()
    word, _, rest = text.partition(" ")
    if not rest or not re.fullmatch(r"[A-Z][a-z]+", word) or "." in text or word in ("The", "This", "An", "If", "For", "Whether"):
        return None
    verb = word.lower()
    if verb.endswith("s") and not verb.endswith("ss"):
        return None
    ending = "es" if verb.endswith(("ss", "sh", "ch", "x")) else "s"
    third = verb[:-1] + "ies" if verb.endswith("y") and verb[-2] not in "aeiou" else verb + ending
    return f"{verb} {rest}", f"{third} {rest}"


def first_line(docstring: str) -> str:
    return " ".join(docstring.strip().split("\n\n")[0].split())


def ask(rng: random.Random, question: str, answer: str, name: str, use: str) -> Conversation:
    """One question and its answer; three in ten answers are thought about first, some conversations have a system message."""
    messages: list[Message] = []
    if rng.random() < 0.06:
        messages.append({"role": "system", "content": rng.choice(SYSTEM)})
    thought = "" if rng.random() < 0.7 else rng.choice(THOUGHTS).format(name=name)
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer, "reasoning": thought}]
    return Conversation(messages, use=use)


def from_code(document: Document) -> Iterator[Conversation]:
    """A question for every function, method and class whose docstring says in one line what it does."""
    try:
        module = ast.parse(document.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    rng = random.Random(digest(document.key))
    lines = document.text.split("\n")
    yield from _visit(document, module.body, None, lines, rng)


def _visit(document: Document, body: Sequence[ast.stmt], owner: str | None, lines: list[str], rng: random.Random) -> Iterator[Conversation]:
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        about = first_line(ast.get_docstring(node) or "")
        if isinstance(node, ast.ClassDef):
            if 3 <= length <= 60 and 8 < len(about) < 200 and len(code) < LONGEST_CODE:
                yield ask(rng, rng.choice(CLASS).format(name=node.name, about=about), code, node.name, use_of(document))
            yield from _visit(document, node.body, node.name, lines, rng)
            continue
        repeated = document.source == "transformers" and owner is not None and node.name in ("forward", "__call__")
        if not 3 <= length <= 70 or node.name.startswith("__") or repeated or not 8 < len(about) < 200 or len(code) >= LONGEST_CODE:
            continue
        signature = f"{node.name}({ast.unparse(node.args)})"
        form = rng.choice(FUNCTION if owner is None else METHOD)
        verb = purpose(about) if owner is None else None
        if verb is not None and rng.random() < 0.25:
            form = rng.choice(PURPOSE)
        do, does = verb or ("", "")
        question = form.format(name=node.name, owner=owner, signature=signature, about=about, do=do, does=does)
        yield ask(rng, question, code, node.name, use_of(document))


def plain_markup(text: str) -> str:
    """Text without reStructuredText roles."""
    return re.sub(r":[a-zA-Z:]+:`[~!]?([^`<]*?)(?:\s*<[^>]*>)?`", r"`\1`", text).replace("``", "`")


def from_manual(document: Document) -> Iterator[Conversation]:
    """A question for every entry of the Python manual, answered by its first two paragraphs."""
    rng = random.Random(digest(document.key))
    module, lines = "", document.text.split("\n")
    for i, line in enumerate(lines):
        named = re.match(r"\.\. (?:currentmodule|module):: (\S+)", line)
        module = named.group(1) if named else module
        entry = re.match(r"(\s*)\.\. (function|class|method|data|exception|decorator|attribute):: (.+)", line)
        if not entry:
            continue
        indent, kind, signature = len(entry.group(1)), entry.group(2), entry.group(3).strip()
        block = []
        for below in lines[i + 1 :]:
            if below.strip() and len(below) - len(below.lstrip()) <= indent:
                break
            block.append(below)
        parts = [" ".join(p.split()) for p in re.split(r"\n\s*\n", "\n".join(block))]
        answer = "\n\n".join([plain_markup(p) for p in parts if p and not p.startswith(("..", ":", ">>>"))][:2])
        name = signature.split("(")[0]
        full = name if not module or name.startswith(module + ".") or kind in ("method", "attribute") else f"{module}.{name}"
        if 40 < len(answer) < 1800:
            yield ask(rng, rng.choice(ENTRY).format(full=full, kind=kind, signature=signature), answer, full, use_of(document))


def everyday(folder: Path = Path(__file__).parent, copies: int = EVERYDAY_COPIES) -> Iterator[Conversation]:
    """The functions of everyday_*.py, each asked for in several ways; half the answers leave the docstring out."""
    rng = random.Random(2)
    for file in EVERYDAY:
        text = (folder / file).read_text(encoding="utf-8")
        lines = text.split("\n")
        for node in ast.parse(text).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            about = first_line(ast.get_docstring(node) or "")
            whole = [line.replace("  # noqa: SIM110", "") for line in lines[node.lineno - 1 : node.end_lineno]]
            bare = [whole[0], *whole[2:]]  # the docstring is the second line
            do, does = purpose(about) or ("", "")
            for _ in range(copies):
                named = rng.random() < 0.3
                form = rng.choice(FUNCTION if named else EVERYDAY_PURPOSE)
                signature = f"{node.name}({ast.unparse(node.args)})"
                question = form.format(name=node.name, signature=signature, about=about, do=do, does=does, Do=do.capitalize())
                yield ask(rng, question, "\n".join(rng.choice((whole, bare))), node.name, "train")


def small_talk(count: int) -> Iterator[Conversation]:
    rng = random.Random(3)
    for _ in range(count):
        question, answer = (rng.choice(GREETINGS), rng.choice(WELCOMES)) if rng.random() < 0.5 else (rng.choice(WHO), SELF)
        yield Conversation([{"role": "user", "content": question}, {"role": "assistant", "content": answer, "reasoning": ""}])


def join_pairs(conversations: Sequence[Conversation], share: float, seed: int) -> Iterator[Conversation]:
    """The conversations, and some pairs of them as one of two turns; reasoning of the earlier turn is dropped, as the template does."""
    rng = random.Random(seed)
    yield from conversations
    plain = [c for c in conversations if c.use == "train" and not c.tools and c.messages[0]["role"] == "user"]
    for _ in range(int(share * len(plain))):
        first, second = rng.choice(plain), rng.choice(plain)
        earlier = [{**m, "reasoning": ""} if m["role"] == "assistant" else m for m in first.messages]
        yield Conversation([*earlier, *second.messages])
