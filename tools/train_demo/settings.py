"""How long and how wide the training goes: one set for an H200, one that proves every stage on a CPU in a minute."""

from __future__ import annotations

from dataclasses import dataclass

from tools.train_demo import shape
from tools.train_demo.decode import Plan
from tools.train_demo.fit_drafter import Sizes
from tools.train_demo.fit_target import StepSizes


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the models, of a step, of the texts written for the drafter, and of the evaluation.

    Of the time left after the data and `reserve_seconds`, the target gets target_share; of what it leaves, the texts get at most
    texts_share and the drafter the rest.
    """

    target: shape.Json
    drafter: shape.Json
    taps: tuple[int, ...]
    steps: StepSizes
    plan: Plan
    sizes: Sizes
    chat_prompts: int
    new_tokens: int
    reserve_seconds: float
    target_share: float = 0.3
    texts_share: float = 0.12


FULL = Settings(
    shape.TARGET,
    shape.DRAFTER,
    shape.TAPS,
    steps=StepSizes(tokens=24 * 2048, length=2048, held_rows=24, held_length=1024),
    plan=Plan(batches=30, count=4096, length=320, chat_share=0.85, greedy_share=0.8),
    sizes=Sizes(texts=192, anchors=32, rows=24, row_anchors=64, row_length=1024),
    chat_prompts=128,
    new_tokens=192,
    reserve_seconds=25.0,
)

MINIATURE = Settings(
    shape.MINIATURE_TARGET,
    shape.MINIATURE_DRAFTER,
    shape.MINIATURE_TAPS,
    steps=StepSizes(tokens=4 * 128, length=128, held_rows=3, held_length=128),
    plan=Plan(batches=2, count=16, length=192),
    sizes=Sizes(texts=4, anchors=8, rows=2, row_anchors=4, row_length=128),
    chat_prompts=4,
    new_tokens=24,
    reserve_seconds=5.0,
)
