"""/metrics: vLLM's names, ours beside them, closed label sets."""

from __future__ import annotations

import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.stats import BudgetStep, EngineStats
from runtime.types import Emission
from server.metrics import VLLM, Metrics
from server.record import ChoiceRecord

WANTED = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
    "request_success_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "admission_rejections_total",
    "corrupted_requests_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "request_time_per_output_token_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_queue_time_seconds_count",
    "request_prefill_time_seconds_count",
    "request_decode_time_seconds_count",
    "request_inference_time_seconds_count",
    "request_max_num_generation_tokens_count",
    "request_prefill_kv_computed_tokens_count",
    "request_prompt_tokens_count",
    "request_generation_tokens_count",
    "request_params_n_count",
    "request_params_max_tokens_count",
]


def samples(text: bytes) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def watched(prefix: str, stats: EngineStats | None = None) -> Metrics:
    metrics = Metrics(prefix)  # type: ignore[arg-type]
    metrics.watch("m", lambda: stats or EngineStats(pages_total=10, pages_used=4, accepted_per_position=[5, 3]))
    return metrics


@pytest.mark.parametrize(("prefix", "prefixes"), [("vllm", ["vllm"]), ("runtime", ["runtime"]), ("both", ["vllm", "runtime"])])
def test_every_name_is_there_under_every_prefix_asked_for(prefix: str, prefixes: list[str]) -> None:
    found = samples(watched(prefix).render())
    assert {name.split(":")[0] for name in found} == set(prefixes)
    for name in WANTED:
        for one in prefixes:
            assert all(sample.labels["model_name"] == "m" for sample in found[f"{one}:{name}"])
    assert ("runtime:kv_pages" in found) == ("runtime" in prefixes)
    ours = {name.removeprefix("vllm:") for name in found if name.startswith("vllm:")}
    stems = {name.removesuffix("_total") for name in ours} - {f"{n}{end}" for n in VLLM for end in ("_bucket", "_count", "_sum")}
    assert stems <= VLLM, f"no name that vLLM does not have: {stems - VLLM}"
    assert not any(name.endswith("_created") for name in found)


def test_values_are_the_engines() -> None:
    stats = EngineStats(running=3, pages_total=10, pages_used=4, pages_kept=1, draft_tokens=9, accepted_per_position=[5, 3])
    stats.bucket_steps.update({1: 2, 3: 1, 4: 1, 500: 7})
    found = samples(watched("both", stats).render())
    assert found["vllm:num_requests_running"][0].value == 3
    assert found["vllm:kv_cache_usage_perc"][0].value == 0.4
    assert {s.labels["state"]: s.value for s in found["runtime:kv_pages"]} == {"used": 4, "kept": 1, "free": 5}
    assert {s.labels["position"]: s.value for s in found["vllm:spec_decode_num_accepted_tokens_per_pos_total"]} == {"0": 5, "1": 3}
    assert {s.labels["rows"]: s.value for s in found["runtime:steps_by_bucket_total"]} == {"1": 2, "4": 2, "512": 7}


def test_chosen_budgets_are_shown() -> None:
    stats = EngineStats()
    assert samples(watched("runtime", stats).render())["runtime:budget_rows"][0].value == 0
    stats.count_budget(BudgetStep(rows=9, bucket=16, nodes=(4, 3), drafted=2, expected=5.5, realised=6, expected_s=0.1, step_s=0.2))
    stats.count_budget(BudgetStep(rows=2, bucket=8, nodes=(0, 0), drafted=0, expected=2.0, realised=2, expected_s=0.1, step_s=0.1))
    found = {name: values[0].value for name, values in samples(watched("runtime", stats).render()).items()}
    assert (found["runtime:budget_rows"], found["runtime:budget_nodes"]) == (8, 0)
    assert (found["runtime:budget_steps_total"], found["runtime:budget_skipped_drafts_total"]) == (2, 1)
    assert (found["runtime:budget_expected_tokens_total"], found["runtime:budget_realised_tokens_total"]) == (7.5, 8)


