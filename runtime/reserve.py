"""What a rank holds besides weights and cache, before any weight is loaded: buffers of a step, places for peers, plans, host memory.

Recorded, not estimated: every step and draft of the very worker over a device that has no memory, so each kernel's scratch is
in it. Not in it is what a library takes for itself: the CUDA context, NCCL's buffers, the library's products, instantiated graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any

from model import dflash, kimi_k26
from model.bound import BoundModel, Drafter
from model.stages import Stage
from runtime.comm import SoloComm
from runtime.config import EngineConfig, SpeculativeConfig
from runtime.cuda_loading import BATCHED_TOKENS, BLOCK_SIZE, path_pages
from runtime.cuda_worker import CudaWorker
from runtime.graph.driver import ListDriver, Mapped
from runtime.hw import Hardware
from runtime.kernels_cu import all_reduce, sample_ranks
from runtime.kernels_cu._tensor_map import blank_maps
from runtime.kernels_cu.array import DeviceArray
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.blank import BlankDevice
from runtime.kernels_cu.peer_comm import PeerComm, PeerMemory, region_of
from runtime.kernels_cu.plan_io import MOST_UNIONS
from runtime.kernels_cu.recorder import DeviceW4
from runtime.kernels_cu.residency import SLOT_BYTES, SLOTS
from runtime.loading import DRAFT_TOP_K, plan_layout
from runtime.null import PackedShape, ShapeOnly
from runtime.shape_model import shape_drafter, shape_weights
from runtime.worker import Limits

ARCHITECTURES = {"h100": "sm_90a", "h200": "sm_90a", "b200": "sm_100a", "rtx-pro-6000": "sm_120a"}
SMS = {"h100": 132, "h200": 132, "b200": 148, "rtx-pro-6000": 188}
DEFAULTS = EngineConfig(max_num_batched_tokens=BATCHED_TOKENS, block_size=BLOCK_SIZE)
_PAGES = 2


@dataclass(frozen=True, slots=True)
class Reserved:
    """Bytes of one rank. buffers: of steps and drafts, with all scratch, named: the same by name; chunks among them: expanded keys of
    long chunks; peers: what other ranks write into, and states; plans: fields of plans; private: pages of batch-invariant trees;
    mapped: host memory that the device reaches; pinned: host memory while weights are loaded."""

    buffers: int
    named: Mapping[str, int]
    peers: int
    plans: int
    private: int
    mapped: int
    pinned: int = SLOTS * SLOT_BYTES

    @property
    def chunks(self) -> int:
        return sum(size for name, size in self.named.items() if name.startswith("chunk_attention."))

    @property
    def device_bytes(self) -> int:
        return self.buffers + self.peers + self.plans + self.private


class CountingDriver(ListDriver):
    """mapped_bytes: of host memory for the device."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self.mapped_bytes = 0

    def mapped(self, nbytes: int) -> Mapped:
        self.mapped_bytes += nbytes
        return super().mapped(nbytes)


class _Library:
    """Carries large messages; here nothing is."""

    def all_reduce(self, address: int, count: int) -> Any:
        return None

    def all_gather(self, source: int, to: int, nbytes: int) -> Any:
        return None


