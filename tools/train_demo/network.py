"""The target in torch, to be trained: Kimi K2's architecture at a small size, its experts rounded to INT4 in every forward pass.

Attention is expanded (keys and values of every head), where the runtime absorbs it; the two are equal. All experts are computed
for all tokens and weighted by the router, zero for most: at 32 narrow experts two large products cost less than sorting rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.kimi_k26 import LATENT_EPS, Config
from runtime.w4 import GROUP

Cache = tuple[Tensor, Tensor]  # keys [B, A, X, N+R] and values [B, A, X, U] of one layer
LARGEST_CODE = 7
SMALLEST_SCALE = 1e-5  # as K2 was trained, and model.tiny.quantise


def scales_and_codes(w: Tensor) -> tuple[Tensor, Tensor]:
    """(scale [..., K/32] of bf16 values, code [..., K/32, 32] in -7..7, both float32) of weights [..., K]: absmax / 7, to nearest."""
    groups = w.detach().float().unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / LARGEST_CODE).clamp(min=SMALLEST_SCALE).bfloat16().float()
    return scale, (groups / scale[..., None]).round().clamp(-LARGEST_CODE, LARGEST_CODE)


def rounded(w: Tensor) -> Tensor:
    """The INT4 values of w; the gradient passes straight through."""
    scale, code = scales_and_codes(w)
    return w + ((code * scale[..., None]).flatten(-2) - w).detach()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates neighbouring pairs of the last dimension; cos and sin [..., R/2] are broadcast."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def drawn(*shape: int, scale: float = 1.0) -> nn.Parameter:
    """A matrix [.., out, in] with entries of deviation scale / sqrt(in)."""
    return nn.Parameter(torch.randn(*shape) * scale * shape[-1] ** -0.5)


class Layer(nn.Module):
    """One block. Experts are stacked: w_gate, w_up [E, F, H], w_down [E, H, F]; a dense layer has none."""

    def __init__(self, c: Config, index: int) -> None:
        super().__init__()
        self.c = c
        self.sparse = index >= c.dense_layers
        out = 0.5 * (2 * c.layers) ** -0.5  # what is added to the residual stream starts small
        self.input_norm, self.post_norm = (nn.Parameter(torch.ones(c.hidden)) for _ in range(2))
        self.q_norm, self.kv_norm = nn.Parameter(torch.ones(c.q_rank)), nn.Parameter(torch.ones(c.latent))
        self.q_a, self.q_b = drawn(c.q_rank, c.hidden, scale=0.7), drawn(c.heads * (c.nope + c.rope_dim), c.q_rank, scale=0.7)
        self.kv_a, self.kv_b = drawn(c.cache_width, c.hidden, scale=0.7), drawn(c.heads * (c.nope + c.value), c.latent, scale=0.7)
        self.o = drawn(c.hidden, c.heads * c.value, scale=out)
        width = c.expert_width * c.shared_experts if self.sparse else c.dense_width
        self.gate, self.up, self.down = (
            drawn(width, c.hidden, scale=0.7),
            drawn(width, c.hidden, scale=0.7),
            drawn(c.hidden, width, scale=out),
        )
        if self.sparse:
            self.router = nn.Parameter(torch.randn(c.experts, c.hidden) * 0.02)
            self.register_buffer("bias", torch.zeros(c.experts))
            self.w_gate, self.w_up = (drawn(c.experts, c.expert_width, c.hidden, scale=0.7) for _ in range(2))
            self.w_down = drawn(c.experts, c.hidden, c.expert_width, scale=out)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None, start: int, qat: bool) -> tuple[Tensor, Tensor | None]:
        x = x + self._attention(rms_norm(x, self.input_norm, self.c.eps), cos, sin, cache, start)
        h = rms_norm(x, self.post_norm, self.c.eps)
        y = F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)
        if not self.sparse:
            return x + y, None
        routed, load = self._experts(h.flatten(0, 1), qat)
        return x + y + routed.view_as(x), load

    def _attention(self, h: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None, start: int) -> Tensor:
        c, (b, t, _) = self.c, h.shape
        q = F.linear(rms_norm(F.linear(h, self.q_a), self.q_norm, LATENT_EPS), self.q_b).view(b, t, c.heads, -1)
        latent, key_rope = F.linear(h, self.kv_a).split([c.latent, c.rope_dim], -1)
        kv = F.linear(rms_norm(latent, self.kv_norm, LATENT_EPS), self.kv_b).view(b, t, c.heads, -1)
        q_nope, q_rope = q.split([c.nope, c.rope_dim], -1)
        turned = rotate_pairs(key_rope, cos, sin).to(q.dtype)[:, :, None].expand(b, t, c.heads, c.rope_dim)
        q = torch.cat([q_nope, rotate_pairs(q_rope, cos[:, None], sin[:, None]).to(q.dtype)], -1).transpose(1, 2)
        k = torch.cat([kv[..., : c.nope], turned], -1).transpose(1, 2)
        v = kv[..., c.nope :].transpose(1, 2)
        if cache is not None:
            cache[0][:, :, start : start + t], cache[1][:, :, start : start + t] = k, v
            k, v = cache[0][:, :, : start + t], cache[1][:, :, : start + t]
        if start:  # one token at a time
            y = torch.softmax((q @ k.transpose(-1, -2)).float() * c.softmax_scale, -1).to(v.dtype) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=c.softmax_scale)
        return F.linear(y.transpose(1, 2).reshape(b, t, -1), self.o)

    def _experts(self, h: Tensor, qat: bool) -> tuple[Tensor, Tensor]:
        """Routed output [n, H] and the number of tokens that each expert got, [E]."""
        c = self.c
        with torch.autocast(h.device.type, enabled=False):
            score = torch.sigmoid(F.linear(h.float(), self.router.float()))
        chosen = torch.zeros_like(score).scatter(1, (score + self.bias).detach().topk(c.top_k, -1).indices, 1.0)
        weight = score * chosen
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * c.routed_scale
        gate, up, down = (rounded(w) if qat else w for w in (self.w_gate, self.w_up, self.w_down))
        inner = F.silu(F.linear(h, gate.flatten(0, 1))) * F.linear(h, up.flatten(0, 1))
        inner = (inner.view(-1, c.experts, c.expert_width) * weight.to(inner.dtype)[:, :, None]).flatten(1)
        return F.linear(inner, down.transpose(0, 1).reshape(c.hidden, -1)), chosen.sum(0)


class Target(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Parameter(torch.randn(c.vocab, c.hidden) * 0.05)
        self.head = nn.Parameter(torch.randn(c.vocab, c.hidden) * 0.02)
        self.norm = nn.Parameter(torch.ones(c.hidden))
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.layers))
        half = c.rope_dim // 2
        table = torch.from_numpy(c.rope.table(c.max_positions, c.rope_dim))
        self.register_buffer("cos", table[:, :half].clone(), persistent=False)
        self.register_buffer("sin", table[:, half:].clone(), persistent=False)
        self.qat = True  # False once the weights are the stored ones

    def trunk(
        self, ids: Tensor, start: int = 0, cache: Sequence[Cache] | None = None, taps: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The residual stream [B, T, H] behind the last layer, the loads of the sparse layers, and the stream behind each tapped layer."""
        x = self.embed[ids]
        cos, sin = self.cos[start : start + ids.shape[1]], self.sin[start : start + ids.shape[1]]
        loads, kept = [], []
        for i, layer in enumerate(self.layers):
            x, load = layer(x, cos, sin, cache[i] if cache else None, start, self.qat)
            if load is not None:
                loads.append(load)
            if i in taps:
                kept.append(x)
        return x, loads, kept

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(rms_norm(x, self.norm, self.c.eps), self.head)

    def forward(self, ids: Tensor, **more: Any) -> Tensor:
        return self.logits(self.trunk(ids, **more)[0])

    def loss(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Mean negative log-likelihood, in nats, of ids [B, T+1] after the first; and the loads."""
        x, loads, _ = self.trunk(ids[:, :-1])
        return F.cross_entropy(self.logits(x).float().flatten(0, 1), ids[:, 1:].flatten()), loads

    @torch.no_grad()
    def tap(self, ids: Tensor, taps: Sequence[int]) -> Tensor:
        """[B, T, taps*H]: what the drafter sees of each token."""
        return torch.cat(self.trunk(ids, taps=taps)[2], -1)

    @torch.no_grad()
    def freeze(self) -> None:
        """Makes the weights what the files will hold: INT4 experts, everything else bf16."""
        for name, p in self.named_parameters():
            if name.rpartition(".")[2] in ("w_gate", "w_up", "w_down"):
                scale, code = scales_and_codes(p)
                p.copy_((code * scale[..., None]).flatten(-2))
            else:
                p.copy_(p.bfloat16().float())
            p.requires_grad_(False)
        self.qat = False
        self.eval()
