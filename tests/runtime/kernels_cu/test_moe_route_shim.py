"""Routing and sorting on the CPU shim: the definition, ties, dead rows, NaN, many blocks, and the work list's rules."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from runtime.kernels_cu.moe_config import Config, Dims
from runtime.kernels_cu.moe_w4 import Sorted, most_octets, workspace_bytes


class Work:
    """Output arrays of the route and sort kernels, poisoned."""

    def __init__(self, dims: Dims, config: Config) -> None:
        self.dims, self.config = dims, config
        self.room = {name: np.full(size, 0xFF, np.uint8) for name, size in workspace_bytes(dims, config).items()}
        self.room["arrived"][:] = 0
        names = ("chunks", "total", "rows", "octets", "claim", "ready", "arrived")
        self.sorted = Sorted(*(self.room[n].ctypes.data for n in names), config.chunk_rows)

    def array(self, name: str, dtype: type = np.int32) -> np.ndarray:
        return self.room[name].view(dtype)

    def check(self, expert: np.ndarray, weight: np.ndarray) -> None:
        """Every live choice has exactly one row, in a chunk of its expert; pads are -1; counters are zero."""
        total, choice = int(self.array("total")[0]), self.array("rows").reshape(-1, 2)[:, 0]
        chunks = self.array("chunks").reshape(-1, 4)[:total]
        flat, flat_weight = expert.reshape(-1), weight.reshape(-1)
        seen: list[int] = []
        for i, (e, row, rows, span) in enumerate(chunks):
            first, count = span & 0x3FFFF, span >> 18
            assert first <= i < first + count and (chunks[first : first + count, 0] == e).all()
            assert row % 8 == 0 and 1 <= rows <= self.config.chunk_rows
            places = choice[row : row + rows]
            assert (flat[places] == e).all()
            np.testing.assert_array_equal(self.array("rows", np.float32).reshape(-1, 2)[row : row + rows, 1], flat_weight[places])
            if i == first + count - 1:
                assert (choice[row + rows : row + -(-rows // 8) * 8] == -1).all()
            seen.extend(places)
        assert sorted(seen) == list(np.flatnonzero(flat >= 0))
        assert (np.diff(chunks[:, 0]) >= 0).all()
        assert int(self.array("octets")[0]) == sum(-(-int((flat == e).sum()) // 8) for e in np.unique(flat[flat >= 0]))
        assert int(self.array("octets")[0]) <= most_octets(self.dims)
        assert self.array("claim")[0] == 0 and (self.array("ready")[:total] == 0).all() and self.array("arrived")[0] == 0


def route(shim, dims, logits, bias, scale=2.5, live=None, descending=False, config=None):
    work = Work(dims, config or Config())
    expert, weight = np.full((dims.M, dims.top_k), -7, np.int32), np.full((dims.M, dims.top_k), np.nan, np.float32)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (logits, bias)]
    pointers += [ctypes.c_void_p(None if live is None else live.ctypes.data)]
    pointers += [ctypes.c_void_p(a.ctypes.data) for a in (expert, weight)]
    lib = shim("route_entry.cu", {"MAX_EXPERTS": -(-dims.E // 128) * 128})
    sizes = (ctypes.c_float(scale), dims.M, dims.E, dims.top_k, ctypes.byref(work.sorted), int(descending))
    lib.cpu_moe_route_sort(*pointers, *sizes)
    return expert, weight, work


def reference(logits, bias, top_k, scale):
    score = 1 / (1 + np.exp(-logits.astype(np.float64)))
    expert = np.argsort(-(score + bias).astype(np.float32), axis=1, kind="stable")[:, :top_k]
    picked = np.take_along_axis(score, expert, axis=1)
    return expert, picked / (picked.sum(1, keepdims=True) + 1e-20) * scale


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(("m", "e", "k"), [(1, 384, 8), (3, 20, 4), (16, 8, 2), (17, 96, 8), (40, 130, 3)])
def test_route_and_sort(shim, rng, m, e, k, descending):
    dims = Dims(m, e, 64, 32, k)
    logits = rng.standard_normal((m, e)).astype(np.float32)
    bias = (rng.standard_normal(e) * 0.2).astype(np.float32)
    expert, weight, work = route(shim, dims, logits, bias, descending=descending)
    want, want_weight = reference(logits, bias, k, 2.5)
    np.testing.assert_array_equal(expert, want)
    np.testing.assert_allclose(weight, want_weight, rtol=1e-5)
    work.check(expert, weight)


def test_bias_chooses_but_does_not_weigh(shim, rng):
    dims = Dims(2, 16, 64, 32, 2)
    logits = rng.standard_normal((2, 16)).astype(np.float32)
    bias = np.zeros(16, np.float32)
    bias[[3, 9]] = 5.0
    expert, weight, _ = route(shim, dims, logits, bias)
    assert set(expert[0]) == {3, 9}
    np.testing.assert_allclose(weight.sum(1), 2.5, rtol=1e-6)


def test_ties_go_to_the_lower_expert(shim):
    dims = Dims(1, 70, 64, 32, 4)
    logits = np.zeros((1, 70), np.float32)
    logits[0, 69] = 1.0
    expert, _, _ = route(shim, dims, logits, np.zeros(70, np.float32))
    np.testing.assert_array_equal(expert, [[69, 0, 1, 2]])


def test_dead_rows_take_no_place(shim, rng):
    dims = Dims(20, 12, 64, 32, 3)
    logits = rng.standard_normal((20, 12)).astype(np.float32)
    live = np.zeros(20, np.int32)
    live[[0, 7, 19]] = -1
    logits[live < 0] = np.nan
    expert, weight, work = route(shim, dims, logits, np.zeros(12, np.float32), live=live)
    assert (expert[live < 0] == -1).all() and (weight[live < 0] == 0).all()
    np.testing.assert_array_equal(expert[live >= 0], reference(logits[live >= 0], np.zeros(12), 3, 2.5)[0])
    work.check(expert, weight)


def test_nan_logits_still_choose_experts(shim):
    dims = Dims(1, 40, 64, 32, 4)
    expert, _, _ = route(shim, dims, np.full((1, 40), np.nan, np.float32), np.zeros(40, np.float32))
    assert len(set(expert[0])) == 4 and (expert >= 0).all() and (expert < 40).all()


def test_hot_expert_is_cut_evenly(shim):
    dims = Dims(33, 4, 64, 32, 1)
    logits = np.zeros((33, 4), np.float32)
    logits[:, 2] = 3.0
    config = Config(octets=4)
    expert, weight, work = route(shim, dims, logits, np.zeros(4, np.float32), config=config)
    work.check(expert, weight)
    np.testing.assert_array_equal(work.array("chunks").reshape(-1, 4)[:2, 2], [24, 9])


def test_a_lost_choice_shows(shim, rng):
    dims = Dims(5, 16, 64, 32, 2)
    expert, weight, work = route(shim, dims, rng.standard_normal((5, 16)).astype(np.float32), np.zeros(16, np.float32))
    work.array("rows").reshape(-1, 2)[int(work.array("chunks")[1]), 0] += 1
    with pytest.raises(AssertionError):
        work.check(expert, weight)
