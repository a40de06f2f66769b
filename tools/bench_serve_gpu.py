#!/usr/bin/env python3
"""Many streams over HTTP against a server on a GPU: no error, no memory kept, a clean stop: `python tools/bench_serve_gpu.py --help`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from server.client import ApiClient
from server.options import WideHelp
from tools.bench_report import provenance_of
from tools.gpu_memory import company, free_bytes
from tools.soak import start_server, take_sample
from tools.soak_traffic import Wrong, sampling, text, want

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "tools" / "results" / "serve_h200.jsonl"
DRIVER_KEEPS = 1 << 20  # bytes; after a process that has ended an H200's driver kept 64 KiB to itself (seen once, 2026-11-30)
SERVER = ("demo", "--backend", "cuda", "--max-num-seqs", "64", "--num-pages", "1500")
HELP = """\
Starts `tools/serve.py` and sends it chats from as many clients as there are streams, each answer streamed, with the `openai` client
where it is installed, else with the project's own. Fails (exit code 1) if an answer is wrong or an error, if requests or cache pages are
held afterwards, if free GPU memory differs from what it was after the warm-up, or if SIGTERM does not end the server with 0.
Tokens/s and times are those that the clients saw; they share one Python process with each other, none with the server.
"""


class Client(Protocol):
    """One streamed chat: its pieces of text, then (finish reason, tokens)."""

    name: str

    def chat(self, content: str, sampling: dict[str, Any]) -> Iterator[str | tuple[str, int]]: ...


class OpenAIClient:
    """The `openai` package."""

    def __init__(self, url: str, model: str, timeout_s: float) -> None:
        import openai

        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=timeout_s)
        self._model, self.name = model, f"openai {openai.__version__}"

    def chat(self, content: str, sampling: dict[str, Any]) -> Iterator[str | tuple[str, int]]:
        known = {"max_tokens", "seed", "temperature", "top_p"}
        extra = {key: value for key, value in sampling.items() if key not in known}
        events = self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": content}],
            stream=True,
            stream_options={"include_usage": True},
            extra_body={**extra, "chat_template_kwargs": {"thinking": False}},
            **{key: value for key, value in sampling.items() if key in known},
        )
        finish = ""
        for event in events:
            for choice in event.choices:
                finish = choice.finish_reason or finish
                if choice.delta.content:
                    yield choice.delta.content
            if event.usage:
                yield finish, event.usage.completion_tokens


class OwnClient:
    """server.client."""

    name = "server.client"

    def __init__(self, url: str, model: str, timeout_s: float) -> None:
        self._client, self._model = ApiClient(url, timeout_s=timeout_s), model

    def chat(self, content: str, sampling: dict[str, Any]) -> Iterator[str | tuple[str, int]]:
        asked = {"model": self._model, "messages": [{"role": "user", "content": content}], **sampling}
        asked |= {"stream_options": {"include_usage": True}, "chat_template_kwargs": {"thinking": False}}
        finish = ""
        for event in self._client.stream("/v1/chat/completions", asked):
            for choice in event["choices"]:
                finish = choice["finish_reason"] or finish
                if choice["delta"].get("content"):
                    yield choice["delta"]["content"]
            if event.get("usage"):
                yield finish, event["usage"]["completion_tokens"]


def open_client(kind: str, url: str, model: str, timeout_s: float) -> Client:
    """kind: openai, own, or auto: openai where it is installed."""
    if kind == "own" or (kind == "auto" and importlib.util.find_spec("openai") is None):
        return OwnClient(url, model, timeout_s)
    return OpenAIClient(url, model, timeout_s)


@dataclass(slots=True)
class Seen:
    """What all clients saw, under one lock."""

    first_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)  # from the first piece on, a token
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    most_open: int = 0
    open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def ask(client: Client, rng: random.Random, seen: Seen) -> None:
    """One request; raises Wrong for an answer that is none."""
    asked, begin, first, length = sampling(rng), time.monotonic(), 0.0, 0
    end: tuple[str, int] | None = None
    for piece in client.chat(text(rng), asked):
        if isinstance(piece, tuple):
            end = piece
            continue
        first = first or time.monotonic()
        length += len(piece)
    want(end is not None, "the stream ended without usage")
    finish, tokens = end or ("", 0)
    want(finish in ("stop", "length"), f"finish reason {finish!r}")
    want(1 <= tokens <= asked["max_tokens"], f"{tokens} tokens, {asked['max_tokens']} asked for")
    now = time.monotonic()
    with seen.lock:
        seen.tokens += tokens
        seen.first_s.append((first or now) - begin)
        if first and tokens > 1:
            seen.token_s.append((now - first) / (tokens - 1))


def send(client: Client, count: int, streams: int, seed: int) -> tuple[Seen, float]:
    """`count` requests, `streams` at a time; what was seen, and the wall time in seconds."""
    seen, numbers, begin = Seen(), iter(range(count)), time.monotonic()

    def work() -> None:
        while True:
            with seen.lock:
                number = next(numbers, None)
                if number is None:
                    return
                seen.open += 1
                seen.most_open = max(seen.most_open, seen.open)
            try:
                ask(client, random.Random(f"{seed} {number}"), seen)
            except Exception as error:  # whatever a client may raise: a refusal, a broken connection, a timeout
                with seen.lock:
                    seen.wrong.append(f"request {number}: {error if isinstance(error, Wrong) else f'{type(error).__name__}: {error}'}")
            finally:
                with seen.lock:
                    seen.open -= 1

    threads = [threading.Thread(target=work, daemon=True) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen, time.monotonic() - begin


def settle(client: ApiClient, pid: int, timeout_s: float = 20.0) -> list[str]:
    """Waits until nothing is open; what still is."""
    end = time.monotonic() + timeout_s
    while True:
        last = take_sample(client, pid, end - timeout_s)
        if not last.open and not last.pages:
            return []
        if time.monotonic() > end:
            return [f"{last.open:.0f} requests are still open, {last.pages:.0f} cache pages held"]
        time.sleep(0.2)


def compare_memory(before: int | None, after: int | None, others: str | None) -> list[str]:
    """What free memory says, in bytes; `others`: why it says nothing."""
    if before is None or after is None or before == after:
        return []
    return [f"free GPU memory: {before} bytes after the warm-up, {after} at the end" + (f"; but {others}" if others else "")]


def stop(popen: subprocess.Popen[str], timeout_s: float = 60.0) -> list[str]:
    """SIGTERM; what is wrong with how it ended."""
    popen.send_signal(signal.SIGTERM)
    try:
        code = popen.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return [f"the server still runs {timeout_s:g} s after SIGTERM"]
    return [f"the server ended with {code} after SIGTERM"] if code else []


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The record of a run."""
    empty = free_bytes()  # makes this process's context, whose memory is the same from here on
    popen, url = start_server(args.server)
    try:
        own = ApiClient(url, timeout_s=args.timeout)
        own.wait_ready(300.0)
        client = open_client(args.client, url, own.model(), args.timeout)
        warm, _ = send(client, 2 * args.streams, args.streams, args.seed + 1)
        found = [f"warm-up: {wrong}" for wrong in warm.wrong[:3]] + settle(own, popen.pid)
        others, before = company(free_bytes, expected=2), free_bytes()
        seen, wall_s = send(client, args.requests, args.streams, args.seed)
        if seen.wrong:
            found.append(f"{len(seen.wrong)} wrong answers, the first: {seen.wrong[0]}")
        found += settle(own, popen.pid)
        after = free_bytes()
        found += compare_memory(before, after, others or company(free_bytes, expected=2))
        found += stop(popen)
    finally:
        if popen.poll() is None:
            popen.kill()
            popen.wait()
    last = free_bytes()
    if empty is not None and last is not None and empty - last > DRIVER_KEEPS and not others:
        found.append(f"free GPU memory: {empty} bytes before the server, {last} after it")
    memory = {"empty": empty, "warm": before, "end": after, "stopped": last, "others": others}
    return {
        "case": f"{args.requests} chats, {args.streams} streams", "client": client.name, "server": " ".join(args.server),
        "requests": args.requests, "streams": args.streams, "most_open": seen.most_open, "errors": len(seen.wrong), "tokens": seen.tokens,
        "wall_s": round(wall_s, 2), "tokens_per_s": round(seen.tokens / wall_s, 1), "ttft_ms": quantiles(seen.first_s),
        "tpot_ms": quantiles(seen.token_s), "free_bytes": memory, "faults": found,
    }  # fmt: skip


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds: median, 90th and 99th of a hundred, the largest."""
    if not seconds:
        return {}
    at = np.percentile(np.array(seconds) * 1e3, [50, 90, 99, 100])
    return dict(zip(("p50", "p90", "p99", "max"), (round(float(value), 2) for value in at), strict=True))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python tools/bench_serve_gpu.py", description=HELP, formatter_class=WideHelp)
    parser.add_argument("--requests", type=int, default=2000, metavar="N", help="after the warm-up (default 2000)")
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="at once (default 64)")
    parser.add_argument("--client", choices=("auto", "openai", "own"), default="auto", help="auto: openai where it is installed (default)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the traffic (default 0)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="of an answer (default 120)")
    parser.add_argument("--json", type=Path, default=RECORDS, metavar="FILE", help="where the record is appended")
    parser.add_argument("--commit", default="", help="recorded where git is not at hand")
    parser.add_argument("server", nargs="*", metavar="OPTION", help=f"after --: options of tools/serve.py (default: {' '.join(SERVER)})")
    args = parser.parse_args(argv)
    args.server = args.server or list(SERVER)
    return args


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    source = provenance_of(["python", "tools/bench_serve_gpu.py", *argv], threads=1)
    if free_bytes() is not None:
        from tools.bench_moe import provenance

        source |= {key: value for key, value in provenance(args.commit).items() if key in ("gpu", "driver", "cupy", "nvrtc")}
    record = {**source, **measure(args)}
    if args.commit:
        record["commit"] = args.commit
    args.json.parent.mkdir(parents=True, exist_ok=True)
    with args.json.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, sort_keys=True) + "\n")
    shown = ("client", "requests", "most_open", "errors", "tokens_per_s", "ttft_ms", "tpot_ms", "free_bytes", "faults")
    print(json.dumps({key: record[key] for key in shown}, indent=1))
    return 1 if record["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
