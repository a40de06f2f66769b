"""Recorded drafter marginals and target tokens, made ready to replay under any tree or budget policy. No model is needed.

A trace file (.npz) holds for each kind of prompt, here `chat` and `text`:

    KIND.ids            [P, N, D, K] u16  the drafter's K likeliest tokens at N generated positions, depths 1 … D
    KIND.logp           [P, N, D, K] f16  their full-vocabulary log-probabilities
    KIND.tokens         [P, L] u16        prompt and the target's greedy continuation
    KIND.prompt_length  [P], KIND.end [P] i64: tokens[prompt_length + i] is the root of position i; tokens past end mean nothing
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.budget import caps_mask
from runtime.tree import Forest, chain, grow_forest
from runtime.types import I64, Array, Bools, DraftLogits

FIELDS = ("ids", "logp", "tokens", "prompt_length", "end")
NODES = 128  # nodes grown for a state; best first, so any smaller tree is its beginning


@dataclass(frozen=True, slots=True)
class States:
    """Positions of recorded texts in a row, text after text: what a stream meets as it goes on.

    A stream at state i that emits n tokens moves on by `moves(i, n)`; behind a text's last state the next text begins, and
    behind the last text the first. Tokens past a text's last state are not counted, so that one pass over all texts emits as
    many tokens under every policy, and policies differ in steps alone.
    """

    logits: DraftLogits  # [n, D, K]
    truth: Array  # [n, D] the target's next tokens, -1 past the end
    last: I64  # [n] first state of the next text (n at the end)

    def __len__(self) -> int:
        return len(self.truth)

    def moves(self, state: I64, tokens: I64) -> I64:
        """States that a stream advances, at most to its text's end; then (state + moves) % len."""
        return np.minimum(tokens, self.last[state] - state)


def load_states(path: Path, part: slice = slice(None)) -> States:
    """Reads the texts `part` of every kind. Raises ValueError naming file and array if the file is not of this format."""
    logits: list[tuple[Array, Array]] = []
    truth: list[Array] = []
    lengths: list[int] = []
    with np.load(path) as held:
        kinds = sorted({name.split(".")[0] for name in held.files})
        missing = [f"{kind}.{field}" for kind in kinds for field in FIELDS if f"{kind}.{field}" not in held.files]
        if missing or not kinds:
            raise ValueError(f"{path}: not a trace file, it lacks {', '.join(missing) or 'everything'}; tools/record_traces.py records one")
        for kind in kinds:
            ids, logp, tokens, starts, ends = (held[f"{kind}.{field}"] for field in FIELDS)
            depth = ids.shape[2]
            for p in range(len(ids))[part]:
                count = int(min(ids.shape[1], ends[p] - starts[p] - 1))  # a root without a next token decides nothing
                if count < 1:
                    continue
                place = int(starts[p]) + np.arange(count)[:, None] + np.arange(1, depth + 1)
                text = tokens[p].astype(np.int64)
                truth.append(np.where(place < ends[p], text[np.minimum(place, len(text) - 1)], -1))
                logits.append((ids[p, :count].astype(np.int32), logp[p, :count].astype(np.float32)))
                lengths.append(count)
    if not lengths:
        raise ValueError(f"{path}: texts {part} hold no state")
    all_ids, all_logp = (np.concatenate([pair[i] for pair in logits]) for i in (0, 1))
    return States(DraftLogits(all_ids, all_logp), np.concatenate(truth), np.repeat(np.cumsum(lengths), lengths))


def draw_truth(states: States, seed: int) -> States:
    """The same drafts before a target that draws each token from them: every value is then exactly right.

    What is not among the K recorded choices is a token that no tree holds (-2). A calibration can not be better than here.
    """
    ids, chance = states.logits.ids, np.exp(states.logits.logp.astype(np.float64))
    rank = (np.random.default_rng(seed).random(chance.shape[:2])[:, :, None] > np.cumsum(chance, axis=2)).sum(axis=2)
    choices = ids.shape[2]
    drawn = np.take_along_axis(ids, np.minimum(rank, choices - 1)[:, :, None], axis=2)[:, :, 0]
    return States(states.logits, np.where(states.truth < 0, -1, np.where(rank < choices, drawn, -2)), states.last)


