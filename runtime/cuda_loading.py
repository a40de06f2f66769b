"""From a checkpoint to a rank on a GPU: which backend, how many pages, graphs.

Lives beside `runtime.loading`. Pages take what weights and buffers leave: the launches are recorded once over a cache of two
pages, which makes every buffer, and then for good over the real one.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from model import dflash, kimi_k26
from model.bound import BoundModel, Drafter
from model.stages import Stage
from runtime.config import EngineConfig, SpeculativeConfig
from runtime.cuda_worker import CudaWorker
from runtime.graph.driver import CudaDriver, Driver
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.tree_paths import PathPages
from runtime.plan import PlanLayout
from runtime.shared_comm import SharedComm
from runtime.stage_comm import StageHost
from runtime.worker import Limits

LOG = logging.getLogger(__name__)
BACKENDS = ("auto", "cuda", "numpy")
BATCHED_TOKENS = 1024  # the largest default bucket: prompts reach the compute bound from a few hundred rows on
BLOCK_SIZE = 64  # a tile of tree_mla's keys: one box of the copy engine
REHEARSAL_PAGES = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend and why. device: the GPU's short name, "" where it is the CPU."""

    backend: str
    reason: str
    device: str = ""


def choose_backend(wanted: str, dtype: str = "auto", tp: int = 1) -> Choice:
    """'auto' takes the GPU where CuPy sees one and the rest of what was asked for runs on it.

    Raises ValueError if "cuda" is wanted and there is no device, or where something else that was asked for does not run there.
    """
    if wanted not in BACKENDS:
        raise ValueError(f"backend: {wanted!r} is not available; {', '.join(BACKENDS)} are")
    if wanted == "numpy":
        return Choice("numpy", "asked for")
    found, why = find_gpu()
    obstacle = _obstacle(dtype, tp)
    if wanted == "cuda":
        if not found or obstacle:
            raise ValueError(f"backend: 'cuda' is not possible here: {obstacle or why}")
        return Choice("cuda", f"asked for; {why}", device_name())
    if found and not obstacle:
        return Choice("cuda", why, device_name())
    return Choice("numpy", obstacle or why)


def _obstacle(dtype: str, tp: int) -> str:
    if dtype == "float32":
        return "dtype is float32, and kernels store bfloat16"
    count = gpu_count()
    return f"tensor_parallel_size is {tp}, and CuPy sees {count} GPU(s)" if 0 < count < tp else ""


def find_gpu() -> tuple[bool, str]:
    """Whether CuPy sees a device, and one line about it."""
    if importlib.util.find_spec("cupy") is None:
        return False, "CuPy is not installed"
    import cupy

    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return False, f"CuPy finds no driver: {error}"
    if not count:
        return False, "CuPy sees no GPU"
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    return True, f"CuPy sees {name}" + (f" and {count - 1} more" if count > 1 else "")


def gpu_count() -> int:
    """GPUs that CuPy sees."""
    if importlib.util.find_spec("cupy") is None:
        return 0
    import cupy

    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def device_name() -> str:
    """The first GPU's short name, as records and stored curves have it."""
    from runtime.kernels_cu.device import gpu_name

    return gpu_name()


def open_driver(eager: bool, index: int = 0) -> CudaDriver:
    """The GPU of that number."""
    from runtime.kernels_cu.device import CupyDevice

    return CudaDriver(CupyDevice(index), eager)


def join_peers(driver: CudaDriver, backend: CudaBackend, host: SharedComm, hidden: int) -> Any:
    """The collectives of this rank's GPU with those of the other ranks, which call this too."""
    from runtime.kernels_cu.peers_cuda import open_peers

    comm = open_peers(backend, host, hidden)
    driver.peers = lambda: host.lost() or comm.failure()
    LOG.info("rank %d: sums by one shot to %d rows, by two to %d, by NCCL above", host.rank, comm.thresholds.one, comm.thresholds.two)
    return comm


def join_stages(driver: CudaDriver, backend: CudaBackend, host: StageHost, hidden: int, lost: Callable[[], str | None]) -> Any:
    """The way to the same rank's GPU in the stages before and after; all ranks of all stages call this. lost: what `join_peers`
    watches besides."""
    from runtime.kernels_cu.peers_cuda import open_line
    from runtime.kernels_cu.stage_peers import DeviceNeighbours

    line, before = open_line(backend, host.column(), hidden), driver.peers
    driver.peers = lambda: (before() if before else None) or lost() or line.failure()
    return DeviceNeighbours(backend, line)


