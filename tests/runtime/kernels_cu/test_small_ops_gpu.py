"""The small kernels on a GPU: the checks of the shim's tests, run by a device. And the device's stand-in on the CPU.

Recorded in tools/results/gpu_tests.jsonl (`tools/gpu_tests.py --check`).
"""

from __future__ import annotations

import numpy as np
import pytest

from runtime.kernels_cu import block_attention, dense, top_merge
from tests.runtime.kernels_cu import test_block_attention_shim as of_attention
from tests.runtime.kernels_cu import test_dense_shim as of_dense
from tests.runtime.kernels_cu import test_draft_shim as of_draft
from tests.runtime.kernels_cu import test_linear_skinny_shim as of_linear
from tests.runtime.kernels_cu import test_mla_prep_shim as of_mla
from tests.runtime.kernels_cu import test_plan_io_shim as of_plan
from tests.runtime.kernels_cu import test_sample_shim as of_sample
from tests.runtime.kernels_cu import test_top_merge_shim as of_merge
from tests.runtime.kernels_cu.gpu_calls import gpu_calls, stand_in_calls
from tests.shim_calls import Device, forget
from tools.sanitize_families import FAMILIES


@pytest.fixture(autouse=True)
def clean():
    forget()
    yield
    forget()


@pytest.fixture
def gpu():
    return gpu_calls()


@pytest.fixture
def stand_in(shim):
    return stand_in_calls(shim)


def everything(get, rng) -> None:
    """One case or a few of every kernel of every family. `forget` keeps a call from carrying the arrays of those before it."""
    for step in (
        of_sample.Step(rng, 12, 4096, top=3, logprobs=2, **of_sample.FILTERS["all"]),
        of_sample.Step(rng, 12, 333, top=3, logprobs=2),
        of_sample.adjusted_step(rng),
        of_sample.masked_step(rng),
    ):
        of_sample.check(step, step.run(get, threads=512))
        forget()
    rows = of_dense.Rows(get, rng, 7, 1024, dense.Config(64, 2))
    of_dense.check_norms(rows)
    of_dense.check_gate(rows)
    rows.out[:] = np.nan
    of_dense.check_embed(rows, rng)
    of_dense.check_gather(get, rng)
    of_dense.check_copy(get, rng)
    for name in of_dense.MOVES:
        of_dense.check_moves(get, rng, name)
        forget()
    for dims, config in of_mla.CASES:
        of_mla.World(rng, dims).check(get, config)
        forget()
    of_draft.check_rope(get, rng)
    of_draft.check_write(get, rng)
    of_draft.check_top(get, 4 * rng.standard_normal((6, 5000)), 20, threads=512)
    of_attention.World(rng, of_attention.SMALL, [29, -1, 155]).check(get, block_attention.Config(3))
    for config, m, n, k in of_linear.SHAPES:
        of_linear.check(get, rng, config, m, n, k)
        forget()
    of_linear.check(get, rng, *of_linear.SHAPES[2], np.float32)
    forget()
    of_merge.check(*of_merge.merged(get, 4, 256, 5))
    of_merge.check_beside(get, top_merge.Config(3, 32), 5, 132)
    for check in (of_plan.check_drafts, of_plan.check_rows, of_plan.check_results):
        forget()
        check(get, rng)
    forget()
    of_plan.check_steps(get, rng, sizes=(5, 65))


def test_the_stand_in_passes_and_takes_every_small_kernel(stand_in, rng, monkeypatch):
    """The list by which tools/sanitize.py knows what this file launches is what it launches."""
    taken, run = set(), Device.run

    def noted(device, call):
        taken.add(call.entry)
        run(device, call)

    monkeypatch.setattr(Device, "run", noted)
    everything(stand_in, rng)
    assert taken == set(FAMILIES["small ops"].kernels)


def test_a_pointer_that_is_not_moved_shows(stand_in):
    with pytest.raises(ValueError, match="lies in no array"):
        stand_in("dense_entry.cu", dense.Config(64, 1).defines()).run(dense.silu_mul(1, 8, x=16, out=16))


@pytest.mark.gpu
def test_every_family_on_the_gpu(gpu, rng):
    everything(gpu, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("name", of_sample.FILTERS)
def test_a_whole_vocabulary_on_the_gpu(gpu, rng, name):
    step = of_sample.Step(rng, 40, 163_840, top=20, logprobs=20, **of_sample.FILTERS[name])
    of_sample.check(step, step.run(gpu, threads=512))
