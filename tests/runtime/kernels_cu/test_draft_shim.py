"""The drafter's small ops on the CPU shim: kernels_np, ties, NaN rows, dead rows, planted faults."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.kernels_cu import draft
from runtime.kernels_cu._build import ARCHITECTURES, build, nvrtc_version
from runtime.kernels_cu.draft import Config
from runtime.kernels_np import draft as define
from runtime.ops import EXACT, OPS
from tests.compare import check_close
from tests.mutants import mutant
from tests.shim_calls import address, bf16, poisoned, random_bf16, run_call

needs_nvrtc = pytest.mark.skipif(nvrtc_version() is None, reason="no NVRTC library (pip install nvidia-cuda-nvrtc cuda-bindings)")
EPS, POSITIONS, SLOTS = 1e-6, 40, 16


def library(get, head: int = 128, threads: int = 64):
    return get("draft_entry.cu", Config(head, threads).defines())


def at(**arrays) -> dict[str, int]:
    return {name: address(a) for name, a in arrays.items()}


def check_rope(get, rng, m: int = 5, heads: int = 6, head: int = 128, descending: bool = False) -> None:
    """Row 1 is dead and NaN, row 0 so small that epsilon counts."""
    x, w, out = random_bf16(rng, m, heads * head), random_bf16(rng, head), poisoned(m, heads, head)
    angle = np.arange(POSITIONS)[:, None] / 1000 ** (np.arange(head // 2) / (head // 2))
    cos_sin = np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32)
    pos, alive = rng.permutation(POSITIONS)[:m].astype(np.int32), np.zeros(m, np.int32)
    x[0] *= np.array(1e-3, bf16)
    if m > 1:
        alive[1], pos[1], x[1] = -1, 1 << 30, np.nan
    call = draft.head_norm_rope(Config(head, 64), m, heads, EPS, **at(x=x, w=w, cos_sin=cos_sin, pos=pos, out=out, alive=alive))
    run_call(library(get, head), call, descending)
    want, live = poisoned(m, heads, head), alive >= 0
    got_live = poisoned(int(live.sum()), heads, head)
    define.head_norm_rope(x[live], w.astype(np.float32), EPS, pos[live], cos_sin, out=got_live)
    want[live] = got_live
    check_close(out.astype(np.float32), want.astype(np.float32), OPS["head_norm_rope"].tolerance, "head_norm_rope")
    assert (out[live] == want[live]).mean() > 0.95


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(("m", "heads", "head"), [(5, 6, 128), (1, 64, 128), (3, 5, 64), (2, 3, 256)])
def test_head_norm_and_rotation(shim, rng, m, heads, head, descending):
    check_rope(shim, rng, m, heads, head, descending)


def check_write(get, rng) -> None:
    k, v = random_bf16(rng, 5, 2, 72), random_bf16(rng, 5, 144)
    k_cache, v_cache, slot = poisoned(SLOTS, 2, 72), poisoned(SLOTS, 2, 72), np.array([3, -1, 15, 0, 8], np.int32)
    run_call(library(get), draft.kv_write(5, 144, **at(k=k, v=v, slot=slot, k_cache=k_cache, v_cache=v_cache)))
    want, live = (poisoned(SLOTS, 2, 72), poisoned(SLOTS, 2, 72)), slot >= 0
    define.kv_write(k[live], v[live], slot[live], k_cache=want[0], v_cache=want[1])
    for got, expected in zip((k_cache, v_cache), want, strict=True):
        check_close(got.astype(np.float32), expected.astype(np.float32), EXACT, "kv_write")


def test_context_is_written_at_its_slots(shim, rng):
    check_write(shim, rng)


def check_top(get, logits: np.ndarray, top: int, threads: int = 64, descending: bool = False) -> None:
    """Two rows of the bucket are not live."""
    rows, vocab = logits.shape
    padded, live = np.full((rows + 2, vocab), np.nan, np.float32), np.array([rows], np.int32)
    padded[:rows] = logits
    ids, logp = poisoned(rows + 2, top, dtype=np.int32), poisoned(rows + 2, top, dtype=np.float32)
    lib = library(get, threads=threads)
    call = draft.top_logprobs(Config(128, threads), rows + 2, vocab, top, **at(logits=padded, live=live, ids=ids, logp=logp))
    run_call(lib, call, descending)
    want_ids, want_logp = poisoned(rows + 2, top, dtype=np.int32), poisoned(rows + 2, top, dtype=np.float32)
    define.top_logprobs(logits.astype(np.float32), ids=want_ids[:rows], logp=want_logp[:rows])
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(logp, want_logp, rtol=0, atol=5e-6)


@pytest.mark.parametrize(("vocab", "top"), [(1, 1), (64, 16), (333, 20), (5000, 64)])
def test_top_of_random_rows(shim, rng, vocab, top):
    check_top(shim, 4 * rng.standard_normal((6, vocab)), top)


def test_ties_go_to_the_lower_id(shim, rng):
    """Few distinct numbers, and one number alone: more equals than the list holds."""
    logits = np.round(rng.standard_normal((5, 3000)))
    logits[2], logits[3, ::2] = 0.0, -0.0
    check_top(shim, logits, 16, descending=True)


def test_a_whole_vocabulary(shim, rng):
    check_top(shim, 4 * rng.standard_normal((2, 163_840)), 16, threads=512)


def test_infinities(shim, rng):
    logits = rng.standard_normal((2, 200))
    logits[0, 5:150] = -np.inf
    check_top(shim, logits, 16)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_row_is_nan_and_its_neighbours_are_not(shim, rng, bad):
    logits = rng.standard_normal((3, 200)).astype(np.float32)
    logits[1, 77] = bad
    ids, logp = poisoned(3, 8, dtype=np.int32), poisoned(3, 8, dtype=np.float32)
    live = np.array([3], np.int32)
    run_call(library(shim), draft.top_logprobs(Config(128, 64), 3, 200, 8, **at(logits=logits, live=live, ids=ids, logp=logp)))
    assert np.isnan(logp[1]).all() and (ids[1] >= 0).all() and (ids[1] < 200).all() and len(set(ids[1])) == 8
    want_ids, want_logp = np.empty((2, 8), np.int32), np.empty((2, 8), np.float32)
    define.top_logprobs(logits[[0, 2]], ids=want_ids, logp=want_logp)
    np.testing.assert_array_equal(ids[[0, 2]], want_ids)
    np.testing.assert_allclose(logp[[0, 2]], want_logp, rtol=0, atol=5e-6)


FAULTS = {
    "a rotation backwards": ("(lane < 16 ? -other : other)", "(lane < 16 ? other : -other)"),
    "pairs of neighbours": ("mine, 16);", "mine, 1);"),
    "the mean of half a head": ("/ (float)HEAD + eps", "/ (float)kHalf + eps"),
    "no epsilon": ("(float)HEAD + eps", "(float)HEAD"),
    "angles of the other half": ("(lane % 16) * 2 * kWords", "(lane / 2) * 2 * kWords"),
    "values into the keys": ("v_cache[(size_t)slot[m] * vectors + i] = v[", "v_cache[(size_t)slot[m] * vectors + i] = k["),
    "a row too many": ("if (m >= *live) return;", "if (m > *live) return;"),
    "the sum not shifted": ("sum += expf(v - largest)", "sum += expf(v)"),
    "one token too few": ("first_to_reach<THREADS>(room, (uint64_t)K,", "first_to_reach<THREADS>(room, (uint64_t)K - 1,"),
    "falling and rising": ("~ordered(plus_zero(v)); }", "ordered(plus_zero(v)); }"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_shows(tmp_path, rng, fault):
    get = mutant(tmp_path, draft.SOURCE, *FAULTS[fault])
    with pytest.raises(AssertionError):
        check_rope(get, rng)
        check_write(get, rng)
        check_top(get, 4 * rng.standard_normal((6, 333)), 20)


def test_both_sides_agree_on_sizes(shim):
    assert library(shim).cpu_room_bytes() == draft.ROOM_BYTES


def test_what_the_kernels_cannot_take_is_named():
    with pytest.raises(ValueError, match=r"heads of 96"):
        Config(96).check()
    with pytest.raises(ValueError, match=r"K = 65 is outside 1\.\.64"):
        draft.top_logprobs(Config(), 1, 64, 65, logits=0, live=0, ids=0, logp=0)
    for config in draft.candidates(128):
        config.check()


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_stack_or_spills(arch, tmp_path, monkeypatch):
    monkeypatch.setenv("RUNTIME_CACHE_DIR", str(tmp_path))
    for config in (*draft.candidates(128), Config(256)):
        entries = build(draft.SOURCE, config.defines(), arch).entries
        assert set(entries) == set(draft.ENTRIES) and max(e.registers for e in entries.values()) <= 128
