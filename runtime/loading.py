"""From a checkpoint folder to an executor: reads configs, cuts weights over ranks, makes caches.

Lives beside `runtime.api` at the top: the only place that knows model, backend and ranks together.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from model import dflash, kimi_k26
from model.bound import BoundModel, Drafter
from model.dummy import DummyCheckpoint, override_config
from model.shards import read_json
from model.stages import Stage, stages_of
from model.weights import Checkpoint
from runtime.checked import CheckedBackend
from runtime.comm import Comm, Neighbours, SoloComm
from runtime.config import AUTO, DEFAULT_TREE_BUDGET, EngineConfig, SpeculativeConfig
from runtime.cuda_loading import BATCHED_TOKENS, BLOCK_SIZE, join_peers, join_stages, load_parts, make_cuda_worker, open_driver, path_pages
from runtime.cuda_worker import CudaWorker
from runtime.env import load_env
from runtime.executor import Executor
from runtime.graph.buckets import fit_sizes
from runtime.graph.driver import CudaDriver
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_np import NumpyBackend
from runtime.kernels_np.rows import ROW_TILE
from runtime.load_config import FROM_FILES, LoadConfig
from runtime.plan import DraftLayout, PlanLayout
from runtime.processes import CapturedRanks, Meeting, ProcessRanks
from runtime.ray_ranks import RayPeers
from runtime.shared_comm import SharedComm
from runtime.spawn import RankJob, SpawnedPeers
from runtime.stage_comm import HostNeighbours, StageHost, StagePlace
from runtime.types import SamplingParams
from runtime.worker import Limits, Worker

DEMO = Path(__file__).parent.parent / "model" / "demo"
CONFIGS = DEMO.parent / "configs"
CACHE_BYTES = 1 << 30  # host memory for cache pages unless num_pages says otherwise
HOST_BATCHED_TOKENS = 512  # attention scores of a chunk take 512 x 4096 x 8 heads x 4 B = 67 MB here
DISTRIBUTED = ("local", "ray")
SPIN_S = 0.05  # a GPU's rank spins for its next plan that long before it yields: steps take less
DRAFT_TOP_K = 16  # deeper ranks do not enter trees of 64 nodes (speculation: ports cap at 8 to 16 without visible loss)
DTYPES = {"auto": "float32", "float32": "float32", "bfloat16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model lies and what its configs say. path: its folder; file: its config, from which a rank opens it again."""

    path: Path
    target: kimi_k26.Config
    drafter_path: Path | None
    drafter: dflash.Config | None
    checkpoint: Checkpoint | DummyCheckpoint
    drafter_checkpoint: Checkpoint | DummyCheckpoint | None
    weights: LoadConfig = FROM_FILES
    file: Path = Path("config.json")


def resolve(model: str | Path) -> Path:
    """The folder of a model: 'demo' is the one in this package. Raises FileNotFoundError saying what was looked for."""
    path = DEMO if str(model) == "demo" else Path(model).expanduser()
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"model {str(model)!r}: {path / 'config.json'} does not exist; give 'demo' or a checkpoint folder")
    return path


def config_file(model: str | Path, dummy: bool = False) -> Path:
    """The config.json of a model. For dummy weights also a JSON file itself, or the name of one in model/configs."""
    if dummy:
        for path in (CONFIGS / f"{model}.json", Path(model).expanduser()):
            if path.is_file():
                return path
    return resolve(model) / "config.json"


def open_source(model: str | Path, speculative: SpeculativeConfig, weights: LoadConfig = FROM_FILES) -> Source:
    """Opens and validates a target and, if speculation wants one, its drafter (the folder `drafter` unless told)."""
    file = config_file(model, weights.dummy)
    path, checkpoint = file.parent, _open_checkpoint(file, weights)
    target = dataclasses.replace(kimi_k26.Config.from_json(checkpoint.config, str(file)), cut_latent=weights.cut_latent)
    if not speculative.enabled:
        return Source(path, target, None, None, checkpoint, None, weights, file)
    where = Path(speculative.model).expanduser() if speculative.model else path / "drafter"
    draft_file = where if weights.dummy and where.is_file() else where / "config.json"
    if not draft_file.is_file():
        raise FileNotFoundError(f"speculative_config: method {speculative.method!r} needs a drafter; {draft_file} does not exist")
    drafter_checkpoint = _open_checkpoint(draft_file, dataclasses.replace(weights, hf_overrides={}))
    drafter = dflash.Config.from_json(drafter_checkpoint.config, str(draft_file))
    drafter.check_target(target, str(draft_file))
    return Source(path, target, where, drafter, checkpoint, drafter_checkpoint, weights, file)


