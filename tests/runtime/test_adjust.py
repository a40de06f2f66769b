from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

from runtime.accept import accept
from runtime.adjust import SequenceHistory, apply_adjustments, fill_adjustments
from runtime.sampling import draw
from runtime.tree import random_tree
from runtime.types import DraftTree, SamplingParams
from tests.pace import ratio

VOCAB = 40
EOS = 3
PENALTIES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 0.9},
    {"frequency_penalty": -1.1},
    {"logit_bias": {5: 3.5, 6: -100.0, 7: 0.1}},
    {"min_tokens": 6, "stop_token_ids": (9, 11)},
    {"repetition_penalty": 1.2, "presence_penalty": -0.3, "frequency_penalty": 0.4, "logit_bias": {1: 0.3, 2: -1, EOS: 2}, "min_tokens": 5},
]


def params_of(given: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": None, **given, **more})


def adjust_plainly(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """One row after `output`, from the parameters' meaning: every token of the vocabulary in turn, nothing incremental."""
    adjusted = logits.copy()
    for token in range(len(logits)):
        value, count = adjusted[token], output.count(token)
        scale = np.float32(params.repetition_penalty if count or token in prompt else 1.0)
        value = value / scale if value > 0 else value * scale
        add = params.logit_bias.get(token, 0.0) - params.frequency_penalty * count - params.presence_penalty * (count > 0)
        adjusted[token] = value + np.float32(add)
        if len(output) < params.min_tokens and token in (EOS, *params.stop_token_ids):
            adjusted[token] = -np.inf
    return adjusted


def path_of(tree: DraftTree, node: int) -> list[int]:
    """Draft tokens from below the root down to the node."""
    tokens: list[int] = []
    while node > 0:
        tokens.insert(0, int(tree.token[node]))
        node = int(tree.parent[node])
    return tokens


def history_of(params: SamplingParams, prompt: list[int], output: list[int]) -> SequenceHistory:
    history = SequenceHistory(params, np.array(prompt, np.int32), (EOS,))
    history.push(output)
    return history


def adjust_tree(logits: np.ndarray, history: SequenceHistory, tree: DraftTree) -> np.ndarray:
    adjusted = logits.copy()
    rows = np.arange(len(tree), dtype=np.int32)
    apply_adjustments(adjusted, np.zeros_like(rows), rows, *fill_adjustments([(0, history, 0, tree)]))
    return adjusted


@pytest.mark.parametrize("given", PENALTIES, ids=str)
def test_every_node_is_adjusted_as_plain_decoding_at_its_prefix(given: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    params = params_of(given)
    for trial in range(25):
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 30))).tolist()
        output = rng.integers(0, 12, int(rng.integers(0, 9))).tolist()
        tree = random_tree(rng, (prompt + output)[-1], 14, int(rng.integers(0, 20)), 6)  # few tokens: repeats on paths, in base and bias
        logits = rng.standard_normal((len(tree), VOCAB)).astype(np.float32) * np.float32(3)
        found = adjust_tree(logits, history_of(params, prompt, output), tree)
        right = np.array([adjust_plainly(logits[t], params, prompt, output + path_of(tree, t)) for t in range(len(tree))])
        assert np.array_equal(found, right), trial  # bit for bit
        assert given == {} or not np.array_equal(found, logits) or (given.keys() == {"min_tokens", "stop_token_ids"} and len(output) > 5)


@pytest.mark.parametrize("given", [PENALTIES[1], PENALTIES[3], PENALTIES[4]], ids=str)
def test_wrong_histories_are_told_apart(given: dict[str, Any]) -> None:
    params, prompt, output = params_of(given), [1, 2, 2], [2, 4]
    tree = DraftTree(np.array([4, 8, 9, 9, 8], np.int32), np.array([-1, 0, 0, 1, 3], np.int16), np.array([0, 1, 1, 2, 3], np.int16))
    logits = np.random.default_rng(2).standard_normal((5, VOCAB)).astype(np.float32)
    right = np.array([adjust_plainly(logits[t], params, prompt, output + path_of(tree, t)) for t in range(5)])
    assert np.array_equal(adjust_tree(logits, history_of(params, prompt, output), tree), right)
    every_node = [adjust_plainly(logits[t], params, prompt, output + tree.token[1 : t + 1].tolist()) for t in range(5)]  # siblings counted
    root_twice = [adjust_plainly(logits[t], params, prompt, [*output, 4, *path_of(tree, t)]) for t in range(5)]
    no_path = [adjust_plainly(logits[t], params, prompt, output) for t in range(5)]
    for wrong in (every_node, no_path, *([] if "repetition_penalty" in given or "presence_penalty" in given else [root_twice])):
        assert not np.array_equal(np.array(wrong), right)


