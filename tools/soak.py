#!/usr/bin/env python3
"""Keeps a server under mixed traffic and watches what must not grow: `python tools/soak.py --help`."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from server.client import ApiClient
from server.options import WideHelp
from tools.bench_report import provenance_of
from tools.soak_traffic import KINDS, Wrong, weights
from tools.top import read_scrape

ROOT = Path(__file__).resolve().parents[1]
SERVER = ("demo", "--num-pages", "400", "--max-model-len", "2048", "--max-num-seqs", "8", "--max-num-batched-tokens", "512")
HELP = """\
Starts `tools/serve.py` and sends it, from several clients at once, streams, whole answers, tool calls, schemas, thinking with a budget,
clients that leave, prompts of all sizes and requests that must be refused. Every answer is checked. Memory, open files, threads, cache
pages and open requests are sampled meanwhile; at the end all is drained, and it fails (exit code 1) if an answer was wrong or late, if
pages or requests are still held, or if memory or open files have grown since the warm-up (the first quarter of the time).
Without options of its own the server gets few cache pages: there is pressure on them, and all are touched during the warm-up.
"""
EXAMPLES = """\
examples:
  five minutes on the demo model
    python tools/soak.py --minutes 5
  an hour, recorded
    python tools/soak.py --minutes 60 --json tools/results/soak_cpu.jsonl
  other options of the server
    python tools/soak.py --minutes 5 -- --max-num-seqs 8 --num-pages 400
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment."""

    at_s: float
    rss_mib: float
    files: int
    threads: int
    pages: float
    open: float  # requests, running and waiting
    steps: float


@dataclass(slots=True)
class Tally:
    """What the clients saw; written by all of them under one lock."""

    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, seconds: float, wrong: str | None) -> None:
        with self.lock:
            self.done[kind] += 1
            self.slowest_s[kind] = max(self.slowest_s.get(kind, 0.0), seconds)
            if wrong is not None:
                self.wrong.append(f"{kind}: {wrong}")


def take_sample(client: ApiClient, pid: int, start_s: float) -> Sample:
    """Reads /metrics and /proc. Raises OSError where either is gone."""
    scrape = read_scrape(client.get("/metrics"), time.monotonic())
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    numbers = {name: int(value) for name, value in re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE)}
    return Sample(
        at_s=scrape.at_s - start_s,
        rss_mib=numbers["VmRSS"] / 1024,
        files=len(list(Path(f"/proc/{pid}/fd").iterdir())),
        threads=numbers["Threads"],
        pages=scrape.of("kv_pages").get("used", 0.0),
        open=scrape.get("num_requests_running") + scrape.get("num_requests_waiting"),
        steps=scrape.get("steps"),
    )


def faults(samples: Sequence[Sample], last: Sample, tally: Tally, growth_mib: float) -> list[str]:
    """What is wrong, in words; empty if all is well. `last` was taken when nothing was open any more.

    Memory: the highest of the last quarter against the highest of the second; open files: the end against the beginning.
    """
    found = [f"{len(tally.wrong)} wrong answers, the first: {tally.wrong[0]}"] if tally.wrong else []
    if last.open:
        found.append(f"{last.open:.0f} requests are still open")
    if last.pages:
        found.append(f"{last.pages:.0f} cache pages are still held")
    if len(samples) >= 4:
        grown = growth_of(samples)
        if grown > growth_mib:
            found.append(f"memory grew by {grown:.1f} MiB after the warm-up, {growth_mib:g} may")
        if last.files > samples[0].files + 2:  # one connection of the sampling client, one of a listener that just closed
            found.append(f"{last.files} open files, {samples[0].files} at the start")
    return found


def growth_of(samples: Sequence[Sample]) -> float:
    """MiB between the peaks of the second and of the last quarter."""
    quarter = len(samples) // 4
    return max(s.rss_mib for s in samples[-quarter:]) - max(s.rss_mib for s in samples[quarter : 2 * quarter])


class Soak:
    """`clients` threads over one server until `end_s` (time.monotonic)."""

    def __init__(self, client: ApiClient, model: str, clients: int, seed: int, limit_s: float) -> None:
        self.tally = Tally()
        self._client, self._model, self._limit_s = client, model, limit_s
        self._rngs = [random.Random(f"{seed} {number}") for number in range(clients)]
        self._stop = threading.Event()

    def run(self, pid: int, seconds: float, every_s: float, note: Any) -> list[Sample]:
        """Samples while the clients work; they have all returned at the end. Raises OSError if the server goes away."""
        self.warm_up()
        start_s = time.monotonic()
        threads = [threading.Thread(target=self._work, args=(rng,), daemon=True) for rng in self._rngs]
        samples = [take_sample(self._client, pid, start_s)]
        for thread in threads:
            thread.start()
        try:
            while time.monotonic() - start_s < seconds:
                time.sleep(min(every_s, max(0.0, seconds - (time.monotonic() - start_s))))
                samples.append(take_sample(self._client, pid, start_s))
                note(samples[-1], self.tally)
        finally:
            self._stop.set()
        for thread in threads:
            thread.join(2 * self._limit_s)
        if any(thread.is_alive() for thread in threads):
            self.tally.add("end", 0.0, f"a client still waits after {2 * self._limit_s:g} s")
        return samples

    def warm_up(self) -> None:
        """The longest prompts and every other kind once: buffers grow to the largest step, and stay."""
        rng = random.Random(0)
        longest = {"model": self._model, "prompt": [" ".join(["sum"] * 900)] * 4, "max_tokens": 2, "temperature": 0}
        self._client.post("/v1/completions", longest)
        for kind in KINDS.values():
            kind.run(self._client, self._model, rng)

    def drained(self, pid: int, timeout_s: float = 10.0) -> Sample:
        """A sample once nothing is open, or after timeout_s."""
        end_s = time.monotonic() + timeout_s
        while True:
            sample = take_sample(self._client, pid, end_s - timeout_s)
            if (not sample.open and not sample.pages) or time.monotonic() > end_s:
                return sample
            time.sleep(0.2)

    def _work(self, rng: random.Random) -> None:
        names = list(KINDS)
        while not self._stop.is_set():
            [kind] = rng.choices(names, weights())
            begin_s, wrong = time.monotonic(), None
            try:
                KINDS[kind].run(self._client, self._model, rng)
            except Wrong as error:
                wrong = str(error)
            except Exception as error:  # a refusal where none was due, a connection that broke, a timeout
                wrong = f"{type(error).__name__}: {error}"
            seconds = time.monotonic() - begin_s
            if wrong is None and seconds > self._limit_s:
                wrong = f"took {seconds:.1f} s"
            self.tally.add(kind, seconds, wrong)


def start_server(options: Sequence[str]) -> tuple[subprocess.Popen[str], str]:
    """The process and its URL. Raises RuntimeError if it ends before it listens."""
    command = [sys.executable, str(ROOT / "tools" / "serve.py"), "--port", "0", "--log-stats-interval", "0", *options]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in popen.stdout or ():
        found = re.search(r" at (https?://\S+) ", line)
        if found:
            return popen, found[1]
    raise RuntimeError(f"the server ended with {popen.wait()} before it listened")


def record_of(args: argparse.Namespace, samples: Sequence[Sample], last: Sample, tally: Tally, found: Sequence[str]) -> dict[str, Any]:
    return {
        **args.provenance,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "case": f"soak {samples[-1].at_s / 60:.1f} min",
        "duration_s": round(samples[-1].at_s, 1),
        "server": " ".join(args.server),
        "clients": args.clients,
        "requests": sum(tally.done.values()),
        "by_kind": dict(sorted(tally.done.items())),
        "slowest_s": {kind: round(seconds, 2) for kind, seconds in sorted(tally.slowest_s.items())},
        "wrong": len(tally.wrong),
        "steps": last.steps,
        "rss_mib": {
            "start": round(samples[0].rss_mib, 1),
            "peak": round(max(s.rss_mib for s in samples), 1),
            "end": round(last.rss_mib, 1),
            "growth_after_warm_up": round(growth_of(samples), 1) if len(samples) >= 4 else None,
        },
        "files": {"start": samples[0].files, "peak": max(s.files for s in samples), "end": last.files},
        "threads": {"start": samples[0].threads, "end": last.threads},
        "pages_held_at_end": last.pages,
        "open_at_end": last.open,
        "faults": list(found),
    }


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python tools/soak.py", description=HELP, epilog=EXAMPLES, formatter_class=WideHelp)
    parser.add_argument("--minutes", type=float, default=5.0, metavar="N", help="how long (default 5)")
    parser.add_argument("--clients", type=int, default=12, metavar="N", help="requests at once (default 12)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the traffic (default 0)")
    parser.add_argument("--sample-every", type=float, default=5.0, metavar="S", help="seconds between two looks (default 5)")
    parser.add_argument("--limit", type=float, default=120.0, metavar="S", help="an answer that takes longer is wrong (default 120)")
    parser.add_argument("--growth", type=float, default=20.0, metavar="MIB", help="memory that may be added after the warm-up (default 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a record there")
    parser.add_argument("server", nargs="*", metavar="OPTION", help=f"after --: options of tools/serve.py (default: {' '.join(SERVER)})")
    args = parser.parse_args(argv)
    args.server = args.server or list(SERVER)
    args.argv = argv
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    args.provenance = provenance_of(["python", "tools/soak.py", *args.argv], threads=1)  # of the code that is loaded now
    popen, url = start_server(args.server)
    try:
        client = ApiClient(url, timeout_s=args.limit)
        client.wait_ready(120.0)
        soak = Soak(client, client.model(), args.clients, args.seed, args.limit)

        def note(sample: Sample, tally: Tally) -> None:
            text = f"{sample.at_s:6.0f} s  {sum(tally.done.values())} requests, {len(tally.wrong)} wrong, {sample.rss_mib:.1f} MiB, "
            print(text + f"{sample.files} files, {sample.pages:.0f} pages, {sample.open:.0f} open", file=sys.stderr, flush=True)

        samples = soak.run(popen.pid, 60 * args.minutes, args.sample_every, note)
        last = soak.drained(popen.pid)
        found = faults(samples, last, soak.tally, args.growth)
        popen.send_signal(signal.SIGTERM)
        if popen.wait(60):
            found.append(f"the server ended with {popen.returncode}")
    finally:
        if popen.poll() is None:
            popen.kill()
    record = record_of(args, samples, last, soak.tally, found)
    if args.json is not None:
        with args.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, sort_keys=True) + "\n")
    print(json.dumps({key: record[key] for key in ("requests", "wrong", "rss_mib", "files", "by_kind", "faults")}, indent=1))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
