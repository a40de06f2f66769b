"""Which backend is taken, and a rank loaded from a checkpoint onto the CPU shim: pages from free memory, one recording for good."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest

import runtime.cuda_loading as cuda_loading
from runtime import loading
from runtime.config import SpeculativeConfig
from runtime.cuda_loading import choose_backend, pages_that_fit, path_pages
from runtime.graph.driver import ListDriver
from runtime.kernels_cu.tree_paths import PathPages
from runtime.types import DraftPlan
from tests.plans import make_plan, page_table
from tests.runtime.graph.worlds import tiny_model
from tests.shim_device import ShimDevice

LOG = logging.getLogger(__name__)


@pytest.mark.parametrize(
    ("wanted", "dtype", "gpu", "backend", "reason"),
    [
        ("auto", "auto", (True, "CuPy sees X"), "cuda", "CuPy sees X"),
        ("auto", "auto", (False, "CuPy is not installed"), "numpy", "CuPy is not installed"),
        ("auto", "float32", (True, "CuPy sees X"), "numpy", "dtype is float32"),
        ("numpy", "auto", (True, "CuPy sees X"), "numpy", "asked for"),
        ("cuda", "bfloat16", (True, "CuPy sees X"), "cuda", "asked for; CuPy sees X"),
    ],
)
def test_a_backend_is_chosen_and_says_why(monkeypatch, wanted, dtype, gpu, backend, reason):
    monkeypatch.setattr(cuda_loading, "find_gpu", lambda: gpu)
    monkeypatch.setattr(cuda_loading, "device_name", lambda: "x")
    choice = choose_backend(wanted, dtype)
    assert (choice.backend, choice.device) == (backend, "x" if backend == "cuda" else "") and reason in choice.reason


def test_what_cannot_be_is_refused(monkeypatch):
    monkeypatch.setattr(cuda_loading, "find_gpu", lambda: (False, "CuPy sees no GPU"))
    with pytest.raises(ValueError, match="backend: 'cuda' is not possible here: CuPy sees no GPU"):
        choose_backend("cuda")
    with pytest.raises(ValueError, match="backend: 'torch' is not available; auto, cuda, numpy are"):
        choose_backend("torch")
    with pytest.raises(ValueError, match=r"cudagraph_capture_sizes: \[8\], but backend 'numpy' captures nothing"):
        loading.first_config("numpy", [8])


def test_a_gpus_defaults():
    config = loading.first_config("cuda", None, max_num_seqs=16)
    assert (config.max_num_batched_tokens, config.block_size, config.buckets[-2:]) == (1024, 64, (768, 1024))
    assert loading.first_config("cuda", [8, 64], max_num_batched_tokens=256).buckets == (8, 64, 256)
    budget = loading.fit_speculation(SpeculativeConfig(method="ddtree"), "cuda").tree_budget
    assert budget == 16 and loading.fit_speculation(SpeculativeConfig(method="ddtree")).tree_budget == 7


class Small(ListDriver):
    """A device that says how much memory it has."""

    memory = (300_000, 1_000_000)

    def free_bytes(self):
        return self.memory


def test_pages_take_what_is_left():
    driver = Small(None)
    assert pages_that_fit(driver, 0.9, 10_000) == 20
    with pytest.raises(ValueError, match=r"gpu_memory_utilization: weights and buffers leave 0\.00 GB of 70% of 0\.0 GB; two pages"):
        pages_that_fit(driver, 0.7, 10_000)
    assert pages_that_fit(driver, 0.9, 10_000, private_bytes=45_000) == 15
    with pytest.raises(ValueError, match=r"two pages take 0\.00 GB, private pages of batch_invariant's draft trees 0\.00 GB"):
        pages_that_fit(driver, 0.9, 10_000, private_bytes=180_001)
    with pytest.raises(ValueError, match="give the number of pages"):
        pages_that_fit(ListDriver(None), 0.9, 10_000)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return loading.open_source(tiny_model(tmp_path_factory.mktemp("tiny")), SpeculativeConfig(method="ddtree"))


def gpu_config(source, **changes):
    given = {"max_num_seqs": 2, "max_num_batched_tokens": 12, "max_model_len": 64, "block_size": 16, **changes}
    return loading.fit_config(loading.first_config("cuda", [4], **given), source, "bfloat16", "cuda")


def test_private_pages_of_trees_are_for_batch_invariant_alone(source):
    config, tree = gpu_config(source, num_pages=7, batch_invariant=True), SpeculativeConfig(method="ddtree")
    limits = loading.limits_of(source, config, tree)
    assert path_pages(config, limits, tree) == PathPages(12, limits.draft_depth, 16)
    assert path_pages(config.replace(batch_invariant=False), limits, tree) is None
    assert path_pages(config, limits, SpeculativeConfig(method="dflash")) is None
    with pytest.raises(ValueError, match="max_num_batched_tokens: 2048 rows; with batch_invariant"):
        path_pages(config, dataclasses.replace(limits, max_rows=2048), tree)


def test_pages_leave_room_for_private_ones(source, shim):
    """Beside them fewer pages fit; they lie behind the last layer, where no page of a sequence is."""
    driver = Small(ShimDevice(shim))
    driver.memory = (800_000, 1_000_000)
    config = gpu_config(source, batch_invariant=True, enforce_eager=True)
    worker = loading.make_gpu_executor(source, config, SpeculativeConfig(method="ddtree"), LOG.debug, driver)
    page, paths, behind = loading.bytes_per_token(source, 2) * 16, worker.backend.paths, worker.backend.path_slots
    assert worker.limits.num_pages == (700_000 - 2 * 576 * paths.slots) // page < 9 and behind.shape == (paths.slots, 576)
    worker.close()


def test_a_rank_is_loaded_and_captured(source, shim):
    """The pages are those that fit; the rehearsal's cache is given back; everything is captured; a step and a draft run."""
    parts = []
    driver = Small(ShimDevice(shim))
    worker = loading.make_gpu_executor(source, gpu_config(source), SpeculativeConfig(method="ddtree"), parts.append, driver)
    page = loading.bytes_per_token(source, 2) * 16
    assert worker.limits.num_pages == min(200_000 // page, 2 * 4 + 1) and worker.backend.arena.sealed
    assert all(program.captured for program in worker.programs()) and worker.sizes == (4, 12)
    assert parts[-1] == "drafter" and "layer 1" in parts
    pages = page_table(1, 2)
    result = worker.step(make_plan([[3, 9, 17]], [[-1, 0, 1]], [0], pages))
    assert result.finite.all() and result.step_us > 0
    taps = np.arange(3, dtype=np.int32)
    slots = (pages[0, 0] * 16 + taps).astype(np.int32)
    drafted = worker.draft(DraftPlan(np.array([5], np.int32), np.array([3], np.int32), pages, taps, taps, slots))
    assert np.isfinite(drafted.logp).all() and (np.diff(drafted.logp, axis=2) <= 0).all()
    worker.close()


def test_eager_captures_nothing_and_a_given_number_of_pages_is_kept(source, shim):
    driver = ListDriver(ShimDevice(shim))
    config = gpu_config(source, num_pages=7, enforce_eager=True, batch_invariant=True)
    worker = loading.make_gpu_executor(source, config, SpeculativeConfig(method="ddtree"), LOG.debug, driver)
    assert worker.limits.num_pages == 7 and not any(program.captured for program in worker.programs())
    assert worker.backend.invariant and worker.backend.paths
    assert worker.step(make_plan([[3, 4, 5]], [[-1, 0, 0]], [0], page_table(1, 1))).finite.all()
