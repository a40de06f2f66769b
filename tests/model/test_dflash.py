"""The drafter against one built from transformers' Qwen3 parts in float32 (fixtures/golden_draft.npz)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model import dflash, kimi_k26
from model.weights import Checkpoint
from runtime.comm import SoloComm
from runtime.kernels_np import NumpyBackend
from runtime.types import DraftPlan, StepPlan
from tests.plans import chain_plan, page_table

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "model" / "demo"
GOLDEN = np.load(ROOT / "tests" / "fixtures" / "golden_draft.npz")
PROMPTS = sorted({key.split(".")[0] for key in GOLDEN.files})
PAGE = 64
REACH = 1400


class World:
    def __init__(self) -> None:
        target, drafter = Checkpoint.open(DEMO), Checkpoint.open(DEMO / "drafter")
        self.ops, self.comm = NumpyBackend(), SoloComm()
        self.target_config = kimi_k26.Config.from_json(target.config)
        self.target = kimi_k26.load(target, self.target_config, self.ops, 0, 1, REACH)
        self.config = dflash.Config.from_json(drafter.config)
        self.weights = dflash.load(drafter, self.config, self.ops, REACH)
        self.pages = page_table(1, 24, np.random.default_rng(1))

    def run_target(self, tokens: np.ndarray) -> tuple[StepPlan, np.ndarray]:
        """A plan over all tokens and the taps of its rows."""
        plan = chain_plan(tokens, 0, self.pages, PAGE, [])
        cache = self.ops.zeros((self.target_config.layers, 25 * PAGE, self.target_config.cache_width))
        _, taps = kimi_k26.forward(self.ops, self.comm, self.target_config, self.target, plan, cache, PAGE, self.config.taps)
        return plan, taps.reshape(len(tokens), -1).copy()

    def block(self, plan: DraftPlan, cache: dflash.Cache) -> np.ndarray:
        token, pos, rows = dflash.block_rows(self.config, plan, REACH - 1)
        return dflash.block_logits(self.ops, self.comm, self.config, self.weights, self.target, token, pos, rows, plan, cache, PAGE).copy()


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def draft_plan(steps: StepPlan, tokens: np.ndarray, root: int, first: int) -> DraftPlan:
    """Roots the block at token `root`; the context since token `first` is new."""
    part = slice(first, root)
    return DraftPlan(
        np.array([tokens[root]], np.int32),
        np.array([root], np.int32),
        steps.pages,
        np.arange(first, root, dtype=np.int32),
        steps.pos[part],
        steps.slot[part],
    )


def run_rounds(world: World, name: str) -> tuple[np.ndarray, list[int]]:
    """Logits of the first block, and the accepted length of every chain round of the fixture."""
    tokens, rounds = GOLDEN[f"{name}.tokens"], GOLDEN[f"{name}.rounds"]
    steps, taps = world.run_target(tokens[:-1])
    cache = dflash.make_cache(world.ops, world.config, 25 * PAGE)
    first_logits, accepted, done = None, [], 0
    for root in rounds[:, 0]:
        plan = draft_plan(steps, tokens, int(root), done)
        dflash.write_context(world.ops, world.config, world.weights, taps, plan, cache)
        done = int(root)
        logits = world.block(plan, cache)
        first_logits = logits if first_logits is None else first_logits
        hits = 0
        for guess in logits.argmax(-1):
            if root + 1 + hits >= len(tokens) or guess != tokens[root + 1 + hits]:
                break
            hits += 1
        accepted.append(hits)
    return first_logits, accepted


@pytest.mark.parametrize("name", PROMPTS)
def test_block_logits_and_acceptance_equal_reference(world: World, name: str) -> None:
    logits, accepted = run_rounds(world, name)
    assert np.abs(logits - GOLDEN[f"{name}.logits"]).max() < 2e-3
    assert accepted == GOLDEN[f"{name}.rounds"][:, 1].tolist()


def test_mutation_all_masks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slot 0 must be the bonus token (acceptance 6.3 against 1.5 elsewhere when it was not)."""
    original = dflash.block_rows

    def all_masks(config: dflash.Config, plan: DraftPlan, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return original(config, replace(plan, root=np.full_like(plan.root, config.mask_token)), last)

    monkeypatch.setattr(dflash, "block_rows", all_masks)
    logits, _ = run_rounds(world, "chat_hi")
    assert np.abs(logits - GOLDEN["chat_hi.logits"]).max() > 0.1


def test_mutation_shifted_context_position(world: World) -> None:
    tokens = GOLDEN["chat_hi.tokens"]
    root = int(GOLDEN["chat_hi.rounds"][0, 0])
    steps, taps = world.run_target(tokens[:-1])
    plan = draft_plan(steps, tokens, root, 0)
    cache = dflash.make_cache(world.ops, world.config, 25 * PAGE)
    dflash.write_context(world.ops, world.config, world.weights, taps, replace(plan, tap_pos=plan.tap_pos + 1), cache)
    assert np.abs(world.block(plan, cache) - GOLDEN["chat_hi.logits"]).max() > 0.05


def test_streams_are_independent(world: World) -> None:
    """Two roots in one draft call give what each gives alone."""
    tokens = GOLDEN["text_300.tokens"]
    steps, taps = world.run_target(tokens[:-1])
    cache = dflash.make_cache(world.ops, world.config, 25 * PAGE)
    dflash.write_context(world.ops, world.config, world.weights, taps, draft_plan(steps, tokens, 200, 0), cache)
    alone = [world.block(draft_plan(steps, tokens, root, root), cache) for root in (120, 200)]
    pair = [draft_plan(steps, tokens, root, root) for root in (120, 200)]
    both = DraftPlan(
        *(np.concatenate([getattr(p, name) for p in pair]) for name in ("root", "pos", "pages", "tap_rows", "tap_pos", "tap_slot"))
    )
    assert np.allclose(world.block(both, cache), np.concatenate(alone), atol=1e-3)


def test_config_refusals() -> None:
    given = Checkpoint.open(DEMO / "drafter").config
    config = dflash.Config.from_json(given)
    assert (config.block, config.depth, config.taps, config.mask_token) == (8, 7, (1, 2, 3), 4094)
    windowed = ["sliding_attention"] * config.layers
    for change in ({"layer_types": windowed}, {"architectures": ["Qwen3ForCausalLM"]}, {"draft_vocab_size": 100}):
        with pytest.raises(ValueError, match=next(iter(change))):
            dflash.Config.from_json({**given, **change})
    target = kimi_k26.Config.from_json(Checkpoint.open(DEMO).config)
    with pytest.raises(ValueError, match="hidden_size is 256, the target's is 384"):
        replace(config, hidden=256).check_target(target, "x")
    with pytest.raises(ValueError, match="target_layer_ids"):
        replace(config, taps=(0, 9)).check_target(target, "x")