@dataclass(frozen=True, slots=True)
class Parts:
    """A model's weights on a device, before it has a cache."""

    target: kimi_k26.Config
    weights: kimi_k26.Weights
    drafter: dflash.Config | None
    drafter_weights: dflash.Weights | None
    last_position: int
    near: Any = None  # the stages before and after, `runtime.kernels_cu.stage_peers`
    taps: tuple[int, ...] = ()  # what a drafter there wants

    def bind(self, backend: CudaBackend, pages: int, page_size: int, paths: PathPages | None = None) -> tuple[BoundModel, list[int]]:
        """The model over new caches of that many pages, and the caches' addresses. paths: private pages besides."""
        slots, drafter = pages * page_size, None
        cache = backend.latent_cache(len(self.weights.layers), slots, self.target.cache_width, paths)
        made = [cache.address]
        if self.drafter and self.drafter_weights:
            own = dflash.make_cache(backend, self.drafter, slots)
            drafter = Drafter(self.drafter, self.drafter_weights, own)
            made += [own.k.address, own.v.address]  # type: ignore[attr-defined]  # device arrays
        bound = BoundModel(self.target, self.weights, cache, page_size, self.last_position, drafter, self.near, self.taps)  # type: ignore[arg-type]
        return bound, made


def load_parts(
    source: Any,
    backend: CudaBackend,
    limits: Limits,
    speculative: SpeculativeConfig,
    progress: Callable[[str], None] = lambda _: None,
    rank: int = 0,
    world: int = 1,
    stage: Stage | None = None,
    near: Any = None,
) -> Parts:
    """Uploads a rank's share of the weights of a `runtime.loading.Source`, or of a stage's layers. near: the stages around it."""
    reach = limits.max_positions + limits.max_rows  # draft nodes and block slots may lie past the context
    weights = kimi_k26.load(source.checkpoint, source.target, backend, rank, world, reach, progress, stage)
    drafter_weights = None
    taps = source.drafter.taps if source.drafter else ()
    if stage is not None and not stage.heads:
        return Parts(source.target, weights, None, None, reach - 1, near, taps)
    if source.drafter and source.drafter_checkpoint:
        factor = speculative.draft_rope_attention_factor
        drafter_weights = dflash.load(source.drafter_checkpoint, source.drafter, backend, reach, factor, rank, world)
        progress("drafter")
    drafter = source.drafter.part(world) if source.drafter else None
    return Parts(source.target, weights, drafter, drafter_weights, reach - 1, near, taps)


def make_cuda_worker(
    parts: Parts,
    driver: Driver,
    backend: CudaBackend,
    comm: Any,
    limits: Limits,
    layout: PlanLayout,
    config: EngineConfig,
    token_bytes: int,
    agree: Callable[[int], int] = lambda pages: pages,
    paths: PathPages | None = None,
) -> CudaWorker:
    """Records everything over as many pages as config.num_pages says, or as fit; captures unless the config says eager.

    limits: num_pages is an upper bound if config.num_pages is None. token_bytes: of the cache, for each slot. agree: the pages that
    every rank has, from this rank's. paths: private pages of draft trees, which no sequence ever holds.
    """
    sizes = [size for size in config.buckets if size < limits.max_rows] or None

    def record(pages: int, seal: bool) -> tuple[CudaWorker, list[int]]:
        model, caches = parts.bind(backend, pages, limits.page_size, paths)
        own = replace(limits, num_pages=pages)
        return CudaWorker(driver, backend, comm, model, own, layout, sizes, config.step_deadline_s, seal), caches

    pages = limits.num_pages
    if config.num_pages is None:
        rehearsed, caches = record(REHEARSAL_PAGES, seal=False)
        rehearsed.close()
        for address in caches:
            driver.device.free(address)
        private_bytes = paths.slots * 2 * parts.target.cache_width if paths else 0
        fitting = pages_that_fit(driver, config.gpu_memory_utilization, token_bytes * limits.page_size, private_bytes)
        pages = agree(min(pages, fitting))
    worker, _ = record(pages, seal=True)
    if not config.enforce_eager:
        worker.capture()
    return worker


def path_pages(config: EngineConfig, limits: Limits, speculative: SpeculativeConfig) -> PathPages | None:
    """The private pages of batch_invariant's draft trees; None where no tree is grown. Raises ValueError where there can be none."""
    if not config.batch_invariant or speculative.method != "ddtree" or not limits.draft_depth:
        return None
    paths = PathPages(limits.max_rows, limits.draft_depth, limits.page_size)
    paths.check()
    return paths


def pages_that_fit(driver: Driver, utilization: float, page_bytes: int, private_bytes: int = 0) -> int:
    """Pages for what is free of that share of the device's memory, beside private_bytes. Raises ValueError if it holds less than two."""
    memory = driver.free_bytes()
    if memory is None:
        raise ValueError("num_pages: this device does not say how much memory is free; give the number of pages")
    free, total = memory
    room = int(free - (1 - utilization) * total)
    if room < 2 * page_bytes + private_bytes:
        private = f", private pages of batch_invariant's draft trees {private_bytes / 1e9:.2f} GB" if private_bytes else ""
        raise ValueError(
            f"gpu_memory_utilization: weights and buffers leave {room / 1e9:.2f} GB of {utilization:.0%} of {total / 1e9:.1f} GB; "
            f"two pages take {2 * page_bytes / 1e9:.2f} GB{private}"
        )
    return (room - private_bytes) // page_bytes
