"""Inputs of the op `sample` for tests that compare implementations of it: every filter, tables, masks, ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

DTYPES = {
    "out_rows": np.int32, "seq": np.int32, "pos": np.int32, "temperature": np.float32, "top_p": np.float32, "min_p": np.float32,
    "top_k": np.int32, "seed": np.uint64, "logprobs": np.int32, "adjust_seq": np.int32, "adjust_seq_by": np.float32,
    "adjust_row": np.int32, "adjust_row_by": np.float32, "mask_rows": np.int32, "masks": np.uint32,
}  # fmt: skip


class Draws:
    """r output rows, a sequence each, as the fields of a plan: scalars are repeated. top: alternatives asked of all that ask."""

    def __init__(self, logits: Any, top: int = 4, **given: Any) -> None:
        self.logits = np.ascontiguousarray(logits, np.float32)
        (rows, vocab), none = self.logits.shape, np.zeros((0, 2))
        self.top = top
        fields: dict[str, Any] = {
            "out_rows": np.arange(rows), "seq": np.arange(rows), "pos": 100 + 7 * np.arange(rows), "temperature": 1.0, "top_p": 1.0,
            "min_p": 0.0, "top_k": 0, "seed": np.arange(rows) + 2**40, "logprobs": -1, "adjust_seq": none, "adjust_seq_by": none,
            "adjust_row": none, "adjust_row_by": none, "mask_rows": np.zeros(0), "masks": np.zeros((0, -(-vocab // 32))),
        } | given  # fmt: skip
        for name, value in fields.items():
            setattr(self, name, np.array(value if np.shape(value) else np.full(rows, value), DTYPES[name]))

    @property
    def plan(self) -> dict[str, np.ndarray]:
        """The op's inputs after the logits, by name."""
        return {name: getattr(self, name) for name in DTYPES}

    def outputs(self) -> dict[str, np.ndarray]:
        rows = len(self.logits)
        made = {"target": np.full(rows, -7, np.int32), "logp": np.full(rows, 7.0, np.float32), "finite": np.zeros(rows, np.bool_)}
        return made | {"top_ids": np.full((rows, self.top), -7, np.int32), "top_logp": np.full((rows, self.top), 7.0, np.float32)}

    def defined(self, define: Callable[..., None]) -> dict[str, np.ndarray]:
        found = self.outputs()
        with np.errstate(all="ignore"):
            define(self.logits, **self.plan, **found)
        return found

    def compare(self, found: dict[str, np.ndarray], want: dict[str, np.ndarray], atol: float = 5e-6) -> None:
        """Tokens and ids exactly, log-probabilities within atol; what was not asked for stays as it was in both."""
        for name in ("target", "finite", "top_ids"):
            np.testing.assert_array_equal(found[name], want[name], err_msg=name)
        for name in ("logp", "top_logp"):
            np.testing.assert_allclose(found[name], want[name], rtol=0, atol=atol, err_msg=name)


def mixed(rng: np.random.Generator, rows: int, vocab: int, grid: bool = False, top: int = 5) -> Draws:
    """Rows of random parameters. grid: logits in halves, so that many are equal."""
    logits = 4 * rng.standard_normal((rows, vocab))
    if grid:
        logits = np.round(logits / 2) / 2
    return Draws(
        logits, top=top, temperature=rng.choice([0.0, 0.3, 1.0, 2.0], rows), top_p=rng.choice([1.0, 1.0, 0.5, 0.95], rows),
        min_p=rng.choice([0.0, 0.0, 0.1, 1e-3], rows), top_k=rng.choice([0, 1, 3, 50, vocab - 1, vocab, 2**31 - 1], rows),
        logprobs=rng.integers(-1, 3, rows),
    )  # fmt: skip


def adjusted(rng: np.random.Generator, rows: int, vocab: int, bare: bool = False) -> Draws:
    """Entries of both tables, tokens of both, bans, and a mask for every other row; bare: without any of it."""
    step, per = mixed(rng, rows, vocab), min(40, vocab)
    seq_token = np.stack([rng.permutation(vocab)[:per] for _ in range(rows)])
    seq_by = np.stack([rng.uniform(0.5, 2, (rows, per)), rng.normal(0, 2, (rows, per))], -1)
    seq_by[:, ::7, 1] = -np.inf
    row_token = np.stack([rng.permutation(vocab)[:6] for _ in range(rows)])
    row_token[:, 0] = [np.setdiff1d(seq, row[1:])[0] for seq, row in zip(seq_token, row_token, strict=True)]
    row_by = np.stack([rng.uniform(0.5, 2, (rows, 6)), rng.normal(0, 3, (rows, 6))], -1)
    masks = rng.integers(0, 2**32, (len(range(1, rows, 2)), -(-vocab // 32)), np.uint32)
    masks[0] = 0
    masks[0, -1 if vocab % 32 == 0 else 0] = 1 << 3  # one token alone
    if bare:
        return step
    every = np.arange(rows)
    return Draws(
        step.logits, step.top,
        **step.plan | {
            "adjust_seq": np.stack([np.repeat(every, per), seq_token.ravel()], -1), "adjust_seq_by": seq_by.reshape(-1, 2),
            "adjust_row": np.stack([np.repeat(every, 6), row_token.ravel()], -1), "adjust_row_by": row_by.reshape(-1, 2),
            "mask_rows": np.arange(1, rows, 2), "masks": masks,
        },
    )  # fmt: skip
