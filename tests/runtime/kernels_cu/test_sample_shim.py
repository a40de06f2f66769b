"""Sampling on the CPU shim: the tokens of runtime/sampling.py, bit for bit, in every mode; dead rows, ties, broken logits."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from runtime import sampling
from runtime.kernels_cu._build import ARCHITECTURES, build, nvrtc_version
from runtime.kernels_cu.sample import ROOM_BYTES, SOURCE, Config, Dims, Params, call, check_tables
from runtime.kernels_np.sample import sample as define
from tests.mutants import mutant
from tests.shim_calls import address, run_call

needs_nvrtc = pytest.mark.skipif(nvrtc_version() is None, reason="no NVRTC library (pip install nvidia-cuda-nvrtc cuda-bindings)")
TYPES = {"out_rows": np.int32, "seq": np.int32, "pos": np.int32, "temperature": np.float32, "top_p": np.float32, "min_p": np.float32,
         "top_k": np.int32, "seed": np.uint64, "logprobs": np.int32, "adjust_seq": np.int32, "adjust_seq_by": np.float32,
         "adjust_row": np.int32, "adjust_row_by": np.float32, "mask_rows": np.int32, "masks": np.uint32}  # fmt: skip


class Step:
    """Inputs of one call: r output rows of M = 2 r plan rows, two rows a sequence; more rows in the bucket than live."""

    def __init__(self, rng, rows: int, vocab: int, top: int = 0, logits=None, **changes) -> None:
        seqs = -(-rows // 2)
        self.logits = (4 * rng.standard_normal((rows, vocab))).astype(np.float32) if logits is None else logits.astype(np.float32)
        self.top = top
        none = np.zeros((0, 2))
        plan = {
            "out_rows": 2 * np.arange(rows) + 1, "seq": np.arange(2 * rows) // 4, "pos": rng.integers(0, 1 << 18, 2 * rows),
            "temperature": np.ones(seqs), "top_p": np.ones(seqs), "min_p": np.zeros(seqs), "top_k": np.zeros(seqs),
            "seed": rng.integers(0, 2**64, seqs, np.uint64), "logprobs": np.full(seqs, -1),
            "adjust_seq": none, "adjust_seq_by": none, "adjust_row": none, "adjust_row_by": none,
            "mask_rows": np.zeros(0), "masks": np.zeros((0, -(-self.logits.shape[1] // 32))),
        } | changes  # fmt: skip
        self.plan = {k: np.array(v if np.shape(v) else np.full(seqs, v), TYPES[k]) for k, v in plan.items()}

    def outputs(self, spare: int = 0) -> dict[str, np.ndarray]:
        rows = len(self.logits) + spare
        made = {"target": np.full(rows, -7, np.int32), "logp": np.full(rows, np.nan, np.float32), "finite": np.full(rows, 77, np.uint8)}
        made["top_ids"] = np.full((rows, self.top), -7, np.int32)
        return made | {"top_logp": np.full((rows, self.top), np.nan, np.float32)}

    def defined(self) -> dict[str, np.ndarray]:
        found = self.outputs()
        found["finite"] = np.zeros(len(self.logits), np.bool_)
        with np.errstate(all="ignore"):
            define(self.logits, **self.plan, **found)
        return found

    def run(self, get, descending: bool = False, spare: int = 2, threads: int = 64) -> dict[str, np.ndarray]:
        rows, vocab = self.logits.shape
        padded = np.full((rows + spare, vocab), np.nan, np.float32)
        padded[:rows] = self.logits
        found = self.outputs(spare)
        lengths = {"live_seq": "adjust_seq", "live_row": "adjust_row", "live_masks": "mask_rows"}
        live = {"live": rows} | {name: len(self.plan[table]) for name, table in lengths.items()}
        counts = {name: np.array([n], np.int32) for name, n in live.items()}
        beyond = np.full(spare, 1 << 30, np.int32)
        arrays = {**self.plan, "out_rows": np.concatenate([self.plan["out_rows"], beyond]), **found, **counts, "logits": padded}
        at, dims, config = {name: address(a) for name, a in arrays.items()}, Dims(rows + spare, vocab, self.top), Config(threads)
        run_call(get("sample_entry.cu", config.defines()), call(dims, config, at), descending)
        for name, a in found.items():
            np.testing.assert_array_equal(a[rows:], self.outputs(spare)[name][rows:], err_msg=f"{name}: a row beyond the live ones")
        return {name: a[:rows] for name, a in found.items()}


def check(step: Step, found: dict[str, np.ndarray]) -> None:
    want = step.defined()
    for name in ("target", "finite", "top_ids"):
        np.testing.assert_array_equal(found[name], want[name], err_msg=name)
    for name in ("logp", "top_logp"):
        np.testing.assert_allclose(found[name], want[name], rtol=0, atol=5e-6, err_msg=name)


FILTERS = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "min_p": {"min_p": 0.05},
    "min_p of one": {"min_p": 1.0},
    "top_p": {"top_p": 0.8},
    "small top_p": {"top_p": 1e-6},
    "all": {"temperature": 0.8, "top_k": 40, "min_p": 0.01, "top_p": 0.9},
}


@pytest.mark.parametrize("vocab", [1, 5, 64, 333, 4096])
@pytest.mark.parametrize("name", FILTERS)
def test_tokens_are_the_definitions(shim, rng, name, vocab):
    step = Step(rng, 12, vocab, top=min(3, vocab), logprobs=2, **FILTERS[name])
    check(step, step.run(shim))


@pytest.mark.parametrize("name", ["plain", "top_k", "top_p", "all"])
def test_ties_end_at_the_lower_ids(shim, rng, name):
    """Logits on a grid of halves, and rows that are all one number: more equals than the list holds."""
    logits = np.round(rng.standard_normal((10, 3000)) * 2) / 2
    logits[3], logits[4], logits[5, ::2] = 0.0, -0.0, -0.0
    step = Step(rng, 10, 3000, top=7, logits=logits, logprobs=0, **FILTERS[name])
    check(step, step.run(shim, descending=True))


def test_a_whole_vocabulary(shim, rng):
    step = Step(rng, 3, 163_840, top=20, logprobs=20, top_p=0.95, temperature=[0.6, 1.0])
    check(step, step.run(shim, threads=512))


def test_parameters_are_each_sequences_own(shim, rng):
    seqs = 16
    step = Step(
        rng, 32, 700, top=4, temperature=rng.choice([0.0, 9e-6, 1.1e-5, 0.3, 1.0, 2.0], seqs), top_p=rng.choice([1.0, 0.5, 0.95], seqs),
        min_p=rng.choice([0.0, 0.1, 1e-3], seqs), top_k=rng.choice([0, 1, 3, 50, 699, 700, 2**31 - 1], seqs),
        logprobs=rng.integers(-1, 3, seqs),
    )  # fmt: skip
    check(step, step.run(shim))


def adjusted_step(rng, rows: int = 8, vocab: int = 257) -> Step:
    """Entries for sequences and rows, tokens of both tables, bans, the likeliest token pushed down, rows without logits."""
    seqs, per = rows // 2, 40
    token = np.stack([rng.permutation(vocab)[:per] for _ in range(seqs)])
    by_seq = np.stack([rng.uniform(0.5, 2, (seqs, per)), rng.normal(0, 2, (seqs, per))], -1)
    by_seq[:, ::7, 1] = -np.inf
    rowed = np.arange(2 * rows)
    row_token = np.stack([rng.permutation(vocab)[:6] for _ in rowed])
    row_token[:, 0] = token[rowed // 4, 0]
    by_row = np.stack([rng.uniform(0.5, 2, row_token.shape), rng.normal(0, 3, row_token.shape)], -1)
    return Step(
        rng, rows, vocab, top=3, logprobs=1, top_k=[0, 9, 0, 9], top_p=[1.0, 1.0, 0.7, 0.9], temperature=[1.0, 0.9, 1.0, 0.0],
        adjust_seq=np.stack([np.repeat(np.arange(seqs), per), token.ravel()], -1), adjust_seq_by=by_seq.reshape(-1, 2),
        adjust_row=np.stack([np.repeat(rowed, 6), row_token.ravel()], -1), adjust_row_by=by_row.reshape(-1, 2),
    )  # fmt: skip


@pytest.mark.parametrize("descending", [False, True])
def test_adjustments(shim, rng, descending):
    step = adjusted_step(rng)
    check(step, step.run(shim, descending=descending))
    bare = Step(rng, 8, 257, logits=step.logits, **{k: v for k, v in step.plan.items() if not k.startswith("adjust")})
    assert (bare.defined()["target"] != step.defined()["target"]).any()


def masked_step(rng, vocab: int = 517, **changes) -> Step:
    """Four of eight rows constrained: to any half of the tokens, to one token, to none; entries of both tables beneath."""
    base = adjusted_step(rng, 8, vocab)
    masks = rng.integers(0, 2**32, (4, -(-vocab // 32)), np.uint32)
    masks[2], masks[3] = 0, 0
    masks[2, 11] = 1 << 9
    return Step(rng, 8, vocab, top=3, logits=base.logits, **base.plan | {"mask_rows": [1, 5, 11, 15], "masks": masks} | changes)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"temperature": 2.0, "top_p": 1.0, "top_k": 0}])
def test_masks(shim, rng, changes):
    step = masked_step(rng, **changes)
    found = step.run(shim)
    check(step, found)
    assert found["target"][5] == 11 * 32 + 9 and found["target"][7] == 0
    bare = Step(rng, 8, 517, top=3, logits=step.logits, **{k: v for k, v in step.plan.items() if "mask" not in k})
    assert (bare.defined()["target"] != step.defined()["target"]).any()


def test_a_row_whose_tokens_are_all_banned_gives_the_first(shim, rng):
    ban = {"adjust_seq": np.stack([np.zeros(64), np.arange(64)], -1), "adjust_seq_by": np.tile([1.0, -np.inf], (64, 1))}
    step = Step(rng, 4, 64, top_p=0.9, **ban)
    found = step.run(shim)
    check(step, found)
    assert (found["target"][:2] == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_broken_row_says_so_and_leaves_its_neighbours_alone(shim, rng, bad):
    step = Step(rng, 5, 130, top=2, logprobs=1, top_p=0.9)
    clean = step.run(shim)
    step.logits[2, 77] = bad
    found = step.run(shim)
    check(step, found)
    np.testing.assert_array_equal(found["finite"], [1, 1, 0, 1, 1])
    others = [0, 1, 3, 4]
    for name, a in found.items():
        np.testing.assert_array_equal(a[others], clean[name][others])


def test_dead_sequences_write_nothing(shim, rng):
    step = Step(rng, 6, 64, top=2, logprobs=1)
    want = step.run(shim)
    step.plan["seq"][step.plan["out_rows"][[1, 4]]] = -1
    step.logits[[1, 4]] = np.nan
    found = step.run(shim)
    for name, a in found.items():
        np.testing.assert_array_equal(a[[1, 4]], step.outputs()[name][[1, 4]])
        np.testing.assert_array_equal(a[[0, 2, 3, 5]], want[name][[0, 2, 3, 5]])


def test_arithmetic_has_numpys_bits(shim, rng):
    check_arithmetic(shim("sample_entry.cu", Config(64).defines()), rng)


def check_arithmetic(lib, rng) -> None:
    near_one = 1 + rng.uniform(-1e-3, 1e-3, 20_000)
    x = np.concatenate([np.exp(rng.uniform(-80, 80, 20_000)), near_one, [1.0, 0.5, 2.0**-126]]).astype(np.float32)
    below = np.concatenate([rng.uniform(0, 30, 40_000), [0.0, 1e-8, np.inf]]).astype(np.float32)
    word = np.concatenate([rng.integers(0, 2**32, 20_000), [0, 1, 2**32 - 1, 2**31, 2**32 - 128]]).astype(np.uint32)
    log, mass, e = np.empty_like(x), np.empty(len(x), np.uint64), np.empty(len(word), np.float32)
    pointer = lambda a: ctypes.c_void_p(a.ctypes.data)  # noqa: E731
    lib.cpu_arithmetic(pointer(x), len(x), pointer(log), pointer(mass))
    np.testing.assert_array_equal(log.view(np.int32), sampling._log(x).view(np.int32))
    lib.cpu_arithmetic(pointer(below), len(x), pointer(log), pointer(mass))
    np.testing.assert_array_equal(mass.astype(np.int64), sampling._mass(below))
    lib.cpu_exponential(pointer(word), len(word), pointer(e))
    np.testing.assert_array_equal(e.view(np.int32), sampling._exponential(word).view(np.int32))
    counter, key, words = rng.integers(0, 2**32, (4, 50), np.uint32), rng.integers(0, 2**32, (2, 50), np.uint32), np.empty(4, np.uint32)
    counter[3] = sampling.TOKEN_DRAW
    for i, want in enumerate(sampling.philox(counter, key).T):
        c, k = counter[:, i].copy(), key[:, i].copy()
        lib.cpu_philox(pointer(c), pointer(k), pointer(words))
        np.testing.assert_array_equal(words, want)


@pytest.mark.parametrize("fault", ["seed", "pos", "temperature", "top_k", "top_p", "min_p", "adjust_seq_by", "adjust_row_by", "logits"])
def test_a_wrong_input_shows(shim, rng, fault):
    step = adjusted_step(rng, rows=8, vocab=600)
    step.plan["temperature"][:], step.plan["top_p"][:], step.plan["top_k"][:] = 3.0, 1.0, 0
    found = step.run(shim)
    check(step, found)
    if fault == "logits":
        step.logits[np.arange(8), found["target"]] -= 5.0
    elif fault in ("seed", "pos"):
        step.plan[fault] += step.plan[fault].dtype.type(1)
    else:
        step.plan[fault][...] = {"temperature": 0.5, "top_k": 2, "top_p": 0.1, "min_p": 0.5}.get(fault, 30.0)
    with pytest.raises(AssertionError):
        check(step, found)


FAULTS = {
    "a fused multiply-add": (
        "prim/draw.cuh",
        "add_rn(mul_rn((float)exponent, 0.6931471805599453f), series)",
        "fmaf((float)exponent, 0.6931471805599453f, series)",
    ),
    "a mask for the next row": ("prim/draw.cuh", "p.mask_rows[mine] == m", "p.mask_rows[mine] >= m"),
    "a mask that entries pass": ("prim/draw.cuh", "return !mask || marked(mask, first + id);", "return true;"),
    "nine rounds": ("prim/draw.cuh", "round < 10", "round < 9"),
    "the row's own position": (SOURCE, "(long long)p.pos[m] + 1", "(long long)p.pos[m]"),
    "a token marked and not taken": ("prim/draw.cuh", "if (adjusted()) each_entry(f);", ""),
    "the sequence's entry lost": ("prim/draw.cuh", "v = adjusted_by(v, p.adjust_seq_by + 2 * k)", "v = v"),
    "a mass one bit short": ("prim/draw.cuh", "kMassBits = 40", "kMassBits = 4"),
    "raw logits of a broken row": (SOURCE, "row.finite = block_sum<THREADS>(sh.room.warp, scan.bad) == 0", "row.finite = true"),
    "a sum without its shift": (SOURCE, "sum += expf(v - largest)", "sum += expf(v)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_shows(tmp_path, rng, fault):
    get = mutant(tmp_path, *FAULTS[fault])
    plain = Step(rng, 40, 2000, top_p=0.7, temperature=np.linspace(0.5, 2, 20))
    plain.logits[5, 100] = np.nan
    with pytest.raises(AssertionError):
        for step in (plain, adjusted_step(rng), masked_step(rng), masked_step(rng, temperature=0.0)):
            check(step, step.run(get))
        check_arithmetic(get("sample_entry.cu", Config(64).defines()), rng)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return key < c.key || (key == c.key && id <= c.id);", "return key <= c.key;"),
        ("r.left = wanted - before;", "r.left = wanted;"),
        ("if (lane >= d) sum += x;", "sum += x;"),
    ],
)
def test_a_fault_in_the_selection_shows(tmp_path, rng, old, new):
    get = mutant(tmp_path, "prim/select.cuh", old, new)
    step = Step(rng, 10, 3000, top=7, logits=np.round(rng.standard_normal((10, 3000))), logprobs=0, top_k=9, temperature=2.0)
    with pytest.raises(AssertionError):
        check(step, step.run(get))


def test_both_sides_agree_on_sizes(shim):
    lib = shim("sample_entry.cu", Config(64).defines())
    assert (lib.cpu_params_bytes(), lib.cpu_shared_bytes()) == (ctypes.sizeof(Params), ROOM_BYTES)


def test_what_the_kernel_cannot_take_is_named():
    with pytest.raises(ValueError, match=r"V = 4194304 is outside"):
        Dims(1, 1 << 22, 0).check()
    with pytest.raises(ValueError, match=r"shared memory"):
        Config().check(Dims(1, 1 << 21, 0))
    with pytest.raises(ValueError, match=r"adjust_row: entry 2 is of 3, entry 1 of 4"):
        check_tables(np.zeros((0, 2), np.int32), np.array([[0, 1], [4, 1], [3, 1]], np.int32), np.zeros(0, np.int32))
    with pytest.raises(ValueError, match=r"mask_rows: entry 1 is of 2, entry 0 of 5"):
        check_tables(np.zeros((0, 2), np.int32), np.zeros((0, 2), np.int32), np.array([5, 2], np.int32))


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_stack_or_spills(arch, tmp_path, monkeypatch):
    monkeypatch.setenv("RUNTIME_CACHE_DIR", str(tmp_path))
    entries = build(SOURCE, Config().defines(), arch).entries
    assert set(entries) == {"sample"} and entries["sample"].registers <= 128
