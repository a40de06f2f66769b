"""Many texts written at once by the target in torch: what the drafter learns from, and what it is judged by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.types import Array
from tools.train_demo.corpus import Stream
from tools.train_demo.fit_target import mixed, product_type
from tools.train_demo.network import Target

SHORTEST_TEXT_PROMPT, LONGEST_TEXT_PROMPT = 12, 96


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts [n, T] int64, the length of each prompt [n], and the end of each text [n] (behind its end token, or T)."""

    ids: Tensor
    prompt: Tensor
    end: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def chosen(self, index: Tensor) -> Texts:
        return Texts(self.ids[index], self.prompt[index], self.end[index])


def join(parts: Sequence[Texts]) -> Texts:
    return Texts(*(torch.cat([getattr(p, name) for p in parts]) for name in ("ids", "prompt", "end")))


@torch.no_grad()
def write(target: Target, prompts: Sequence[Array], length: int, temperature: Tensor, stops: Sequence[int], pad: int) -> Texts:
    """Continues each prompt to `length` tokens in all; temperature [n], 0 is greedy. Prompts stand at the left."""
    c, device, count = target.c, target.embed.device, len(prompts)
    starts = torch.tensor([len(p) for p in prompts], device=device)
    given = np.full((count, length), pad, np.int64)
    for row, prompt in zip(given, prompts, strict=True):
        row[: len(prompt)] = prompt
    ids = torch.from_numpy(given).to(device)
    first, last = int(starts.min()), int(starts.max())
    if last >= length:
        raise ValueError(f"a prompt of {last} tokens leaves no room in {length}")
    kind = product_type(device)
    shape = (count, c.heads, length)
    cache = [
        (torch.empty(*shape, c.nope + c.rope_dim, dtype=kind, device=device), torch.empty(*shape, c.value, dtype=kind, device=device))
        for _ in range(c.layers)
    ]
    end = torch.full((count,), length, device=device)
    stop = torch.tensor(list(stops), device=device)
    heat = temperature.to(device)[:, None]
    with mixed(device):
        row = target.logits(target.trunk(ids[:, :first], cache=cache)[0][:, -1]).float()
        for t in range(first, length):
            noise = -torch.log(-torch.log(torch.rand_like(row).clamp(1e-9, 1 - 1e-7)))
            drawn = (row + heat * noise).argmax(-1)
            token = torch.where(t < starts, ids[:, t], drawn)
            ids[:, t] = token
            ended = (t >= starts) & torch.isin(token, stop) & (end == length)
            end = torch.where(ended, t + 1, end)
            if t % 16 == 15 and bool((end < length).all()):
                break
            if t + 1 < length:
                row = target.logits(target.trunk(ids[:, t : t + 1], start=t, cache=cache)[0][:, -1]).float()
    return Texts(ids, starts, end)


class Prompts:
    """Random prompts of both kinds; half of them from files that the target was not trained on."""

    def __init__(self, corpus: dict[str, Stream], longest: int, seed: int) -> None:
        self._corpus, self._longest = corpus, longest
        self._random = np.random.default_rng(seed)

    def chat(self, count: int) -> list[Array]:
        found: list[Array] = []
        while len(found) < count:
            stream = self._pick("prompt_chat", "chat")
            i = int(self._random.integers(len(stream.start)))
            if 0 < stream.prompt[i] <= self._longest:
                found.append(stream.ids[stream.start[i] : stream.start[i] + stream.prompt[i]])
        return found

    def text(self, count: int) -> list[Array]:
        found = []
        for _ in range(count):
            stream = self._pick("prompt_text", "core")
            length = int(self._random.integers(SHORTEST_TEXT_PROMPT, LONGEST_TEXT_PROMPT + 1))
            at_start = self._random.random() < 0.4
            first = int(self._random.choice(stream.start) if at_start else self._random.integers(len(stream) - length))
            found.append(stream.ids[min(first, len(stream) - length) :][:length])
        return found

    def _pick(self, unseen: str, seen: str) -> Stream:
        name = unseen if self._random.random() < 0.5 and len(self._corpus[unseen].start) else seen
        return self._corpus[name]


@dataclass(frozen=True, slots=True)
class Plan:
    """How many texts are written for the drafter: `batches` of `count`, `length` tokens with the prompt."""

    batches: int
    count: int
    length: int
    longest_prompt: int = 160
    chat_share: float = 0.6
    greedy_share: float = 0.65
    temperatures: tuple[float, ...] = (0.6, 0.8, 1.0)


def write_many(target: Target, prompts: Prompts, plan: Plan, stops: Sequence[int], pad: int, more: Callable[[], bool]) -> Texts:
    """Batches of texts, chat and text prompts apart (chats end early, so their batches are short), while `more()`."""
    made: list[Texts] = []
    random = np.random.default_rng(7)
    for i in range(plan.batches):
        if made and not more():
            break
        chat = (i * plan.chat_share) % 1.0 < plan.chat_share
        given = prompts.chat(plan.count) if chat else prompts.text(plan.count)
        given.sort(key=len)
        heat = np.where(random.random(plan.count) < plan.greedy_share, 0.0, random.choice(plan.temperatures, plan.count))
        texts = write(target, given, plan.length, torch.from_numpy(heat.astype(np.float32)), stops, pad)
        made.append(texts.chosen(texts.end - texts.prompt > 4))
    return join(made)
