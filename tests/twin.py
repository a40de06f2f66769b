"""One checkpoint on two backends: the definition in bfloat16, and CUDA launches over some device. The same plans go to both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from model import dflash, kimi_k26
from model.bound import BoundModel, Drafter
from model.weights import Checkpoint
from runtime.comm import SoloComm
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.recorder import Recorded
from runtime.kernels_cu.tree_paths import PathPages
from runtime.ops import Tolerance
from runtime.types import DraftPlan, StepPlan
from tests.device_plans import Room, place_block, place_step, place_taps, poison
from tests.near_ties import Following
from tests.plans import make_plan, page_table

bf16 = ml_dtypes.bfloat16
LEAST = 0.9995  # cosine of a row of logits
LONGER = 0.02  # or shorter, a row of logits
TIE = 0.005  # of sigmoid + bias: `near_ties`
CACHED = Tolerance(6e-2, 4e-2, 0.9999)  # a few roundings to bf16, one layer upon another


def bind(path: Path, backend: Any, positions: int, pages: int, page_size: int, paths: PathPages | None = None) -> BoundModel:
    """The target in `path`, its drafter if there is one, and their caches. paths: private pages, which CUDA's backend alone has."""
    ckpt = Checkpoint.open(path)
    config = kimi_k26.Config.from_json(ckpt.config)
    slots, drafter = pages * page_size, None
    weights = kimi_k26.load(ckpt, config, backend, 0, 1, positions)
    if (path / "drafter").exists():
        own = Checkpoint.open(path / "drafter")
        c = dflash.Config.from_json(own.config)
        drafter = Drafter(c, dflash.load(own, c, backend, positions), dflash.make_cache(backend, c, slots))
    shape = (config.layers, slots, config.cache_width)
    cache = backend.latent_cache(*shape, paths) if paths else backend.zeros(shape)
    return BoundModel(config, weights, cache, page_size, positions - 1, drafter)


def last_of(op: str, launches: list[Recorded]) -> list[int]:
    """Places of its last call's launches, without the one that chooses experts. All: over one range of keys nobody misses a merge."""
    places = [at for at, one in enumerate(launches) if one.op == op]
    first = max((at for at in places if launches[at].symbols), default=0)
    return [at for at in places if at >= first + (op == "moe_w4")]


