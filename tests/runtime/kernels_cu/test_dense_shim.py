"""The ops between the products on the CPU shim: kernels_np in bfloat16, dead rows, overlapping moves, planted faults."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.kernels_cu import dense
from runtime.kernels_cu._build import ARCHITECTURES, build, nvrtc_version
from runtime.kernels_np import dense as define
from runtime.ops import EXACT, OPS
from tests.compare import check_close
from tests.mutants import mutant
from tests.shim_calls import address, bf16, poisoned, random_bf16, run_call

needs_nvrtc = pytest.mark.skipif(nvrtc_version() is None, reason="no NVRTC library (pip install nvidia-cuda-nvrtc cuda-bindings)")
EPS = 1e-5
SHAPES = [(1, 8, dense.Config(32, 1)), (5, 264, dense.Config(32, 2)), (7, 512, dense.Config(64, 1)), (3, 7168, dense.Config(896, 1))]


class Rows:
    """M rows of width H, one of them dead and full of NaN where M allows it, and the arrays of every row op."""

    def __init__(self, get, rng, m: int, hidden: int, config: dense.Config, fault: bool = False) -> None:
        self.m, self.hidden, self.config, self.lib = m, hidden, config, get("dense_entry.cu", config.defines())
        self.seq = np.zeros(m, np.int32)
        self.seq[m // 2] = -1 if m > 1 else 0
        self.dead = self.seq < 0
        self.x, self.delta, self.gate = random_bf16(rng, m, hidden), random_bf16(rng, m, hidden), random_bf16(rng, m, 2 * hidden, scale=3)
        for array in (self.x, self.delta, self.gate):
            array[self.dead] = np.nan
        self.w, self.out = random_bf16(rng, hidden), poisoned(m, hidden)

    def run(self, call, descending: bool = False) -> None:
        run_call(self.lib, call, descending)

    def at(self, **names) -> dict[str, int]:
        return {name: address(array) for name, array in names.items()} | {"seq": address(self.seq)}

    def check(self, op: str, got: np.ndarray, want: np.ndarray) -> None:
        """want of the dead rows is ignored: they must be as they were, NaN."""
        expected = np.where(self.dead[:, None], np.nan, want.astype(np.float32))
        check_close(got.astype(np.float32), expected, OPS[op].tolerance, op)
        equal = (got == want)[~self.dead].mean()  # a sum in another order moves few results by a step of bf16
        assert equal > 0.95, f"{op}: {equal:.3f} of the elements have the definition's bits"


def check_norms(rows: Rows, descending: bool = False) -> None:
    want, x = np.zeros_like(rows.x), rows.x.copy()
    w = rows.w.astype(np.float32)
    rows.run(dense.rms_norm(rows.config, rows.m, rows.hidden, EPS, **rows.at(x=rows.x, w=rows.w, out=rows.out)), descending)
    define.rms_norm(x, w, EPS, out=want)
    rows.check("rms_norm", rows.out, want)
    rows.out[:] = np.nan
    call = dense.add_rms_norm(rows.config, rows.m, rows.hidden, EPS, **rows.at(x=rows.x, delta=rows.delta, w=rows.w, out=rows.out))
    rows.run(call, descending)
    define.add_rms_norm(x, rows.delta, w, EPS, out=want)
    check_close(rows.x.astype(np.float32), x.astype(np.float32), EXACT, "x += delta")
    rows.check("add_rms_norm", rows.out, want)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(("m", "hidden", "config"), SHAPES)
def test_norms(shim, rng, m, hidden, config, descending):
    check_norms(Rows(shim, rng, m, hidden, config), descending)


def check_gate(rows: Rows) -> None:
    want = np.zeros_like(rows.out)
    rows.gate[0, : min(4, rows.hidden)] = [-300, 300, 0, -1]  # exp overflows, and must not give NaN
    rows.run(dense.silu_mul(rows.m, rows.hidden, **rows.at(x=rows.gate, out=rows.out)))
    define.silu_mul(rows.gate, out=want)
    rows.check("silu_mul", rows.out, want)


@pytest.mark.parametrize(("m", "hidden", "config"), SHAPES)
def test_gate(shim, rng, m, hidden, config):
    check_gate(Rows(shim, rng, m, hidden, config))


def check_embed(rows: Rows, rng) -> None:
    """A rank with 40 of 120 tokens, the first and the last of them asked for, and tokens of other ranks on both sides."""
    token, table = rng.integers(30, 90, rows.m).astype(np.int32), random_bf16(rng, 40, rows.hidden)
    token[: min(4, rows.m)] = [40, 79, 80, 39][: min(4, rows.m)]
    want = np.zeros_like(rows.out)
    rows.run(dense.embed(rows.config, rows.m, rows.hidden, 40, 40, **rows.at(token=token, table=table, out=rows.out)))
    define.embed(token, table, 40, out=want)
    rows.check("embed", rows.out, want)


@pytest.mark.parametrize(("m", "hidden", "config"), SHAPES)
def test_embed(shim, rng, m, hidden, config):
    check_embed(Rows(shim, rng, m, hidden, config), rng)


def check_copy(get, rng) -> None:
    """As the taps are kept: [M, 3, H], one of the three written."""
    rows = Rows(get, rng, 5, 264, dense.Config(64, 1))
    kept = poisoned(5, 3, 264)
    rows.run(dense.copy(5, 264, **rows.at(x=rows.x, out=kept[:, 1]), out_stride_bytes=kept.strides[0]))
    rows.check("copy", kept[:, 1], rows.x)
    assert np.isnan(kept[:, [0, 2]].astype(np.float32)).all()


def test_copy_into_a_strided_buffer(shim, rng):
    check_copy(shim, rng)


def check_gather(get, rng) -> None:
    x, out, live = random_bf16(rng, 9, 264), poisoned(7, 264), np.array([5], np.int32)
    picked = np.array([8, 0, -1, 3, 3, 6, 6], np.int32)
    config = dense.Config(64, 1)
    arrays = {"x": x, "rows": picked, "live": live, "out": out}
    run_call(get("dense_entry.cu", config.defines()), dense.gather_rows(7, 264, **{k: address(a) for k, a in arrays.items()}))
    want = np.full((7, 264), np.nan, np.float32)
    want[[0, 1, 3, 4]] = x[[8, 0, 3, 3]].astype(np.float32)
    check_close(out.astype(np.float32), want, EXACT, "gather_rows")


def test_gather_takes_live_rows_only(shim, rng):
    check_gather(shim, rng)


MOVES = {
    "none": [],
    "apart": [[3, 9], [4, 0]],
    "down by one": [[i + 1, i] for i in range(200)],
    "up by one": [[i, i + 1] for i in range(200)],
    "a ring": [[5, 6], [6, 7], [7, 5]],
    "one source twice": [[2, 8], [2, 9]],
}


def check_moves(get, rng, name: str, descending: bool = False) -> None:
    moves = np.array(MOVES[name], np.int32).reshape(-1, 2)
    cache, live, room = random_bf16(rng, 3, 210, 72), np.array([len(moves)], np.int32), np.full((256, 2), 1 << 20, np.int32)
    room[: len(moves)] = moves
    want = cache.copy()
    define.kv_move(want, moves)
    call = dense.kv_move(3, 210, 144, 256, cache=address(cache), moves=address(room), live=address(live))
    run_call(get("dense_entry.cu", dense.Config(64, 1).defines()), call, descending)
    np.testing.assert_array_equal(cache.view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("name", MOVES)
def test_moves_read_all_before_they_write(shim, rng, name, descending):
    check_moves(shim, rng, name, descending)


FAULTS = {
    "the norm of what was not rounded": ("unpack8(pack8(value[k]), value[k]);", ""),
    "a mean of sixteenths": ("(float)(kEight * vectors)", "(float)(2 * kEight * vectors)"),
    "the last warp's sum lost": ("w < kWarps; ++w", "w < kWarps - 1; ++w"),
    "no epsilon": (" + eps);", ");"),
    "the residual not stored": ("x[i] = pack8(value[k]);", ""),
    "a dead row written": ("return seq && seq[row] < 0;", "return false;"),
    "gate and up changed about": ("gate[j] / (1.f + expf(-gate[j])) * up[j]", "up[j] / (1.f + expf(-up[j])) * gate[j]"),
    "another rank's token": ("local >= 0 && local < rows", "local >= 0 && local <= rows"),
    "gather beyond the live rows": ("n >= *live || rows[n] < 0", "rows[n] < 0"),
    "a store before all loads": ("  __syncthreads();\n  for (int i = threadIdx.x; i < total", "  for (int i = threadIdx.x; i < total"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_shows(tmp_path, rng, fault):
    get = mutant(tmp_path, dense.SOURCE, *FAULTS[fault])
    rows = Rows(get, rng, 6, 1024, dense.Config(64, 2))
    rows.x[0] *= np.array(2e-3, bf16)  # where epsilon counts
    rows.delta[0] *= np.array(2e-3, bf16)
    with pytest.raises(AssertionError):
        check_norms(rows)
        check_gate(rows)
        rows.out[:] = np.nan
        check_embed(rows, rng)
        for name in MOVES:
            check_moves(get, rng, name)
        check_gather(get, rng)


def test_what_the_kernels_cannot_take_is_named():
    with pytest.raises(ValueError, match=r"H = 12 numbers of 2 bytes"):
        dense.rms_norm(dense.Config(), 1, 12, EPS, x=0, w=0, out=0)
    with pytest.raises(ValueError, match=r"room for 64 vectors, a row of H = 1024 has 128"):
        dense.Config(64, 1).check(1024)
    with pytest.raises(ValueError, match=r"4000 moves .* split"):
        dense.kv_move(1, 1, 1152, 4000, cache=0, moves=0, live=0)
    for hidden in (8, 512, 1536, 7168, 8192):
        for config in dense.candidates(hidden):
            config.check(hidden)


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_stack_or_spills(arch, tmp_path, monkeypatch):
    monkeypatch.setenv("RUNTIME_CACHE_DIR", str(tmp_path))
    for config in dense.candidates(7168):
        entries = build(dense.SOURCE, config.defines(), arch).entries
        assert set(entries) == set(dense.ENTRIES) and max(e.registers for e in entries.values()) <= 128
