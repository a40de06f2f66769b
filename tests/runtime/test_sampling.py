from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from runtime import sampling
from runtime.sampling import draw, is_finite_rows, log_softmax_at, philox, top_logprobs
from tests.pace import ratio

PARAMS = ("temperature", "top_p", "min_p", "top_k", "seed", "pos")


def keyed(
    rows: int, *, temperature: Any = 1.0, top_p: Any = 1.0, min_p: Any = 0.0, top_k: Any = 0, seed: Any = 7, pos: Any = None
) -> dict[str, Any]:
    """Parameters of `rows` rows: scalars are repeated, positions count from 0."""
    values = (temperature, top_p, min_p, top_k, seed, np.arange(rows) if pos is None else pos)
    dtypes = (np.float32, np.float32, np.float32, np.int32, np.uint64, np.int64)
    return {name: np.broadcast_to(np.asarray(v, t), (rows,)).copy() for name, v, t in zip(PARAMS, values, dtypes, strict=True)}


def some(params: dict[str, Any], rows: Any) -> dict[str, Any]:
    return {name: value[rows] for name, value in params.items()}


def philox_scalar(counter: list[int], key: list[int], rounds: int = 10) -> list[int]:
    x, k = list(counter), list(key)
    for _ in range(rounds):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(b >> 32) ^ x[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ x[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x


def kept_reference(logits: np.ndarray, p: dict[str, float]) -> tuple[np.ndarray, bool]:
    """Kept ids and whether some filter's edge is too near to call, in float64, one token at a time."""
    d = (logits.astype(np.float64) - logits.max()) / p["temperature"]
    order = sorted(range(len(d)), key=lambda i: (-d[i], i))
    close = False
    if p["min_p"] > 0:
        close |= any(0 < abs(math.exp(d[i]) - p["min_p"]) < 1e-5 for i in order)
        order = [i for i in order if math.exp(d[i]) >= p["min_p"]]
    if p["top_k"] > 0:
        order = order[: int(p["top_k"])]
    if p["top_p"] < 1:
        total = math.fsum(math.exp(d[i]) for i in order)
        sums = np.cumsum([math.exp(d[i]) for i in order]) / total
        close |= bool((np.abs(sums[:-1] - p["top_p"]) < 1e-5).any())
        order = order[: int(np.argmax(sums >= p["top_p"] - 1e-12)) + 1]
    return np.array(order), close


def draw_reference(logits: np.ndarray, p: dict[str, float]) -> tuple[int, bool]:
    """The token by the formula in float64 with Python integers, and whether it is too near to call."""
    if p["temperature"] < 1e-5:
        return int(np.flatnonzero(logits == logits.max())[0]), False
    kept, close = kept_reference(logits, p)
    low, high = 0xFFFFFFFF, 32
    scores = []
    for i in kept.tolist():
        counter = [i // 4, int(p["pos"]) & low, int(p["pos"]) >> high, 0x544F4B4E]
        word = philox_scalar(counter, [int(p["seed"]) & low, int(p["seed"]) >> high])[i % 4]
        v = min((word + 0.5) / 2**32, 1 - 2.0**-24)
        scores.append((float(logits[i]) - float(logits.max())) / p["temperature"] - math.log(-math.log1p(-v)))
    ranked = sorted(scores, reverse=True)
    close |= len(ranked) > 1 and ranked[0] - ranked[1] < 1e-5
    return int(kept[int(np.argmax(scores))]), close


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers(counter: str, key: str, words: str) -> None:
    c, k, w = ([int(word, 16) for word in text.split()] for text in (counter, key, words))
    assert philox_scalar(c, k) == w
    assert philox_scalar(c, k, rounds=9) != w
    found = philox(np.array(c, np.uint32)[:, None].repeat(9000, 1), np.array(k, np.uint32)[:, None].repeat(9000, 1))
    assert found.dtype == np.uint32
    assert (found == np.array(w, np.uint32)[:, None]).all()


def test_philox_of_many_blocks_is_each_blocks_own() -> None:
    rng = np.random.default_rng(0)
    counter, key = rng.integers(0, 2**32, (4, 5000), np.uint32), rng.integers(0, 2**32, (2, 5000), np.uint32)
    words = philox(counter, key)
    for at in (0, 1, 4095, 4096, 4999):
        assert words[:, at].tolist() == philox_scalar(counter[:, at].tolist(), key[:, at].tolist())


def test_arithmetic_is_close_to_the_functions_it_stands_for() -> None:
    rng = np.random.default_rng(1)
    x = np.concatenate([np.exp(rng.uniform(-80, 80, 20000)), 1 + rng.uniform(-1e-3, 1e-3, 20000), [1.0, 0.5, 2.0**-126]]).astype(np.float32)
    exact = np.log(x.astype(np.float64))
    assert (np.abs(sampling._log(x) - exact) <= 4e-7 * np.abs(exact)).all()
    assert sampling._log(np.ones(1, np.float32))[0] == 0
    edges = [0, 1, 2**32 - 1, 2**32 - 128, 2**31]
    word = np.concatenate([rng.integers(0, 2**32, 20000), 2 ** rng.integers(0, 32, 500), edges]).astype(np.uint32)
    v = np.minimum((word.astype(np.float64) + 0.5) / 2**32, 1 - 2.0**-24)
    e, exact = sampling._exponential(word), -np.log1p(-v)
    assert (np.abs(e - exact) <= 5e-7 * exact + 2.0**-25 / (1 - v)).all()  # the grid of v, coarse where E is large and never wins
    assert (e > 0).all() and (e < 17).all()
    assert -np.log(sampling._exponential(np.array([0], np.uint32)))[0] < 22.88 < -float(sampling.HOPELESS) - 2.82
    below = np.concatenate([rng.uniform(0, 27, 20000), [0.0, 1e-8, 1000.0, np.inf]]).astype(np.float32)
    mass = 2.0**40 * np.exp(-below.astype(np.float64))
    assert (np.abs(sampling._mass(below) - mass) <= 2.5e-6 * mass + 1).all()
    assert sampling._mass(below)[20000] == 2**40


@pytest.mark.parametrize("vocab", [1, 5, 37, 64])
def test_draw_is_the_formula(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows = 250
    logits = (rng.standard_normal((rows, vocab)) * 2).astype(np.float32)
    logits[::3] = np.round(logits[::3])  # ties
    p = keyed(
        rows,
        temperature=rng.choice([0.0, 1e-6, 0.01, 0.7, 1.0, 2.0], rows),
        top_p=rng.choice([1.0, 0.95, 0.5, 0.01], rows),
        min_p=rng.choice([0.0, 0.05, 0.6, 1.0], rows),
        top_k=rng.choice([0, 1, 3, 20, 500], rows),
        seed=rng.integers(0, 2**64, rows, np.uint64),
        pos=rng.choice([0, 1, 77, 2**31, 2**40 + 5], rows),
    )
    found = draw(logits, **p)
    assert found.dtype == np.int32
    close = 0
    for r in range(rows):
        token, near = draw_reference(logits[r], {name: float(v[r]) if v.dtype.kind == "f" else int(v[r]) for name, v in p.items()})
        close += near
        assert near or found[r] == token, r
    assert close < rows / 20


def test_filters_keep_what_the_reference_keeps() -> None:
    rng = np.random.default_rng(2)
    checked = 0
    for vocab, scale in ((9, 1.0), (64, 1.0), (64, 4.0), (300, 2.0)):
        logits = (rng.standard_normal((60, vocab)) * scale).astype(np.float32)
        logits[::2] = np.round(logits[::2] * 2) / 2
        p = keyed(60, temperature=rng.choice([0.5, 1.0, 2.0], 60), top_p=rng.choice([1.0, 0.9, 0.3], 60), min_p=rng.choice([0.0, 0.1], 60))
        p["top_k"] = rng.choice([0, 1, 7, 50], 60).astype(np.int32)
        d = (logits - logits.max(axis=1, keepdims=True)) / p["temperature"][:, None]
        _, token, counts = sampling._keep(d, p["top_p"], p["min_p"], p["top_k"])
        for r, kept in enumerate(np.split(token, np.cumsum(counts)[:-1])):
            right, close = kept_reference(logits[r], {name: float(p[name][r]) for name in PARAMS[:4]})
            checked += not close
            right = right[d[r, right] >= sampling.HOPELESS]
            assert close or kept.tolist() == sorted(right.tolist())
    assert checked > 200


def test_equals_at_the_edge_go_by_id() -> None:
    logits = np.tile(np.array([1, 2, 2, 1, 2, 1, 2, 1], np.float32), (5, 1))
    d = logits - 2
    p = keyed(5, top_k=[3, 6, 0, 0, 0], top_p=[1, 1, 0.5, 1e-6, 1], min_p=[0, 0, 0, 0, 1])
    _, token, counts = sampling._keep(d, p["top_p"], p["min_p"], p["top_k"])
    kept = [part.tolist() for part in np.split(token, np.cumsum(counts)[:-1])]
    assert kept == [[1, 2, 4], [0, 1, 2, 3, 4, 6], [1, 2, 4], [1], [1, 2, 4, 6]]
    flat = np.zeros((1, 8), np.float32)  # exact halves: the sums are integers
    for top_p, n in ((0.5, 4), (0.25, 2), (0.125, 1), (0.51, 5)):
        q = keyed(1, top_p=top_p)
        assert sampling._keep(flat, q["top_p"], q["min_p"], q["top_k"])[1].tolist() == list(range(n))


def chi_square_z(counts: np.ndarray, probability: np.ndarray) -> float:
    """Standard deviations above expectation, by Wilson and Hilferty; cells below 5 expected draws are pooled."""
    expected = probability * counts.sum()
    small = expected < 5
    cells = np.append(counts[~small], counts[small].sum()), np.append(expected[~small], expected[small].sum())
    if cells[1][-1] < 1e-9:
        assert cells[0][-1] == 0
        cells = cells[0][:-1], cells[1][:-1]
    k = len(cells[0]) - 1
    x = float(((cells[0] - cells[1]) ** 2 / cells[1]).sum())
    return ((x / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))


def filtered_softmax(logits: np.ndarray, p: dict[str, float]) -> np.ndarray:
    kept, _ = kept_reference(logits, p)
    weight = np.zeros(len(logits))
    weight[kept] = np.exp((logits[kept].astype(np.float64) - logits.max()) / p["temperature"])
    return weight / weight.sum()


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 1.0},
        {"temperature": 2.0},
        {"temperature": 0.3},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 6},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 1.2, "min_p": 0.05, "top_k": 20, "top_p": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_draws_have_the_filtered_distribution(given: dict[str, float], over: str) -> None:
    rows, vocab = 40_000, 40
    logits = np.random.default_rng(3).standard_normal(vocab).astype(np.float32) * np.float32(1.5)
    p = keyed(rows, **given, **({"seed": np.arange(rows), "pos": 17} if over == "seeds" else {"seed": 2**63 + 5}))
    counts = np.bincount(draw(np.broadcast_to(logits, (rows, vocab)), **p), minlength=vocab)
    scalar = {"top_p": 1.0, "min_p": 0.0, "top_k": 0, **given}
    right = filtered_softmax(logits, scalar)
    assert counts[right == 0].sum() == 0
    assert abs(chi_square_z(counts, right)) < 4
    warm = filtered_softmax(logits, {**scalar, "temperature": given["temperature"] * 1.1})  # a tenth off is seen
    assert chi_square_z(counts, np.where(right > 0, np.maximum(warm, 1e-4), 0) / np.where(right > 0, np.maximum(warm, 1e-4), 0).sum()) > 6


def test_draws_of_other_positions_and_seeds_are_independent() -> None:
    n = 20_000
    fair = np.zeros((n, 2), np.float32)
    coins = {
        "positions": draw(fair, **keyed(n, pos=np.arange(n))),
        "seeds": draw(fair, **keyed(n, seed=np.arange(n), pos=5)),
        "far positions": draw(fair, **keyed(n, pos=np.arange(n) << 32)),
        "far seeds": draw(fair, **keyed(n, seed=np.arange(n, dtype=np.uint64) << np.uint64(32), pos=5)),
    }
    limit = 4.5 / math.sqrt(n)
    signs = {name: coin * 2.0 - 1 for name, coin in coins.items()}
    for s in signs.values():
        assert abs(s.mean()) < limit
        assert all(abs((s[lag:] * s[:-lag]).mean()) < limit for lag in range(1, 9))
    names = list(signs)
    assert all(abs((signs[a] * signs[b]).mean()) < limit for a in names for b in names if a < b)
    stuck = draw(fair, **keyed(n, pos=np.arange(n) // 2)) * 2.0 - 1  # the same position twice: what the check must see
    assert abs((stuck[1:] * stuck[:-1]).mean()) > 10 * limit


def test_tokens_of_a_block_are_independent() -> None:
    n = 20_000
    words = sampling._words(np.repeat(np.arange(n), 8), np.tile(np.arange(8), n), np.full(n, 3, np.uint64), np.arange(n))
    u = words.reshape(n, 8) / 2.0**32 - 0.5
    correlation = (u.T @ u) / n * 12
    assert np.abs(correlation - np.eye(8)).max() < 4.5 / math.sqrt(n) * 2


def test_a_row_does_not_feel_its_company() -> None:
    rng = np.random.default_rng(5)
    rows, vocab = 70, 1003
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    logits[::4] = np.round(logits[::4])
    p = keyed(
        rows,
        temperature=rng.choice([0.0, 0.01, 0.8, 2.0], rows),
        top_p=rng.choice([1.0, 0.95, 0.2], rows),
        min_p=rng.choice([0.0, 0.02], rows),
        top_k=rng.choice([0, 40], rows),
        seed=rng.integers(0, 2**64, rows, np.uint64),
        pos=rng.integers(0, 2**20, rows),
    )
    together = draw(logits, **p)
    logp, (ids, top) = log_softmax_at(logits, together), top_logprobs(logits, 7)
    assert [int(draw(logits[r : r + 1], **some(p, slice(r, r + 1)))[0]) for r in range(rows)] == together.tolist()
    for _ in range(6):
        members = rng.permutation(rows)[: int(rng.integers(1, rows))]
        assert np.array_equal(draw(logits[members], **some(p, members)), together[members])
        assert np.array_equal(log_softmax_at(logits[members], together[members]), logp[members])
        sub_ids, sub_top = top_logprobs(logits[members], 7)
        assert np.array_equal(sub_ids, ids[members]) and np.array_equal(sub_top, top[members])
    strided = np.zeros((rows, 2 * vocab), np.float32)[:, ::2]
    strided[:] = logits
    assert np.array_equal(draw(strided, **p), together)
    other = dict(p, pos=p["pos"] + 1)
    assert (draw(logits, **other) != together).any()
    assert (draw(logits, **dict(p, seed=p["seed"] ^ np.uint64(1 << 40))) != together).any()


def test_the_definition_is_pinned() -> None:
    logits = ((np.arange(24 * 50).reshape(24, 50) * 7919 % 1009) / np.float32(200)).astype(np.float32)
    p = keyed(24, temperature=0.9, top_p=[1.0, 0.9] * 12, seed=0x0123456789ABCDEF, pos=np.arange(24) * 1000)
    pinned = [1, 49, 6, 10, 45, 27, 39, 46, 18, 6, 43, 44, 40, 4, 22, 15, 12, 21, 17, 15, 17, 39, 8, 45]
    assert draw(logits, **p).tolist() == pinned  # other numbers here: every seeded text changes
    word = np.arange(0, 2**32, 65_537, dtype=np.uint32)
    below = np.arange(0, 27, 2**-10, dtype=np.float32)
    bits = (sampling._log(below + 1).view(np.int32), sampling._exponential(word).view(np.int32), sampling._mass(below))
    assert [int(b.astype(np.int64).sum()) for b in bits] == [29708782189435, 69329506682887, 1126449771583227]  # the same on every machine


def test_equal_scores_go_to_the_lower_id(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.array([[0, 5, 1, 5, 5], [4, 4, 0, 0, 4], [0, 0, 0, 0, 9]], np.float32)
    monkeypatch.setattr(sampling, "_words", lambda place, token, seed, pos: np.full(len(token), 1 << 31, np.uint32))
    assert draw(logits, **keyed(3)).tolist() == [1, 0, 4]


@pytest.mark.parametrize("temperature", [0.01, 1.0, 2.0])
def test_one_token_left_is_the_argmax(temperature: float) -> None:
    rng = np.random.default_rng(6)
    logits = np.round(rng.standard_normal((80, 30)) * 2).astype(np.float32)
    best = logits.argmax(axis=1)
    for given in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 0.0}, {"temperature": 9e-6}):
        assert np.array_equal(draw(logits, **keyed(80, **{"temperature": temperature, **given})), best)
    among = draw(logits, **keyed(80, temperature=temperature, min_p=1.0))
    assert (logits[np.arange(80), among] == logits.max(axis=1)).all()
    assert (among != best).any()  # equals are drawn, not the first taken


def test_large_logits_and_forbidden_tokens() -> None:
    rng = np.random.default_rng(7)
    logits = (rng.standard_normal((200, 6)) * 1e3).astype(np.float32)
    logits[:, 2] = -np.inf
    for given in ({}, {"top_p": 0.99}, {"top_k": 6}, {"min_p": 1e-3}, {"temperature": 2.0}, {"temperature": 0.01}):
        assert not (draw(logits, **keyed(200, **given)) == 2).any()
    huge = np.array([[3e38, -3e38, 3e38]], np.float32)
    assert draw(np.repeat(huge, 50, 0), **keyed(50, temperature=0.01)).tolist().count(1) == 0
    nothing = np.full((2, 6), -np.inf, np.float32)
    assert draw(nothing, **keyed(2, top_p=0.5)).tolist() == [0, 0]


def test_rows_that_are_not_finite_leave_the_others_alone() -> None:
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((8, 33)).astype(np.float32)
    sick = logits.copy()
    sick[1], sick[3, 4], sick[5, 0], sick[6, 9] = np.nan, np.nan, np.inf, -np.inf
    assert is_finite_rows(logits).all()
    assert is_finite_rows(sick).tolist() == [True, False, True, False, True, False, False, True]
    well = [0, 2, 4, 7]
    for given in ({}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}, {"temperature": 0.0}):
        p = keyed(8, **given)
        with np.errstate(all="raise"):
            found = draw(sick, **p)
            ids, logp = top_logprobs(sick, 4)
            at = log_softmax_at(sick, found)
        assert np.array_equal(found[well], draw(logits, **p)[well])
        assert ((found >= 0) & (found < 33)).all() and ((ids >= 0) & (ids < 33)).all()
        assert np.isnan(at[1]) and np.isnan(logp[1]).all()
        assert np.array_equal(logp[well], top_logprobs(logits, 4)[1][well])


def test_shapes_are_checked_and_empty_ones_are_legal() -> None:
    assert draw(np.zeros((0, 9), np.float32), **keyed(0)).shape == (0,)
    assert draw(np.zeros((3, 1), np.float32), **keyed(3, top_p=0.5)).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match=r"draw: seed has shape \(2,\)"):
        draw(np.zeros((3, 4), np.float32), **dict(keyed(3), seed=np.zeros(2, np.uint64)))


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    rng = np.random.default_rng(9)
    for rows, vocab in ((1, 3), (20, 64), (3, 40_000)):
        logits = (rng.standard_normal((rows, vocab)) * 4).astype(np.float32)
        logits[:, ::2] = np.round(logits[:, ::2])
        exact = logits.astype(np.float64)
        exact -= np.log(np.exp(exact - exact.max(1, keepdims=True)).sum(1, keepdims=True)) + exact.max(1, keepdims=True)
        token = rng.integers(0, vocab, rows)
        found = log_softmax_at(logits, token)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, exact[np.arange(rows), token], atol=3e-6)
        for n in (0, 1, 5, 20):
            ids, logp = top_logprobs(logits, n)
            right = np.array([sorted(range(vocab), key=lambda i, r=r: (-logits[r, i], i))[:n] for r in range(rows)], np.int64)
            assert ids.dtype == np.int32 and np.array_equal(ids, right.reshape(rows, min(n, vocab)))
            np.testing.assert_allclose(logp, np.take_along_axis(exact, right, axis=1), atol=3e-6)
        if vocab > 3:
            ids, logp = top_logprobs(logits, 1)
            assert np.array_equal(log_softmax_at(logits, ids[:, 0]), logp[:, 0])