@cache
def reserve(
    c: kimi_k26.Config,
    tp: int,
    drafter: dflash.Config | None,
    hw: Hardware,
    config: EngineConfig = DEFAULTS,
    stage: Stage | None = None,
    device: BlankDevice | None = None,
) -> Reserved:
    """What rank 0 of `tp` holds on that machine, whose kernels know its architecture. device: to record on. ValueError for a machine
    without kernels."""
    if hw.name not in ARCHITECTURES and device is None:
        raise ValueError(f"{hw.name} has no kernels; {', '.join(ARCHITECTURES)} have")
    device = device or BlankDevice(ARCHITECTURES[hw.name], SMS[hw.name], hw.name)
    heads = stage is None or stage.heads
    own = drafter.part(tp) if drafter and heads else None
    length = config.max_model_len or c.max_positions
    limits = Limits(c.vocab, config.max_num_batched_tokens, _PAGES, config.block_size, length, own.depth if own else 0, DRAFT_TOP_K)
    backend = CudaBackend(device, config.batch_invariant)
    backend.single_rows = drafter is None
    with blank_maps():
        trees = replace(limits, draft_depth=drafter.depth if drafter else 0)  # which every stage verifies
        paths = path_pages(config, trees, SpeculativeConfig(method="ddtree" if drafter else "none"))
        comm, peers = _comm(backend, tp, c.hidden)
        if stage is None:
            c, own = _short(c, own)
        weights = shape_weights(c, tp, length, stage)
        backend.moe_layers = sum(isinstance(layer.mlp, kimi_k26.Moe) for layer in weights.layers)
        slots, layers = _PAGES * config.block_size, len(weights.layers)
        latents = backend.latent_cache(layers, slots, c.cache_width, paths)
        drafting = Drafter(own, placed(shape_drafter(own, length), device), dflash.make_cache(backend, own, slots)) if own else None
        taps = drafter.taps if drafter and stage else ()
        model = BoundModel(c, placed(weights, device), latents, config.block_size, length, drafting, _Neighbours() if stage else None, taps)  # type: ignore[arg-type]
        before, driver = device.nbytes, CountingDriver(device)
        sizes = [size for size in config.buckets if size < limits.max_rows] or None  # as make_cuda_worker has it
        CudaWorker(driver, backend, comm, model, limits, plan_layout(config, limits), sizes)
    named = {name: size for name, (_, size) in backend.arena.held.items()}
    buffers, private = backend.arena.nbytes, paths.slots * 2 * c.cache_width if paths else 0
    return Reserved(buffers, named, peers, device.nbytes - before - buffers, private, driver.mapped_bytes)


def _short(c: kimi_k26.Config, drafter: dflash.Config | None) -> tuple[kimi_k26.Config, dflash.Config | None]:
    """A model of fewer layers with the same buffers: layers share them, but for the lists by which experts are counted, MOST_UNIONS at
    most, and the states that a drafter taps."""
    experts, taps = c.layers - c.dense_layers, len(drafter.taps) if drafter else 0
    lists = -(-experts // -(-experts // MOST_UNIONS)) if experts else 0
    layers = min(c.layers, max(c.dense_layers + lists, taps))
    return replace(c, layers=layers), replace(drafter, taps=tuple(range(taps))) if drafter else None


class _Neighbours:
    """Stages that are not there."""

    def receive(self, x: Any) -> None:
        return None

    def send(self, x: Any) -> None:
        return None


def _comm(backend: CudaBackend, tp: int, hidden: int) -> tuple[Any, int]:
    """A rank's collectives, and bytes of what they hold."""
    if tp == 1:
        return SoloComm(), 0
    device = backend.device
    sums, draws = all_reduce.candidates(tp, hidden, device.sms)[0], sample_ranks.default_config(tp, device.sms)
    behind, nbytes = region_of(sums, draws, hidden)
    states = device.alloc(sums.state_bytes()), device.alloc(draws.state_bytes())
    seat = sample_ranks.Seat(draws, all_reduce.Ranks(0, [behind] * tp, states[1], 0))
    memory = PeerMemory(sums, all_reduce.Ranks(0, [0] * tp, states[0], 0), hidden, None, seat)
    return PeerComm(backend, 0, tp, _Library(), memory), nbytes + sums.state_bytes() + draws.state_bytes()


def placed(value: Any, device: BlankDevice, name: str = "") -> Any:
    """Shapes, at any depth of dataclasses and tuples, as arrays on the device. INT4 weights called w13 are woven."""
    if isinstance(value, ShapeOnly):
        return DeviceArray(device.alloc(value.nbytes), value.shape, value.dtype)
    if isinstance(value, PackedShape):
        return DeviceW4(device.alloc(value.nbytes), value.E, value.N, value.K, int, name == "w13")
    if isinstance(value, tuple):
        return tuple(placed(part, device) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: placed(getattr(value, f.name), device, f.name) for f in fields(value)})
    return value
