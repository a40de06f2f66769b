"""The requests of tools/soak.py: what each kind sends, and what its answer must be."""

from __future__ import annotations

import http.client
import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from server.client import ApiClient, ServerRefused

WORDS = "write a function that adds sorts reads numbers lists files from to and returns the largest smallest sum of words".split()  # noqa: SIM905
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["red", "green", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": SCHEMA}}]
BAD: list[tuple[str, Any, int]] = [
    ("/v1/completions", {"prompt": ""}, 400),
    ("/v1/completions", {"prompt": [-1]}, 400),
    ("/v1/completions", {"prompt": "a", "n": 10**9}, 400),
    ("/v1/completions", {"prompt": "a", "temperature": -1}, 400),
    ("/v1/completions", {"prompt": "a", "best_of": 4}, 400),
    ("/v1/completions", {"prompt": "a", "stop": [""]}, 400),
    ("/v1/completions", {"prompt": "a", "model": "another"}, 404),
    ("/v1/chat/completions", {"messages": []}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, 400),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "["}}, 400),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": {"type": 7}}}, 400),
    ("/nothing", {}, 404),
]


class Wrong(Exception):
    """An answer is not what it must be."""


def want(holds: object, what: str) -> None:
    if not holds:
        raise Wrong(what[:300])


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind of request is made and checked, and how often it comes."""

    run: Callable[[ApiClient, str, random.Random], None]
    weight: float


def text(rng: random.Random, most: int = 40) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))


def sampling(rng: random.Random, most: int = 48) -> dict[str, Any]:
    ways: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.2, "repetition_penalty": 1.1}]
    return {"max_tokens": rng.randint(1, most), "seed": rng.randrange(2**31), **rng.choice(ways)}


def talk(rng: random.Random, thinking: bool = False) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text(rng)}], "chat_template_kwargs": {"thinking": thinking}}


def completion(client: ApiClient, model: str, rng: random.Random) -> None:
    asked = {"model": model, "prompt": text(rng), **sampling(rng), "n": rng.choice((1, 1, 1, 3))}
    body = client.post("/v1/completions", asked)
    want(len(body["choices"]) == asked["n"], f"{len(body['choices'])} choices")
    want(1 <= body["usage"]["completion_tokens"] <= asked["n"] * asked["max_tokens"], f"usage {body['usage']}")
    want(all(choice["finish_reason"] in ("stop", "length") for choice in body["choices"]), str(body["choices"]))


def chat_stream(client: ApiClient, model: str, rng: random.Random) -> None:
    asked = {"model": model, **talk(rng, rng.random() < 0.5), **sampling(rng), "stream_options": {"include_usage": True}}
    events = list(client.stream("/v1/chat/completions", asked))
    want(events and "usage" in events[-1] and not events[-1]["choices"], "no usage at the end")
    ends = [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]
    want(len(ends) == 1 and ends[0] in ("stop", "length"), f"ends {ends}")
    want(events[-1]["usage"]["completion_tokens"] <= asked["max_tokens"], "more tokens than asked for")


def repeated(client: ApiClient, model: str, rng: random.Random) -> None:
    """The same request whole and streamed, in whatever company: the same text."""
    asked = {"model": model, "prompt": text(rng, 200), **sampling(rng), "logprobs": 1}
    body = client.post("/v1/completions", asked)
    streamed = "".join(c["text"] for e in client.stream("/v1/completions", asked) for c in e["choices"])
    want(streamed == body["choices"][0]["text"], f"streamed {streamed!r}, whole {body['choices'][0]['text']!r}")


def schema(client: ApiClient, model: str, rng: random.Random) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    body = client.post("/v1/chat/completions", {"model": model, **talk(rng), **sampling(rng), "max_tokens": 200, "response_format": form})
    choice = body["choices"][0]
    if choice["finish_reason"] == "stop":
        _check_object(json.loads(choice["message"]["content"]))


def pattern(client: ApiClient, model: str, rng: random.Random) -> None:
    """A pattern of its own each time: compiled grammars must not pile up."""
    width = rng.randint(1, 400)
    asked = {
        "model": model,
        "prompt": text(rng),
        **sampling(rng),
        "max_tokens": 40,
        "structured_outputs": {"regex": f"[0-9]{{1,{width}}}x"},
    }
    choice = client.post("/v1/completions", asked)["choices"][0]
    want(re.fullmatch("[0-9]*x?", choice["text"]), f"{choice['text']!r} is not of the pattern")


def tool(client: ApiClient, model: str, rng: random.Random) -> None:
    asked = {"model": model, **talk(rng), **sampling(rng), "max_tokens": 200, "tools": TOOLS, "tool_choice": "required"}
    choice = client.post("/v1/chat/completions", asked)["choices"][0]
    for call in choice["message"].get("tool_calls", ()) if choice["finish_reason"] == "tool_calls" else ():
        want(call["function"]["name"] == "paint", f"call {call}")
        _check_object(json.loads(call["function"]["arguments"]))


def thinking(client: ApiClient, model: str, rng: random.Random) -> None:
    budget = rng.randint(0, 20)
    asked = {"model": model, **talk(rng, True), **sampling(rng), "max_tokens": 60, "thinking_token_budget": budget}
    used = client.post("/v1/chat/completions", asked)["usage"]["completion_tokens_details"]["reasoning_tokens"]
    want(used <= budget + 1, f"{used} tokens of reasoning, {budget} may be")


def message(client: ApiClient, model: str, rng: random.Random) -> None:
    asked = {"model": model, "max_tokens": rng.randint(1, 32), "messages": [{"role": "user", "content": text(rng)}]}
    want(client.post("/v1/messages", asked)["type"] == "message", "no message")
    want(client.post("/v1/responses", {"model": model, "input": text(rng), "max_output_tokens": 16})["object"] == "response", "no response")


def long_prompt(client: ApiClient, model: str, rng: random.Random) -> None:
    body = client.post("/v1/completions", {"model": model, "prompt": text(rng, 900), "max_tokens": 2, "temperature": 0})
    want(body["usage"]["completion_tokens"] >= 1, "nothing generated")


def leaves(client: ApiClient, model: str, rng: random.Random) -> None:
    """A client that closes its stream after a few events."""
    asked = {"model": model, "prompt": text(rng), "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    events = client.stream("/v1/completions", asked)
    for _ in range(rng.randint(1, 6)):
        next(events, None)
    events.close()  # type: ignore[attr-defined]


def leaves_early(client: ApiClient, model: str, rng: random.Random) -> None:
    """A client that is gone before anything was answered: in the queue, in its prompt, or amid a whole answer."""
    host, _, port = client.base_url.partition("//")[2].partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    body = {"model": model, "prompt": text(rng, 400), "max_tokens": 400, "ignore_eos": True, "stream": rng.random() < 0.3}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    time.sleep(rng.random() * 0.3)
    connection.close()


def refused(client: ApiClient, model: str, rng: random.Random) -> None:
    path, body, status = rng.choice(BAD)
    try:
        client.post(path, body)
    except ServerRefused as error:
        want(error.status == status, f"{path} {body}: {error.status} {error}")
        return
    raise Wrong(f"{path} {body} was not refused")


def looks(client: ApiClient, model: str, rng: random.Random) -> None:
    want(client.get("/health")["status"] == "ok", "not healthy")
    want(client.get("/v1/models")["data"][0]["id"] == model, "another model")
    words = text(rng)
    ids = client.post("/tokenize", {"prompt": words})["tokens"]
    want(client.post("/detokenize", {"tokens": ids})["prompt"] == words, "the text did not come back")
    want("steps" in client.get("/dashboard.json"), "no figures")


def _check_object(value: Any) -> None:
    want(value.keys() == {"kind", "count"} and value["kind"] in ("red", "green", "blue") and 0 <= value["count"] <= 99, f"{value}")


KINDS: dict[str, Kind] = {
    "completion": Kind(completion, 3),
    "chat stream": Kind(chat_stream, 4),
    "repeated": Kind(repeated, 2),
    "schema": Kind(schema, 1.5),
    "pattern": Kind(pattern, 1.5),
    "tool": Kind(tool, 1),
    "thinking": Kind(thinking, 1),
    "messages and responses": Kind(message, 1),
    "long prompt": Kind(long_prompt, 0.5),
    "leaves": Kind(leaves, 3),
    "leaves early": Kind(leaves_early, 3),
    "refused": Kind(refused, 4),
    "looks": Kind(looks, 2),
}


def weights() -> list[float]:
    return [kind.weight for kind in KINDS.values()]
