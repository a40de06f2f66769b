"""A whole step and draft of Kimi K2.6 recorded at full size without a device: launches, memory, and builds that compile."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from model import dflash, kimi_k26
from runtime.comm import SoloComm
from runtime.graph.buckets import DEFAULT_SIZES
from runtime.kernels_cu._build import build, nvrtc_version
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.recorder import Live
from runtime.kernels_cu.tree_paths import PathPages
from runtime.null import ShapeOnly
from runtime.shape_model import shape_drafter, shape_plan, shape_weights
from runtime.types import DraftPlan
from tests.blank_device import BlankDevice, placed, without_driver

ROOT = Path(__file__).parents[3]
LIVE = Live(1, 1, 1, 1, 1)
PAGE, PAGES, STREAMS = 64, 4096, 64
MODELS = {
    "kimi": (ROOT / "model" / "configs" / "kimi-k26.json", ROOT / "model" / "configs" / "kimi-k26-dflash.json"),
    "demo": (ROOT / "model" / "demo" / "config.json", ROOT / "model" / "demo" / "drafter" / "config.json"),
}


class Full:
    """A model of shapes over a blank device, and what its steps record. Two layers stand for all: one dense, one of experts."""

    def __init__(self, name: str, tp: int, invariant: bool, arch: str = "sm_90a") -> None:
        target, drafter = (json.loads(path.read_text()) for path in MODELS[name])
        whole = kimi_k26.Config.from_json(target)
        self.config, self.draft = replace(whole, layers=2), dflash.Config.from_json(drafter)
        self.device = BlankDevice(arch)
        self.ops = CudaBackend(self.device, invariant)
        self.weights = placed(shape_weights(self.config, tp), self.device)
        self.drafter = placed(shape_drafter(self.draft, whole.max_positions), self.device)
        paths = PathPages(DEFAULT_SIZES[-1], self.draft.depth, PAGE) if invariant else None
        self.cache = self.ops.latent_cache(2, PAGE * PAGES, whole.cache_width, paths)

    def step(self, m: int) -> Counter[str]:
        """Launches by what they are, of a bucket whose streams may be as long as the cache."""
        b = min(m, STREAMS)
        shapes = {"ancestors": ((m, -(-m // 64)), "u64"), "pages": ((b, PAGES), "i32"), "moves": ((512, 2), "i32")}
        plan = replace(shape_plan(m, b), **{name: ShapeOnly(*shape) for name, shape in shapes.items()})
        plan = placed(plan, self.device)
        with self.ops.recording(plan.seq, LIVE) as launches:
            logits, _ = kimi_k26.forward(self.ops, SoloComm(), self.config, self.weights, plan, self.cache, PAGE)
            buffer = self.ops.buffer
            self.ops.sample(
                logits, plan.out_rows, plan.seq, plan.pos, plan.temperature, plan.top_p, plan.min_p, plan.top_k, plan.seed, plan.logprobs,
                plan.adjust_seq, plan.adjust_seq_by, plan.adjust_row, plan.adjust_row_by, plan.mask_rows, plan.masks,
                target=buffer("t", (m,), "i32"), logp=buffer("l", (m,), "f32"), finite=buffer("f", (m,), "bool"),
                top_ids=buffer("ti", (m, 20), "i32"), top_logp=buffer("tl", (m, 20), "f32"),
            )  # fmt: skip
        return Counter(getattr(one.run, "entry", "product") for one in launches)

    def block(self, streams: int) -> Counter[str]:
        d, i32 = self.draft, lambda *shape: placed(ShapeOnly(shape, "i32"), self.device)
        plan = DraftPlan(i32(streams), i32(streams), i32(streams, PAGES), i32(streams), i32(streams), i32(streams))
        cache = dflash.make_cache(self.ops, d, PAGE * PAGES)
        rows, masks = streams * d.block, streams * d.depth
        with self.ops.recording(i32(rows), LIVE) as launches:
            given = (i32(rows), i32(rows), i32(masks), plan, cache, PAGE)
            logits = dflash.block_logits(self.ops, SoloComm(), d, self.drafter, self.weights, *given)
            self.ops.top_logprobs(logits, ids=self.ops.buffer("ids", (masks, 16), "i32"), logp=self.ops.buffer("logp", (masks, 16), "f32"))
        return Counter(getattr(one.run, "entry", "product") for one in launches)

    def context(self, rows: int) -> None:
        d, i32 = self.draft, lambda *shape: placed(ShapeOnly(shape, "i32"), self.device)
        plan = DraftPlan(i32(0), i32(0), i32(0, PAGES), i32(rows), i32(rows), i32(rows))
        taps = self.ops.buffer("taps", (rows, len(d.taps) * d.hidden))
        with self.ops.recording(plan.tap_slot, LIVE):
            dflash.write_context(self.ops, d, self.drafter, taps, plan, dflash.make_cache(self.ops, d, PAGE * PAGES))


def everything(full: Full) -> None:
    for m in reversed(DEFAULT_SIZES):
        full.step(m)
        full.context(m)
    for streams in (64, 10, 2, 1):
        full.block(streams)


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    without_driver(monkeypatch)


@pytest.mark.parametrize(("tp", "most_gb"), [(1, 2.5 + 4.4), (8, 1.0 + 1.1)])  # and expanded keys of long chunks
@pytest.mark.parametrize("invariant", [False, True])
def test_all_buckets_record_within_memory(tp, most_gb, invariant):
    """Activations, logits and scratch of every bucket: far less than an H200 has beside weights and caches."""
    full = Full("kimi", tp, invariant)
    everything(full)
    full.ops.seal()
    everything(full)
    assert full.ops.arena.nbytes < (most_gb + 2.5 * invariant) * 1e9


@pytest.mark.parametrize("m", [1, 16, 17, 1024])
def test_a_layer_is_so_many_launches(m):
    """Dense: norm, qkv_a, latent, q_b, query and rope, attention, value, o, norm, gate-up, gate, down. Experts: the same for the
    shared one, then router, choice, (packing,) experts, sum."""
    found = Full("kimi", 8, False).step(m)
    linear = 2 * (3 + 2) + 2 * 2 + 1 + 1  # of two layers, the router, the head
    own = {name: found[f"linear_{name}"] + found[f"linear_{name}_f32"] for name in ("skinny", "stream")}
    assert sum(own.values()) + found["product"] == linear
    assert (own["skinny"] == 0 or m <= 16) and (own["stream"] == 0 or m <= 64) and (sum(own.values()) > 0 or m > 16)
    once = {
        name: found[name] for name in ("kv_move", "embed", "rms_norm", "tree_mla_plan", "moe_route_sort", "moe_w4", "moe_combine", "sample")
    }
    assert set(once.values()) == {1} and found["moe_pack"] <= 1
    assert found["tree_mla"] == found["query_rope"] == found["mla_latent"] == 2 and found["add_rms_norm"] == 4
    exact = Full("kimi", 8, True).step(m)
    assert (exact["path_plan"], exact["tree_mla_plan"], exact["path_copy"], exact["tree_mla"], found["path_copy"]) == (1, 1, 2, 2, 0)


def test_an_invariant_backend_has_one_build_of_each_kernel():
    """Of everything whose order of sums a build decides: attention, experts, drafts."""
    full = Full("kimi", 8, True)
    everything(full)
    sources = Counter(source for source, _ in full.device.builds)
    assert sources["moe_w4.cu"] == sources["tree_mla.cu"] + sources["tree_mla_rows.cu"] == sources["block_attention.cu"] == 1
    assert not sources["linear_skinny.cu"]
    free = Full("kimi", 8, False)
    everything(free)
    assert Counter(source for source, _ in free.device.builds)["moe_w4.cu"] > 1


@pytest.mark.slow
@pytest.mark.skipif(nvrtc_version() is None, reason="no NVRTC library (pip install nvidia-cuda-nvrtc cuda-bindings)")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize(("name", "tp"), [("demo", 1), ("kimi", 1), ("kimi", 8)])
def test_every_build_that_is_recorded_compiles(name, tp, arch):
    for invariant in (False, True):
        full = Full(name, tp, invariant, arch)
        everything(full)
        for source, defines in full.device.builds:
            build(source, dict(defines), arch)
