"""Trials that are served: which launches a step has then, in what order they may start, and that the model's results stay the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.kernels_cu import record_attention, tree_mla
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.tree_mla_config import SERVED, Config, Dims, candidates, served
from runtime.kernels_cu.tree_paths import PathPages
from tests.runtime.kernels_cu.test_backend_shim import VOCAB, make, path  # noqa: F401  fixtures
from tests.runtime.kernels_cu.test_recorder import Still
from tests.shim_device import shim_map
from tests.twin import check_story

ENDS = (("EARLY_KEYS", 1), ("MERGE_LATER", 1))
COLUMNS, NARROW, ROWS = Config(9, 17), Config(1, 27), Config(8, 18, rows=True)


@pytest.fixture
def maps(monkeypatch):
    monkeypatch.setattr(tree_mla, "tensor_map", shim_map)


def test_each_kind_has_its_own_fields():
    few, many = Dims(90, 10, 8, 4096), Dims(330, 10, 64, 65536)
    assert served(NARROW, few) == replace(NARROW, slots=25, trials=ENDS)
    assert served(NARROW, few, early=False).trials == ENDS[1:]
    assert served(replace(NARROW, chunk=8), few) == replace(NARROW, chunk=8, trials=ENDS[:1])
    assert served(COLUMNS, few) == replace(COLUMNS, ahead=0, trials=ENDS[:1])
    assert served(ROWS, few) == replace(ROWS, trials=ENDS[:1])
    assert served(ROWS, many) == replace(ROWS, trials=(("SOFTEN_FIRST", 1),))
    portable = Config(2, 9, producers=2, wgmma=False)
    assert served(portable, few) == portable


def test_a_trial_is_served_with_what_it_needs(monkeypatch):
    """Were they served: nothing is ready before a wait that comes first, and with `chunk` given nobody owns a column tile."""
    trials = (("EARLY_KEYS", 1), ("OWNERS", 2), ("READY_FIRST", 1))
    monkeypatch.setitem(SERVED, "rows", {"trials": trials})
    few = Dims(90, 10, 8, 4096)
    assert served(ROWS, few).trials == trials
    assert served(ROWS, few, early=False).trials == trials[1:2]
    assert served(replace(ROWS, chunk=8), few).trials == (trials[0], trials[2])


@pytest.mark.parametrize("dims", [Dims(9, 1, 8, 4096), Dims(330, 10, 64, 65536), Dims(90, 10, 8, 4096)], ids=str)
def test_whatever_may_be_chosen_is_legal_as_it_is_served(dims):
    for config in (*candidates(dims), *candidates(dims, chunk=80)):
        served(config, dims).check(dims)
        served(config, dims, early=False).check(dims)


class Hopper(Still):
    arch = "sm_90a"


@pytest.mark.parametrize(("heads", "octets"), [(8, 1), (16, 2), (32, 4)])
def test_undrafted_rows_get_as_many_columns_as_they_have(heads, octets):
    """A bucket of ten rows is ten streams then; with drafts it may be a tree."""
    ops, dims = CudaBackend(Hopper(lambda *_: None)), Dims(10, 10, heads, 131072)
    assert record_attention._config(ops, dims).octets > octets
    ops.single_rows = True
    assert record_attention._config(ops, dims).octets == octets
    assert record_attention._config(ops, replace(dims, B=2)).octets > octets


def recorded(paths, ops):
    """Two layers' launches."""
    cache = ops.latent_cache(2, 64, 576, paths)
    pages, seq, bits = ops.zeros((2, 3), "i32"), ops.zeros((4,), "i32"), ops.zeros((4, 1), "u64")
    streams = ops.zeros((2,), "i32"), ops.zeros((2,), "i32")
    q, out = ops.buffer("q", (4, 8, 576)), ops.buffer("u", (4, 8, 512))
    with ops.recording() as launches:
        for layer in range(2):
            ops.tree_mla(q, cache[layer], pages, 16, *streams, seq, seq, seq, bits, 0.1, out=out)
        return [one.run for one in launches]


def test_the_first_layer_starts_when_the_plan_has_ended(maps):
    calls = recorded(None, CudaBackend(Hopper(lambda *_: None)))
    assert [(call.entry, call.pdl) for call in calls] == [
        ("tree_mla_plan", True), ("tree_mla", False), ("tree_mla_merge", True), ("tree_mla", True), ("tree_mla_merge", True),
    ]  # fmt: skip


def test_keys_that_a_step_copies_are_not_asked_for_early(maps):
    """Private pages are written ahead of every layer."""
    ops = CudaBackend(Hopper(lambda *_: None), invariant=True)
    calls = recorded(PathPages(4, 2, 16), ops)
    assert {call.entry for call in calls if "tree_mla" in call.entry} == {"tree_mla_plan", "tree_mla"}
    assert all(call.pdl for call in calls)
    (config,) = {choice for key, choice in ops._choices.items() if key[0] == "tree_mla"}
    assert config.chunk and not config.trials


SPLIT = {"buckets": (72, 16, 4), "chunk": 70}  # two key tiles, each a split of its own


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(Config(1, 26, chunk=1, trials=ENDS), id="columns", marks=pytest.mark.slow),
        pytest.param(Config(8, 18, rows=True, chunk=1, trials=ENDS[:1]), id="rows"),
    ],
)
def test_the_model_is_the_definitions(make, maps, monkeypatch, config):  # noqa: F811
    """On the shim, through the recorder; without the last launch, a layer's merge or the layer, it is not."""
    monkeypatch.setattr(record_attention, "_config", lambda r, dims: config)
    monkeypatch.setattr(record_attention, "served", lambda config, *_: config)
    room = {"positions": 96, "pages": 13}
    check_story(make(**room), VOCAB, **SPLIT)
    with pytest.raises(AssertionError):
        check_story(make(**room, dropped=("tree_mla",)), VOCAB, **SPLIT)
