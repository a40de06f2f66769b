"""Rotary tables with YaRN (arXiv 2309.00071): shared by the target and its drafter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.types import F32


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary part of a config: base, and YaRN's five numbers if it scales (factor 1: it does not)."""

    theta: float
    factor: float = 1.0
    original_positions: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @staticmethod
    def from_json(config: Mapping[str, Any], where: str) -> Rope:
        """Reads rope_theta and rope_scaling, or transformers 5's rope_parameters, which holds both.

        Raises ValueError naming the file and the key for a type other than yarn, or a number that is missing.
        """
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = scaling.get("rope_theta", config.get("rope_theta"))
        if theta is None:
            raise ValueError(f"{where}: neither rope_theta nor rope_parameters.rope_theta is given")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind in ("default", None):
            return Rope(float(theta))
        if kind not in ("yarn", "deepseek_yarn"):
            raise ValueError(f"{where}: rope type {kind!r} is not supported; yarn, deepseek_yarn and default are")
        missing = [k for k in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow") if k not in scaling]
        if missing:
            raise ValueError(f"{where}: yarn needs {', '.join(missing)}; they differ between members of this family and are not guessed")
        return Rope(
            float(theta),
            float(scaling["factor"]),
            int(scaling["original_max_position_embeddings"]),
            float(scaling["beta_fast"]),
            float(scaling["beta_slow"]),
            scaling.get("mscale"),
            scaling.get("mscale_all_dim"),
        )

    def inverse_frequencies(self, width: int) -> F32:
        """[width / 2] angles a position turns: high frequencies as trained, low ones divided by the factor, a ramp between."""
        pair = np.arange(width // 2, dtype=np.float64)
        plain = self.theta ** (-2.0 * pair / width)
        if self.factor == 1.0:
            return plain.astype(np.float32)

        def pair_of(rotations: float) -> float:
            return width * math.log(self.original_positions / (2 * math.pi * rotations)) / (2 * math.log(self.theta))

        low = max(math.floor(pair_of(self.beta_fast)), 0)
        high = float(min(math.ceil(pair_of(self.beta_slow)), width - 1))
        if high == low:
            high += 0.001
        kept = 1.0 - np.clip((pair - low) / (high - low), 0.0, 1.0)
        return (plain * (kept + (1.0 - kept) / self.factor)).astype(np.float32)

    def attention_factor(self) -> float:
        """What cos and sin are multiplied by: mscale / mscale_all_dim, 1 where a config gives both (Kimi's do)."""
        if self.mscale is not None and self.mscale_all_dim is not None:
            return mscale(self.factor, self.mscale) / mscale(self.factor, self.mscale_all_dim)
        return mscale(self.factor, 1.0)

    def table(self, positions: int, width: int, factor: float | None = None) -> F32:
        """[positions, width] f32: width/2 cosines, then width/2 sines, times the attention factor.

        Angles are float32 products, as the reference computes them (positions reach 262,143).
        """
        angle = np.arange(positions, dtype=np.float32)[:, None] * self.inverse_frequencies(width)[None, :]
        amplitude = np.float32(self.attention_factor() if factor is None else factor)
        return np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * amplitude

    def softmax_scale(self, width: int) -> float:
        """MLA's scale: width^-0.5 times YaRN's (0.1 mscale_all_dim ln factor + 1) squared; K2.6: 0.14467963."""
        return float(width**-0.5 * mscale(self.factor, self.mscale_all_dim or 0.0) ** 2)


def mscale(factor: float, weight: float) -> float:
    """YaRN's temperature, 0.1 weight ln(factor) + 1 for factor > 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0
