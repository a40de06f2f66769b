"""Fixtures: the CPU shim, random layers and their dense reference."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import pytest

from runtime.kernels_cu import moe_config, tree_mla_config
from runtime.w4 import dequantise, pack

bf16 = ml_dtypes.bfloat16


class Layer:
    """A random layer and its reference."""

    def __init__(self, dims, seed: int = 0, scale: float = 0.02, dead: tuple[int, ...] = (), one_expert: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.dims = dims
        self.w13 = pack(*self._matrix(rng, dims.E, 2 * dims.F, dims.H, scale), interleaved=True)
        self.w2 = pack(*self._matrix(rng, dims.E, dims.H, dims.F, scale))
        self.x = rng.standard_normal((dims.M, dims.H)).astype(bf16)
        self.base = rng.standard_normal((dims.M, dims.H)).astype(bf16)
        self.expert = np.stack([rng.permutation(dims.E)[: dims.top_k] for _ in range(dims.M)]).astype(np.int32)
        if one_expert:
            self.expert[:, 0] = 0
            self.expert[:, 1:] = np.stack([1 + rng.permutation(dims.E - 1)[: dims.top_k - 1] for _ in range(dims.M)])
        self.weight = rng.random((dims.M, dims.top_k)).astype(np.float32)
        self.dead = list(dead)
        self.expert[self.dead] = -1
        self.x[self.dead] = np.nan
        self.base[self.dead] = np.nan

    @staticmethod
    def _matrix(rng, e, n, k, scale):
        return rng.integers(0, 16, (e, n, k), dtype=np.uint8), (scale * (0.5 + rng.random((e, n, k // 32)))).astype(bf16)

    def reference(self) -> np.ndarray:
        d = self.dims
        out = np.full((d.M, d.H), np.nan, np.float32)
        for m in range(d.M):
            if m in self.dead:
                continue
            total = self.base[m].astype(np.float32)
            for j, e in enumerate(self.expert[m]):
                both = dequantise(self.w13, int(e)) @ self.x[m].astype(np.float32)
                gate, up = both[: d.F], both[d.F :]
                hidden = (gate / (1 + np.exp(-gate)) * up).astype(bf16).astype(np.float32)
                total = total + self.weight[m, j] * (dequantise(self.w2, int(e)) @ hidden)
            out[m] = total
        return out


@pytest.fixture
def every_lane_arrives(monkeypatch):
    """Kernels whose warps arrive at barriers with all lanes, where one does otherwise."""
    for config in (moe_config.Config, tree_mla_config.Config):
        built = config.defines
        monkeypatch.setattr(config, "defines", lambda self, *dims, built=built: {**built(self, *dims), "EVERY_LANE_ARRIVES": 1})


@pytest.fixture(autouse=True)
def for_racecheck(request):
    """compute-sanitizer --tool racecheck does not follow a __syncwarp before one lane's arrival: tools/sanitize.py sets this."""
    if os.environ.get("EVERY_LANE_ARRIVES") == "1":
        request.getfixturevalue("every_lane_arrives")


@pytest.fixture(scope="session")
def make_layer():
    return Layer


@pytest.fixture(scope="session")
def layer_error():
    return relative_error


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Relative L2 error; infinite where the NaNs differ."""
    if not np.array_equal(np.isnan(got), np.isnan(want)):
        return float("inf")
    live = ~np.isnan(want)
    return float(np.linalg.norm(got[live] - want[live]) / np.linalg.norm(want[live]))
