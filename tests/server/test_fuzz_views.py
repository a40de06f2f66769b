"""Generated requests to every other endpoint with a body; at RUNTIME_TEST_LEVEL 3 more than 20,000 of them, with the memory watched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.env import load_env
from server.messages import NOT_SERVED as NOT_IN_MESSAGES
from server.messages import CountRequest, MessagesRequest
from server.responses import NOT_SERVED as NOT_IN_RESPONSES
from server.responses import ResponsesRequest
from server.tokens import DetokenizeRequest, TokenizeRequest

LEVEL = load_env().test_level
MOST_GROWN = 20 << 20  # bytes of resident memory over the whole campaign, after a warm-up
INTS = st.integers(-(2**70), 2**70) | st.sampled_from([0, 1, -1, 5, 267, 268, 2**31, 2**63])
SCALARS = st.none() | st.booleans() | INTS | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=10
)
KINDS = st.sampled_from(
    ["text", "input_text", "output_text", "thinking", "reasoning_text", "image", "message", "reasoning", "function_call"]
)
PART = st.fixed_dictionaries({"type": KINDS}, optional={"text": st.text(max_size=9) | SCALARS, "thinking": st.text(max_size=9)}) | JSON
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "developer"]) | JSON,
        "content": st.text(max_size=20) | st.lists(PART, max_size=3) | JSON,
    },
    optional={"type": KINDS},
)
EXAMPLES = settings(
    max_examples={1: 120, 2: 1000, 3: 4500}.get(LEVEL, 120),
    deadline=5000,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    database=None,
)


def fields(*kinds: type[msgspec.Struct], beside: Any = ()) -> st.SearchStrategy[dict[str, Any]]:
    names = sorted({name for kind in kinds for name in kind.__struct_fields__} | set(beside) | {"unknown"})
    return st.dictionaries(st.sampled_from(names), JSON, max_size=3)


def check(client: Any, path: str, body: Any) -> None:
    response = client.open("POST", path, json.dumps(body).encode())
    raw = response.read()
    assert response.status in (200, 400, 404), (path, response.status, raw, body)
    if response.status != 200:
        error = json.loads(raw)["error"]
        assert {"message", "type", "param"} <= set(error) and 0 < len(error["message"]) <= 600
    elif isinstance(body, dict) and body.get("stream"):
        assert b"event: error" not in raw and raw.rstrip().endswith(b"}")
    else:
        json.loads(raw)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@EXAMPLES
@given(more=fields(ResponsesRequest, beside=NOT_IN_RESPONSES), said=st.text(max_size=20) | st.lists(MESSAGE, max_size=3) | JSON)
def test_responses(running: Any, more: dict[str, Any], said: Any) -> None:
    check(running.client, "/v1/responses", {"input": said, **more})


@EXAMPLES
@given(more=fields(MessagesRequest, beside=NOT_IN_MESSAGES), said=st.lists(MESSAGE, max_size=3) | JSON, most=st.integers(1, 9) | INTS)
def test_messages(running: Any, more: dict[str, Any], said: Any, most: int) -> None:
    check(running.client, "/v1/messages", {"messages": said, "max_tokens": most, **more})


@EXAMPLES
@given(more=fields(CountRequest), said=st.lists(MESSAGE, max_size=3))
def test_count_tokens(running: Any, more: dict[str, Any], said: Any) -> None:
    check(running.client, "/v1/messages/count_tokens", {"messages": said, **more})


@EXAMPLES
@given(more=fields(TokenizeRequest), said=st.text(max_size=30))
def test_tokenize(running: Any, more: dict[str, Any], said: str) -> None:
    check(running.client, "/tokenize", {"prompt": said, **more})


@EXAMPLES
@given(tokens=st.lists(st.integers(-1, 268) | INTS, max_size=8) | JSON, more=fields(DetokenizeRequest))
def test_detokenize(running: Any, tokens: Any, more: dict[str, Any]) -> None:
    check(running.client, "/detokenize", {"tokens": tokens, **more})


def test_nothing_is_left_and_memory_stays(running: Any) -> None:
    """The same few hundred requests again and again: what they leave behind is what a server would leak."""
    bodies = [
        ("/v1/responses", {"input": "hi", "stream": True}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
    ]
    bodies += [("/tokenize", {"prompt": "x" * 200}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 9})]
    for path, body in bodies * 25:
        running.client.open("POST", path, body).read()
    before = resident_bytes()
    for path, body in bodies * (100 if LEVEL == 1 else 1000):
        running.client.open("POST", path, body).read()
    grown = resident_bytes() - before
    print(f"\nresident memory grew by {grown / 2**20:.1f} MiB")
    assert grown < MOST_GROWN
    assert running.client.get("/health")[0] == 200
    assert running.engine.stats().pages_used == 0 and not running.service.generations


def test_the_check_can_fail(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(running.loaded.tokenizer, "decode", broken)
    with pytest.raises(AssertionError):
        check(running.client, "/detokenize", {"tokens": [1]})