@pytest.mark.parametrize(("temperature", "most"), [(0.8, 0.9), (0.0, 0.05)])
def test_a_draw_is_quicker_than_looking_at_every_token(temperature: float, most: float) -> None:
    """145 and 5 us of an EPYC, 0.2 and 0.01 of the plain reading; 0.45 without AVX2."""
    logits = (np.random.default_rng(0).standard_normal((1, 4096)) * 3).astype(np.float32)
    p = keyed(1, temperature=temperature, top_p=0.95)
    plain = lambda: sorted((math.exp(v / 0.8), i) for i, v in enumerate(logits[0].tolist()))  # noqa: E731
    assert ratio(lambda: draw(logits, **p), plain) < most
    assert ratio(lambda: (plain(), draw(logits, **p)), plain, rounds=1) > most, "mutation"


@pytest.mark.parametrize(("temperature", "most"), [(0.8, 22.0), (0.0, 12.0)])
def test_the_rows_of_a_step_are_drawn_together(temperature: float, most: float) -> None:
    """33 take as long as 6 and 2 drawn alone; as 15 without AVX2."""
    logits = (np.random.default_rng(0).standard_normal((33, 4096)) * 3).astype(np.float32)
    all_, one = (keyed(n, temperature=temperature, top_p=0.95) for n in (33, 1))
    alone = lambda: draw(logits[:1], **one)  # noqa: E731
    assert ratio(lambda: draw(logits, **all_), alone) < most
    assert ratio(lambda: [draw(logits[i : i + 1], **one) for i in range(33)], alone, rounds=1) > most, "mutation: one after the other"
