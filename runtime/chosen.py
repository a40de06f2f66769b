"""What is chosen before any weight is read: backend, configs, sizes, from what a user said. The same on every node of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime import loading
from runtime.config import EngineConfig, SpeculativeConfig
from runtime.cuda_loading import Choice, choose_backend
from runtime.env import load_env
from runtime.load_config import LoadConfig
from runtime.stage_comm import StagePlace
from runtime.stages import Master, StageLeader, stage_job


@dataclass(frozen=True, slots=True)
class Chosen:
    """master: where stage 0 waits for stages that are started elsewhere; None: it starts them itself, by `distributed`."""

    source: loading.Source
    config: EngineConfig
    speculative: SpeculativeConfig
    choice: Choice
    activations: str
    tp: int
    pp: int
    distributed: str
    master: Master | None


def choose(
    model: str | Path,
    *,
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
    load_format: str = "auto",
    hf_overrides: Mapping[str, Any] | str | None = None,
    backend: str = "auto",
    dtype: str = "auto",
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    distributed_executor: str = "local",
    nnodes: int | None = None,
    master_addr: str | None = None,
    cudagraph_capture_sizes: Sequence[int] | None = None,
    **capacity: Any,
) -> Chosen:
    """Arguments and errors are `runtime.load`'s; capacity: those that are EngineConfig's."""
    if distributed_executor not in loading.DISTRIBUTED:
        raise ValueError(f"distributed_executor: {distributed_executor!r} is not one of {', '.join(loading.DISTRIBUTED)}")
    if dtype not in loading.DTYPES:
        raise ValueError(f"dtype: {dtype!r} is not one of {', '.join(loading.DTYPES)}")
    master = _master(nnodes, master_addr, pipeline_parallel_size, distributed_executor)
    here = pipeline_parallel_size if distributed_executor == "local" and master is None else 1
    choice = choose_backend(backend, dtype, tensor_parallel_size * here)
    activations = loading.DTYPES[dtype] if choice.backend == "numpy" else "bfloat16"
    paced = capacity.get("tpot_target_ms") is not None
    speculative = loading.fit_speculation(SpeculativeConfig.parse(speculative_config), choice.backend, paced)
    source = loading.open_source(model, speculative, LoadConfig.parse(load_format, hf_overrides))
    config = loading.first_config(choice.backend, cudagraph_capture_sizes, **capacity)
    config.check_speculation(speculative)
    config = loading.fit_config(config, source, activations, choice.backend)
    sizes = (tensor_parallel_size, pipeline_parallel_size)
    return Chosen(source, config, speculative, choice, activations, *sizes, distributed_executor, master)


def _master(nnodes: int | None, address: str | None, stages: int, distributed: str) -> Master | None:
    """Raises ValueError for nodes that are no stages, or that somebody else places."""
    if nnodes in (None, 1) and address is None:
        return None
    if address is None:
        raise ValueError(f"nnodes: {nnodes}, but no master_addr; give the HOST:PORT where node 0 waits for the others")
    if (nnodes or stages) != stages or stages == 1:
        raise ValueError(
            f"nnodes: {nnodes or 1} node(s) for pipeline_parallel_size {stages}; a node holds one stage, so they must be equal"
        )
    if distributed != "local":
        raise ValueError(f"distributed_executor: {distributed!r} together with master_addr {address!r}; one of them starts the stages")
    return Master.parse(address, load_env().stage_token)


def follow_node(model: str | Path, node_rank: int, **options: Any) -> StageLeader:
    """The stage of a node above 0, loaded and ready to `follow`. Options are those that node 0 was given.

    Raises ValueError for a number that is no such node's, StageRefused where node 0 was told other things, and what loading raises.
    """
    for name in ("served_model_name", "seed", "progress"):
        options.pop(name, None)
    chosen = choose(model, **options)
    if chosen.master is None:
        raise ValueError(f"node_rank: {node_rank}, but no master_addr; give the HOST:PORT where node 0 waits")
    if not 0 < node_rank < chosen.pp:
        raise ValueError(f"node_rank: {node_rank} of {chosen.pp} nodes; legal: 0 to {chosen.pp - 1}")
    place = StagePlace(node_rank, chosen.pp)
    parts = (chosen.source, chosen.config, chosen.speculative, chosen.activations, chosen.choice.backend)
    return StageLeader(stage_job(*parts, chosen.tp, place, chosen.master))
