"""No request, however wrong, gives a 5xx or harms the server: public fault reports as inputs."""

from __future__ import annotations

import json
from typing import Any

import pytest

JSON = {"content-type": "application/json"}


def post_raw(client: Any, body: bytes, headers: dict[str, str] = JSON, path: str = "/v1/completions") -> tuple[int, Any]:
    response = client.open("POST", path, body, headers)
    return response.status, json.loads(response.read())


@pytest.mark.parametrize(
    "prompt", [[-1], [[-1]], [268], [4294967295], [], "", [1.5], [[1], "a"], [[]], [""], ["a", 1], [None], None, {}, True, [[1], [268]]]
)
def test_prompts(running: Any, prompt: object) -> None:
    status, body = running.client.complete(prompt=prompt)
    assert status == 400
    assert body["error"]["param"].startswith("prompt"), body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == 400
    assert running.client.get("/health")[0] == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [268]}, "stop_token_ids"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"n": 10**9}, "n"),
        ({"n": 0}, "n"),
        ({"n": 2.0}, "n"),
        ({"prompt": ["a"] * 100_000}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ["a"] * 64, "n": 3}, "n"),
        ({"max_tokens": -24}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": 5000}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"268": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": [65] * 4096}, "prompt"),
        ({"prompt": [65] * 4050}, "prompt"),  # the engine's own check
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": "yes"}, "stream"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_fields(running: Any, fields: dict[str, Any], param: str, stream: bool) -> None:
    status, body = running.client.complete(**{"stream": stream, **fields})
    assert (status, body["error"]["param"]) == (400, param), body
    assert param in body["error"]["message"]
    assert len(body["error"]["message"]) <= 600
    assert running.client.get("/health")[0] == 200


@pytest.mark.parametrize("max_tokens", [10**8, 10**12, None])
def test_a_huge_max_tokens_is_clamped(running: Any, max_tokens: int | None) -> None:
    assert running.client.complete(max_tokens=max_tokens)[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "a", "zz": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
        b'{"prompt": "a", "messages": [], "seed": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "a", "messages": [], "temperature": NaN}',
        b'{"prompt": "a", "messages": [], "seed": 1, "seed": 2}',
        b'{"prompt": "\xff", "messages": []}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}], "prompt": "\\ud800"}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bodies(running: Any, body: bytes, path: str) -> None:
    status, answer = post_raw(running.client, body, path=path)
    assert status == 400
    assert answer["error"]["message"]
    assert running.client.get("/health")[0] == 200


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_another_content_type_is_415(running: Any, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = running.client.open("POST", "/v1/completions", headers={"content-length": "2", **headers})
    assert response.status == 415
    assert "application/json" in json.loads(response.read())["error"]["message"]


def test_a_charset_is_no_other_content_type(running: Any) -> None:
    assert post_raw(running.client, b'{"prompt": "a"}', {"content-type": "Application/JSON; charset=utf-8"})[0] == 200


def test_another_model_is_404(running: Any) -> None:
    for call in (running.client.complete, running.client.chat):
        status, body = call(model="gpt-9")
        assert (status, body["error"]["param"], body["error"]["type"]) == (404, "model", "NotFoundError")
        assert call(model="fake")[0] == 200


def test_paths_and_methods(running: Any) -> None:
    for method, path, wanted in (
        ("GET", "/nope", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/x/y", 404),
    ):
        response = running.client.open(method, path)
        body = json.loads(response.read())
        assert (response.status, body["error"]["code"]) == (wanted, wanted), path


def test_models(running: Any) -> None:
    status, body = running.client.get("/v1/models")
    assert status == 200
    card = body["data"][0]
    assert (card["id"], card["max_model_len"], card["object"]) == ("fake", 4096, "model")
    assert running.client.get("/v1/models/fake") == (200, card)
    assert running.client.get("/version")[0] == 200


def test_a_failure_inside_is_500_and_tells_nothing(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret at 0x7f00deadbeef in /root/x.py")

    monkeypatch.setattr(running.loaded.engine, "check", broken)
    status, body = running.client.complete()
    assert (status, body["error"]["code"]) == (500, 500)
    assert "secret" not in json.dumps(body)
    monkeypatch.undo()
    assert running.client.complete()[0] == 200
