"""Latent norms, rotation and cache write on the CPU shim: kernels_np in bfloat16, dead rows, planted faults."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.kernels_cu import mla_prep
from runtime.kernels_cu._build import ARCHITECTURES, build, nvrtc_version
from runtime.kernels_cu.mla_prep import Config, Dims
from runtime.kernels_np import mla as define
from runtime.ops import OPS
from tests.compare import check_close
from tests.mutants import mutant
from tests.shim_calls import address, bf16, poisoned, random_bf16, run_call

needs_nvrtc = pytest.mark.skipif(nvrtc_version() is None, reason="no NVRTC library (pip install nvidia-cuda-nvrtc cuda-bindings)")
KIMI = Dims(M=3, A=64, Q=1536, L=512, R=64, N=128)
TINY = Dims(M=6, A=3, Q=24, L=16, R=8, N=8)
CASES = [(KIMI, Config(288, 1)), (KIMI, Config(160, 2)), (TINY, Config(32, 1)), (Dims(1, 1, 264, 40, 16, 24), Config(64, 1))]
EPS, POSITIONS, SLOTS = 1e-6, 50, 20


class World:
    """Rows at distinct slots and positions; row 1 is dead, its numbers NaN, its slot and position far outside."""

    def __init__(self, rng, dims: Dims) -> None:
        self.dims = d = dims
        self.a, self.q = random_bf16(rng, d.M, 8 * d.row), random_bf16(rng, d.M, d.A * (d.N + d.R))
        self.a[0] *= np.array(1e-3, bf16)  # where epsilon counts
        self.q_norm, self.kv_norm = random_bf16(rng, d.Q), random_bf16(rng, d.L)
        angle = np.arange(POSITIONS)[:, None] / 10000 ** (np.arange(d.R // 2) / (d.R // 2))
        self.cos_sin = np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32)
        self.pos, self.slot = rng.permutation(POSITIONS)[: d.M].astype(np.int32), rng.permutation(SLOTS)[: d.M].astype(np.int32)
        self.seq = np.zeros(d.M, np.int32)
        if d.M > 1:
            self.seq[1], self.pos[1], self.slot[1] = -1, 1 << 30, 1 << 30
            self.a[1], self.q[1] = np.nan, np.nan

    def at(self, *names: str, **outputs: np.ndarray) -> dict[str, int]:
        return {n: address(getattr(self, n)) for n in (*names, "cos_sin", "pos", "seq")} | {n: address(a) for n, a in outputs.items()}

    def check(self, get, config: Config, descending: bool = False) -> None:
        d, lib = self.dims, get("mla_prep_entry.cu", config.defines())
        live = self.seq >= 0
        q_latent, cache, out = poisoned(d.M, d.Q), poisoned(SLOTS, d.L + d.R), poisoned(d.M, d.A, d.L + d.R)
        latent = self.at("a", "q_norm", "kv_norm", "slot", q_latent=q_latent, cache=cache)
        run_call(lib, mla_prep.mla_latent(config, d, EPS, **latent), descending)
        run_call(lib, mla_prep.query_rope(d, **self.at("q", out=out)), descending)

        want = [poisoned(*a.shape) for a in (q_latent, cache, out)]
        got_live = poisoned(int(live.sum()), d.Q)
        norms = (self.q_norm.astype(np.float32), self.kv_norm.astype(np.float32))
        define.mla_latent(self.a[live], *norms, EPS, self.pos[live], self.slot[live], self.cos_sin, q_latent=got_live, cache=want[1])
        want[0][live] = got_live
        rows = self.q[live].astype(np.float32).reshape(-1, d.A, d.N + d.R)[:, :, d.N :]
        want[2][live, :, d.L :] = define.rotate_pairs(rows, self.cos_sin[self.pos[live]][:, None])
        for name, got, expected in zip(("q_latent", "cache", "rotated"), (q_latent, cache, out), want, strict=True):
            check_close(got.astype(np.float32), expected.astype(np.float32), OPS["mla_latent"].tolerance, name)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(("dims", "config"), CASES)
def test_is_the_definition(shim, rng, dims, config, descending):
    World(rng, dims).check(shim, config, descending)


FAULTS = {
    "sums changed about": ("part[0][tid / 32] = query_squares;", "part[0][tid / 32] = latent_squares;"),
    "the latent's mean over Q": ("latent_squares / (float)(kEight * p.L)", "latent_squares / (float)(kEight * p.Q)"),
    "no epsilon": ("(float)(kEight * p.Q) + p.eps", "(float)(kEight * p.Q)"),
    "a rotation backwards": ("even * cosine - odd * sine", "even * cosine + odd * sine"),
    "pairs of halves": ("sine = cos_sin[half + pair + j]", "sine = cos_sin[pair + j]"),
    "the next position": (
        "p.cos_sin + (size_t)p.pos[m] * kEight * p.R;\n#pragma",
        "p.cos_sin + (size_t)(p.pos[m] + 1) * kEight * p.R;\n#pragma",
    ),
    "the key's first pairs for all": ("rotated8(value[k], table, in_key * kEight / 2", "rotated8(value[k], table, 0 * kEight / 2"),
    "the key over the latent": ("else cached[in_latent] = rotated8", "else cached[in_key] = rotated8"),
    "the query's latent columns": ("(p.L + p.R) + p.L + at]", "(p.L + p.R) + at]"),
    "the query's unrotated part": ("(p.N + p.R) + p.N + at]", "(p.N + p.R) + at]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_shows(tmp_path, rng, fault):
    world = World(rng, Dims(M=4, A=3, Q=520, L=64, R=16, N=24))
    world.pos[world.seq >= 0] = [3, 20, 49 - 1]
    with pytest.raises(AssertionError):
        world.check(mutant(tmp_path, mla_prep.SOURCE, *FAULTS[fault]), Config(96, 1))


def test_a_dead_row_that_is_written_shows(tmp_path, rng):
    world = World(rng, TINY)
    world.pos[1], world.slot[1] = 0, int(np.setdiff1d(np.arange(SLOTS), world.slot)[0])
    get = mutant(tmp_path, mla_prep.SOURCE, "if (p.seq && p.seq[m] < 0) return;", "")
    world.a[1], world.q[1] = 1.0, 1.0
    with pytest.raises(AssertionError):
        world.check(get, Config(32, 1))


def test_what_the_kernels_cannot_take_is_named():
    with pytest.raises(ValueError, match=r"L = 12 numbers of 2 bytes"):
        Dims(1, 1, 8, 12, 8, 8).check()
    with pytest.raises(ValueError, match=r"room for 32 vectors, a row has 264"):
        Config(32, 1).check(KIMI)
    for dims in (KIMI, TINY):
        for config in mla_prep.candidates(dims):
            config.check(dims)


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_stack_or_spills(arch, tmp_path, monkeypatch):
    monkeypatch.setenv("RUNTIME_CACHE_DIR", str(tmp_path))
    for config in mla_prep.candidates(KIMI):
        entries = build(mla_prep.SOURCE, config.defines(), arch).entries
        assert set(entries) == set(mla_prep.ENTRIES) and max(e.registers for e in entries.values()) <= 128