def _open_checkpoint(file: Path, weights: LoadConfig) -> Checkpoint | DummyCheckpoint:
    if weights.dummy:
        return DummyCheckpoint(override_config(read_json(file), weights.hf_overrides, str(file)), file.parent)
    checkpoint = Checkpoint.open(file.parent)
    checkpoint.config = override_config(checkpoint.config, weights.hf_overrides, str(file))
    return checkpoint


def bytes_per_token(source: Source, itemsize: int, tp: int = 1, stage: Stage | None = None) -> int:
    """Cache bytes a token takes on a rank: the target's latents, of a stage's layers, and its share of the drafter's context keys and
    values, which the last stage holds."""
    own = (len(stage.layers) if stage else source.target.layers) * source.target.cache_width
    if source.drafter and (stage is None or stage.heads):
        drafter = source.drafter.part(tp)
        own += 2 * drafter.layers * drafter.kv_heads * drafter.head_dim
    return own * itemsize


def first_config(backend: str, capture_sizes: Sequence[int] | None = None, **given: Any) -> EngineConfig:
    """An engine config with the backend's own defaults where a value is None. ValueError for sizes that do not fit the rows."""
    values = {key: value for key, value in given.items() if value is not None}
    seqs = values.get("max_num_seqs", EngineConfig().max_num_seqs)
    values.setdefault("max_num_batched_tokens", max(BATCHED_TOKENS if backend == "cuda" else HOST_BATCHED_TOKENS, seqs))
    if backend == "cuda":
        values.setdefault("block_size", BLOCK_SIZE)
        values["buckets"] = fit_sizes(values["max_num_batched_tokens"], capture_sizes)
    elif capture_sizes:
        raise ValueError(f"cudagraph_capture_sizes: {list(capture_sizes)}, but backend {backend!r} captures nothing")
    return EngineConfig(**values)


