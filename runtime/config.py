"""What the engine and the speculation are told at start: checked once, frozen from then on."""

from __future__ import annotations

import dataclasses
import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_TREE_BUDGET = 1023  # nodes a stream; with the root 16 words of ancestor bits a row
MAX_DRAFT_DEPTH = 64
DEFAULT_TREE_BUDGET = 16
AUTO = "auto"  # as tree_budget: one budget for all streams, chosen at every step from the cost curve
METHODS = ("ddtree", "dflash", "none")
POLICIES = ("fcfs", "priority")


def _check_int(name: str, value: Any, low: int, high: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}: {value!r} is not an integer in [{low}, {high}]")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Capacities of one engine; names are vLLM's where vLLM has one. A bad value raises ValueError.

    None leaves the choice to the executor: max_model_len to its positions, num_pages to its memory.
    """

    max_num_seqs: int = 64  # sequences in a step
    max_num_batched_tokens: int = 2048  # rows of a step: roots, draft nodes and prompt chunks together
    max_model_len: int | None = None  # prompt + output of a request
    block_size: int = 16  # positions of a cache page
    num_pages: int | None = None  # cache pages, the null page included
    enable_prefix_caching: bool = True
    max_num_queued_reqs: int = 1024  # requests that may wait beyond the free seats; one more is QueueFull
    max_num_queued_tokens: int | None = None  # prompt tokens that may wait, beyond the first request that waits; None: any number
    step_deadline_s: float = 120.0  # a step that takes longer is a hang: check_health says so
    scheduling_policy: str = "fcfs"  # or "priority": requests of lower `priority` first, equal ones by arrival
    tpot_target_ms: float | None = None  # time an output token of a stream may take on average; None: seats alone bound admission
    buckets: tuple[int, ...] = ()  # the M that steps are launched with, rising; empty: any M
    gpu_memory_utilization: float = 0.9  # share of a device's memory for weights, buffers and pages together
    enforce_eager: bool = False  # launch kernel by kernel instead of capturing graphs
    batch_invariant: bool = False  # one configuration of every kernel: a row's bits depend neither on its company nor on drafts

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", tuple(self.buckets))
        _check_int("max_num_seqs", self.max_num_seqs, 1, 4096)
        _check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 20)
        _check_int("block_size", self.block_size, 1, 4096)
        _check_int("max_num_queued_reqs", self.max_num_queued_reqs, 0)
        if self.max_num_queued_tokens is not None:
            _check_int("max_num_queued_tokens", self.max_num_queued_tokens, 1)
        if self.max_model_len is not None:
            _check_int("max_model_len", self.max_model_len, 2)
        if self.num_pages is not None:
            _check_int("num_pages", self.num_pages, 2)
        if not isinstance(self.step_deadline_s, (int, float)) or not self.step_deadline_s > 0:
            raise ValueError(f"step_deadline_s: {self.step_deadline_s!r} is not a number of seconds above 0")
        if not isinstance(self.gpu_memory_utilization, (int, float)) or not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization: {self.gpu_memory_utilization!r} is not a number in (0, 1]")
        if self.scheduling_policy not in POLICIES:
            raise ValueError(f"scheduling_policy: {self.scheduling_policy!r} is none of {', '.join(POLICIES)}")
        if self.tpot_target_ms is not None and not 0 < self.tpot_target_ms < math.inf:
            raise ValueError(f"tpot_target_ms: {self.tpot_target_ms!r} is not a number of milliseconds above 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} rows are fewer than max_num_seqs {self.max_num_seqs}, "
                "and each running sequence needs one a step; raise the former or lower the latter"
            )
        for bucket in self.buckets:
            _check_int("buckets", bucket, 1)
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"buckets: {self.buckets} do not rise")
        if self.buckets and self.buckets[-1] < self.max_num_batched_tokens:
            raise ValueError(
                f"buckets: the largest, {self.buckets[-1]}, is below max_num_batched_tokens {self.max_num_batched_tokens}; "
                "add a bucket or lower max_num_batched_tokens"
            )

    def check_speculation(self, speculative: SpeculativeConfig) -> None:
        """Raises ValueError where the latency target has no cost curve to stand on."""
        if self.tpot_target_ms is not None and speculative.enabled and speculative.tree_budget != AUTO:
            how = speculative.method if speculative.method != "ddtree" else f"ddtree with tree_budget {speculative.tree_budget}"
            raise ValueError(
                f"tpot_target_ms: {self.tpot_target_ms:g} together with {how}; the target needs tree_budget {AUTO!r}, or no speculation"
            )

    def bucket_for(self, rows: int) -> int:
        """The M of a step with `rows` live rows: the smallest bucket that holds them."""
        if not self.buckets:
            return rows
        return self.buckets[bisect_left(self.buckets, rows)]

    def replace(self, **changes: Any) -> EngineConfig:
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How drafts are made. `parse` reads the user's form; a bad key or value raises ValueError.

    ddtree grows a tree of at most tree_budget nodes a stream (arXiv 2604.12989) from the block
    drafter's marginals; dflash verifies their top-1 chain (arXiv 2602.06036); none drafts nothing.
    """

    method: str = "none"
    model: str | None = None  # drafter folder; None: the one that came with the target
    num_speculative_tokens: int | None = None  # greatest depth; None: the drafter's
    tree_budget: int | str | None = None  # nodes a stream, the root not counted; "auto": chosen each step; None: what suits the backend
    draft_rope_attention_factor: float | None = None  # factor on the drafter's cos and sin; None: from its config
    draft_top_k: int | None = None  # choices a depth; None: as many as the executor gives

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"speculative_config.method: {self.method!r} is none of {', '.join(METHODS)}")
        if self.model is not None and (not isinstance(self.model, str) or not self.model):
            raise ValueError(f"speculative_config.model: {self.model!r} is not a path")
        if self.num_speculative_tokens is not None:
            _check_int("speculative_config.num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFT_DEPTH)
        if isinstance(self.tree_budget, str):
            if self.tree_budget != AUTO:
                raise ValueError(f"speculative_config.tree_budget: {self.tree_budget!r} is neither an integer nor {AUTO!r}")
        elif self.tree_budget is not None:
            _check_int("speculative_config.tree_budget", self.tree_budget, 1, MAX_TREE_BUDGET)
        factor = self.draft_rope_attention_factor
        if factor is not None and (isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf):
            raise ValueError(f"speculative_config.draft_rope_attention_factor: {factor!r} is not a number above 0")
        if self.draft_top_k is not None:
            _check_int("speculative_config.draft_top_k", self.draft_top_k, 1, MAX_TREE_BUDGET)

    @property
    def enabled(self) -> bool:
        return self.method != "none"

    @staticmethod
    def parse(given: SpeculativeConfig | Mapping[str, Any] | str | None) -> SpeculativeConfig:
        """Reads a mapping, its JSON text, a bare method name, or None (no speculation).

        A mapping without "method" means ddtree; "method": null and "none" switch drafting off
        whatever else it says. Unknown keys are refused with the legal ones.
        """
        if given is None:
            return SpeculativeConfig()
        if isinstance(given, SpeculativeConfig):
            return given
        if isinstance(given, str):
            return SpeculativeConfig.parse(_read_text(given))
        if not isinstance(given, Mapping):
            raise ValueError(f"speculative_config: want a mapping or JSON text, not {type(given).__name__}")
        legal = [field.name for field in dataclasses.fields(SpeculativeConfig)]
        unknown = [str(key) for key in given if key not in legal]
        if unknown:
            raise ValueError(f"speculative_config: unknown {', '.join(map(repr, unknown))}; legal keys are {', '.join(legal)}")
        values = dict(given)
        method = values.setdefault("method", "ddtree")
        values["method"] = "none" if method is None else method
        if values["method"] == "dflash" and "tree_budget" in values:
            raise ValueError("speculative_config.tree_budget: a dflash chain has no tree; use num_speculative_tokens or method ddtree")
        return SpeculativeConfig(**values)


def _read_text(text: str) -> Mapping[str, Any]:
    stripped = text.strip()
    if stripped in METHODS:
        return {"method": stripped}
    try:
        value = json.loads(stripped)
    except ValueError as error:
        raise ValueError(f"speculative_config: not JSON and none of {', '.join(METHODS)}: {text[:80]!r} ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"speculative_config: want a JSON object, not {type(value).__name__}")
    return value
