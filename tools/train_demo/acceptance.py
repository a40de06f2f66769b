"""How good the drafter is: tokens a round on held-out prompts, and by depth, on and off the likeliest path; what the target writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model.tokenizer import Tokenizer
from runtime.types import Array
from tools.replay import Grown, States, grow_states, load_states
from tools.train_demo.decode import Texts
from tools.train_demo.drafting import Drafter
from tools.train_demo.fit_target import mixed
from tools.train_demo.network import Target

BUDGETS = (8, 16, 32, 64)
CHOICES = 16
ANCHORS = 32


@torch.no_grad()
def record(target: Target, drafter: Drafter, texts: Texts, positions: int) -> dict[str, Array]:
    """What the drafter offers at the first `positions` roots of each text: the arrays of tools/replay.py for one kind of prompt."""
    depth, count = drafter.c.depth, len(texts)
    ids = np.zeros((count, positions, depth, CHOICES), np.uint16)
    logp = np.full(ids.shape, -np.inf, np.float16)
    place = torch.arange(positions, device=texts.ids.device)
    for first in range(0, count, 16):
        some = texts.chosen(torch.arange(first, min(first + 16, count), device=texts.ids.device))
        with mixed(texts.ids.device):
            taps = target.tap(some.ids, drafter.c.taps)
        for at in place.split(ANCHORS):
            pos = (some.prompt[:, None] + at[None]).clamp(max=some.ids.shape[1] - 1)
            with mixed(texts.ids.device):
                logits = drafter(target, taps, some.ids.gather(1, pos), pos)
            best = torch.log_softmax(logits.float(), -1).topk(CHOICES, -1)
            here = (slice(first, first + len(some)), slice(int(at[0]), int(at[0]) + len(at)))
            ids[here], logp[here] = best.indices.cpu().numpy(), best.values.cpu().numpy()
    tokens = texts.ids.cpu().numpy().astype(np.uint16)
    return {"ids": ids, "logp": logp, "tokens": tokens, "prompt_length": texts.prompt.cpu().numpy(), "end": texts.end.cpu().numpy()}


def tokens_a_round(states: States, grown: Grown, nodes: int | None) -> float:
    """Tokens emitted a round, bonus included, over every text from its first state; nodes None: the chain of full depth."""
    at, rounds, emitted = 0, 0, 0
    while at < len(states):
        state = np.array([at])
        accepted = grown.chain[state] if nodes is None else grown.accepted(state, nodes)
        rounds, emitted = rounds + 1, emitted + int(accepted[0]) + 1
        at += int(states.moves(state, accepted + 1)[0])
    return emitted / max(rounds, 1)


def by_depth(states: States) -> dict[str, dict[str, list[float]]]:
    """Share of true next tokens among the drafter's 1 and 4 likeliest, at each depth; on the spine: all before were its likeliest."""
    known = states.truth >= 0
    first = (states.logits.ids[:, :, 0] == states.truth) & known
    among = (states.logits.ids[:, :, :4] == states.truth[:, :, None]).any(-1) & known
    before = np.logical_and.accumulate(first, axis=1)
    spine = np.concatenate([np.ones((len(states), 1), np.bool_), before[:, :-1]], axis=1)
    table = {}
    for name, where in (("all", known), ("on_spine", known & spine), ("off_spine", known & ~spine)):
        count = np.maximum(where.sum(0), 1)
        table[name] = {
            "top1": [round(float(x), 3) for x in (first & where).sum(0) / count],
            "top4": [round(float(x), 3) for x in (among & where).sum(0) / count],
        }
    return table


def judge(path: Path, kinds: Sequence[str]) -> dict[str, Any]:
    """Tokens a round of chain and trees, and tables by depth, for each kind of a trace file."""
    found: dict[str, Any] = {}
    for kind in kinds:
        with np.load(path) as held:
            alone = path.with_name(f"{path.stem}.{kind}.npz")
            np.savez(alone, **{name: held[name] for name in held.files if name.startswith(f"{kind}.")})
        states = load_states(alone)
        alone.unlink()
        grown = grow_states(states, max(BUDGETS))
        found[kind] = {
            "states": len(states),
            "chain": round(tokens_a_round(states, grown, None), 3),
            **{str(n): round(tokens_a_round(states, grown, n), 3) for n in BUDGETS},
            "by_depth": by_depth(states),
        }
    return found


def samples(texts: Texts, tokenizer: Tokenizer, count: int) -> list[dict[str, str]]:
    """The first `count` prompts and what was written, not chosen."""
    found = []
    for ids, prompt, end in zip(texts.ids[:count].tolist(), texts.prompt.tolist(), texts.end.tolist(), strict=False):
        found.append({"prompt": tokenizer.decode(ids[:prompt], False), "answer": tokenizer.decode(ids[prompt:end], False)})
    return found
