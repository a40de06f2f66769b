"""A model cut into stages computes what it computes whole, to the bit, and its taps arrive in their order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model import kimi_k26
from model.stages import Passing, Stage, stage_layers, stages_of
from model.tiny import make_tiny
from model.weights import Checkpoint
from runtime.comm import SoloComm
from runtime.kernels_np import NumpyBackend
from tests.plans import PAGE, make_plan, page_table, random_parents

TAPS = (3, 0, 2)  # in an order of the drafter's own


@dataclass
class Line:
    """The stages before and after, one after the other in this process."""

    passed: list[np.ndarray] = field(default_factory=list)

    def send(self, x: Any) -> None:
        self.passed.append(x.copy())

    def receive(self, x: Any) -> None:
        came = self.passed.pop()
        assert x.shape == came.shape
        x[:] = came


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("stages") / "tiny", seed=4, num_hidden_layers=5)


def steps(tiny: Path, stages: tuple[Stage, ...], activations: str) -> list[tuple[np.ndarray, ...]]:
    """Logits, taps and caches after a prompt, then after a tree that first moves rows of the cache."""
    ckpt, line, ranks = Checkpoint.open(tiny), Line(), []
    c = kimi_k26.Config.from_json(ckpt.config)
    for stage in stages:
        ops = NumpyBackend(activations)
        w = kimi_k26.load(ckpt, c, ops, 0, 1, 64, stage=stage)
        assert len(w.layers) == len(stage.layers) and (w.embed is not None, w.head is not None) == (stage.embeds, stage.heads)
        ranks.append((ops, w, ops.zeros((len(w.layers), 5 * PAGE, c.cache_width))))
    pages, rng, found = page_table(2, 2), np.random.default_rng(1), []
    prompt = make_plan([[3, 9, 4, 7], [5, 6]], [[-1, 0, 1, 2], [-1, 0]], [0, 0], pages)
    tree = make_plan([[8, 1, 2, 3], [9, 7, 7]], [random_parents(rng, 4), random_parents(rng, 3)], [3, 1], pages)
    tree = replace(tree, moves=np.array([[PAGE + 3, PAGE + 2]], np.int32), out_rows=np.array([0, 3, 6], np.int32))
    for plan in (prompt, tree):
        for ops, w, cache in ranks:
            made = kimi_k26.forward(ops, SoloComm(), c, w, plan, cache, PAGE, TAPS, line)
            assert (made is None) == (w.head is None)
        assert made is not None and not line.passed
        found.append((made[0].copy(), made[1].copy(), np.concatenate([cache for _, _, cache in ranks])))
    return found


@pytest.mark.parametrize("activations", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_stages_give_the_bits_of_the_whole(tiny: Path, count: int, activations: str) -> None:
    whole = steps(tiny, (Stage(0, 5),), activations)
    for got, want in zip(steps(tiny, stages_of(5, count, drafts=False), activations), whole, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    assert not np.array_equal(whole[0][2], whole[1][2])


def test_a_tap_in_another_place_is_seen(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = steps(tiny, (Stage(0, 5),), "float32")
    receive = Passing.receive

    def turned(self: Passing, line: Line) -> None:
        line.passed[-1][1:] = line.passed[-1][1:][::-1].copy()
        receive(self, line)

    monkeypatch.setattr(Passing, "receive", turned)
    other = steps(tiny, stages_of(5, 2, drafts=False), "float32")
    assert np.array_equal(other[0][0], whole[0][0]) and not np.array_equal(other[0][1], whole[0][1])


def test_earlier_stages_take_the_rest_and_the_legal_sizes_are_named() -> None:
    assert [len(part) for part in stage_layers(61, 4)] == [16, 15, 15, 15]
    assert [layer for part in stage_layers(61, 4) for layer in part] == list(range(61))
    assert [(s.embeds, s.heads) for s in stages_of(6, 3, drafts=True)] == [(True, False), (False, False), (True, True)]
    for stages in (0, 7):
        with pytest.raises(ValueError, match=f"pipeline_parallel_size {stages} does not cut this model; legal: 1 to 6, its layers"):
            stage_layers(6, stages)
