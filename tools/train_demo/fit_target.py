"""Trains the target on the clock: rows of the corpus, INT4 rounding in the forward pass, experts balanced by their selection bias."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tools.train_demo.corpus import Corpus, Stream
from tools.train_demo.network import Target
from tools.train_demo.optimise import Clock, Optimiser, rate

PEAK_RATE = 3e-3
LONG_FROM = 0.85  # share of the time after which every second batch has rows of the model's whole length
REPORT_SECONDS = 15.0
JUMP = 1.0  # nats: a held-out loss this far above the best means divergence

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Tokens of a step, in rows of `length`; rows and their length of the held-out loss, of which reports take a third."""

    tokens: int
    length: int
    held_rows: int
    held_length: int


class Rows:
    """Random rows of a corpus on the training device."""

    def __init__(self, corpus: Corpus, device: torch.device, seed: int) -> None:
        self._streams = {name: (self._move(s, device), torch.from_numpy(s.start).to(device)) for name, s in corpus.items() if len(s)}
        self.device = device
        self._random = torch.Generator(device).manual_seed(seed)

    @staticmethod
    def _move(stream: Stream, device: torch.device) -> Tensor:
        return torch.from_numpy(stream.ids.astype(np.int32)).to(device)

    def take(self, part: str, count: int, length: int, at_start: float) -> Tensor:
        """[count, length] int64; a share `at_start` of the rows begins where a piece begins."""
        ids, starts = self._streams[part]
        anywhere = torch.randint(len(ids), (count,), device=self.device, generator=self._random)
        begin = starts[torch.randint(len(starts), (count,), device=self.device, generator=self._random)]
        first = torch.where(torch.rand(count, device=self.device, generator=self._random) < at_start, begin, anywhere)
        first = first.clamp(max=max(len(ids) - length, 0))
        return ids[first[:, None] + torch.arange(length, device=self.device)].long()

    def batch(self, count: int, length: int, fraction: float) -> Tensor:
        """Rows for one step: more conversations and more of the core sources towards the end."""
        late = fraction > 0.6
        chat = max(1, round(count * (0.45 if late else 0.3)))
        more = round((count - chat) * (0.25 if late else 0.4))
        core = max(count - chat - more, 0)
        wanted = (("core", core, 0.2), ("more", more, 0.2), ("chat", chat, 0.6))
        return torch.cat([self.take(part, n, length, start) for part, n, start in wanted if n])

    def fixed(self, part: str, count: int, length: int) -> Tensor:
        """[count, length] evenly spread rows of a part, the same at every call; fewer if the part is short."""
        ids, _ = self._streams[part]
        count = max(1, min(count, len(ids) // length))
        first = torch.arange(count, device=self.device) * ((len(ids) - length) // count)
        return ids[first[:, None] + torch.arange(length, device=self.device)].long()


def product_type(device: torch.device) -> torch.dtype:
    """bf16 on a GPU; full precision elsewhere."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def mixed(device: torch.device) -> torch.autocast:
    """Products in `product_type`."""
    return torch.autocast(device.type, torch.bfloat16, enabled=product_type(device) == torch.bfloat16)


@torch.no_grad()
def held_out_loss(target: Target, rows: Rows, count: int, length: int) -> dict[str, float]:
    """Nats a token on the held-out text and conversations."""
    found = {}
    for kind in ("text", "chat"):
        ids = rows.fixed(f"held_{kind}", count, length + 1)
        with mixed(rows.device):
            losses = [target.loss(part)[0].item() * len(part) for part in ids.split(8)]
        found[kind] = round(sum(losses) / len(ids), 4)
    return found


class Balance:
    """Moves each expert's selection bias against its load, less and less (auxiliary-loss-free balancing, arXiv 2408.15664)."""

    def __init__(self, target: Target) -> None:
        self._biases = [layer.bias for layer in target.layers if layer.sparse]

    @torch.no_grad()
    def step(self, loads: list[Tensor], fraction: float) -> None:
        speed = 1e-2 * (1.0 - fraction) ** 3 + 1e-4 * (1.0 - fraction)
        for bias, load in zip(self._biases, loads, strict=True):
            bias += speed * torch.sign(load.mean() - load)


def compiled(function: Callable[..., Any], sample: Sequence[Any], log: Log, use: bool) -> Callable[..., Any]:
    """torch.compile'd if forward and backward of a sample work so, else the function itself. function(*sample)[0] is a loss.

    The sample's gradients stay in the parameters: clear them.
    """
    if not use:
        return function
    began = time.monotonic()
    try:
        made: Callable[..., Any] = torch.compile(function, dynamic=False)
        made(*sample)[0].backward()
    except Exception as error:  # whatever a compiler raises: training goes on without it
        log(f"not compiled: {type(error).__name__}: {str(error)[:500]}")
        torch._dynamo.reset()
        return function
    log(f"compiled in {time.monotonic() - began:.1f} s")
    return made


def fit_target(
    target: Target, rows: Rows, clock: Clock, log: Log, sizes: StepSizes, compile_it: bool, peak: float = PEAK_RATE
) -> dict[str, Any]:
    """Trains until the clock is out. Returns steps, tokens, seconds and the curve."""

    def loss_of(ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        with mixed(rows.device):
            return target.loss(ids)

    longest, optimiser, balance = target.c.max_positions, Optimiser(target, peak), Balance(target)
    fast = compiled(loss_of, [rows.batch(max(1, sizes.tokens // sizes.length), sizes.length + 1, 0.0)], log, compile_it)
    optimiser.clear()
    step, seen, reported, factor, best = 0, 0, 0.0, 1.0, math.inf
    kept: dict[str, Tensor] = {}
    curve: list[dict[str, Any]] = []
    while (fraction := clock.fraction) < 1.0:
        long = fraction > LONG_FROM and step % 2 == 0 and longest > sizes.length
        size = longest if long else sizes.length
        ids = rows.batch(max(1, sizes.tokens // size), size + 1, fraction)
        loss, loads = (loss_of if long else fast)(ids)
        norm = optimiser.step(loss, factor * rate(step, fraction))
        balance.step(loads, fraction)
        step, seen = step + 1, seen + ids.shape[0] * size
        if step % 8 == 0:
            loss.item()  # the host must not run ahead of a clock that it watches
        if clock.spent - reported < REPORT_SECONDS:
            continue
        reported = clock.spent
        held = held_out_loss(target, rows, max(1, sizes.held_rows // 3), sizes.held_length)
        entry = {
            "t": round(clock.spent, 1),
            "step": step,
            "tokens": seen,
            "loss": round(loss.item(), 4),
            **held,
            "gradient": round(norm.item(), 3),
        }
        entry["load"] = round(max(float(load.max() / load.mean()) for load in loads), 2)
        curve.append(entry)
        log(json.dumps(entry))
        if kept and not (math.isfinite(entry["loss"] + held["text"]) and held["text"] < best + JUMP):
            factor *= 0.5
            target.load_state_dict(kept)
            optimiser.forget()
            log(f"diverged: back to the last good weights at {factor} of the rate")
        else:
            best = min(best, held["text"])
            kept = {name: value.detach().clone() for name, value in target.state_dict().items()}
    return {"steps": step, "tokens": seen, "seconds": round(clock.spent, 1), "curve": curve}
