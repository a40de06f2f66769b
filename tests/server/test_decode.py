"""Bodies that are wrong are refused with the field, or the byte, that is wrong."""

from __future__ import annotations

import logging

import pytest

from server.decode import RequestDecoder
from server.errors import MAX_MESSAGE_CHARS, ApiError
from server.limits import Limits
from server.protocol import NOT_SERVED, ChatRequest, CompletionRequest


def refusal(body: bytes, kind: type = CompletionRequest) -> ApiError:
    with pytest.raises(ApiError) as caught:
        RequestDecoder(Limits()).decode(body, kind)
    assert caught.value.status == 400
    assert len(caught.value.message) <= MAX_MESSAGE_CHARS
    return caught.value


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{}", "prompt"),
        (b'{"prompt": null}', "prompt"),
        (b'{"prompt": 7}', "prompt"),
        (b'{"prompt": [1.5]}', "prompt[0]"),
        (b'{"prompt": [[1], [2, "x"]]}', "prompt[1][1]"),
        (b'{"prompt": "a", "n": 1.0}', "n"),
        (b'{"prompt": "a", "n": true}', "n"),
        (b'{"prompt": "a", "n": "1"}', "n"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "top_p": -Infinity}', "top_p"),
        (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", "seed"),
        (b'{"prompt": "a", "seed": 1, "seed": 1}', "seed"),
        (b'{"prompt": "a", "logit_bias": {"3": 1, "3": 2}}', "3"),
        (b'{"prompt": "a", "stream_options": {"include_usage": 1}}', "stream_options.include_usage"),
        (b'{"prompt": "a", "stop": ["x", 3]}', "stop[1]"),
    ],
)
def test_the_field_is_named(body: bytes, field: str) -> None:
    error = refusal(body)
    assert error.param == field
    assert error.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  \n",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "a", "zz": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a"',
        b'{"prompt": "a"} x',
        b"[]",
        b'"prompt"',
        b"null",
        b'{"prompt": "a", "zz": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "zz": 1' + b"0" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"[" * 100_000,
    ],
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    refusal(body)


def test_half_a_surrogate_pair_is_explained() -> None:
    assert "surrogate" in refusal(b'{"prompt": "\\ud800"}').message
    assert "surrogate" not in refusal(b'{"prompt": "a"').message


def test_a_right_body_passes() -> None:
    request = RequestDecoder(Limits()).decode(
        '{"prompt": ["é", "\\ud83d\\ude00"], "n": 2, "temperature": 0, "seed": null}'.encode(), CompletionRequest
    )
    assert request.prompt == ["é", "😀"]
    assert (request.n, request.temperature, request.seed) == (2, 0.0, None)


def test_messages_may_be_any_object() -> None:
    request = RequestDecoder(Limits()).decode(b'{"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 3}', ChatRequest)
    assert request.messages[0]["content"] == "a"
    assert refusal(b'{"messages": "hi"}', ChatRequest).param == "messages"
    assert refusal(b'{"messages": ["hi"]}', ChatRequest).param == "messages[0]"


@pytest.mark.parametrize("name", sorted(NOT_SERVED))
def test_what_would_change_the_output_is_refused_by_name(name: str) -> None:
    assert refusal(b'{"prompt": "a", "' + name.encode() + b'": [7]}').param == name


def test_switched_off_is_accepted() -> None:
    decoder = RequestDecoder(Limits())
    decoder.decode(
        b'{"prompt": "a", "best_of": 1, "suffix": null, "use_beam_search": false, "bad_words": [], "modalities": ["text"]}',
        CompletionRequest,
    )


def test_an_unknown_field_is_logged_once_and_only_so_many(caplog: pytest.LogCaptureFixture) -> None:
    decoder = RequestDecoder(Limits(max_logged_fields=2))
    with caplog.at_level(logging.WARNING, "server"):
        for _ in range(3):
            for name in (b"abc", b"def", b"ghi"):
                decoder.decode(b'{"prompt": "a", "' + name + b'": 1}', CompletionRequest)
    assert len(caplog.records) == 2
