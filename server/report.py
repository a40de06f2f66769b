"""The lines that the log gets every few seconds: vLLM's words, then what is ours (steps, rows, experts, tree nodes)."""

from __future__ import annotations

from collections.abc import Callable

from runtime.stats import EngineStats, by_power


class EngineReport:
    """Makes the lines of one interval out of the counters at its two ends.

    lines() is empty where nothing ran, waited or ended since the last call.
    """

    def __init__(self, read_stats: Callable[[], EngineStats], now_s: float) -> None:
        self._read_stats = read_stats
        self._before, self._then_s = read_stats(), now_s

    def lines(self, now_s: float) -> list[str]:
        """What happened since the last call."""
        now, before = self._read_stats(), self._before
        seconds = max(now_s - self._then_s, 1e-9)
        self._before, self._then_s = now, now_s
        if now.steps == before.steps and not now.running and not now.waiting:
            return []
        return [_engine_line(now, before, seconds), *_speculation_line(now, before, seconds), *_budget_line(now, before)]


def _engine_line(now: EngineStats, before: EngineStats, seconds: float) -> str:
    queries, hits = now.prefix_queries - before.prefix_queries, now.prefix_hits - before.prefix_hits
    steps = now.steps - before.steps
    line = (
        f"Engine 000: Avg prompt throughput: {(now.prompt_tokens - before.prompt_tokens) / seconds:.1f} tokens/s, "
        f"Avg generation throughput: {(now.generation_tokens - before.generation_tokens) / seconds:.1f} tokens/s, "
        f"Running: {now.running} reqs, Waiting: {now.waiting} reqs, KV cache usage: {100 * now.kv_cache_usage:.1f}%, "
        f"Prefix cache hit rate: {100 * hits / queries if queries else 0.0:.1f}%"
    )
    if steps:
        spent_ms = 1e3 * (sum(now.bucket_s.values()) - sum(before.bucket_s.values()))
        buckets = by_power({rows: count - before.bucket_steps[rows] for rows, count in now.bucket_steps.items()})
        shown = " ".join(f"{rows}×{count:.0f}" for rows, count in buckets.items() if count)
        exposed_ms = 1e3 * (sum(now.bucket_exposed_s.values()) - sum(before.bucket_exposed_s.values()))
        line += f", Steps: {steps / seconds:.1f}/s of {spent_ms / steps:.1f} ms"
        if spent_ms > 0:
            line += f" (host {100 * exposed_ms / spent_ms:.1f}%)"
        line += f", Rows a step: {(now.rows - before.rows) / steps:.1f} (M {shown})" + _experts(now, before)
    for name, word in (("preemptions", "Preempted"), ("corrupted_requests", "Corrupted"), ("rejected", "Refused")):
        if getattr(now, name) > getattr(before, name):
            line += f", {word}: {getattr(now, name) - getattr(before, name)} reqs"
    return line


def _experts(now: EngineStats, before: EngineStats) -> str:
    """Distinct experts a layer hit, and where the rows of a step stand beside the threshold from which rows are cheap."""
    counted, steps = now.experts_steps - before.experts_steps, now.steps - before.steps
    text = ""
    if counted:
        mean = (now.experts_sum - before.experts_sum) / counted
        share = f" of {now.experts_total} ({100 * mean / now.experts_total:.0f}%)" if now.experts_total else ""
        text = f", Distinct experts: {mean:.1f}{share}"
    threshold = now.threshold
    if threshold is not None:
        text += f", Threshold: M {threshold} (now at {(now.rows - before.rows) / steps / threshold:.2f} of it)"
    return text


def _budget_line(now: EngineStats, before: EngineStats) -> list[str]:
    """Where the engine chose its node budgets: how many nodes, and whether tokens and times were as expected."""
    steps = now.budget_steps - before.budget_steps
    recent = list(now.budget_records)[-steps:] if steps else []
    if not recent:
        return []
    nodes = sum(sum(step.nodes) for step in recent) / len(recent)
    expected_ms, took_ms = (1e3 * sum(times) / len(recent) for times in zip(*((s.expected_s, s.step_s) for s in recent), strict=True))
    return [
        f"Node budget: {nodes:.1f} nodes a step, none in {100 * (now.skipped_drafts - before.skipped_drafts) / steps:.0f}% of steps, "
        f"Tokens a step: {(now.realised_tokens - before.realised_tokens) / steps:.2f} "
        f"(expected {(now.expected_tokens - before.expected_tokens) / steps:.2f}), Step: {took_ms:.1f} ms (expected {expected_ms:.1f})"
    ]


def _speculation_line(now: EngineStats, before: EngineStats, seconds: float) -> list[str]:
    drafts, nodes = now.drafts - before.drafts, now.draft_tokens - before.draft_tokens
    accepted = now.accepted_tokens - before.accepted_tokens
    if not drafts or not nodes:
        return []
    earlier = before.accepted_per_position + [0] * len(now.accepted_per_position)
    rates = ", ".join(f"{(count - earlier[depth]) / drafts:.3f}" for depth, count in enumerate(now.accepted_per_position))
    return [
        f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / drafts:.2f}, "
        f"Accepted throughput: {accepted / seconds:.2f} tokens/s, Drafted throughput: {nodes / seconds:.2f} tokens/s, "
        f"Accepted: {accepted} tokens, Drafted: {nodes} tokens, Per-position acceptance rate: {rates}, "
        f"Avg Draft acceptance rate: {100 * accepted / nodes:.1f}%, Tree nodes a draft: {nodes / drafts:.1f}"
    ]