@dataclass(frozen=True, slots=True)
class Grown:
    """The trees of all states, and where the target's path runs through them."""

    forest: Forest
    exists: Bools  # [n, N] node j + 1 exists
    value: NDArray[np.float64]  # [n, N] exp of its key: the drafter's word
    path: I64  # [n, D] node of the target's token at each depth, 0 where the tree does not hold it
    on_path: Bools  # [n, N] node j + 1 is one of them
    chain: I64  # [n] accepted nodes of the top-1 chain of full depth

    def accepted(self, state: I64, nodes: int) -> I64:
        """Accepted nodes [S] if each tree is cut to its first `nodes`."""
        path = self.path[state]
        return np.count_nonzero((path > 0) & (path <= nodes), axis=1)

    def accepted_of(self, state: I64, kept: Bools) -> I64:
        """Accepted nodes [S] if the nodes kept [S, N] are verified."""
        path = self.path[state]
        return np.count_nonzero((path > 0) & np.take_along_axis(kept, np.maximum(path - 1, 0), axis=1), axis=1)

    def forest_of(self, state: I64) -> Forest:
        """The trees of some states, [S, N + 1]."""
        f = self.forest
        return Forest(f.token[state], f.parent[state], f.depth[state], f.key[state], f.size[state])

    def longest(self) -> I64:
        """[n] depth to which the tree holds the target's path: what an oracle verifies."""
        return np.count_nonzero(self.path > 0, axis=1)


def grow_states(states: States, nodes: int = NODES) -> Grown:
    """Grows every state's tree once, best first, and finds the target's path in it."""
    count = len(states)
    root = np.zeros(count, np.int32)
    forest = grow_forest(states.logits, root, nodes)
    depth = states.truth.shape[1]
    exists = caps_mask(forest, np.full(count, nodes), np.full(count, depth))
    at, alive = np.zeros(count, np.int64), np.ones(count, np.bool_)
    path = np.zeros((count, depth), np.int64)
    for d in range(depth):
        hit = exists & (forest.parent[:, 1:] == at[:, None]) & (forest.token[:, 1:] == states.truth[:, d, None])
        alive &= hit.any(axis=1)
        at = np.where(alive, hit.argmax(axis=1) + 1, at)
        path[:, d] = np.where(alive, at, 0)
    trees = chain(states.logits, root, depth)
    sizes = np.array([len(tree) - 1 for tree in trees])
    right = states.logits.ids[:, :, 0] == states.truth
    right &= np.arange(depth) < sizes[:, None]
    value = np.where(exists, np.exp(forest.key[:, 1:]), 0.0)
    on_path = np.zeros(exists.shape, np.bool_)
    state, level = np.nonzero(path > 0)
    on_path[state, path[state, level] - 1] = True
    return Grown(forest, exists, value, path, on_path, np.logical_and.accumulate(right, axis=1).sum(axis=1))


def excerpt(source: Path, target: Path, texts: int = 4, positions: int = 96) -> None:
    """Writes a trace file of the first `texts` texts of each kind and their first `positions` states.

    tests/fixtures/draft_traces.npz has this size; tools/train_demo/reference.py makes it, from the demo model.
    """
    with np.load(source) as held:
        kinds = sorted({name.split(".")[0] for name in held.files})
        cut: dict[str, Array] = {}
        for kind in kinds:
            ids, logp, tokens, starts, ends = (held[f"{kind}.{field}"][:texts] for field in FIELDS)
            depth, starts = ids.shape[2], starts.astype(np.int64)
            ends = np.minimum(ends, starts + positions + depth)
            for field, value in zip(FIELDS, (ids[:, :positions], logp[:, :positions], tokens[:, : ends.max()], starts, ends), strict=True):
                cut[f"{kind}.{field}"] = value
    np.savez_compressed(target, **cut)  # type: ignore[arg-type]