def test_requests_do_not_grow_the_scrape(running: Any) -> None:
    running.client.complete()

    def lines() -> int:
        return len(running.client.get("/metrics")[1].splitlines())

    before = lines()
    for i in range(20):
        running.client.complete(user=f"u{i}", cache_salt=f"s{i}")
        running.client.get(f"/path{i}")
        running.client.complete(model=f"m{i}")
    assert lines() == before


def test_times_are_observed_once_a_choice(start_server: Any) -> None:
    server = start_server(lambda _: [[97], [98], [99], [256]])
    assert server.client.complete(n=2)[0] == 200
    assert server.client.metric("vllm:time_to_first_token_seconds_count") == 2
    assert server.client.metric("vllm:inter_token_latency_seconds_count") == 6
    assert server.client.metric("vllm:request_generation_tokens_sum") == 8
    assert server.client.metric("vllm:request_params_n_sum") == 2
    assert server.client.metric("vllm:request_success_total") == 2


def test_times_of_a_request_add_up() -> None:
    """Arrived at 9, encoded and submitted at 10, a seat at 12, first token at 15, last at 21."""
    metrics = watched("both")
    made = ChoiceRecord(prompt_tokens=30, submitted_s=10.0, arrived_s=9.0)
    for at, tokens in ((15.0, (1,)), (18.0, (1, 2)), (21.0, (1, 2, 3))):
        made.observe(Emission("x", tokens, "", cached_tokens=16, admitted_s=12.0), at)
    metrics.finished(made, 21.0)
    never = ChoiceRecord(prompt_tokens=5, submitted_s=10.0)
    never.observe(Emission("y", (), "", finish="abort"), 30.0)
    metrics.finished(never, 30.0)
    metrics.ended([made, never])
    sums = {
        name: values[0].value for name, values in samples(metrics.render()).items() if name.startswith("vllm:") and name.endswith("_sum")
    }
    parts = {"queue": 2.0, "prefill": 3.0, "decode": 6.0, "inference": 9.0}
    assert {part: sums[f"vllm:request_{part}_time_seconds_sum"] for part in parts} == parts
    assert sums["vllm:request_prefill_kv_computed_tokens_sum"] == 14 and sums["vllm:request_max_num_generation_tokens_sum"] == 6
    assert sums["vllm:request_time_per_output_token_seconds_sum"] == 6.0 / 5
    counts = {name: values[0].value for name, values in samples(metrics.render()).items() if name.endswith("_count")}
    assert sums["vllm:e2e_request_latency_seconds_sum"] == 12.0 + 20.0
    assert counts["vllm:e2e_request_latency_seconds_count"] == 2 and counts["vllm:request_queue_time_seconds_count"] == 1


def test_experts_and_the_threshold_are_shown() -> None:
    stats = EngineStats(experts_total=8)
    for rows, ms in ((1, 1.0), (2, 1.9), (4, 2.0)):
        for _ in range(10):
            stats.count_step(rows, rows, ms / 1e3, 4.5)
    found = {name: values[0].value for name, values in samples(watched("runtime", stats).render()).items()}
    assert (found["runtime:experts_hit"], found["runtime:experts"], found["runtime:threshold_rows"]) == (4.5, 8, 2)
    assert found["runtime:step_experts_total"] == 4.5 * 30 and found["runtime:experts_counted_steps_total"] == 30


def test_arrival_is_before_the_prompt_is_encoded(start_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server(lambda _: [[97], [256]])
    encode = type(server.loaded.tokenizer).encode

    def slow(self: Any, text: str) -> Any:
        time.sleep(0.2)
        return encode(self, text)

    monkeypatch.setattr(type(server.loaded.tokenizer), "encode", slow)
    server.client.complete()
    assert server.client.metric("vllm:time_to_first_token_seconds_sum") > 0.2
    assert server.client.metric("vllm:e2e_request_latency_seconds_sum") > 0.2