def test_fields_mean_what_vllm_means() -> None:
    prompt, output = [1], [2, 2]
    row = np.full(VOCAB, 2.0, np.float32)
    row[1::2] = -2.0

    def at(token: int, **given: Any) -> float:
        root = DraftTree.root_only(2)
        return float(adjust_tree(row[None], history_of(params_of(given), prompt, output), root)[0, token])

    assert at(2, repetition_penalty=2.0) == 1.0 and at(1, repetition_penalty=2.0) == -4.0  # output and prompt; by sign
    assert at(4, repetition_penalty=2.0) == 2.0
    assert at(2, frequency_penalty=0.5) == 1.0 and at(1, frequency_penalty=0.5) == -2.0  # a count, of the output alone
    assert at(2, presence_penalty=0.5) == 1.5 and at(1, presence_penalty=0.5) == -2.0  # a set, of the output alone
    assert at(7, logit_bias={7: 1.5}) == -0.5
    assert at(EOS, min_tokens=3) == -math.inf and at(EOS, min_tokens=2) == -2.0


@pytest.mark.parametrize("given", PENALTIES, ids=str)
def test_pushing_piecewise_equals_pushing_once(given: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    output = rng.integers(0, 3000, 500).tolist()
    tree = random_tree(rng, 0, 3000, 12, 4)
    whole, piecewise = history_of(params_of(given), [1, 2], output), history_of(params_of(given), [1, 2], [])
    at = 0
    while at < len(output):
        step = int(rng.integers(0, 9))
        piecewise.push(np.array(output[at : at + step], np.int32))
        piecewise.entries(tree)
        at += step
    assert piecewise.output_len == whole.output_len == 500
    a, b = (fill_adjustments([(0, h, 0, tree)]) for h in (whole, piecewise))
    for table in (0, 2):
        ours, theirs = (sorted(zip(plan[table].tolist(), plan[table + 1].tolist(), strict=True)) for plan in (a, b))
        assert ours == theirs


def test_a_row_and_token_are_stated_once() -> None:
    rng = np.random.default_rng(4)
    for given in PENALTIES:
        tree = random_tree(rng, 0, 10, 20, 5)
        seq, _, row, _ = fill_adjustments([(0, history_of(params_of(given), [1, 2, EOS], [4, 5]), 0, tree)])
        assert len(set(map(tuple, row.tolist()))) == len(row)
        assert len(set(seq[:, 1].tolist())) == len(seq)
        assert not set(seq[:, 1].tolist()) & set(row[:, 1].tolist())


def test_min_tokens_bans_for_exactly_so_many_tokens() -> None:
    params = params_of({"min_tokens": 10, "stop_token_ids": (8,)})
    chain = DraftTree(np.arange(20, 26, dtype=np.int32), np.arange(-1, 5, dtype=np.int16), np.arange(6, dtype=np.int16))
    history = history_of(params, [1], [])
    for length in range(15):  # the token drawn at depth d is output number length + d
        banned = adjust_tree(np.zeros((6, VOCAB), np.float32), history, chain) == -np.inf
        assert banned[:, EOS].tolist() == [length + d < 10 for d in range(6)]
        assert np.array_equal(banned[:, 8], banned[:, EOS]) and banned.sum() == 2 * banned[:, EOS].sum()
        assert history.active == (length < 10)
        history.push([20])


def test_requests_without_adjustments_are_inactive_and_cost_no_entries() -> None:
    plain, greedy = params_of({}), params_of({"temperature": 0.0, "top_p": 0.5, "stop_token_ids": (4,)})
    for params in (plain, greedy):
        history = history_of(params, [1, 2], [3])
        assert not history.active
        assert [len(a) for a in fill_adjustments([(0, history, 0, DraftTree.root_only(3))])] == [0, 0, 0, 0]
    assert all(history_of(params_of(given), [1], []).active for given in PENALTIES[1:])
    assert [a.dtype for a in fill_adjustments([])] == [np.int32, np.float32, np.int32, np.float32]
    assert [a.shape for a in fill_adjustments([])] == [(0, 2)] * 4


def test_a_plan_of_many_sequences_and_rows_without_logits() -> None:
    """Sequences 0 and 3 decode, 1 is a chunk that stops short, 2 a chunk whose last row is the root; some plan rows have no logits."""
    rng = np.random.default_rng(5)
    several = [params_of(PENALTIES[7]), params_of(PENALTIES[1]), params_of(PENALTIES[2]), params_of(PENALTIES[4])]
    prompts = [rng.integers(0, VOCAB, 9).tolist() for _ in several]
    outputs = [[5, 6], [], [], [7, 7, 1]]
    trees = [random_tree(rng, 6, 9, 8, 4), None, DraftTree.root_only(prompts[2][-1]), random_tree(rng, 1, 9, 5, 4)]
    first = [0, 9, 20, 21]
    histories = [history_of(p, prompt, output) for p, prompt, output in zip(several, prompts, outputs, strict=True)]
    items = [(b, histories[b], first[b], tree) for b, tree in enumerate(trees) if tree is not None]
    out_rows = np.array([*range(9), 20, *range(21, 27)], np.int32)
    seq = np.repeat([0, 2, 3], [9, 1, 6]).astype(np.int32)
    logits = rng.standard_normal((16, VOCAB)).astype(np.float32)
    right = logits.copy()
    for i, (row, b) in enumerate(zip(out_rows.tolist(), seq.tolist(), strict=True)):
        right[i] = adjust_plainly(logits[i], several[b], prompts[b], outputs[b] + path_of(trees[b], row - first[b]))
    plan = fill_adjustments(items)
    found = logits.copy()
    apply_adjustments(found, seq, out_rows, *plan)
    assert np.array_equal(found, right)
    backwards = logits.copy()  # sequences need not rise
    apply_adjustments(backwards, seq, out_rows, *fill_adjustments(items[::-1]))
    assert np.array_equal(backwards, right)
    shuffled = logits[[3, 9, 15]]  # fewer rows than the plan has entries for
    apply_adjustments(shuffled, seq[[3, 9, 15]], out_rows[[3, 9, 15]], *plan)
    assert np.array_equal(shuffled, right[[3, 9, 15]])
    shifted = logits.copy()
    apply_adjustments(shifted, seq, out_rows + np.int32(1), *plan)
    assert not np.array_equal(shifted, right)
    apply_adjustments(np.zeros((0, VOCAB), np.float32), seq[:0], out_rows[:0], *plan)


def scripted(seed: int) -> Callable[[list[int]], np.ndarray]:
    """A target: logits as a function of the last three tokens."""

    def logits(tokens: list[int]) -> np.ndarray:
        rng = np.random.default_rng([seed, *tokens[-3:]])
        return (rng.standard_normal(VOCAB) * 2 + 4 * (np.arange(VOCAB) < 12)).astype(np.float32)

    return logits


def by_depth(tree: DraftTree) -> np.ndarray:
    return tree.depth.astype(np.int64)


def generate(
    params: SamplingParams, seed: int, count: int, budget: int, place: Callable[[DraftTree], np.ndarray] = by_depth
) -> tuple[list[int], int]:
    """Decodes with random draft trees (budget 0: plainly); returns the output and the number of steps."""
    rng = np.random.default_rng([seed, budget])
    target, prompt, output = scripted(seed), [4, 9, 4], []
    history = history_of(params, prompt, output)
    steps = 0
    while len(output) < count:
        base = prompt + output
        tree = random_tree(rng, base[-1], 12, budget, 5)
        rows = np.arange(len(tree), dtype=np.int32)
        logits = np.array([target(base + path_of(tree, t)) for t in rows.tolist()])
        apply_adjustments(logits, np.zeros_like(rows), rows, *fill_adjustments([(0, history, 0, tree)]))
        constant = {"temperature": params.temperature, "top_p": params.top_p, "min_p": params.min_p}
        drawn = draw(
            logits,
            **{name: np.full(len(tree), value, np.float32) for name, value in constant.items()},
            top_k=np.full(len(tree), params.top_k, np.int32),
            seed=np.full(len(tree), seed, np.uint64),
            pos=len(base) + place(tree),
        )
        tokens = accept(tree, drawn).tokens.tolist()
        history.push(tokens)
        output += tokens
        steps += 1
    return output[:count], steps


SAMPLED = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8, "min_p": 0.01}]


