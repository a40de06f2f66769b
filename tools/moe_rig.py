"""A MoE layer on the GPU at full size: weights from a hash, routings, numerics check, timing inside a graph.

Method: a graph of several layer calls over different routings is replayed; a sample is replay time / calls; the median of
the samples is reported. Rotation keeps the weights cold: the calls' experts together are many times the 60 MB of L2.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cupy as cp
import numpy as np

from runtime.kernels_cu._build import build
from runtime.kernels_cu._launch import Launch, load
from runtime.kernels_cu.device import arch_of_device
from runtime.kernels_cu.moe_config import Config, Dims
from runtime.kernels_cu.moe_w4 import build_kernels, layer_launches, workspace_bytes
from tools.graph_timing import COOL_DOWN_S, Timing, replay_us, timing

MAX_ERROR = 8e-3  # relative L2 of a layer; a bf16-rounded weight alone gives 2e-3
CHECK_ROWS = 12
ALL = slice(None)


@dataclass(slots=True)
class Weights:
    """Packed weights of one layer shape, filled on the device."""

    dims: Dims
    w13: Any
    w2: Any


class Rig:
    """Device, stream, helper kernels; one weight set at a time."""

    def __init__(self) -> None:
        self.arch = arch_of_device()
        self.sms = int(cp.cuda.Device().attributes["MultiProcessorCount"])
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.helpers = load(build("moe_check.cu", {}, self.arch, allow_spills=True).code, ("naive_hidden", "naive_out", "read_all"))
        self.helpers |= load(build("fill.cu", {}, self.arch).code, ("fill_w4", "fill_bf16"))
        self.kernels: dict[Any, Any] = {}

    def launch(self, name: str, grid: tuple[int, int, int], threads: int, *arguments: Any) -> None:
        Launch(self.helpers[name], grid, (threads, 1, 1), 0, tuple(arguments), pdl=False).run(self.stream.ptr)

    def make_weights(self, dims: Dims) -> Weights:
        """Fills both matrices of every expert; 9.5 GB take some milliseconds."""
        w13 = cp.empty(dims.E * dims.strips[0] * dims.groups[0] * 1152, cp.uint8)
        w2 = cp.empty(dims.E * dims.strips[1] * dims.groups[1] * 1152, cp.uint8)
        for seed, array in enumerate((w13, w2)):
            self.launch(
                "fill_w4", (8192, 1, 1), 256, ctypes.c_void_p(array.data.ptr), ctypes.c_uint64(array.size // 16), ctypes.c_uint32(seed + 1)
            )
        self.stream.synchronize()
        return Weights(dims, w13, w2)

    def normal(self, rows: int, columns: int, seed: int) -> Any:
        """[rows, columns] bf16 as uint16, about N(0, 1)."""
        array = cp.empty((rows, columns), cp.uint16)
        self.launch(
            "fill_bf16", (1024, 1, 1), 256, ctypes.c_void_p(array.data.ptr), ctypes.c_uint64(array.size // 2), ctypes.c_uint32(seed)
        )
        self.stream.synchronize()
        return array

    def read_bps(self) -> float:
        """Best plain read rate over 6 GiB of random bytes, bytes a second: the best of four medians of 7, each after a cool-down."""
        sink, array = cp.zeros(1, cp.uint32), cp.empty(6 << 30, cp.uint8)
        pieces = array.size // 16
        self.launch("fill_w4", (8192, 1, 1), 256, ctypes.c_void_p(array.data.ptr), ctypes.c_uint64(pieces), ctypes.c_uint32(3))
        self.stream.synchronize()
        medians = []
        for blocks in (8448, 2112, 8448, 2112):
            time.sleep(COOL_DOWN_S)
            samples = []
            for _ in range(8):
                start, stop = cp.cuda.Event(), cp.cuda.Event()
                start.record(self.stream)
                arguments = (ctypes.c_void_p(array.data.ptr), ctypes.c_uint64(pieces), ctypes.c_void_p(sink.data.ptr))
                self.launch("read_all", (blocks, 1, 1), 256, *arguments)
                stop.record(self.stream)
                stop.synchronize()
                samples.append(cp.cuda.get_elapsed_time(start, stop))
            medians.append(float(np.median(samples[1:])))
        rate = float(array.size / (min(medians) * 1e-3))
        del array
        cp.get_default_memory_pool().free_all_blocks()
        return rate


def make_logits(dims: Dims, routing: str, seed: int) -> np.ndarray:
    """[M, E] f32 whose top k is a draw without replacement: uniform, or zipf:s with weight rank**-s and a fixed permutation.

    A .npy file [calls, rows, E] is taken as it stands. Otherwise Gumbel noise on log-weights; a tenth of it, so that the
    sigmoid keeps the order in float32.
    """
    if routing.endswith(".npy"):
        stored = np.load(routing)
        if stored.ndim != 3 or stored.shape[1] < dims.M or stored.shape[2] != dims.E:
            raise ValueError(f"{routing}: logits are {stored.shape}; M = {dims.M}, E = {dims.E} need [calls, rows >= M, E]")
        return np.ascontiguousarray(stored[seed % len(stored), : dims.M], np.float32)
    rng = np.random.default_rng(1000 + seed)
    logits = rng.gumbel(size=(dims.M, dims.E))
    if routing.startswith("zipf:"):
        rank = np.random.default_rng(7).permutation(dims.E) + 1
        logits = logits - float(routing.removeprefix("zipf:")) * np.log(rank)
    elif routing != "uniform":
        raise ValueError(f"routing {routing!r}: uniform or zipf:s")
    return np.ascontiguousarray(logits / 10, np.float32)


def rotations(m: int) -> int:
    """Different routings in a graph."""
    return 24 if m <= 16 else 8 if m <= 256 else 4


class LayerCase:
    """One (weights, M, routing): inputs, and runs of any configuration."""

    def __init__(self, rig: Rig, weights: Weights, m: int, routing: str = "uniform", calls: int | None = None) -> None:
        base = weights.dims
        self.rig, self.weights, self.dims = rig, weights, Dims(m, base.E, base.H, base.F, base.top_k)
        self.calls = calls or rotations(m)
        self.logits = [cp.asarray(make_logits(self.dims, routing, 100 * m + r)) for r in range(self.calls)]
        self.x = rig.normal(m, base.H, 11)
        self.base = rig.normal(m, base.H, 12)
        self.out = cp.zeros((m, base.H), cp.uint16)
        self.bias = cp.zeros(base.E, cp.float32)
        self.expert = cp.full((m, base.top_k), -1, cp.int32)
        self.weight = cp.zeros((m, base.top_k), cp.float32)
        self.room: dict[str, Any] = {}

    def launches(self, config: Config, call: int) -> list[Launch]:
        key = (self.dims.E, config)
        if key not in self.rig.kernels:
            self.rig.kernels[key] = build_kernels(self.dims, config, self.rig.arch)
        kernels = self.rig.kernels[key]
        kernels.dims = self.dims
        for name, size in workspace_bytes(self.dims, config).items():
            if name not in self.room or self.room[name].size < size:
                self.room[name] = cp.zeros(size, cp.uint8)
        at = {name: a.data.ptr for name, a in self.room.items()}
        at |= {"w13": self.weights.w13.data.ptr, "w2": self.weights.w2.data.ptr, "x": self.x.data.ptr, "base": self.base.data.ptr}
        at |= {"out": self.out.data.ptr, "expert": self.expert.data.ptr, "weight": self.weight.data.ptr}
        at |= {"logits": self.logits[call].data.ptr, "bias": self.bias.data.ptr, "live": 0}
        return layer_launches(kernels, at, (0, 0), self.rig.sms, scale=2.5)

    def experts(self) -> float:
        """Mean number of distinct experts of a call."""
        k = self.dims.top_k
        return float(np.mean([len(np.unique(np.argsort(-cp.asnumpy(g), axis=1, kind="stable")[:, :k])) for g in self.logits]))

    def error(self, config: Config, call: int = 0) -> float:
        """Relative L2 distance of a sample of rows from the naive kernels; infinite for NaN or unequal routing."""
        rig, d = self.rig, self.dims
        self.out[...] = 0xFFFF
        cp.cuda.Device().synchronize()
        for launch in self.launches(config, call):
            launch.run(rig.stream.ptr)
        rig.stream.synchronize()
        if not self.routed_right(call):
            return float("inf")
        rows = cp.asarray(np.unique(np.linspace(0, d.M - 1, min(d.M, CHECK_ROWS)).astype(np.int32)))
        n = len(rows)
        hidden, out = cp.empty((n * d.top_k, d.F), cp.uint16), cp.empty((n, d.H), cp.float32)
        p, i = ctypes.c_void_p, ctypes.c_int
        cp.cuda.Device().synchronize()
        sizes = (i(d.H), i(d.F), i(d.top_k))
        first = [p(a.data.ptr) for a in (self.weights.w13, self.x, self.expert, rows, hidden)]
        then = [p(a.data.ptr) for a in (self.weights.w2, hidden, self.expert, self.weight, self.base, rows, out)]
        rig.launch("naive_hidden", (d.F // 4, n * d.top_k, 1), 128, *first, *sizes)
        rig.launch("naive_out", (d.H // 4, n, 1), 128, *then, *sizes)
        rig.stream.synchronize()
        got = (cp.asnumpy(self.out[rows]).astype(np.uint32) << 16).view(np.float32)
        want = cp.asnumpy(out)
        if not np.isfinite(got).all():
            return float("inf")
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))

    def routed_right(self, call: int) -> bool:
        """The chosen experts are different ones and their logits the row's largest, up to a near-tie of the sigmoids."""
        logits, expert, k = cp.asnumpy(self.logits[call]), cp.asnumpy(self.expert), self.dims.top_k
        if expert.min() < 0 or any(len(set(row)) != k for row in expert):
            return False
        best = -np.sort(-logits, axis=1)[:, :k]
        return bool(np.allclose(np.take_along_axis(logits, expert, axis=1), best, rtol=0, atol=2e-6))

    def capture(self, config: Config, only: slice = ALL) -> Any:
        """A graph of one call a routing. only: some launches of each call."""
        stream = self.rig.stream
        launches = [launch for call in range(self.calls) for launch in self.launches(config, call)[only]]
        for call in range(min(2, self.calls)):
            for launch in self.launches(config, call):
                launch.run(stream.ptr)
        stream.synchronize()
        with stream:
            stream.begin_capture()
            for launch in launches:
                launch.run(stream.ptr)
            graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        return graph

    def time_ms(self, config: Config, budget_s: float = 0.1) -> float:
        """Median milliseconds of a call over about `budget_s`, at least five replays: for comparing configurations."""
        return float(np.median(replay_us(self.rig.stream, self.capture(config), budget_s))) * 1e-3 / self.calls

    def timing(self, config: Config) -> Timing:
        """The figures that are reported, in microseconds of a call."""
        return timing(self.rig.stream, self.capture(config), self.calls)