def fit_config(config: EngineConfig, source: Source, activations: str, backend: str = "numpy") -> EngineConfig:
    """Fills in what the user left open: context length, rows of a step, pages that fit CACHE_BYTES (a GPU: its memory, later)."""
    positions = source.target.max_positions
    length = config.max_model_len or positions
    if length > positions:
        raise ValueError(f"max_model_len: {length} is above the model's max_position_embeddings {positions}")
    pages = config.num_pages
    if pages is None and backend != "cuda":
        token = bytes_per_token(source, 4 if activations == "float32" else 2)
        pages = max(2, min(most_pages(config, length), CACHE_BYTES // (token * config.block_size)))
    return config.replace(max_model_len=length, num_pages=pages)


def most_pages(config: EngineConfig, length: int) -> int:
    """Pages of as many sequences as may run, each of that length, and the null page."""
    return config.max_num_seqs * -(-length // config.block_size) + 1


def fit_speculation(config: SpeculativeConfig, backend: str = "numpy", paced: bool = False) -> SpeculativeConfig:
    """Chooses a tree for this backend where the user chose none: on a CPU it fills one tile of rows with its root; auto if paced."""
    if config.method != "ddtree" or config.tree_budget is not None:
        return config
    return dataclasses.replace(config, tree_budget=AUTO if paced else DEFAULT_TREE_BUDGET if backend == "cuda" else ROW_TILE - 1)


def make_executor(
    source: Source,
    config: EngineConfig,
    speculative: SpeculativeConfig,
    activations: str,
    tp: int,
    progress: Callable[[str], None] = lambda _: None,
    backend: str = "numpy",
    distributed: str = "local",
    place: StagePlace | None = None,
    group: str = "",
) -> Executor:
    """Loads the weights once per rank and returns what runs plans: this process, or it and `tp` - 1 others, started by `distributed`.

    place: which stage of a pipeline that is; group: where Ray has room for it.
    """
    source.target.check_tp(tp)
    if tp == 1:
        return make_rank(source, config, speculative, activations, backend, None, progress, place)
    jobs = [rank_job(source, config, speculative, activations, backend, rank, tp, place, group) for rank in range(1, tp)]
    make_own = partial(make_rank, source, config, speculative, activations, backend, progress=progress, place=place)
    peers = RayPeers(jobs) if distributed == "ray" else SpawnedPeers(jobs)
    ranks = CapturedRanks if backend == "cuda" else ProcessRanks
    return ranks(meeting_of(source, config, speculative, backend, tp), peers, make_own)


def make_rank(
    source: Source,
    config: EngineConfig,
    speculative: SpeculativeConfig,
    activations: str,
    backend: str,
    host: SharedComm | None,
    progress: Callable[[str], None] = lambda _: None,
    place: StagePlace | None = None,
) -> Executor:
    """One rank, loaded: on the CPU or the GPU of its number. host: how it reaches the others of its stage; None: it is the only one."""
    if backend == "cuda":
        return make_gpu_executor(source, config, speculative, progress, host=host, place=place)
    stage, near = stage_of(source, place), HostNeighbours(place, host) if place else None
    limits = limits_of(source, config, speculative)
    return make_worker(source, limits, speculative, activations, host or SoloComm(), progress, stage, near)


def stage_of(source: Source, place: StagePlace | None) -> Stage | None:
    """The part of the model that belongs there; None: all of it."""
    return stages_of(source.target.layers, place.count, source.drafter is not None)[place.number] if place else None


def make_gpu_executor(
    source: Source,
    config: EngineConfig,
    speculative: SpeculativeConfig,
    progress: Callable[[str], None],
    driver: CudaDriver | None = None,
    host: SharedComm | None = None,
    place: StagePlace | None = None,
) -> CudaWorker:
    """One rank on a GPU (driver; None: the one of its number, counted from its stage's first)."""
    rank, world = (host.rank, host.world) if host else (0, 1)
    driver = driver or open_driver(config.enforce_eager, rank + (place.device if place else 0))
    backend = CudaBackend(driver.device, config.batch_invariant)
    backend.single_rows = not speculative.enabled
    comm = join_peers(driver, backend, host, source.target.hidden) if host else SoloComm()
    limits = limits_of(source, _with_pages(source, config), speculative)
    paths = path_pages(config, limits, speculative)
    stage, least, near = stage_of(source, place), host.least if host else int, None
    if place:
        everybody = StageHost(place, host)
        near, least = join_stages(driver, backend, everybody, source.target.hidden, place.lost), everybody.least
    parts = load_parts(source, backend, limits, speculative, progress, rank, world, stage, near)
    if stage and not stage.heads:
        limits = dataclasses.replace(limits, draft_depth=0)
    if place:
        least(0)  # the first launches meet all stages, whose loading may differ by more than a step may take
    layout, token_bytes = plan_layout(config, limits), bytes_per_token(source, 2, world, stage)
    return make_cuda_worker(parts, driver, backend, comm, limits, layout, config, token_bytes, least, paths)


def _with_pages(source: Source, config: EngineConfig) -> EngineConfig:
    """The config with an upper bound for its pages where their number is open."""
    return config.replace(num_pages=config.num_pages or most_pages(config, config.max_model_len or source.target.max_positions))


def rank_job(
    source: Source,
    config: EngineConfig,
    speculative: SpeculativeConfig,
    activations: str,
    backend: str,
    rank: int,
    world: int,
    place: StagePlace | None = None,
    group: str = "",
) -> RankJob:
    """What a rank beside this process has to load."""
    drafter = str(source.drafter_path.resolve()) if source.drafter_path else None
    found = dataclasses.replace(speculative, model=drafter)
    model = source.file if source.weights.dummy else source.path
    where: dict[str, Any] = {"stage": place.number, "stages": place.count, "device": place.device, "group": group} if place else {}
    return RankJob(rank, world, os.getpid(), str(model.resolve()), backend, activations, config, found, weights=source.weights, **where)


def limits_of(source: Source, config: EngineConfig, speculative: SpeculativeConfig) -> Limits:
    """What a rank is built for."""
    if config.num_pages is None or config.max_model_len is None:
        raise ValueError("engine config: num_pages and max_model_len are open; fit_config chooses them")
    return Limits(
        vocab_size=source.target.vocab,
        max_rows=config.max_num_batched_tokens,
        num_pages=config.num_pages,
        page_size=config.block_size,
        max_positions=config.max_model_len,
        draft_depth=source.drafter.depth if source.drafter else 0,
        draft_top_k=min(speculative.draft_top_k or DRAFT_TOP_K, source.target.vocab),
        experts=source.target.experts,
    )


def make_worker(
    source: Source,
    limits: Limits,
    speculative: SpeculativeConfig,
    activations: str,
    comm: Comm,
    progress: Callable[[str], None] = lambda _: None,
    stage: Stage | None = None,
    near: Neighbours | None = None,
) -> Worker:
    """Loads the share of comm's rank and binds it to a backend."""
    backend: Any = NumpyBackend(activations)
    if load_env().check_shapes:
        backend = CheckedBackend(backend)
    model = _bind(source, backend, limits, speculative, comm.rank, comm.world, progress, stage, near)
    return Worker(backend, comm, model, limits)


def meeting_of(source: Source, config: EngineConfig, speculative: SpeculativeConfig, backend: str, world: int) -> Meeting:
    """Where `world` ranks of this engine meet."""
    plan = plan_layout(config, limits_of(source, _with_pages(source, config), speculative))
    draft = DraftLayout(plan.max_seqs, plan.max_pages, plan.max_rows)
    return Meeting(world, plan, draft, config.step_deadline_s, SPIN_S if backend == "cuda" else 0.0)


def plan_layout(config: EngineConfig, limits: Limits) -> PlanLayout:
    """Capacities of a step plan under these limits."""
    rows = limits.max_rows
    return PlanLayout(
        max_rows=rows,
        max_seqs=config.max_num_seqs,
        max_pages=-(-(limits.max_positions + rows) // limits.page_size),
        max_words=-(-rows // 64),
        max_moves=rows,
        mask_words=-(-limits.vocab_size // 32),
        max_adjust=min(config.max_num_seqs * min(limits.vocab_size, limits.max_positions) + rows * 64, 1 << 20),
    )


def _bind(
    source: Source,
    backend: Any,
    limits: Limits,
    speculative: SpeculativeConfig,
    rank: int,
    tp: int,
    progress: Callable[[str], None],
    stage: Stage | None,
    near: Neighbours | None,
) -> BoundModel:
    reach = limits.max_positions + limits.max_rows  # draft nodes and block slots may lie past the context
    slots = limits.num_pages * limits.page_size
    target = kimi_k26.load(source.checkpoint, source.target, backend, rank, tp, reach, progress, stage)
    drafter, taps = None, source.drafter.taps if source.drafter else ()
    if source.drafter and source.drafter_checkpoint and (stage is None or stage.heads):
        factor, own = speculative.draft_rope_attention_factor, source.drafter.part(tp)
        weights = dflash.load(source.drafter_checkpoint, source.drafter, backend, reach, factor, rank, tp)
        drafter = Drafter(own, weights, dflash.make_cache(backend, own, slots))
        progress("drafter")
    cache = backend.zeros((len(target.layers), slots, source.target.cache_width))
    return BoundModel(source.target, target, cache, limits.page_size, reach - 1, drafter, near, taps)


def generation_defaults(path: Path) -> SamplingParams:
    """Sampling values of the checkpoint's generation_config.json; greedy where it says do_sample false."""
    file = path / "generation_config.json"
    if not file.is_file():
        return SamplingParams()
    given = json.loads(file.read_text(encoding="utf-8"))
    if given.get("do_sample") is False:
        return SamplingParams(temperature=0.0)
    known = {key: given[key] for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty") if given.get(key) is not None}
    return SamplingParams(**known)


def rng_seed(seed: int | None) -> np.random.Generator:
    """The generator that gives seeds to requests without one of their own."""
    return np.random.default_rng(seed)
