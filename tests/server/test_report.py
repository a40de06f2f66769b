"""What an operator sees: the log's lines, the board for Grafana, the terminal's view."""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runtime.stats import BudgetStep, EngineStats
from server.metrics import Metrics
from server.report import EngineReport
from tools.top import View, read_scrape, spark

ROOT = Path(__file__).resolve().parents[2]


def busy(times: int) -> EngineStats:
    stats = EngineStats(running=2, waiting=1, pages_total=10, pages_used=4, experts_total=8)
    for _ in range(times):
        stats.count_step(16, 10, 0.02, 6.0)
        stats.count_draft(4, 2)
        stats.generation_tokens += 3
        stats.prompt_tokens += 1
        stats.prefix_queries += 4
        stats.prefix_hits += 1
    return stats


def test_the_lines_say_what_happened_in_the_interval() -> None:
    now = [busy(5)]
    report = EngineReport(lambda: now[0], 0.0)
    now[0] = busy(25)
    engine, speculation = report.lines(10.0)
    for words in (
        "Avg prompt throughput: 2.0 tokens/s",
        "Avg generation throughput: 6.0 tokens/s",
        "Running: 2 reqs, Waiting: 1 reqs",
        "KV cache usage: 40.0%",
        "Prefix cache hit rate: 25.0%",
        "Steps: 2.0/s of 20.0 ms",
        "Rows a step: 10.0 (M 16×20)",
    ):
        assert words in engine
    for words in (
        "Mean acceptance length: 3.00",
        "Accepted throughput: 4.00 tokens/s",
        "Drafted throughput: 8.00 tokens/s",
        "Accepted: 40 tokens, Drafted: 80 tokens",
        "Per-position acceptance rate: 1.000, 1.000",
        "Avg Draft acceptance rate: 50.0%",
    ):
        assert words in speculation
    assert "Preempted" not in engine
    now[0] = busy(26)
    now[0].preemptions = 3
    assert "Preempted: 3 reqs" in report.lines(20.0)[0]


def test_experts_and_the_threshold_are_said() -> None:
    now = [EngineStats(experts_total=64)]
    report = EngineReport(lambda: now[0], 0.0)

    def grown(hit: float, flat: bool) -> EngineStats:
        stats = EngineStats(experts_total=64)
        for rows, ms in ((16, 2.0), (32, 3.9), (64, 4.0 if flat else 7.7)):
            for _ in range(10):
                stats.count_step(rows, rows, ms / 1e3, hit)
        return stats

    now[0] = grown(48.0, True)
    [line] = report.lines(10.0)
    assert "Distinct experts: 48.0 of 64 (75%), Threshold: M 32 (now at 1.17 of it)" in line, "112 / 3 rows a step"
    report = EngineReport(lambda: EngineStats(), 0.0)
    report._read_stats = lambda: grown(0.0, False)
    [line] = report.lines(10.0)
    assert "experts" not in line and "Threshold" not in line


def test_chosen_budgets_have_a_line() -> None:
    now = [busy(5)]
    report = EngineReport(lambda: now[0], 0.0)
    now[0] = busy(8)
    for nodes in ((4, 2), (3, 3), ()):
        step = BudgetStep(7, 8, nodes, drafted=len(nodes), expected=3.5, realised=4, expected_s=0.01, step_s=0.02)
        now[0].count_budget(step)
    line = report.lines(10.0)[2]
    assert line.startswith("Node budget: 4.0 nodes a step, none in 33% of steps, Tokens a step: 4.00 (expected 3.50)")
    assert line.endswith("Step: 20.0 ms (expected 10.0)")
    now[0].count_step(16, 10, 0.02)
    assert len(report.lines(20.0)) == 1, "no draft and no chosen budget since"


def test_an_idle_engine_says_nothing_and_a_stuck_one_does() -> None:
    idle = EngineStats()
    assert EngineReport(lambda: idle, 0.0).lines(10.0) == []
    stuck = EngineStats(waiting=4)
    assert "Waiting: 4 reqs" in EngineReport(lambda: stuck, 0.0).lines(10.0)[0]


def test_the_server_logs_them(start_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "server")
    server = start_server(lambda _: [[97]] * 100, log_stats_s=0.05)
    server.engine.step_s = 0.01
    server.client.complete()
    assert any(message.startswith("Engine 000: Avg prompt throughput") for message in caplog.messages)
    time.sleep(0.15)
    quiet = len(caplog.messages)
    time.sleep(0.2)
    assert len(caplog.messages) <= quiet + 1, "nothing more once it is idle"


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:vllm|runtime):\w+", expression))


def test_the_board_asks_for_metrics_that_exist() -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    metrics = Metrics("both")
    metrics.watch("m", lambda: busy(3))
    text = metrics.render().decode()
    there = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    asked = {name for panel in board["panels"] for target in panel["targets"] for name in names_in(target["expr"])}
    assert len(asked) > 20
    assert asked <= there, sorted(asked - there)
    assert not {"vllm:num_request_running"} <= there, "the check can fail"
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places)


def screen(view: View, text: str, at_s: float) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view.show(read_scrape(text, at_s)))
    return console.export_text()


@pytest.mark.parametrize("prefix", ["vllm", "both", "runtime"])
def test_the_view_shows_rates_of_two_scrapes(prefix: Any) -> None:
    now = [busy(5)]
    metrics = Metrics(prefix)
    metrics.watch("m", lambda: now[0])
    view = View("http://x")
    screen(view, metrics.render().decode(), 0.0)
    now[0] = busy(25)
    shown = screen(view, metrics.render().decode(), 10.0)
    assert re.search(r"tokens / s +6\.0", shown) and re.search(r"prompt / s +2\.0", shown)
    assert re.search(r"requests +2 +running, 1 waiting", shown)
    assert re.search(r"depth 2 +100\.0%", shown)
    if prefix != "vllm":
        assert re.search(r"M ≤ 16 +25 steps +20\.0 ms", shown)
        assert "4 of 10" in shown
        assert re.search(r"experts +6\.0 +of 8 a layer, 6\.0 on average", shown)


def test_sparks() -> None:
    assert spark([0.0, 1.0, 2.0]) == "▁▅█" and spark([]) == "" and spark([0.0]) == "▁"