def describe(config: Config) -> str:
    """A configuration in a few characters, as tables print it."""
    kind = f"wgmma{'+' if config.wide else ''}{'1' if config.merged else ''}b{config.batch}" if config.wgmma else "mma"
    least = f"{8 * config.fewest}-" if config.fewest > 1 else ""
    shape = f"n{least}{8 * config.octets} g{config.groups} w{config.warps}f{config.fragments} st{config.stages} x{config.blocks}"
    more = f"{f' k{config.splits13}/{config.splits}' if config.splits * config.splits13 > 1 else ''}"
    more += f"{f' c{config.claim}' if config.claim > 1 else ''}{'' if config.float_parts else ' b16'}"
    return f"{kind} {shape} r{config.rows13}/{config.rows2}{more}"


def best_of(case: LayerCase, configs: Sequence[Config], read_bps: float, budget_s: float = 0.2) -> tuple[Config, float]:
    """Checks and times each configuration; the fastest correct one and its milliseconds."""
    experts = case.experts()
    gb = experts * case.dims.expert_bytes / 1e9
    best: tuple[Config, float] | None = None
    for config in configs:
        try:
            error = case.error(config)
            if not error < MAX_ERROR:
                print(f"  M {case.dims.M:5d} {describe(config):<36} WRONG error {error:.2e}")
                continue
            ms = case.time_ms(config, budget_s)
        except Exception as problem:
            print(f"  M {case.dims.M:5d} {describe(config):<36} FAILED {type(problem).__name__}: {str(problem)[:200]}")
            if "CUDA error" in str(problem) or "cuda" in type(problem).__name__.lower():
                raise
            continue
        tflops = 6.0 * case.dims.M * case.dims.top_k * case.dims.F * case.dims.H / ms * 1e-9
        print(
            f"  M {case.dims.M:5d} {describe(config):<36} {ms * 1e3:9.1f} us  {gb / ms:6.3f} TB/s "
            f"share {gb / ms * 1e12 / read_bps:5.3f} {tflops:6.1f} TFLOP/s err {error:.1e}"
        )
        if best is None or ms < best[1]:
            best = (config, ms)
    if best is None:
        raise RuntimeError(f"M = {case.dims.M}: no configuration was right")
    return best
