"""Adjusted logits: penalties, logit bias and min_tokens, along every path of a draft tree.

A row's logits are adjusted by the history of its own path: prompt, committed output, and the draft
tokens from below the root down to the row's node (the root is committed). Plain decoding at that
prefix adjusts a logit l of a token by exactly the same two numbers,

    l > 0 ? l / scale : l * scale      scale = repetition_penalty if the token is in prompt, output or path
    then l + add                       add = bias - frequency * count - presence * (count > 0), count in output and path

and every (row, token) gets them once: from the sequence, or, if any draft node holds the token, from
the row. Nothing is composed of two steps, so no rounding tells a tree from plain decoding. While the
output is shorter than min_tokens, the ids that end it get (1, -inf).
Source: repetition penalty, arXiv 1909.05858 section 4.1; the meaning of the fields is vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.types import F32, I32, Array, DraftTree, SamplingParams


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What one sequence asks for: entries for all its rows, and entries for single nodes of its tree."""

    token: I32  # [a]
    by: F32  # [a, 2] (scale, add)
    node: I32  # [c]
    node_token: I32  # [c]
    node_by: F32  # [c, 2]


class SequenceHistory:
    """The tokens of one generation as far as its parameters look at them.

    stop_ids are the ids that end a generation whatever its parameters say (EOS); with the request's
    own stop_token_ids they are banned until min_tokens are out. `push` takes every committed token
    once, the bonus included, and costs O(pushed), never O(history).
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int] | I32, stop_ids: Iterable[int] = ()) -> None:
        self._params = params
        self._banned = sorted({*stop_ids, *params.stop_token_ids}) if params.min_tokens else []
        self._counts = params.has_penalties  # tokens of the output change logits
        self._steady = self._counts or bool(params.logit_bias)  # active to the end
        self.output_len = 0
        prompted = np.unique(np.asarray(prompt, np.int32)) if params.repetition_penalty != 1.0 else np.zeros(0, np.int32)
        known = np.union1d(prompted, np.array(list(params.logit_bias), np.int32))
        # Entry 0 is the token never seen nor biased. Known tokens follow, in order of first sight.
        self._token = np.concatenate([[-1], known]).astype(np.int32)
        self._count = np.zeros(len(known) + 1, np.int64)  # in the output
        self._prompted = np.isin(self._token, prompted)
        self._bias = np.array([0.0, *(params.logit_bias.get(t, 0.0) for t in known.tolist())])
        self._by = self._weigh(self._count, self._prompted, self._bias)
        self._place = dict(zip(known.tolist(), range(1, len(known) + 1), strict=True))

    @property
    def active(self) -> bool:
        """False when no logit of the sequence is adjusted, now."""
        return self._steady or self._bans

    @property
    def _bans(self) -> bool:
        return bool(self._banned) and self.output_len < self._params.min_tokens

    def push(self, tokens: Sequence[int]) -> None:
        """Appends committed output tokens."""
        self.output_len += len(tokens)
        if not self._counts or not len(tokens):
            return
        values = [int(token) for token in tokens]
        places = [self._place.setdefault(token, len(self._place) + 1) for token in values]
        if len(self._place) >= len(self._token):
            self._widen()
        self._token[places] = values
        np.add.at(self._count, places, 1)
        self._by[places] = self._weigh(self._count[places], self._prompted[places], self._bias[places])

    def entries(self, tree: DraftTree) -> Adjustments:
        """Returns what the tree's rows need: node t is the row with the tokens of t's path below the root.

        Tokens of draft nodes, and banned ids, are stated row by row and left out of the sequence's own.
        The arrays may be views, good until the next `push`.
        """
        drafted = set(tree.token[1:].tolist()) if self._params.has_penalties else set()
        apart = sorted(drafted.union(self._banned if self._bans else ()))
        known = slice(1, len(self._place) + 1)
        if not apart:
            none = np.zeros(0, np.int32)
            return Adjustments(self._token[known], self._by[known], none, none, np.zeros((0, 2), np.float32))
        places = np.array([self._place.get(token, 0) for token in apart])
        own = np.ones(len(self._token), np.bool_)
        own[places] = False
        mine = np.flatnonzero(own[known]) + 1
        by = self._weigh(self._count[places] + _path_counts(tree, apart), self._prompted[places], self._bias[places])
        if self._bans:
            short = self.output_len + tree.depth < self._params.min_tokens
            by[np.ix_(short, np.isin(apart, self._banned))] = (1.0, -np.inf)
        node, column = np.nonzero((by != (1.0, 0.0)).any(axis=2))
        tokens = np.array(apart, np.int32)[column]
        return Adjustments(self._token[mine], self._by[mine], node.astype(np.int32), tokens, by[node, column])

    def _weigh(self, count: Array, prompted: Array, bias: Array) -> F32:
        """(scale, add) of tokens: [..., 2]. The one place that knows the parameters, so equal histories give equal bits."""
        params = self._params
        by = np.empty((*np.shape(count), 2), np.float32)
        by[..., 0] = np.where(prompted | (count > 0), params.repetition_penalty, 1.0)
        by[..., 1] = bias - params.frequency_penalty * count - params.presence_penalty * (count > 0)
        return by

    def _widen(self) -> None:
        """Doubles the room; the new part is as entry 0."""
        more = len(self._place) + 1
        self._token = np.concatenate([self._token, np.full(more, -1, np.int32)])
        self._count = np.concatenate([self._count, np.zeros(more, np.int64)])
        self._prompted = np.concatenate([self._prompted, np.zeros(more, np.bool_)])
        self._bias = np.concatenate([self._bias, np.zeros(more)])
        self._by = np.concatenate([self._by, np.tile(self._by[:1], (more, 1))])


def _path_counts(tree: DraftTree, tokens: list[int]) -> NDArray[np.int64]:
    """How often each token stands on each node's path below the root: [T, len(tokens)]. tokens rise and hold all of the tree's."""
    counts = np.zeros((len(tree), len(tokens)), np.int64)
    columns = np.searchsorted(tokens, tree.token).tolist()
    for t, (parent, column, token) in enumerate(zip(tree.parent.tolist(), columns, tree.token.tolist(), strict=True)):
        if t and column < len(tokens) and tokens[column] == token:
            counts[t, column] = 1
        if t:
            counts[t] += counts[parent]
    return counts


def fill_adjustments(items: Iterable[tuple[int, SequenceHistory, int, DraftTree]]) -> tuple[I32, F32, I32, F32]:
    """Builds a StepPlan's adjust_seq [a, 2], adjust_seq_by [a, 2], adjust_row [c, 2], adjust_row_by [c, 2].

    items: (sequence of the plan, its history, row of the tree's root, tree); a chunk that reaches the
    newest token is the tree of that one node, other chunks are left out. Sequences should rise.
    """
    sequences, sequences_by = [np.zeros((0, 2), np.int32)], [np.zeros((0, 2), np.float32)]
    rows, rows_by = [np.zeros((0, 2), np.int32)], [np.zeros((0, 2), np.float32)]
    for sequence, history, first_row, tree in items:
        if not history.active:
            continue
        asked = history.entries(tree)
        sequences.append(np.stack([np.full_like(asked.token, sequence), asked.token], axis=1))
        sequences_by.append(asked.by)
        rows.append(np.stack([asked.node + np.int32(first_row), asked.node_token], axis=1))
        rows_by.append(asked.node_by)
    return np.concatenate(sequences), np.concatenate(sequences_by), np.concatenate(rows), np.concatenate(rows_by)


def apply_adjustments(
    logits: F32, rows_seq: I32, row_index: I32, adjust_seq: I32, adjust_seq_by: F32, adjust_row: I32, adjust_row_by: F32
) -> None:
    """Adjusts logits [r, V] f32 in place: l > 0 ? l / scale : l * scale, then + add.

    rows_seq: [r] sequence of each logits row; row_index: [r] its row in the plan, rising. Entries of
    rows that have no logits are passed over. The sequence's entries act before the row's; within
    a table a (row, token) may stand once.
    """
    if len(adjust_seq):
        if (adjust_seq[1:, 0] < adjust_seq[:-1, 0]).any():
            order = np.argsort(adjust_seq[:, 0], kind="stable")
            adjust_seq, adjust_seq_by = adjust_seq[order], adjust_seq_by[order]
        for sequence in np.unique(rows_seq).tolist():
            first, last = np.searchsorted(adjust_seq[:, 0], [sequence, sequence + 1])
            if first < last:
                rows = np.flatnonzero(rows_seq == sequence)[:, None]
                _adjust(logits, rows, adjust_seq[None, first:last, 1], adjust_seq_by[first:last])
    if len(adjust_row) and len(row_index):
        at = np.minimum(np.searchsorted(row_index, adjust_row[:, 0]), len(row_index) - 1)
        here = row_index[at] == adjust_row[:, 0]
        _adjust(logits, at[here], adjust_row[here, 1], adjust_row_by[here])


def _adjust(logits: F32, rows: Array, tokens: Array, by: F32) -> None:
    value = logits[rows, tokens]
    scale, add = by[:, 0], by[:, 1]
    logits[rows, tokens] = np.where(value > 0, value / scale, value * scale) + add
