"""Trains the drafter on texts that the target wrote: at random anchors of a text, the tokens that follow are the labels, and half
of the loss is the distance to what the target thought of them (arXiv 1503.02531)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_demo.decode import Texts
from tools.train_demo.drafting import Drafter
from tools.train_demo.fit_target import REPORT_SECONDS, Log, Rows, compiled, mixed, product_type
from tools.train_demo.network import Target, rms_norm
from tools.train_demo.optimise import Clock, Optimiser, rate

PEAK_RATE = 3e-3
AGAIN_RATE = 2e-3  # for a drafter that was trained to the end before
DECAY_DEPTH = 6.0  # a label at depth d weighs exp(-(d - 1) / 6): a deep guess counts only if a tree holds those before it, 0.93 of each
TAUGHT = 0.5  # share of the loss against the target's whole distribution; the rest is against the token that it wrote
CORPUS_EVERY = 16  # every sixteenth step takes long rows of the corpus instead, so that far positions are not forgotten


@dataclass(frozen=True, slots=True)
class Sizes:
    """Texts and anchors a step; rows, anchors and length of a step on the corpus."""

    texts: int
    anchors: int
    rows: int
    row_anchors: int
    row_length: int


@torch.no_grad()
def tap_all(target: Target, ids: Tensor, taps: Sequence[int], at_once: int) -> Tensor:
    """[n, T, taps*H] of many texts, bf16 on a GPU, kept for the whole training: 2.3 KB a token at the demo's size."""
    kept = torch.empty(*ids.shape, len(taps) * target.c.hidden, dtype=product_type(ids.device), device=ids.device)
    with mixed(ids.device):
        for first in range(0, len(ids), at_once):
            kept[first : first + at_once] = target.tap(ids[first : first + at_once], taps)
    return kept


def labels_of(ids: Tensor, pos: Tensor, end: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """(labels, valid) [B, n, depth]: the tokens behind each anchor, and which of them lie before the text's end."""
    at = pos[:, :, None] + 1 + torch.arange(depth, device=ids.device)
    valid = at < end[:, None, None]
    label = ids.gather(1, at.clamp(max=ids.shape[1] - 1).flatten(1)).view(at.shape)
    return label, valid


@torch.no_grad()
def thoughts_of(target: Target, taps: Tensor, pos: Tensor, depth: int) -> Tensor:
    """[B, n, depth, V] the target's logits for the tokens behind each anchor. The last tap has to be the last layer's stream."""
    at = (pos[:, :, None] + torch.arange(depth, device=pos.device)).clamp(max=taps.shape[1] - 1).flatten(1)
    last = taps[..., -target.c.hidden :].gather(1, at[:, :, None].expand(-1, -1, target.c.hidden))
    return F.linear(rms_norm(last, target.norm, target.c.eps), target.head).unflatten(1, (pos.shape[1], depth))


def block_loss(logits: Tensor, thoughts: Tensor, label: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, accuracy [depth]) of logits and the target's [B, n, depth, V]."""
    depth = label.shape[-1]
    weight = torch.exp(-torch.arange(depth, device=label.device) / DECAY_DEPTH) * valid
    spoken = torch.log_softmax(logits.float(), -1)
    written = -spoken.gather(-1, label[..., None])[..., 0]
    thought = -(torch.softmax(thoughts.float(), -1) * spoken).sum(-1)
    each = TAUGHT * thought + (1.0 - TAUGHT) * written
    right = (logits.detach().argmax(-1) == label) & valid
    return (each * weight).sum() / weight.sum().clamp(min=1.0), right.sum((0, 1)) / valid.sum((0, 1)).clamp(min=1)


def fit_drafter(
    drafter: Drafter,
    target: Target,
    texts: Texts,
    rows: Rows,
    clock: Clock,
    log: Log,
    sizes: Sizes,
    compile_it: bool,
    peak: float = PEAK_RATE,
) -> dict[str, Any]:
    """Trains until the clock is out, then rounds the weights to bf16. Returns steps, seconds, anchors and the curve.

    Raises ValueError if the drafter's last tap is not behind the target's last layer: its stream is what the target thinks.
    """
    c, device = drafter.c, texts.ids.device
    if c.taps[-1] != target.c.layers - 1:
        raise ValueError(f"the last tap is behind layer {c.taps[-1]}, the target's last layer is {target.c.layers - 1}")
    kept = tap_all(target, texts.ids, c.taps, 256)
    log(f"taps of {texts.ids.numel() / 1e6:.1f} million tokens after {clock.spent:.1f} s")

    def loss_of(taps: Tensor, bonus: Tensor, pos: Tensor, label: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        with mixed(device):
            return block_loss(drafter(target, taps, bonus, pos), thoughts_of(target, taps, pos, c.depth), label, valid)

    def own_batch() -> tuple[Tensor, ...]:
        index = torch.randint(len(texts), (sizes.texts,), device=device)
        some = texts.chosen(index)
        span = (some.end - some.prompt - 1).clamp(min=1)
        pos = (some.prompt[:, None] + torch.rand(len(index), sizes.anchors, device=device) * span[:, None]).long()
        return kept[index], some.ids.gather(1, pos), pos, *labels_of(some.ids, pos, some.end, c.depth)

    def corpus_batch() -> tuple[Tensor, ...]:
        ids = torch.cat([rows.take(part, max(1, sizes.rows // 2), sizes.row_length, 0.4) for part in ("core", "chat")])
        pos = torch.randint(1, sizes.row_length - 2, (len(ids), sizes.row_anchors), device=device)
        end = torch.full((len(ids),), sizes.row_length, device=device)
        with mixed(device):
            taps = target.tap(ids, c.taps).to(product_type(device))
        return taps, ids.gather(1, pos), pos, *labels_of(ids, pos, end, c.depth)

    optimiser = Optimiser(drafter, peak)
    fast = compiled(loss_of, own_batch(), log, compile_it)
    optimiser.clear()
    step, anchors, reported = 0, 0, 0.0
    curve: list[dict[str, Any]] = []
    while (fraction := clock.fraction) < 1.0:
        corpus = step % CORPUS_EVERY == CORPUS_EVERY - 1
        batch = corpus_batch() if corpus else own_batch()
        loss, accuracy = (loss_of if corpus else fast)(*batch)
        optimiser.step(loss, rate(step, fraction))
        step, anchors = step + 1, anchors + batch[2].numel()
        if step % 8 == 0:
            loss.item()
        if not corpus and clock.spent - reported >= REPORT_SECONDS:
            reported = clock.spent
            entry = {
                "t": round(clock.spent, 1),
                "step": step,
                "loss": round(loss.item(), 4),
                "top1": [round(a, 3) for a in accuracy.tolist()],
            }
            curve.append(entry)
            log(json.dumps(entry))
    drafter.freeze()
    return {"steps": step, "seconds": round(clock.spent, 1), "anchors": anchors, "curve": curve}
