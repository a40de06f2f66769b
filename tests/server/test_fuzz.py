"""Generated requests: whatever is sent, no answer is a 5xx, none hangs, and the server lives on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.env import load_env
from server.protocol import NOT_SERVED, ChatRequest, CompletionRequest

INTS = st.integers(-(2**70), 2**70) | st.sampled_from([0, 1, -1, 2, 20, 21, 255, 256, 267, 268, 2**31, 2**63, 2**64])
SCALARS = (
    st.none()
    | st.booleans()
    | INTS
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["auto", "text", "user"])
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=12
)
NAMES = sorted({*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__, *NOT_SERVED, "unknown"})
FIELDS = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id", "reasoning"]), JSON, max_size=5)
    | st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": st.text(max_size=30)}),
    max_size=4,
)
EXAMPLES = settings(
    max_examples={1: 250, 2: 2000, 3: 7000}[load_env().test_level],
    deadline=5000,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    database=None,
)


def check(client: Any, path: str, body: dict[str, Any]) -> None:
    response = client.open("POST", path, json.dumps(body).encode())
    raw = response.read()
    assert response.status in (200, 400, 404), (response.status, raw, body)
    if response.status != 200:
        error = json.loads(raw)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert 0 < len(error["message"]) <= 600
    elif body.get("stream"):
        assert raw.endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in raw
    else:
        assert json.loads(raw)["choices"]


@EXAMPLES
@given(fields=FIELDS, prompt=JSON | st.text(max_size=20) | st.lists(st.integers(-1, 268), max_size=5))
def test_completions(running: Any, fields: dict[str, Any], prompt: Any) -> None:
    check(running.client, "/v1/completions", {"prompt": prompt, **fields})


@EXAMPLES
@given(fields=FIELDS, messages=MESSAGES)
def test_chat(running: Any, fields: dict[str, Any], messages: Any) -> None:
    check(running.client, "/v1/chat/completions", {"messages": messages, **fields})


@EXAMPLES
@given(body=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes(running: Any, body: bytes) -> None:
    response = running.client.open("POST", "/v1/completions", body, {"content-type": "application/json"})
    assert response.status in (200, 400, 404)
    response.read()


def test_nothing_is_left_after_all_that(running: Any) -> None:
    assert running.client.get("/health")[0] == 200
    assert running.engine.stats().pages_used == 0
    assert not running.service.generations


def test_the_check_can_fail(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(running.loaded.engine, "check", broken)
    with pytest.raises(AssertionError):
        check(running.client, "/v1/completions", {"prompt": "a"})