@pytest.mark.parametrize("sampled", SAMPLED, ids=str)
@pytest.mark.parametrize("case", [0, 6, 7])
def test_trees_do_not_change_the_text(case: int, sampled: dict[str, Any]) -> None:
    params = params_of({**PENALTIES[case], **sampled})
    for seed in (1, 2):
        plain, steps = generate(params, seed, 120, 0)
        assert steps == 120
        for budget in (6, 25):
            text, steps = generate(params, seed, 120, budget)
            assert text == plain
        assert steps < 105  # drafts were accepted
        assert generate(params, seed + 10, 120, 0)[0] != plain
        if not params.greedy:  # keyed by the row in place of the position
            assert generate(params, seed, 120, 25, lambda tree: np.arange(len(tree)))[0] != plain
    assert EOS not in plain[: params.min_tokens]


def test_a_step_costs_what_it_adds_and_not_the_history() -> None:
    long, short = (SequenceHistory(params_of({"frequency_penalty": 0.5}), np.arange(n) % 9999, (EOS,)) for n in (100_000, 100))
    long.push(np.arange(50_000))
    number = count()

    def push(history: SequenceHistory) -> None:
        history.push([i := next(number), i + 1, 60_000 + i])

    assert ratio(lambda: push(long), lambda: push(short)) < 5, "20 us either way"
    assert ratio(lambda: np.unique(np.arange(150_000)), lambda: push(short), rounds=1) > 50, "mutation: counted afresh"
