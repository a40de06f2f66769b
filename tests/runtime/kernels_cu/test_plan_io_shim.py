"""Plans into device fields and results out of them on the CPU shim, against runtime.plan and model/dflash."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from model import dflash
from runtime.kernels_cu import plan_io
from runtime.kernels_cu._build import ARCHITECTURES, build, nvrtc_version
from runtime.kernels_cu.plan_io import SOURCE, Field, PublishParams, ReadParams, Result, block_rows, plan_read, publish
from runtime.plan import DRAFT_FIELDS, STEP_FIELDS, DraftLayout, PlanLayout, pack_draft, pack_plan, places
from runtime.types import DraftPlan, StepPlan
from tests.mutants import mutant
from tests.plans import make_plan, page_table, random_parents
from tests.shim_calls import address, run_call

needs_nvrtc = pytest.mark.skipif(nvrtc_version() is None, reason="no NVRTC library (pip install nvidia-cuda-nvrtc cuda-bindings)")
ENTRY = "plan_io_entry.cu"
LAYOUT = PlanLayout(max_rows=200, max_seqs=9, max_pages=13, max_words=4, max_moves=30, max_adjust=40, mask_words=3)
FILLS = {"token": 0, "pos": 0, "slot": -1, "seq": -1, "ctx": 0, "row0": 0, "out_rows": -1, "logprobs": -1}


def aligned(nbytes: int, fill: int) -> np.ndarray:
    """Bytes at a multiple of 16, as pinned and device memory are."""
    room = np.full(nbytes + 16, fill, np.uint8)
    skip = -int(room.ctypes.data) % 16
    return room[skip : skip + nbytes]


def sample_plan(rng, seqs: int, most: int) -> StepPlan:
    """Trees of up to `most` nodes, every table in use."""
    parents = [random_parents(rng, int(n)) for n in rng.integers(1, most + 1, seqs)]
    plan = make_plan(
        [rng.integers(1, 99, len(p)) for p in parents], parents, rng.integers(0, 40, seqs), page_table(seqs, 3 + -(-most // 16), rng)
    )
    wanted = np.sort(rng.permutation(plan.m)[: rng.integers(1, plan.m + 1)]).astype(np.int32)
    pairs = lambda n: rng.integers(1, 99, (n, 2)).astype(np.int32)  # noqa: E731
    changes = {
        "moves": pairs(5), "seed": rng.integers(0, 2**64, seqs, np.uint64), "out_rows": wanted, "top_k": pairs(seqs)[:, 0],
        "adjust_seq": pairs(7), "adjust_seq_by": rng.random((7, 2)).astype(np.float32), "adjust_row": pairs(3),
        "adjust_row_by": rng.random((3, 2)).astype(np.float32), "mask_rows": wanted[:2],
        "masks": rng.integers(0, 2**32, (len(wanted[:2]), 3), np.uint32),
    }  # fmt: skip
    return replace(plan, **changes)


class Bucket:
    """The device fields of a bucket of M rows, and what they must hold after a plan."""

    def __init__(self, layout, names, rows: int, fills, pads=("ancestors",)) -> None:
        self.layout, self.names, self.fills, self.pads = layout, names, fills, pads
        self.words = -(-rows // 64)
        self.places, size = places(layout)
        self.blob, self.held, self.fields = aligned(size, 0xFF), {}, []
        self.sequence, self.live = np.array([77], np.uint32), np.full(len(names) + 1, -5, np.int32)
        for name in names:
            place = self.places[name]
            room = min(place.rows, rows) if place.rows in (LAYOUT.max_rows, LAYOUT.max_seqs) else place.rows
            columns = self.words if name == "ancestors" else max(place.columns, 1)
            raw = aligned(-(-room * columns * place.item_bytes // 16) * 16, 0xEE)
            self.held[name] = raw[: room * columns * place.item_bytes].view(np.int32 if place.item_bytes == 4 else np.int64)
            self.held[name] = self.held[name].reshape(room, columns)
            at = address(self.held[name])
            self.fields.append(Field(name, place.at, place.header, at, room, columns, place.item_bytes, fills.get(name), name in pads))

    def call(self):
        return plan_read(self.fields, blob=address(self.blob), sequence=address(self.sequence), live=address(self.live))

    def wanted(self, plan) -> dict[str, np.ndarray]:
        """The fields as they stand now, overwritten by the plan as the docstring of `Field` has it."""
        found = {}
        for name in self.names:
            value, room = getattr(plan, name), self.held[name].copy()
            if name in self.fills:
                room[len(value) :] = self.fills[name]
            elif value.nbytes == len(value) * room[:1].nbytes:  # whole vectors, with zeros behind the last row
                words = value.nbytes // 4
                room.reshape(-1).view(np.int32)[words : -(-words // 4) * 4] = 0
            if name in self.pads:
                room[: len(value)] = 0
            kind = room.dtype
            found[name] = room
            if value.size:
                room[: len(value), : value.shape[1] if value.ndim == 2 else 1] = value.reshape(len(value), -1).view(kind)
        return found

    def check(self, get, plan, descending: bool = False) -> None:
        want = self.wanted(plan)
        run_call(get(ENTRY, {}), self.call(), descending)
        for name in self.names:
            np.testing.assert_array_equal(self.held[name], want[name], err_msg=name)
        np.testing.assert_array_equal(self.live, [*(len(getattr(plan, name)) for name in self.names), self.sequence[0]])


def check_steps(get, rng, descending: bool = False, sizes=(1, 5, 64, 65, 200)) -> None:
    """One bucket after another, plan after plan into the same fields: large, small, of one row, large again."""
    for rows in sizes:
        bucket = Bucket(LAYOUT, STEP_FIELDS, rows, FILLS)
        for seqs, most in ((min(9, rows), max(1, rows // 9)), (1, 1), (1, min(rows, 130)), (min(3, rows), max(1, rows // 3))):
            plan = sample_plan(rng, seqs, most)
            pack_plan(plan, LAYOUT, bucket.blob)
            bucket.sequence += 1
            bucket.check(get, plan, descending)


def check_drafts(get, rng) -> None:
    layout = DraftLayout(max_streams=9, max_pages=11, max_taps=200)
    fills = {"root": 0, "pos": -1, "tap_rows": -1, "tap_pos": 0, "tap_slot": -1}
    bucket = Bucket(layout, DRAFT_FIELDS, 40, fills, ())
    for streams, taps in ((9, 40), (0, 3), (4, 0), (1, 17)):
        parts = [rng.integers(1, 99, n).astype(np.int32) for n in (streams, streams, taps, taps, taps)]
        pages = rng.integers(1, 99, (streams, 6 if streams else 0)).astype(np.int32)
        plan = DraftPlan(parts[0], parts[1], pages, *parts[2:])
        pack_draft(plan, layout, bucket.blob)
        bucket.check(get, plan)


@pytest.mark.parametrize("descending", [False, True])
def test_fields_hold_the_plan_and_dead_tails(shim, rng, descending):
    check_steps(shim, rng, descending)


def test_draft_plans_too(shim, rng):
    check_drafts(shim, rng)


def check_rows(get, rng) -> None:
    c = dflash.Config(1, 8, 1, 1, 64, 8, 4096, 1e-5, 8, 4094, (0,), None)
    last = 60
    for streams, live in ((1, 1), (4, 3), (64, 64), (5, 0)):
        root, pos = rng.integers(0, 99, streams).astype(np.int32), rng.integers(40, 60, streams).astype(np.int32)
        none = np.zeros(0, np.int32)
        want = dflash.block_rows(c, DraftPlan(root[:live], pos[:live], np.zeros((live, 0), np.int32), none, none, none), last)
        token, row_pos, seq = (np.full(streams * c.block, -7, np.int32) for _ in range(3))
        mask_rows, counts, masks = np.full(streams * (c.block - 1), -7, np.int32), np.array([live], np.int32), np.array([-7], np.int32)
        at = {"root": root, "pos": pos, "live": counts, "token": token, "row_pos": row_pos, "seq": seq, "mask_rows": mask_rows,
              "live_masks": masks}  # fmt: skip
        run_call(get(ENTRY, {}), block_rows(streams, c.block, c.mask_token, last, **{name: address(a) for name, a in at.items()}))
        n = live * c.block
        for got, expected in zip((token, row_pos, mask_rows), want, strict=True):
            np.testing.assert_array_equal(got[: len(expected)], expected)
        np.testing.assert_array_equal(seq, [*np.repeat(np.arange(live), c.block), *[-1] * (streams * c.block - n)])
        assert masks[0] == live * c.depth and (token[n:] == 0).all() and (row_pos[n:] == 0).all()


def test_block_rows_are_the_drafters(shim, rng):
    check_rows(shim, rng)


class Results:
    """Five arrays of 40 rows as the step has them, and what the host sees."""

    WIDTHS = (4, 4, 1, 4 * 5, 4 * 5)

    def __init__(self, rng) -> None:
        self.device = [aligned(-(-40 * width // 16) * 16, 0) for width in self.WIDTHS]
        for array in self.device:
            array[:] = rng.integers(0, 255, len(array))
        self.host = [aligned(len(array), 0xEE) for array in self.device]
        self.sequence = np.zeros(1, np.uint32)

    def check(self, get, live: int, logprobs: list[int]) -> None:
        before = [array.copy() for array in self.host]
        numbers = np.array([live, self.sequence[0] + 9, len(logprobs)], np.int32)
        wanted = np.array([*logprobs, 3], np.int32)  # what lies beyond the live sequences is not looked at
        results = [Result(address(d), address(h), w, w == 20) for d, h, w in zip(self.device, self.host, self.WIDTHS, strict=True)]
        at = address(numbers)
        call = publish(
            results, live=at, number=at + 4, live_seqs=at + 8, logprobs=address(wanted), sequence=address(self.sequence)
        )  # fmt: skip
        run_call(get(ENTRY, {}), call)
        for old, new, device, width in zip(before, self.host, self.device, self.WIDTHS, strict=True):
            n = live * width if width != 20 or max(logprobs, default=0) > 0 else 0
            np.testing.assert_array_equal(new[:n], device[:n])
            whole = -(-n // 16) * 16
            np.testing.assert_array_equal(new[whole:], old[whole:], err_msg="more was written than is live")
        assert self.sequence[0] == numbers[1]


def check_results(get, rng) -> None:
    results = Results(rng)
    for live, logprobs in ((40, [-1, 0]), (3, [-1, 2]), (0, []), (17, [5]), (1, [])):
        results.check(get, live, logprobs)


def test_results_reach_the_host(shim, rng):
    check_results(shim, rng)


def work_list(rng, experts: int, chunk_rows: int, most: int) -> tuple[np.ndarray, np.ndarray, int]:
    """What moe_route.cu leaves for random choices: chunks, with stale ones behind, their number, and the experts that were hit."""
    rows = rng.integers(0, most + 1, experts)
    chunks = [
        (e, 0, 0, first | (-(-n // chunk_rows)) << 18)
        for e, n in enumerate(rows)
        for first in [int((-(-rows[:e] // chunk_rows)).sum())]
        for _ in range(-(-n // chunk_rows))
    ]
    stale = [(0, 0, 0, i | 1 << 18) for i in range(len(chunks), len(chunks) + 5)]
    return np.array([*chunks, *stale], np.int32), np.array([len(chunks)], np.int32), int((rows > 0).sum())


def check_experts(get, rng) -> None:
    for layers, experts in ((0, 0), (1, 1), (3, 40), (8, 384)):
        lists = [work_list(rng, experts, 8, 40) for _ in range(layers)]
        numbers, seen = np.array([0, 3], np.int32), np.full(2, 77, np.uint32)
        at = address(numbers)
        unions = [(address(chunks), address(total)) for chunks, total, _ in lists]
        run_call(get(ENTRY, {}), publish([], live=at, number=at + 4, sequence=address(seen), experts=address(seen) + 4, unions=unions))
        assert seen.tolist() == [3, sum(hit for *_, hit in lists) if layers else 77]


def test_distinct_experts_are_counted(shim, rng):
    check_experts(shim, rng)


FAULTS = {
    "chunks for experts": ("mine += (p.hit[i].chunks[c].w & 0x3ffff) == c", "mine += 1"),
    "stale chunks": ("? *p.hit[i].total : 0", "? *p.hit[i].total + 3 : 0"),
    "a layer short": ("i < p.unions ? *p", "i + 1 < p.unions ? *p"),
    "a tail without its fill": ("v = make_uint4(read.x, live > 1 ? read.y : f.fill,", "v = make_uint4(read.x, read.y,"),
    "words that keep what they held": ("column < p.words ? ldg32_host", "column < p.words + 1 ? ldg32_host"),
    "a stride of the blob": ("f.to[row * f.width + column] =", "f.to[row * p.words + column] ="),
    "a field too few": ("if (t < p.count) p.live[t]", "if (t + 1 < p.count) p.live[t]"),
    "positions past the last": ("least(pos[b] + i, last)", "pos[b] + i"),
    "a dead stream alive": ("seq[row] = here ? b : -1;", "seq[row] = b;"),
    "alternatives nobody asked for": ("if (r.asked && !asked) continue;", ""),
    "a row short": ("r.row_bytes + 15) / 16)", "r.row_bytes) / 16)"),
    "no number": ("if (t == 0) store_release_host", "if (t == 1 && p.count == 99) store_release_host"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_shows(tmp_path, rng, fault):
    get = mutant(tmp_path, SOURCE, *FAULTS[fault])
    with pytest.raises(AssertionError):
        check_steps(get, rng)
        check_drafts(get, rng)
        check_rows(get, rng)
        check_results(get, rng)
        check_experts(get, rng)


def test_both_sides_agree_on_sizes(shim):
    lib = shim(ENTRY, {})
    assert (lib.cpu_read_bytes(), lib.cpu_publish_bytes()) == (ctypes.sizeof(ReadParams), ctypes.sizeof(PublishParams))


def test_what_the_kernels_cannot_take_is_named():
    field = Field("token", 16, 2, 32, 4, 1, 4)
    for changes, text in (
        ({"at": 8}, "offset 8 to"),
        ({"item_bytes": 2}, "of 2 bytes"),
        ({"rows": 0}, r"\[0, 1\]"),
        ({"fill": 1 << 40}, "filled"),
    ):
        with pytest.raises(ValueError, match=text):
            plan_read([replace(field, **changes)], blob=0, sequence=0, live=0)
    with pytest.raises(ValueError, match="25 fields"):
        plan_read([field] * 25, blob=0, sequence=0, live=0)
    with pytest.raises(ValueError, match="T = 1"):
        block_rows(1, 1, 0, 0, **dict.fromkeys(("root", "pos", "live", "token", "row_pos", "seq", "mask_rows", "live_masks"), 0))
    with pytest.raises(ValueError, match="7 results"):
        publish([Result(0, 0, 4)] * 7, live=0, number=0, sequence=0)
    with pytest.raises(ValueError, match="experts of 9 layers; at most 8"):
        publish([], live=0, number=0, sequence=0, unions=[(0, 0)] * 9)


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_stack_or_spills(arch, tmp_path, monkeypatch):
    monkeypatch.setenv("RUNTIME_CACHE_DIR", str(tmp_path))
    entries = build(SOURCE, {}, arch).entries
    assert set(entries) == set(plan_io.ENTRIES) and max(e.registers for e in entries.values()) <= 64
