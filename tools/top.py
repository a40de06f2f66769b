"""A live view of a running server in the terminal: `python tools/top.py [URL]`. It reads /metrics once a second."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from runtime.env import load_env
from server.client import ApiClient, ServerRefused

SPARKS = "▁▂▃▄▅▆▇█"
KEPT = 60  # rates remembered for the line
_SAMPLE = re.compile(r"^(?:vllm|runtime):(?P<name>\w+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
OWN_LABELS = ("position", "rank", "rows", "stage", "finished_reason", "state")


@dataclass(slots=True)
class Scrape:
    """Samples of one moment: plain ones by name, labelled ones by name and label value; _total is left off."""

    at_s: float
    plain: dict[str, float] = field(default_factory=dict)
    labelled: dict[str, dict[str, float]] = field(default_factory=dict)

    def get(self, name: str) -> float:
        return self.plain.get(name, 0.0)

    def of(self, name: str) -> dict[str, float]:
        return self.labelled.get(name, {})


def read_scrape(text: str, at_s: float) -> Scrape:
    """The samples of the Prometheus text format. Both prefixes give the same names."""
    scrape = Scrape(at_s)
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name, value = match["name"].removesuffix("_total"), float(match["value"])
        labels = dict(_LABEL.findall(match["labels"] or ""))
        own = next((labels[key] for key in OWN_LABELS if key in labels), None)
        if own is not None:
            scrape.labelled.setdefault(name, {})[own] = value
        elif "le" not in labels:
            scrape.plain[name] = value
    return scrape


def spark(values: Mapping[int, float] | list[float]) -> str:
    """A line of block characters, the highest value full."""
    numbers = list(values.values()) if isinstance(values, Mapping) else values
    most = max(numbers, default=0.0)
    return "".join(SPARKS[min(7, int(8 * value / most))] if most > 0 else SPARKS[0] for value in numbers)


def bar(share: float, width: int = 24) -> str:
    full = round(max(0.0, min(1.0, share)) * width)
    return "█" * full + "·" * (width - full)


class View:
    """Turns scrapes into a screen; rates are of the time between two scrapes."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._rates: deque[float] = deque(maxlen=KEPT)
        self._before: Scrape | None = None

    def show(self, now: Scrape) -> Group:
        before, self._before = self._before or now, now
        seconds = max(now.at_s - before.at_s, 1e-9)

        def over(name: str) -> float:
            return max(0.0, now.get(name) - before.get(name))  # a restarted server counts from 0 again

        if now is not before:
            self._rates.append(over("generation_tokens") / seconds)
        table = Table.grid(padding=(0, 2))
        pages, steps = now.of("kv_pages"), over("steps")
        used, total = pages.get("used", 0.0), sum(pages.values())
        rows = (
            ("tokens / s", f"{self._rates[-1] if self._rates else 0.0:8.1f}", spark(list(self._rates))),
            ("prompt / s", f"{over('prompt_tokens') / seconds:8.1f}", ""),
            ("requests", f"{now.get('num_requests_running'):8.0f}", f"running, {now.get('num_requests_waiting'):.0f} waiting"),
            (
                "KV pages",
                f"{100 * now.get('kv_cache_usage_perc'):7.1f}%",
                f"{bar(now.get('kv_cache_usage_perc'))} {used:.0f} of {total:.0f}",
            ),
            ("step", f"{now.get('step_milliseconds'):6.1f}ms", f"{steps / seconds:.1f} a second"),
            ("rows (M)", f"{over('step_rows') / steps if steps else 0.0:8.1f}", _threshold(now)),
            ("experts", f"{now.get('experts_hit'):8.1f}", _experts(now)),
        )
        for name, value, note in rows:
            table.add_row(Text(name, "bold"), Text(value, "cyan"), note)
        return Group(Panel(table, title=f"Threshold · {self._url}"), self._speculation(now), self._buckets(now))

    def _speculation(self, now: Scrape) -> Panel:
        drafts, nodes = now.get("spec_decode_num_drafts"), now.get("spec_decode_num_draft_tokens")
        accepted = now.get("spec_decode_num_accepted_tokens")
        table = Table.grid(padding=(0, 2))
        if not drafts:
            return Panel("no drafts so far", title="speculation since start")
        share = f"{100 * accepted / nodes:.1f}% of {nodes / drafts:.1f} nodes a tree"
        table.add_row("tokens a step", Text(f"{1 + accepted / drafts:.2f}", "cyan"), share)
        for position, count in sorted(now.of("spec_decode_num_accepted_tokens_per_pos").items(), key=lambda entry: int(entry[0])):
            table.add_row(f"depth {int(position) + 1}", f"{100 * count / drafts:5.1f}%", Text(bar(count / drafts), "green"))
        return Panel(table, title="speculation since start")

    def _buckets(self, now: Scrape) -> Panel:
        table = Table.grid(padding=(0, 2))
        steps, seconds = now.of("steps_by_bucket"), now.of("step_seconds_by_bucket")
        most = max(steps.values(), default=1.0)
        for rows, count in sorted(steps.items(), key=lambda entry: int(entry[0])):
            each_ms = 1e3 * seconds.get(rows, 0.0) / count if count else 0.0
            table.add_row(f"M ≤ {rows}", f"{count:.0f} steps", Text(f"{each_ms:.1f} ms", "cyan"), Text(bar(count / most), "blue"))
        stages = now.of("stage_seconds")
        total = sum(stages.values()) or 1.0
        shares = " · ".join(f"{name} {100 * value / total:.0f}%" for name, value in stages.items())
        return Panel(Group(table, Text(shares, "dim")), title="steps since start")


def _threshold(now: Scrape) -> str:
    rows = now.get("threshold_rows")
    return f"a step; further ones are cheap from {rows:.0f} on" if rows else "a step"


def _experts(now: Scrape) -> str:
    """Of how many, and the mean since start."""
    steps, total = now.get("experts_counted_steps"), now.get("experts")
    if not steps:
        return "not counted"
    return (
        f"of {total:.0f} a layer, {now.get('step_experts') / steps:.1f} on average {bar(now.get('experts_hit') / total if total else 0.0)}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python tools/top.py", description=__doc__)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="the server (default http://127.0.0.1:8000)")
    parser.add_argument("--api-key", default=None, metavar="KEY", help="where the server asks for one (default: RUNTIME_API_KEY)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks (default 1)")
    parser.add_argument("--once", action="store_true", help="print the figures once and end")
    args = parser.parse_args(argv)
    try:
        client = ApiClient(args.url, args.api_key or load_env().api_key, timeout_s=10.0)
        view, console = View(client.base_url), Console()
        screen = view.show(read_scrape(client.get("/metrics"), time.monotonic()))
        if args.once:
            console.print(screen)
            return 0
        with Live(screen, console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(args.interval)
                live.update(view.show(read_scrape(client.get("/metrics"), time.monotonic())), refresh=True)
    except KeyboardInterrupt:
        return 0
    except (ServerRefused, OSError, ValueError) as error:
        print(f"top: error: {args.url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
