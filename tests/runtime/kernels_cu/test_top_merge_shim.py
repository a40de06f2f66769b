"""A vocabulary cut over ranks: the merged likeliest tokens are those of the whole, on the shim and in shared memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runtime.kernels_cu import top_merge as kernel
from runtime.kernels_cu._build import ARCHITECTURES, build, nvrtc_version
from runtime.kernels_np import NumpyBackend
from runtime.kernels_np import draft as define
from runtime.shared import LINE, SharedBlock, Watch
from runtime.shared_comm import SharedComm
from tests.forks import on_ranks
from tests.mutants import mutant
from tests.shim_calls import address, poisoned, run_call

Get = Callable[[str, dict[str, int]], ctypes.CDLL]


def logits_of(rows: int, vocab: int) -> np.ndarray:
    """Rows with ties, signed zeros and one NaN."""
    rng = np.random.default_rng(3)
    made = rng.standard_normal((rows, vocab)).astype(np.float32) * 4
    made[1] = np.round(made[1])  # many equals
    made[2, :] = np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
    made[3, vocab // 2] = np.nan
    return made


def whole(logits: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    ids, logp = np.empty((len(logits), top), np.int32), np.empty((len(logits), top), np.float32)
    define.top_logprobs(logits, ids=ids, logp=logp)
    return ids, logp


def check(ids: np.ndarray, logp: np.ndarray, want: tuple[np.ndarray, np.ndarray]) -> None:
    finite = ~np.isnan(want[1]).any(axis=1)
    assert np.array_equal(ids[finite], want[0][finite])
    assert np.abs(logp[finite] - want[1][finite]).max() < 2e-5
    assert np.isnan(logp[~finite]).all() and (~finite).sum() == 1


def merged(get: Get, world: int, vocab: int, top: int) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    rows, config, share = 6, kernel.Config(world, 32), vocab // world
    lib, logits, live = get("top_merge_entry.cu", config.defines()), logits_of(rows, vocab), np.array([rows - 1], np.int32)
    parts = np.zeros((world, rows, top + 1, 2), np.uint32)
    for rank in range(world):
        local = np.ascontiguousarray(logits[:, rank * share : (rank + 1) * share])
        ids, logp = whole(local, top)
        at = {name: address(a) for name, a in {"logits": local, "ids": ids, "logp": logp, "live": live, "out": parts[rank]}.items()}
        run_call(lib, kernel.top_pack(config, rows, share, top, rank * share, **at))
    assert not parts[:, -1].any(), "a dead row was written"
    got, got_logp = poisoned(rows, top, dtype=np.int32), poisoned(rows, top, dtype=np.float32)
    at = {"parts": address(parts), "live": address(live), "ids": address(got), "logp": address(got_logp)}
    run_call(lib, kernel.top_merge(config, rows, top, **at))
    assert (got[-1] == -7).all() and np.isnan(got_logp[-1]).all()
    want_ids, want_logp = whole(logits, top)
    return got[:-1], got_logp[:-1], (want_ids[:-1], want_logp[:-1])


@pytest.mark.parametrize(("world", "vocab", "top"), [(2, 64, 16), (4, 256, 5), (8, 512, 16), (2, 40, 20)])
def test_merged_tokens_are_those_of_the_whole(shim: Get, world: int, vocab: int, top: int) -> None:
    check(*merged(shim, world, vocab, top))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("name[other] < name[c]", "name[other] > name[c]"),
        ("id + first", "id"),
        ("row[id] - logp[m * K]", "row[id]"),
        ("(size_t)rank * M + m", "(size_t)m"),
    ],
)
def test_planted_faults_are_found(tmp_path: Any, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check(*merged(mutant(tmp_path, "top_merge.cu", old, new), 2, 64, 16))


def check_beside(get: Get, config: kernel.Config, rows: int, width: int) -> None:
    parts = np.random.default_rng(0).standard_normal((config.world, rows, width)).astype(np.float32)
    out = poisoned(rows, config.world * width, dtype=np.float32)
    lib = get("top_merge_entry.cu", config.defines())
    run_call(lib, kernel.side_by_side(config, rows, 4 * width, parts=address(parts), out=address(out)))
    assert np.array_equal(out, np.concatenate(list(parts), axis=1))


@pytest.mark.parametrize(("world", "rows", "width"), [(2, 3, 8), (3, 5, 132), (8, 1, 260)])
def test_rows_stand_side_by_side(shim: Get, world: int, rows: int, width: int) -> None:
    config = kernel.Config(world, 32)
    check_beside(shim, config, rows, width)
    with pytest.raises(ValueError, match="a row must be a positive multiple of 16 bytes"):
        kernel.side_by_side(config, rows, 20, parts=0, out=0)


@pytest.mark.parametrize(("world", "top"), [(2, 16), (3, 5), (2, 40)])  # 40 of shares of 30: gathered whole
def test_ranks_on_the_cpu_merge_too(world: int, top: int) -> None:
    block, logits = SharedBlock.create(LINE + SharedComm.nbytes(world)), logits_of(6, 30 * world)

    def run(rank: int) -> tuple[np.ndarray, np.ndarray]:
        comm = SharedComm(rank, world, block, LINE, Watch(block, 0, 30.0))
        ids, logp = np.empty((6, top), np.int32), np.empty((6, top), np.float32)
        comm.top_logprobs(NumpyBackend(), np.ascontiguousarray(logits[:, 30 * rank : 30 * rank + 30]), ids=ids, logp=logp)
        return ids, logp

    results = on_ranks(world, run)
    for ids, logp in results:
        check(ids, logp, whole(logits, top))
    assert all(ids.tobytes() + logp.tobytes() == results[0][0].tobytes() + results[0][1].tobytes() for ids, logp in results)


@pytest.mark.skipif(nvrtc_version() is None, reason="no NVRTC library (pip install nvidia-cuda-nvrtc cuda-bindings)")
def test_it_builds_for_every_architecture_without_spills() -> None:
    for world in (2, 8):
        for arch in ARCHITECTURES:
            assert set(build(kernel.SOURCE, kernel.Config(world).defines(), arch).entries) == set(kernel.ENTRIES)
    assert kernel.Config(8).fits(20_480, 128) and not kernel.Config(8).fits(20_480, 129) and not kernel.Config(2).fits(15, 16)
    with pytest.raises(ValueError, match="8 ranks' 200 tokens; at most 1024"):
        kernel.top_merge(kernel.Config(8), 1, 200, parts=0, live=0, ids=0, logp=0)
