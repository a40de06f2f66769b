"""The DFlash drafter in torch, to be trained: one bidirectional pass proposes a block from the target's tapped hidden states.

Many blocks of one text are trained at once: block n stands at its own anchor and sees the context before it and itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.dflash import Config
from tools.train_demo.network import Target, drawn, rms_norm


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates dimension i with i + J/2; x [B, heads, T, J], cos and sin [B, T, J/2]."""
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Layer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        out = 0.5 * (2 * c.layers) ** -0.5
        self.input_norm, self.post_norm = (nn.Parameter(torch.ones(c.hidden)) for _ in range(2))
        self.q_norm, self.k_norm = (nn.Parameter(torch.ones(c.head_dim)) for _ in range(2))
        self.q = drawn(c.heads * c.head_dim, c.hidden, scale=0.7)
        self.k, self.v = (drawn(c.kv_heads * c.head_dim, c.hidden, scale=0.7) for _ in range(2))
        self.o = drawn(c.hidden, c.heads * c.head_dim, scale=out)
        self.gate, self.up = (drawn(c.width, c.hidden, scale=0.7) for _ in range(2))
        self.down = drawn(c.hidden, c.width, scale=out)

    def forward(self, x: Tensor, context: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """x [B, n, H] rows of blocks, context [B, T, H]; angles of T + n positions [B, T+n, J/2]; mask [B, 1, n, T+n] of what is seen."""
        c, (b, n, _) = self.c, x.shape
        h = rms_norm(x, self.input_norm, c.eps)
        both = torch.cat([context, h], 1)
        cos, sin = angles
        q = rms_norm(F.linear(h, self.q).view(b, n, c.heads, -1), self.q_norm, c.eps).transpose(1, 2)
        k = rms_norm(F.linear(both, self.k).view(b, both.shape[1], c.kv_heads, -1), self.k_norm, c.eps).transpose(1, 2)
        v = F.linear(both, self.v).view(b, both.shape[1], c.kv_heads, -1).transpose(1, 2)
        q, k = rotate_halves(q, cos[:, -n:], sin[:, -n:]).to(v.dtype), rotate_halves(k, cos, sin).to(v.dtype)
        shared = c.heads // c.kv_heads
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=c.head_dim**-0.5)
        x = x + F.linear(y.transpose(1, 2).reshape(b, n, -1), self.o)
        h = rms_norm(x, self.post_norm, c.eps)
        return x + F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)


class Drafter(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.fc = drawn(c.hidden, len(c.taps) * c.hidden, scale=0.7)
        self.hidden_norm, self.norm = (nn.Parameter(torch.ones(c.hidden)) for _ in range(2))
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))

    def forward(self, target: Target, taps: Tensor, bonus: Tensor, pos: Tensor) -> Tensor:
        """Logits [B, n, block-1, V] of n blocks of each text.

        taps [B, T, taps*H] of tokens 0..T-1; bonus, pos [B, n]: the token each block starts from and its position. A block sees
        the taps before its position, its own rows, and nothing else.
        """
        c, (b, t, _), n = self.c, taps.shape, pos.shape[1]
        rows, device = n * c.block, taps.device
        context = rms_norm(F.linear(taps, self.fc), self.hidden_norm, c.eps)
        ids = torch.full((b, n, c.block), c.mask_token, device=device)
        ids[:, :, 0] = bonus
        at = (pos[:, :, None] + torch.arange(c.block, device=device)).flatten(1)
        where = torch.cat([torch.arange(t, device=device).expand(b, t), at], 1)
        angles = target.cos[where], target.sin[where]
        block = torch.arange(rows, device=device) // c.block
        own = (block[:, None] == block[None]).expand(b, rows, rows)
        before = torch.arange(t, device=device)[None, None] < pos.repeat_interleave(c.block, 1)[:, :, None]
        mask = torch.cat([before, own], -1)[:, None]
        x = target.embed[ids.flatten(1)]
        for layer in self.layers:
            x = layer(x, context, angles, mask)
        x = x.view(b, n, c.block, -1)[:, :, 1:]
        return F.linear(rms_norm(x, self.norm, c.eps), target.head)

    @torch.no_grad()
    def freeze(self) -> None:
        for p in self.parameters():
            p.copy_(p.bfloat16().float())
            p.requires_grad_(False)
        self.eval()
