"""Variants of the attention kernel that await a measurement, case by case; `tools/bench_mla.py --variants` times them side by side.

Three rounds, so that a run cut short still tells most: today's build against what should gain most, then each trial by itself,
then what is likelier to show a reason than a gain.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from runtime.kernels_cu.tree_mla_config import Config

ROUNDS = 3
LEAN = {"HOLD_MAXIMA": 1, "STRAIGHT": 3}
BRISK, FEW = {"BRISK_COPIER": 1}, {"FEW_REGISTERS": 1}
QUICK = {**LEAN, "EARLY_KEYS": 1, "MERGE_LATER": 1}
COLUMNS = Config(9, 17, ahead=9, float_parts=False)
ROWS = Config(8, 18, rows=True, float_parts=False)


@dataclass(frozen=True, slots=True)
class Variant:
    """round: 0 to 2. paired: neighbouring blocks are clusters of two, so they share a pair of SMs; nothing else follows from it.
    promotion: what a copy of keys brings into L2 at least, 2: 128 bytes, 3: 256."""

    round: int
    config: Config
    paired: bool = False
    promotion: int = 3

    def __str__(self) -> str:
        return describe(self.config) + " paired" * self.paired + (" l2-128" if self.promotion == 2 else "")


def describe(c: Config) -> str:
    kind = "rows" if c.rows else "wgmma" if c.wgmma else f"mma p{c.producers}"
    ahead, parts, chunk = f" a{c.ahead}" if c.ahead else "", "" if c.float_parts else " b16", f" c{c.chunk}" if c.chunk else ""
    trials = "".join(f" {name.lower()}" + (f"={value}" if value > 1 else "") for name, value in c.trials)
    return f"{kind} n{c.columns} s{c.slots}{ahead}{parts}{chunk}{trials}"


def trying(config: Config, *trials: dict[str, int], **change: Any) -> Config:
    """`config` with more trials and other fields changed."""
    named = dict(config.trials) | {name: value for trial in trials for name, value in trial.items()}
    return replace(config, trials=tuple(named.items()), **change)


def _in_rounds(*rounds: Iterable[Config]) -> list[Variant]:
    return [Variant(round, config) for round, configs in enumerate(rounds) for config in configs]


def _narrow(base: Config, others: Iterable[Config]) -> list[Variant]:
    """Few columns, short contexts: launch, look-ups and the merge are most of the time."""
    ends, quick = {"EARLY_KEYS": 1, "MERGE_LATER": 1}, trying(base, QUICK)
    alone = ({"MERGE_LATER": 1}, {"EARLY_KEYS": 1}, ends, {"HOLD_MAXIMA": 1}, {"STRAIGHT": 3})
    first = [base, quick, trying(base, LEAN), trying(base, QUICK, FEW, slots=base.slots - 1)]  # a box less: room for the merge
    second = [
        trying(base, QUICK, BRISK),
        trying(base, QUICK, FEW, BRISK, slots=base.slots - 1),
        *(trying(base, trial) for trial in alone),
        *others,
    ]
    third = [
        replace(quick, ahead=0),
        replace(quick, float_parts=True),
        *(trying(base, QUICK, {t: n}) for t, n in (("KEYS_STAY", 1), ("NEXT_IN_L2", 3))),
    ]
    return [*_in_rounds(first, second, third), Variant(2, quick, promotion=2)]


def _wide(base: Config) -> list[Variant]:
    """72 columns: the chain of a tile's scores, softmax and product, and a ring that holds hardly two tiles, or just two. With nothing
    ahead no score waits for a copy, and a softmax of half the length is all that the tensor cores wait for."""
    land, near, far = {"AS_THEY_LAND": 1}, {"NEXT_IN_L2": 1}, {"NEXT_IN_L2": 2}
    two = trying(replace(base, slots=18), LEAN, {"P_IN_ROPE": 1})
    first = [
        base, trying(base, LEAN), trying(base, LEAN, ahead=0), trying(base, LEAN, near, ahead=0), trying(base, QUICK, near, ahead=0),
        trying(two, near, ahead=0),
    ]  # fmt: skip
    second = [
        trying(base, LEAN, near), trying(base, QUICK, near), trying(base, LEAN, land, near, ahead=3),
        trying(two, near, ahead=3), trying(two, near), trying(two, QUICK, near, ahead=0),
        trying(base, QUICK, land, near, ahead=3), trying(base, {"HOLD_MAXIMA": 1}), trying(base, near), trying(base, {"MERGE_LATER": 1}),
        trying(base, {"EARLY_KEYS": 1}), trying(base, {"STRAIGHT": 3}), trying(base, LEAN, far, ahead=0),
        trying(base, LEAN, near, BRISK, ahead=0),
    ]  # fmt: skip
    third = [
        replace(base, ahead=0), two, trying(base, LEAN, ahead=3), trying(base, LEAN, land), trying(base, LEAN, land, near, ahead=5),
        trying(base, LEAN, land, ahead=2), trying(base, LEAN, {"KEYS_STAY": 1}), trying(base, LEAN, float_parts=True, ahead=0),
    ]  # fmt: skip
    return [*_in_rounds(first, second, third), Variant(2, trying(base, LEAN, ahead=0), promotion=2)]


def _rows(base: Config, others: Iterable[Config] = ()) -> list[Variant]:
    """Pairs as rows: an odd tile's softmax, waits on the way of a product, and what L2 gives."""
    soft, own, near, far = {"SOFTEN_FIRST": 1}, {"OWN_FIRST": 1}, {"NEXT_IN_L2": 1}, {"NEXT_IN_L2": 2}
    tight, ends = {"SOFTEN_FIRST": 1, "SEE_EARLY": 1}, {"EARLY_KEYS": 1, "MERGE_LATER": 1}
    first = [base, trying(base, tight), trying(base, soft), trying(base, tight, own), trying(base, tight, ends, near)]
    second = [
        trying(base, tight, BRISK),
        trying(base, tight, near),
        trying(base, tight, ends),
        trying(base, tight, far),
        trying(base, tight, own, ends),
        *others,
    ]
    alone = ({"SEE_EARLY": 1}, near, own, {"EARLY_KEYS": 1}, {"MERGE_LATER": 1})
    third = [*(trying(base, trial) for trial in alone), replace(base, float_parts=not base.float_parts)]
    return [*_in_rounds(first, second, third), Variant(1, trying(base, tight), paired=True), Variant(2, base, paired=True)]


