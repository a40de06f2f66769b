"""EngineStats as Prometheus families, read at scrape time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.stats import EngineStats, by_power

StatsReader = Callable[[], EngineStats]


class EngineCollector(Collector):
    """Asks `read_stats` once a scrape, so that all values of a scrape are of the same moment."""

    def __init__(self, read_stats: StatsReader) -> None:
        self._read_stats = read_stats

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        yield from _gauges(stats)
        yield from _counters(stats)
        yield _labelled("request_success", "Finished choices.", "finished_reason", stats.finished)
        by_position = {str(depth): count for depth, count in enumerate(stats.accepted_per_position)}
        yield _labelled(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts whose node at this depth (0: the first) was accepted.",
            "position",
            by_position,
        )
        ranks = {str(rank): count for rank, count in sorted(stats.accepted_per_rank.items())}
        yield _labelled(
            "accepted_tokens_per_rank", "Draft nodes accepted, by place among their siblings (0: the likeliest).", "rank", ranks
        )
        yield _labelled("stage_seconds", "Wall time of the engine's thread by stage of a step.", "stage", stats.stage_s)
        exposed = "Of it, while neither a draft nor a step was in flight."
        yield _labelled("stage_exposed_seconds", exposed, "stage", stats.exposed_s)
        yield _labelled("steps_by_bucket", "Steps by rows, rounded up to a power of two.", "rows", _by_power(stats.bucket_steps))
        yield _labelled("step_seconds_by_bucket", "Wall time of steps, likewise.", "rows", _by_power(stats.bucket_s))
        exposed = "Of it, while nothing was in flight: what the host cost."
        yield _labelled("step_exposed_seconds_by_bucket", exposed, "rows", _by_power(stats.bucket_exposed_s))


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("num_requests_running", "Choices in the engine's steps.", stats.running)
    yield GaugeMetricFamily("num_requests_waiting", "Choices that wait for a seat.", stats.waiting)
    yield GaugeMetricFamily("seats", "Choices that may run at once: fewer than --max-num-seqs under --tpot-target-ms.", stats.seats)
    yield GaugeMetricFamily("kv_cache_usage_perc", "Share of cache pages held by sequences; 1 is full.", stats.kv_cache_usage)
    yield GaugeMetricFamily("step_milliseconds", "Moving mean of a step.", stats.step_ms_ema)
    yield GaugeMetricFamily("experts_hit", "Distinct experts that a layer hit in the last step, mean over layers.", stats.experts)
    yield GaugeMetricFamily("experts", "Experts of a layer; 0: not known.", stats.experts_total)
    threshold = "Rows of a step from which further ones cost less than a quarter of the average row; 0: not within what was run."
    yield GaugeMetricFamily("threshold_rows", threshold, stats.threshold or 0)
    last = stats.budget_records[-1] if stats.budget_records else None
    rows, nodes = (last.bucket, sum(last.nodes)) if last else (0, 0)
    yield GaugeMetricFamily("budget_rows", "M of the last step whose node budget was chosen, padding included; 0: none was.", rows)
    yield GaugeMetricFamily("budget_nodes", "Draft nodes of that step.", nodes)
    pages = GaugeMetricFamily("kv_pages", "Cache pages by state.", labels=["state"])
    pages.add_metric(["used"], stats.pages_used)
    pages.add_metric(["kept"], stats.pages_kept)
    pages.add_metric(["free"], stats.pages_total - stats.pages_used - stats.pages_kept)
    yield pages


def _counters(stats: EngineStats) -> Iterator[Metric]:
    for name, text, value in (
        ("prompt_tokens", "Prompt tokens of admitted choices.", stats.prompt_tokens),
        ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
        ("generation_tokens", "Tokens delivered, after the cut at a stop or limit.", stats.generation_tokens),
        ("num_preemptions", "Running choices put back to wait for pages.", stats.preemptions),
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
        ("prefix_cache_hits", "Prompt tokens found there.", stats.prefix_hits),
        ("corrupted_requests", "Choices ended by a NaN or Inf in their logits.", stats.corrupted_requests),
        ("spec_decode_num_drafts", "Draft trees verified.", stats.drafts),
        ("spec_decode_num_draft_tokens", "Draft nodes verified, roots not counted.", stats.draft_tokens),
        ("spec_decode_num_accepted_tokens", "Draft nodes accepted.", stats.accepted_tokens),
        ("steps", "Steps of the target.", stats.steps),
        ("budget_steps", "Steps whose node budget was chosen by expected tokens over time.", stats.budget_steps),
        ("budget_skipped_drafts", "Of these, steps where no draft was made because none should pay.", stats.skipped_drafts),
        ("budget_expected_tokens", "Of these, tokens expected beforehand.", stats.expected_tokens),
        ("budget_realised_tokens", "Of these, tokens drawn along accepted paths.", stats.realised_tokens),
        ("step_rows", "Live rows of all steps.", stats.rows),
        ("step_experts", "Distinct experts that a layer hit, summed over the steps that counted them.", stats.experts_sum),
        ("experts_counted_steps", "The steps that counted them.", stats.experts_steps),
        ("callback_errors", "Deliveries that raised.", stats.callback_errors),
        ("flight_seconds", "Time that drafts and steps were in flight.", stats.flown_s),
        ("late_flights", "Of these, done before the host came to wait: not in flight_seconds.", stats.late_flights),
    ):
        yield CounterMetricFamily(name, text, value)


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _by_power(values: Mapping[int, float]) -> dict[str, float]:
    return {str(rows): value for rows, value in by_power(values).items()}
