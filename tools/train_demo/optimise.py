"""What moves the weights: Muon for matrices, AdamW for the rest, and a schedule that follows the clock instead of a step count."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn

WARM_STEPS = 100
FLAT_UNTIL = 0.35  # share of the time at full rate, before it falls linearly
LAST_RATE = 0.02
CLIP = 1.0


class Clock:
    """Seconds of one stage: `fraction` runs from where an earlier run stopped (0 for a fresh one) to 1."""

    def __init__(self, seconds: float, spent: float = 0.0) -> None:
        self.seconds = max(seconds, 1e-3)
        self._start = time.monotonic() - spent

    @property
    def spent(self) -> float:
        return time.monotonic() - self._start

    @property
    def fraction(self) -> float:
        return min(self.spent / self.seconds, 1.0)


def rate(step: int, fraction: float) -> float:
    """The factor on the peak learning rate."""
    fall = 1.0 if fraction < FLAT_UNTIL else 1.0 - (1.0 - LAST_RATE) * (fraction - FLAT_UNTIL) / (1.0 - FLAT_UNTIL)
    return min(1.0, (step + 1) / WARM_STEPS) * fall


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrices of g [n, rows, columns], roughly: a quintic Newton-Schulz iteration in bf16.

    Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(g.dtype)


class Muon:
    """Momentum whose matrices are made orthogonal; matrices of one shape are stacked and handled together.

    Updates have the root mean square of AdamW's (0.2 of the rate), so both share one rate (arXiv 2502.16982).
    """

    def __init__(self, params: Iterable[nn.Parameter], momentum: float = 0.95, decay: float = 0.1) -> None:
        self.momentum, self.decay = momentum, decay
        groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for p in params:
            groups.setdefault(tuple(p.shape[-2:]), []).append(p)
        self._groups = [(ps, [torch.zeros_like(p) for p in ps]) for ps in groups.values()]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for params, moving in self._groups:
            grads = [p.grad for p in params]
            torch._foreach_lerp_(moving, grads, 1.0 - self.momentum)
            ahead = torch._foreach_lerp(grads, moving, self.momentum)
            rows, columns = params[0].shape[-2:]
            turned = orthogonal(torch.cat([a.reshape(-1, rows, columns) for a in ahead]))
            parts = turned.split([p.numel() // (rows * columns) for p in params])
            torch._foreach_mul_(params, 1.0 - lr * self.decay)
            scale = -lr * 0.2 * max(rows, columns) ** 0.5
            torch._foreach_add_(params, [part.view_as(p) for part, p in zip(parts, params, strict=True)], alpha=scale)


class Optimiser:
    """Both rules over one module. Embeddings, head, router and norms are AdamW's; every other matrix is Muon's."""

    ELEMENTWISE = ("embed", "head", "router")

    def __init__(self, module: nn.Module, peak: float) -> None:
        self.peak = peak
        self.params = [p for p in module.parameters() if p.requires_grad]
        named = [(name.rpartition(".")[2], p) for name, p in module.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if p.ndim > 1 and name not in self.ELEMENTWISE]
        others = [p for name, p in named if p.ndim == 1 or name in self.ELEMENTWISE]
        self._muon = Muon(matrices)
        self._adam = torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.95), eps=1e-9, weight_decay=0.0, fused=others[0].is_cuda)

    def step(self, loss: Tensor, factor: float) -> Tensor:
        """Backward and one update; returns the gradient's norm (a tensor, so nothing waits for it)."""
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.params, CLIP)
        for group in self._adam.param_groups:
            group["lr"] = self.peak * factor
        self._adam.step()
        self._muon.step(self.peak * factor)
        self.clear()
        return norm

    def clear(self) -> None:
        """Drops the gradients."""
        for p in self.params:
            p.grad = None

    def forget(self) -> None:
        """Drops all momentum, after the weights were put back."""
        self._adam.state.clear()
        for _, moving in self._muon._groups:
            torch._foreach_zero_(moving)