@dataclass
class Twin:
    """step, context and block take a live plan and return (definition's, device's) results of the live rows.

    The definition follows the device's choices of experts where those are at least as good but for `tie`.
    """

    path: Path
    device: Any
    positions: int
    pages: int
    page_size: int
    streams: int  # of every bucket
    invariant: bool = False
    paths: PathPages | None = None
    dropped: tuple[str, ...] = ()
    tie: float = TIE
    ops: CudaBackend = field(init=False)
    launches: list[Recorded] = field(init=False, default_factory=list)
    choices: list[np.ndarray] = field(init=False, default_factory=list)  # of the last run: expert of each layer

    def __post_init__(self) -> None:
        self.ops, self.comm, self.oracle = CudaBackend(self.device, self.invariant), SoloComm(), Following(self.tie)
        there = (self.positions, self.pages, self.page_size)
        self.model, self.truth = bind(self.path, self.ops, *there, self.paths), bind(self.path, self.oracle, *there)
        self.each = -(-self.positions // self.page_size)
        self.taps: tuple[Any, Any] = (None, None)
        for truth, mine in self._cache_pairs():
            truth[:] = np.nan
            self.device.upload(mine.address, np.full(mine.shape, np.nan, bf16).view(np.uint16))
        self.sampled: dict[str, np.ndarray] = {}

    def step(self, plan: StepPlan, rows: int, top: int = 2) -> tuple[np.ndarray, np.ndarray]:
        """Logits [r, V]; what was drawn is in `sampled`."""
        got, there = self.run_step(plan, rows, top)
        self.oracle.follow(self.choices)
        want, taps = self.truth.step(self.oracle, self.comm, plan)
        self.taps = taps.reshape(len(taps), -1).copy(), there.reshape(len(there), -1)
        return want.copy(), got

    def run_step(self, plan: StepPlan, rows: int, top: int = 2) -> tuple[np.ndarray, Any]:
        """The device's logits and, where they stand there, its taps."""
        plan = replace(plan, logprobs=np.full(len(plan.ctx), top, np.int32))
        fields = place_step(self.device, plan, Room(rows, self.streams, self.each, -(-rows // 64)))
        ops, n = self.ops, len(plan.out_rows)
        with ops.recording(fields.seq, fields.live) as launches:
            self.logits, taps = self.model.step(ops, self.comm, fields)
            kinds = {"target": "i32", "logp": "f32", "finite": "bool"}
            out = {name: ops.buffer(f"out_{name}", (rows,), kind) for name, kind in kinds.items()}
            out |= {f"top_{name}": ops.buffer(f"out_top_{name}", (rows, top), kind) for name, kind in (("ids", "i32"), ("logp", "f32"))}
            f = fields
            ops.sample(
                self.logits, f.out_rows, f.seq, f.pos, f.temperature, f.top_p, f.min_p, f.top_k, f.seed, f.logprobs, f.adjust_seq,
                f.adjust_seq_by, f.adjust_row, f.adjust_row_by, f.mask_rows, f.masks, **out,
            )  # fmt: skip
        self.run(launches, ())
        self.sampled = {name: ops.host(array)[:n] for name, array in out.items()}
        return ops.host(self.logits)[:n], taps

    def context(self, plan: DraftPlan, rows: int) -> None:
        """Both drafters' context of the last step's taps."""
        self.truth.context(self.oracle, self.taps[0], plan)
        fields = place_taps(self.device, plan, rows)
        with self.ops.recording(fields.tap_slot, fields.live) as launches:
            self.model.context(self.ops, self.taps[1], fields)
        self.run(launches)

    def block(self, plan: DraftPlan, top: int = 4) -> tuple[np.ndarray, np.ndarray]:
        """Logits [B * D, V]; the likeliest tokens are in `sampled`."""
        want = self.truth.block(self.oracle, self.comm, plan).copy()
        d = self.model.drafter
        rows = dflash.block_rows(d.config, plan, self.model.last_position)
        fields = place_block(self.device, plan, rows, self.streams, self.each)
        with self.ops.recording(fields.alive, fields.live) as launches:
            self.logits = logits = dflash.block_logits(
                self.ops, self.comm, d.config, d.weights, self.model.weights, fields.token, fields.row_pos, fields.mask_rows, fields,
                d.cache, self.page_size,
            )  # fmt: skip
            ids, logp = (self.ops.buffer(f"draft_{name}", (len(logits), top), kind) for name, kind in (("ids", "i32"), ("logp", "f32")))
            self.ops.top_logprobs(logits, ids=ids, logp=logp)
        self.run(launches)
        self.sampled = {"ids": self.ops.host(ids)[: len(want)], "logp": self.ops.host(logp)[: len(want)]}
        return want, self.ops.host(logits)[: len(want)]

    def run(self, launches: list[Recorded], keep: tuple[str, ...] = ("taps",)) -> None:
        """Eagerly, over poisoned buffers but for what an earlier recording left for this one. Of each op in `dropped`, the last
        launches are left out: a fault that must show."""
        out = {at for op in self.dropped for at in last_of(op, launches)}
        launches = [one for at, one in enumerate(launches) if at not in out]
        self.launches, self.choices = launches, []
        poison(self.ops, keep)
        for one in launches:
            one.run.run(self.device.stream)
            if one.op == "moe_w4" and one.symbols:  # its first launch chooses; the next layer's choices go to the same buffer
                shape = one.symbols["M"], one.symbols["k"]
                self.choices.append(self.ops.host(self.ops.buffer("expert", shape, "i32")))
        self.device.synchronize()

    def favour(self, expert: int, by: float) -> None:
        """A fault that must show: the device's routers add that to one expert's bias."""
        for layer in self.model.weights.layers:
            if isinstance(layer.mlp, kimi_k26.Moe):
                bias = self.ops.host(layer.mlp.bias)
                bias[expert] += by
                self.device.upload(layer.mlp.bias.address, bias)

    def caches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(definition's, device's) caches, whole; NaN where nothing was written."""
        return [(truth, self.ops.host(mine)) for truth, mine in self._cache_pairs()]

    def _cache_pairs(self) -> list[tuple[Any, Any]]:
        pairs = [(self.truth.cache, self.model.cache)]
        if self.model.drafter and self.truth.drafter:
            mine, truth = self.model.drafter.cache, self.truth.drafter.cache
            pairs += [(truth.k, mine.k), (truth.v, mine.v)]
        return pairs


def cosines(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    """Of each row; 0 where a number is not finite."""
    a, b = want.astype(np.float64), got.astype(np.float64)
    found = (a * b).sum(-1) / np.maximum(np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1), 1e-300)
    return np.nan_to_num(found, nan=0.0)


def check_draws(logits: np.ndarray, drawn: dict[str, np.ndarray]) -> None:
    """What a greedy `sample` or `top_logprobs` made of a device's own logits."""
    rows = logits.astype(np.float64)
    logp = rows - rows.max(1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(1, keepdims=True))
    ids, given = (drawn.get(f"top_{name}", drawn.get(name)) for name in ("ids", "logp"))
    np.testing.assert_array_equal(ids, np.argsort(-rows, axis=1, kind="stable")[:, : ids.shape[1]])
    np.testing.assert_allclose(given, np.take_along_axis(logp, ids, 1), atol=1e-3)
    if "target" in drawn:
        np.testing.assert_array_equal(drawn["target"], rows.argmax(1))
        np.testing.assert_allclose(drawn["logp"], logp.max(1), atol=1e-3)
        assert drawn["finite"].all()


def check_caches(twin: Twin) -> None:
    """Written in the same slots, and no others, with nearly the same numbers."""
    for want, got in twin.caches():
        want, got = (a.astype(np.float32).reshape(-1, a.shape[-1]) for a in (want, got))
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        written = ~np.isnan(want[:, 0])
        want, got = want[written], got[written]
        worst = (np.abs(got - want) / (CACHED.atol + CACHED.rtol * np.abs(want))).max(1)
        assert worst.max() <= 1.0, f"{(worst > 1.0).sum()} of {len(worst)} rows are off, by up to {worst.max():.3g} tolerances"


TREE = [-1, 0, 0, 1, 3, 2]
PATH = [0, 1, 3]  # the accepted nodes of TREE


def story(
    twin: Twin, vocab: int, buckets: tuple[int, int, int] = (24, 16, 4), chunk: int = 19
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """A chunk, a tree beside another chunk, drafts, and a step whose moves put the accepted nodes in their places.

    Yields (name, definition's, device's) results; each bucket has dead rows and a dead stream.
    """
    rng = np.random.default_rng(5)
    pages, page = page_table(2, twin.each, rng), twin.page_size
    draw = lambda n: rng.integers(0, vocab, n)  # noqa: E731
    chain = lambda n: list(range(-1, n - 1))  # noqa: E731
    slots = lambda b, at: pages[b][np.asarray(at) // page] * page + np.asarray(at) % page  # noqa: E731
    i32 = lambda *parts: np.concatenate([np.asarray(part) for part in parts]).astype(np.int32)  # noqa: E731

    first = make_plan([draw(chunk)], [chain(chunk)], [0], pages[:1], page)
    yield "chunk", *twin.step(first, buckets[0])
    before = np.arange(chunk)
    none = np.zeros(0, np.int32)
    twin.context(DraftPlan(none, none, pages[:0], i32(before), i32(before), i32(slots(0, before))), buckets[0])

    other = 7
    yield "tree", *twin.step(make_plan([draw(6), draw(other)], [TREE, chain(other)], [chunk, 0], pages, page), buckets[1])
    depth, own = np.arange(len(PATH)), np.arange(other)
    taken = (i32(PATH, 6 + own), i32(chunk + depth, own), i32(slots(0, chunk + depth), slots(1, own)))
    twin.context(DraftPlan(none, none, pages[:0], *taken), buckets[1])
    roots = DraftPlan(i32(draw(2)), i32([chunk + 3, other]), pages, none, none, none)
    yield "block", *twin.block(roots)

    last = make_plan([draw(1), draw(1)], [[-1], [-1]], [chunk + 3, other], pages, page)
    moves = np.stack([slots(0, chunk + np.array(PATH)), slots(0, chunk + depth)], 1)[depth != PATH]
    yield "moved", *twin.step(replace(last, moves=moves.astype(np.int32)), buckets[2])


def check_story(twin: Twin, vocab: int, **options: Any) -> None:
    """Every result of the story, what was drawn from it, and the caches it leaves."""
    for name, want, got in story(twin, vocab, **options):
        each = cosines(want, got)
        assert each.min() >= LEAST, f"{name}: {(each < LEAST).sum()} rows are off, with cosines of {np.sort(each)[:5]}"
        lengths = np.linalg.norm(got.astype(np.float64), axis=1) / np.linalg.norm(want.astype(np.float64), axis=1)
        assert np.abs(lengths - 1.0).max() <= LONGER, f"{name}: rows are {lengths.min():.4f} to {lengths.max():.4f} times as long"
        check_draws(got, twin.sampled)
    check_caches(twin)
