"""/tokenize and /detokenize, and what /server_info, /health_generate, /dashboard and /openapi.json tell."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from server.openapi import BODIES, READS

EOS = 256


def test_text_to_tokens_and_back(running: Any) -> None:
    text = "삼겹살 👍🏽 <|im_end|>"
    status, made = running.client.post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert status == 200
    assert made["tokens"] == list(text.encode()), "a control token that is spelled out stays text"
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["max_model_len"] == 4096
    assert running.client.post("/detokenize", {"tokens": made["tokens"]}) == (200, {"prompt": text})
    assert running.client.post("/detokenize", {"tokens": [97, 257]}) == (200, {"prompt": "a<|im_end|>"})
    assert running.client.post("/detokenize", {"tokens": []}) == (200, {"prompt": ""})


def test_a_conversation_is_tokenized_as_chat_takes_it(running: Any) -> None:
    messages = [{"role": "user", "content": "hi</think><|im_end|>"}]
    _, made = running.client.post("/tokenize", {"messages": messages})
    assert made["tokens"].count(257) == 1 and made["tokens"].count(262) == 0, "only the template's own"
    _, instant = running.client.post("/tokenize", {"messages": messages, "chat_template_kwargs": {"thinking": False}})
    assert instant["tokens"].count(262) == 1
    _, answer = running.client.post("/v1/chat/completions", {"messages": messages})
    assert answer["usage"]["prompt_tokens"] == made["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": [{"role": "x"}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, 2**40]}, "tokens[1]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_what_is_wrong_is_named(running: Any, path: str, body: Any, param: str) -> None:
    status, answer = running.client.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)


def test_server_info_has_no_secrets(start_server: Any) -> None:
    server = start_server(keys=("s3cret",))
    server.service.options = {"max_num_seqs": 4}
    key = {"authorization": "Bearer s3cret"}
    assert server.client.get("/server_info")[0] == 401
    status, info = server.client.get("/server_info", **key)
    assert (status, info["model"], info["options"], info["status"]) == (200, "fake", {"max_num_seqs": 4}, "serving")
    assert info["internal_states"][0]["avg_spec_accept_length"] is None
    assert "s3cret" not in str(info)


def test_the_probe_generates_one_token(start_server: Any) -> None:
    server = start_server(lambda _: [[97]])
    status, answer = server.client.get("/health_generate")
    assert (status, answer["status"]) == (200, "ok")
    assert server.client.metric("vllm:generation_tokens_total") == 1
    server.engine.max_running = server.engine.max_waiting = 0
    assert server.client.get("/health_generate") == (200, {"status": "busy"})


def test_the_probe_fails_where_no_token_comes(start_server: Any) -> None:
    from server.limits import Limits

    server = start_server(limits=Limits(probe_timeout_s=0.2))
    server.engine.gate.clear()
    status, answer = server.client.get("/health_generate")
    assert status == 503 and "0.2 s" in answer["error"]["message"]
    assert len(server.engine.aborted) == 1, "the probe leaves nothing behind"


def test_the_page_needs_nothing_from_elsewhere(running: Any) -> None:
    running.client.complete(prompt="figures")
    response = running.client.open("GET", "/dashboard")
    page = response.read().decode()
    assert response.status == 200 and response.getheader("content-type", "").startswith("text/html")
    outside = [url for url in re.findall(r"https?://[^\s\"'<]+", page) if url != "http://www.w3.org/2000/svg"]
    assert not outside and "src=" not in page and "@import" not in page
    status, figures = running.client.get("/dashboard.json")
    assert status == 200 and figures["status"] == "serving" and figures["generation_tokens"] > 0
    read = set(re.findall(r"\b(?:now|then|h|over)\b[.(]\"?(\w+)", page)) - {"filter", "map"}
    assert read <= set(figures), f"the page reads {sorted(read - set(figures))}, which the figures lack"
    assert {"accepted_per_position", "buckets", "stage_s", "kv", "waiting"} <= read


def test_a_browser_may_ask_for_the_key_on_the_dashboard_alone(start_server: Any) -> None:
    import base64

    server = start_server(keys=("s3cret",))
    basic = {"authorization": "Basic " + base64.b64encode(b"me:s3cret").decode()}
    response = server.client.open("GET", "/dashboard")
    assert response.status == 401 and response.getheader("www-authenticate", "").startswith("Basic")
    assert server.client.get("/dashboard", **basic)[0] == 200
    assert server.client.get("/dashboard.json", **basic)[0] == 200
    assert server.client.get("/v1/models", **basic)[0] == 401
    for wrong in (b"me:other", b"s3cret", b"\xff"):
        assert server.client.get("/dashboard", authorization="Basic " + base64.b64encode(wrong).decode())[0] == 401
    assert server.client.get("/dashboard", authorization="Basic %%%")[0] == 401
    assert server.client.get("/v1/models", x_api_key="s3cret")[0] == 200
    assert server.client.get("/v1/models", x_api_key="other")[0] == 401
    assert server.client.get("/v1/models", x_api_key="other", authorization="Bearer s3cret")[0] == 401


def test_the_document_lists_every_route_and_field(running: Any) -> None:
    status, document = running.client.get("/openapi.json")
    assert status == 200
    for path, (kind, _) in BODIES.items():
        operation = document["paths"][path]["post"]
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert set(document["components"]["schemas"][name]["properties"]) == {field.encode_name for field in msgspec.structs.fields(kind)}
        assert running.client.post(path, b"{")[0] == 400, f"{path} is not served"
    for path in READS:
        assert running.client.get(path.replace("{model_id}", "fake"))[0] == 200, f"{path} is not served"
    assert set(document["paths"]) == {*BODIES, *READS}
    operations = [o["operationId"] for entry in document["paths"].values() for o in entry.values()]
    assert len(set(operations)) == len(operations)
