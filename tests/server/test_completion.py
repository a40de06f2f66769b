"""POST /v1/completions over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

EOS = 256


def joined(events: list[Any], index: int = 0) -> str:
    return "".join(c["text"] for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index)


def test_the_answer_has_the_known_form(running: Any) -> None:
    status, body = running.client.complete(prompt="héllo 世", max_tokens=100, seed=3)
    assert status == 200
    assert body["object"] == "text_completion"
    assert body["model"] == "fake"
    assert body["id"].startswith("cmpl-")
    choice = body["choices"][0]
    assert choice == {"index": 0, "text": "héllo 世", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    tokens = len("héllo 世".encode())
    assert body["usage"]["prompt_tokens"] == tokens
    assert body["usage"]["completion_tokens"] == tokens + 1
    assert body["usage"]["total_tokens"] == 2 * tokens + 1
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_stream_and_whole_give_the_same_text(running: Any) -> None:
    for prompt in ("plain", "삼겹살 👍🏽 ďábel 世", "x" * 300):
        whole = running.client.complete(prompt=prompt)[1]["choices"][0]
        events = running.client.events("/v1/completions", prompt=prompt)
        assert events[-1] == "[DONE]"
        assert joined(events) == whole["text"] == prompt
        assert events[-2]["choices"][0]["finish_reason"] == whole["finish_reason"]
        assert len({event["id"] for event in events[:-1]}) == 1


def test_prompt_forms(running: Any) -> None:
    def texts(prompt: object) -> list[str]:
        status, body = running.client.complete(prompt=prompt)
        assert status == 200, body
        assert [c["index"] for c in body["choices"]] == list(range(len(body["choices"])))
        return [c["text"] for c in body["choices"]]

    assert texts("ab") == ["ab"]
    assert texts([97, 98]) == ["ab"]
    assert texts(["ab", "c"]) == ["ab", "c"]
    assert texts([[97], [98, 99]]) == ["a", "bc"]


def test_n_times_prompts_in_order_with_their_own_seeds(running: Any) -> None:
    running.loaded.seeds.clear()
    status, body = running.client.complete(prompt=["a", "b"], n=3, seed=10)
    assert status == 200
    assert [c["text"] for c in body["choices"]] == ["a"] * 3 + ["b"] * 3
    assert running.loaded.seeds == [10, 11, 12, 10, 11, 12]
    assert body["usage"]["prompt_tokens"] == 2, "a prompt counts once, not n times"
    events = running.client.events("/v1/completions", prompt=["ab", "cd"], n=2)
    assert [joined(events, index) for index in range(4)] == ["ab", "ab", "cd", "cd"]


def test_stop_strings_and_their_reason(running: Any) -> None:
    choice = running.client.complete(prompt="one END! two", stop=["END!", "zzz"])[1]["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one ", "stop", "END!")
    choice = running.client.complete(prompt="one END! two", stop="END!", include_stop_str_in_output=True)[1]["choices"][0]
    assert choice["text"] == "one END!"
    choice = running.client.complete(prompt="ENX", stop="END!")[1]["choices"][0]
    assert choice["text"] == "ENX", "what was held back is released"
    choice = running.client.complete(prompt="abc", stop_token_ids=[98])[1]["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("a", 98)


def test_the_cap_counts_tokens(running: Any) -> None:
    before = running.client.metric("vllm:generation_tokens_total")
    _, body = running.client.complete(prompt="abcdefghij", max_tokens=8, logprobs=0)
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("abcdefgh", "length")
    assert body["usage"]["completion_tokens"] == len(body["choices"][0]["logprobs"]["tokens"]) == 8
    assert running.client.metric("vllm:generation_tokens_total") - before == 8


def test_logprobs_whole_and_streamed_agree(running: Any) -> None:
    whole = running.client.complete(prompt="aé", logprobs=2)[1]["choices"][0]["logprobs"]
    assert whole["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "[EOS]"]
    assert whole["token_logprobs"] == [-0.5] * 4
    assert whole["top_logprobs"][1] == {"bytes:\\xc3": -0.5, "A": -9999.0}
    assert whole["text_offset"] == [0, 1, 11, 21]
    events = running.client.events("/v1/completions", prompt="aé", logprobs=2)
    parts = [c["logprobs"] for e in events[:-1] for c in e["choices"] if c["logprobs"]]
    assert {key: [entry for part in parts for entry in part[key]] for key in whole} == whole


def test_echo_gives_the_prompt_first(running: Any) -> None:
    assert running.client.complete(prompt="ab", echo=True)[1]["choices"][0]["text"] == "abab"
    assert joined(running.client.events("/v1/completions", prompt=[97, 98], echo=True)) == "abab"
    status, body = running.client.complete(echo=True, logprobs=1)
    assert (status, body["error"]["param"]) == (400, "echo")


def test_usage_chunks(running: Any) -> None:
    events = running.client.events("/v1/completions", prompt="ab", stream_options={"include_usage": True})
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 3
    assert all("usage" not in event for event in events[:-2])
    events = running.client.events("/v1/completions", prompt="ab", stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert all("usage" not in event for event in running.client.events("/v1/completions", prompt="ab")[:-1])
    status, body = running.client.complete(stream_options={"include_usage": True})
    assert (status, body["error"]["param"]) == (400, "stream_options")


@pytest.mark.parametrize("detail", ["none", "summary", "detailed"])
def test_the_speculation_record(start_server: Any, detail: str) -> None:
    server = start_server(lambda _: [[97, 98, 99], [100], [101, 102], [EOS]], spec_detail=detail)
    body = server.client.complete()[1]
    closing = server.client.events("/v1/completions", prompt="a", stream_options={"include_usage": True})[-2]
    if detail == "none":
        assert "metrics" not in body
        assert "metrics" not in closing
        return
    found = body["metrics"]["speculative_decoding"]
    assert closing["metrics"]["speculative_decoding"] == found
    assert found["acceptance_histogram"] == [0, 1, 1, 0, 0, 0, 0, 0]
    assert found["mean_acceptance_length"] == 2.5
    assert ("per_step_accepted" in found) == (detail == "detailed")
    assert server.client.complete(n=2)[1]["metrics"] == {"speculative_decoding": None}


def test_runs_of_several_tokens_stay_whole(start_server: Any) -> None:
    tokens = list("삼겹살 👍🏽 ďábel 世".encode())
    for size in (1, 3, 7):
        server = start_server(lambda _, size=size: [tokens[i : i + size] for i in range(0, len(tokens), size)])
        assert joined(server.client.events("/v1/completions", prompt="x")) == bytes(tokens).decode()
        assert "�" not in server.client.complete()[1]["choices"][0]["text"]