def variants(case: str) -> list[Variant]:
    """Of a case of bench_mla.CASES, or of REASONS, in the order of their rounds; the first is today's build."""
    n24, n8 = Config(3, 24, ahead=9, float_parts=False), Config(1, 27, ahead=9, float_parts=False)
    made = {
        "8x1x9x4096": lambda: _narrow(n24, [trying(replace(n24, octets=o, slots=s), QUICK) for o, s in ((2, 25), (5, 22), (9, 17))]),
        "8x10x1x4096": lambda: _narrow(n8, ()),
        "8x10x9x4096": lambda: _wide(COLUMNS),
        "8x10x9x65536": lambda: [*_wide(COLUMNS), Variant(1, trying(COLUMNS, LEAN, chunk=79, ahead=0))],  # an item a block, 130 of them
        "8x10x33x65536": lambda: _rows(ROWS, [trying(COLUMNS, LEAN, {"NEXT_IN_L2": 1}, ahead=a) for a in (0, 9)]),
        "32x10x9x4096": lambda: _rows(ROWS, [trying(COLUMNS, QUICK, {"NEXT_IN_L2": 1}, ahead=a) for a in (0, 9)]),
        "64x10x33x65536": lambda: _rows(replace(ROWS, float_parts=True)),
        "8x10x8x65536": lambda: [Variant(2, Config(8, slots, ahead=a, float_parts=False)) for slots in (18, 17) for a in (0, 9)],
    }
    return sorted(made.get(case, lambda: _rows(ROWS))(), key=lambda v: v.round)


REASONS = ("8x10x8x65536",)  # cases without a target: 64 columns with and without the eighteenth place of the ring
