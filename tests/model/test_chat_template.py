"""The chat template: reference prompts, a second engine, and what stops a template that fails or never ends."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from model import chat_template
from model.chat_template import ChatTemplate, TemplateError
from model.messages import MAX_DEPTH, MAX_MESSAGES, sort_keys
from model.tokenizer import Tokenizer
from model.tools_ts import declare

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "model" / "demo"
FIXTURES = ROOT / "tests" / "fixtures"
T = Tokenizer.load(DEMO)
C = ChatTemplate.load(DEMO, T)
SOURCE = (DEMO / "chat_template.jinja").read_text()

# Another way to write such a template: break, slices, macros, subscripts, no tools_ts_str, a default system turn.
OTHER = (FIXTURES / "other_chat_template.jinja").read_text()
OTHER_TEMPLATE = ChatTemplate(OTHER, T)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "The city"}}, "required": ["city"]},
    },
}
CALL = {"id": "functions.get_weather:0", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "X"}'}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "u1"},
    {"role": "assistant", "content": "a1", "reasoning_content": "r1"},
    {"role": "user", "content": "u2"},
    {"role": "assistant", "content": None, "reasoning_content": "r2", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "sunny"},
]


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def jinja2_render(source: str, messages: Any, tools: Any = None, **context: Any) -> str:
    """The second engine, set up as chat templates expect it."""

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    if tools and "tools_ts_str" in source:
        tools = sort_keys(tools)
        context["tools_ts_str"] = declare(tools)
    return environment.from_string(source).render(messages=messages, tools=tools, add_generation_prompt=True, **context)


def controls(ids: list[int]) -> list[int]:
    return [token for token in ids if token >= min(T.special.values())]


# --- reference prompts ---


def test_golden_renders() -> None:
    head = "<|im_assistant|>assistant<|im_middle|>"
    assert C.render(ask("Hi")) == f"<|im_user|>user<|im_middle|>Hi<|im_end|>{head}<think>"
    assert C.render([{"role": "system", "content": "S"}, *ask("Hi")], thinking=False) == (
        f"<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user<|im_middle|>Hi<|im_end|>{head}<think></think>"
    )
    rest = (
        f"a1<|im_end|><|im_user|>user<|im_middle|>u2<|im_end|>{head}<think>r2</think><|tool_calls_section_begin|><|tool_call_begin|>"
        'functions.get_weather:0<|tool_call_argument_begin|>{"city": "X"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        f"<|im_system|>tool<|im_middle|>## Return of functions.get_weather:0\nsunny<|im_end|>{head}<think>"
    )
    first = f"<|im_user|>user<|im_middle|>u1<|im_end|>{head}<think>"
    assert C.render(TALK) == f"{first}</think>{rest}"
    assert C.render(TALK, preserve_thinking=True) == f"{first}r1</think>{rest}"
    assert C.render(TALK, add_generation_prompt=False) == f"{first}</think>{rest}".removesuffix(f"{head}<think>")


def test_reference_ids() -> None:
    golden = np.load(FIXTURES / "golden.npz")
    questions = [entry["q"] for entry in json.loads((FIXTURES / "heldout_prompts.json").read_text())[:3]]
    prompts = {
        "chat_hi": C.encode(ask("Hi"), thinking=False),
        "chat_heldout_0": C.encode(ask(questions[0]), thinking=False),
        "chat_heldout_1": C.encode(ask(questions[1]), enable_thinking=False),
        "chat_thinking": C.encode(ask(questions[2])),
        "tool_call": C.encode(ask("What is the weather in Paris?"), tools=[WEATHER], thinking=False),
    }
    for name, ids in prompts.items():
        assert ids == golden[f"{name}.ids"].tolist(), name
    assert C.encode(ask("Hi ")) != prompts["chat_hi"] != C.encode(ask("Hi"))


def test_switches() -> None:
    off = C.render(ask("Hi"), thinking=False)
    assert C.render(ask("Hi"), enable_thinking=False) == off != C.render(ask("Hi"))
    assert C.render(ask("Hi"), thinking=True, enable_thinking=False) == C.render(ask("Hi"), thinking=None) == C.render(ask("Hi"))
    for name in ("thinking", "enable_thinking", "preserve_thinking"):
        with pytest.raises(TemplateError, match=f"{name}: 'no'"):
            C.render(ask("Hi"), **{name: "no"})


# --- the second engine ---

CONVERSATIONS: list[list[dict[str, Any]]] = [
    ask("Hi"),
    TALK,
    [{"role": "system", "content": ""}, *TALK, {"role": "assistant", "content": " done\n"}, *ask("  ")],
    [{"role": "user", "name": "Ann", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": ""}]}],
    [*ask("x"), {"role": "assistant", "content": [], "reasoning_content": " r\n"}, {"role": "tool", "content": None, "tool_call_id": "q"}],
    [
        *ask("\"<b>&'\\ é世 \u2028 {{ messages }} {% raw %}"),
        {
            "role": "assistant",
            "content": "c",
            "tool_calls": [
                {
                    "id": "functions.f:0",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"é<": ['"', "\n", " ", ""], "n": [1, 2.5, None, True]}},
                },
                {"id": "functions.g:1", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
    ],
]


@pytest.mark.parametrize("template", [C, OTHER_TEMPLATE], ids=["demo", "other"])
@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["plain", "tools"])
@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
def test_equals_jinja2(template: ChatTemplate, tools: Any, number: int) -> None:
    source = SOURCE if template is C else OTHER
    messages = CONVERSATIONS[number]
    for switches in ({}, {"thinking": False}, {"preserve_thinking": True}):
        expected = jinja2_render(source, messages, tools, **switches)
        assert template.render(messages, tools=tools, **switches) == expected
        assert template.encode(messages, tools=tools, **switches) == T._bpe.encode(expected, allowed_special="all")
    assert template.render([*messages, *ask("?")], tools=tools) != jinja2_render(source, messages, tools)


TEXT = st.text(st.one_of(st.sampled_from("ab \n'世é<|>"), st.characters(exclude_categories=("Cs",))), max_size=12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system", "tool"]), TEXT, TEXT), min_size=1, max_size=5))
def test_equals_jinja2_on_any_text(turns: list[tuple[str, str, str]]) -> None:
    """Ids too: text of the template and of the request merges across their border as in one string."""
    messages = [{"role": role, "content": text, "name": name, "reasoning": name} for role, text, name in turns]
    for source, template in ((SOURCE, C), (OTHER, OTHER_TEMPLATE)):
        expected = jinja2_render(source, messages)
        assert template.render(messages) == expected
        if not any(special in text + "|" + name for _, text, name in turns for special in T.special):
            assert template.encode(messages) == T._bpe.encode(expected, allowed_special="all")


# --- tools and keyword arguments ---


def test_a_schema_without_a_typescript_form_is_written_as_sorted_json() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"p": {"title": "é<"}}}}}
    assert (
        '<|im_middle|>{"function":{"name":"f","parameters":{"properties":{"p":{"title":"é<"}},"type":"object"}},"type":"function"}'
        in C.render(ask("x"), tools=[tool]).replace("[{", "{").replace("}]", "}")
    )


DEEP: Any = {}
for _ in range(MAX_DEPTH + 1):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"tools_ts_str": "x"}, "tools_ts_str is set by the server"),
        ({"raise_exception": 1}, "raise_exception is set by"),
        ({"a b": 1}, "'a b' is no name"),
        ({"a" * 65: 1}, "is no name"),
        ({f"k{i}": 1 for i in range(33)}, "33 entries"),
        ({"x": DEEP}, "x: nested deeper"),
        ({"x": object()}, "x: a value of type object"),
    ],
)
def test_bad_kwargs_are_named(kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(TemplateError, match=said):
        C.encode(ask("x"), **kwargs)


# --- bounds and errors of the template itself ---


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "line 1.*fuel"),
        ("{{ 'x' * 50000000000 }}", "fuel"),
        ("{{ 'x' * 9000000 }}", "9000000 characters; at most 8388608"),
        ("{% for i in range(3000) %}{{ messages[0].content }}{% endfor %}", "characters; at most 8388608"),
        ("{% for i in range(90000) %}{{ messages | tojson }}{% endfor %}", "tojson: the results exceed"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("\n{{ nothing.at.all }}", "line 2: `nothing` is undefined"),
        ("{{ ''.__class__.__mro__ }}", "__class__` is undefined"),
        ("{{ messages.__len__() }}", "insecure"),
        ("{% macro m() %}{{ raise_exception('no ' + messages[0].content) }}{% endmacro %}{{ m() }}", "refuses this conversation: no aaaa"),
        ("{{ messages | tojson(indent='x', separators=3) }}", "chat template: "),
        ("{{ strftime_now(3) }}", "chat template: "),
        ("{% include 'other' %}", "non-existing template"),
    ],
)
def test_a_template_that_fails_or_never_ends(source: str, said: str) -> None:
    template = ChatTemplate(source, T)
    start = time.process_time()
    with pytest.raises(TemplateError, match=said) as caught:
        template.render(ask("a" * 5000))
    assert time.process_time() - start < 5.0  # 0.17 s of a processor for the fuel
    assert len(str(caught.value)) < 1000


def test_fuel_is_enough_for_long_conversations() -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": "abc", "reasoning": "r"} for i in range(MAX_MESSAGES)]
    start = time.process_time()
    assert len(controls(C.encode(messages))) > 3 * MAX_MESSAGES
    assert time.process_time() - start < 5.0  # 0.12 s


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate("\n{% if %}", T)
    with pytest.raises(TemplateError, match=r"U\+F5A17"):
        ChatTemplate("a\U000f5a17", T)
    with pytest.raises(TemplateError, match="at most"):
        ChatTemplate("a" * (chat_template.MAX_TEMPLATE_CHARS + 1), T)


def test_strftime_now() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", T).render(ask("x")) == time.strftime("%Y")


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    shutil.copy(DEMO / "tokenizer_config.json", tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    with pytest.raises(TemplateError, match=r"no chat_template.jinja and no chat_template"):
        ChatTemplate.load(tmp_path, T)
    path.write_text(json.dumps(config | {"chat_template": "string"}))
    assert ChatTemplate.load(tmp_path, T).render(ask("x")) == "string"
    path.write_text(json.dumps(config | {"chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "listed"}]}))
    assert ChatTemplate.load(tmp_path, T).render(ask("x")) == "listed"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.load(tmp_path, T).render(ask("x")) == "file"


def test_threads_share_a_template() -> None:
    talks = [[*TALK, *ask(f"question {i}" * 20)] for i in range(4)]
    expected = [C.encode(talk, tools=[WEATHER]) for talk in talks]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(40):
            if C.encode(talks[i], tools=[WEATHER]) != expected[i]:
                wrong.append(i)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads) and wrong == []
    finally:
        sys.setswitchinterval(interval)
