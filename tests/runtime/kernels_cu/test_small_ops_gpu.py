"""The small kernels on a GPU: the checks of the shim's tests, run by a device. And the device's stand-in on the CPU.

Recorded in tools/results/gpu_tests.jsonl (`tools/gpu_tests.py --check`).
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from runtime.kernels_cu import block_attention, dense, draft, linear_skinny, mla_prep, sample
from runtime.kernels_cu._call import Call
from tests.runtime.kernels_cu import test_block_attention_shim as of_attention
from tests.runtime.kernels_cu import test_dense_shim as of_dense
from tests.runtime.kernels_cu import test_draft_shim as of_draft
from tests.runtime.kernels_cu import test_linear_skinny_shim as of_linear
from tests.runtime.kernels_cu import test_mla_prep_shim as of_mla
from tests.runtime.kernels_cu import test_sample_shim as of_sample
from tests.shim_calls import Device, forget, run_call

FAMILIES = {f"{m.SOURCE.removesuffix('.cu')}_entry.cu": m for m in (block_attention, dense, draft, linear_skinny, mla_prep, sample)}


@pytest.fixture(autouse=True)
def clean():
    forget()
    yield
    forget()


@pytest.fixture
def gpu():
    """get(entry, defines) as the fixture `shim`, on the current CUDA device."""
    import cupy

    from runtime.kernels_cu._build import build
    from runtime.kernels_cu._launch import load

    capability = cupy.cuda.Device().compute_capability
    arch = f"sm_{capability}" + ("a" if int(capability) >= 90 else "")
    runtime, held = cupy.cuda.runtime, []

    def upload(array: np.ndarray) -> int:
        held.append(cupy.cuda.alloc(array.nbytes))
        runtime.memcpy(held[-1].ptr, array.ctypes.data, array.nbytes, runtime.memcpyHostToDevice)
        return int(held[-1].ptr)

    def download(at: int, array: np.ndarray) -> None:
        runtime.memcpy(array.ctypes.data, at, array.nbytes, runtime.memcpyDeviceToHost)

    def get(source: str, defines: dict[str, int]) -> Device:
        family = FAMILIES[source]
        functions = load(build(family.SOURCE, defines, arch).code, family.ENTRIES)

        def launch(call: Call) -> None:
            call.launch(functions).run(cupy.cuda.get_current_stream().ptr)
            runtime.deviceSynchronize()

        return Device(upload, launch, download, held.clear)

    return get


@pytest.fixture
def stand_in(shim):
    """A device whose memory is other memory of the host, and whose kernels are the shim's: what finds a pointer not moved."""

    def get(source: str, defines: dict[str, int]) -> Device:
        library, copies = shim(source, defines), {}

        def upload(array: np.ndarray) -> int:
            room = np.empty(array.nbytes + 64, np.uint8)
            at = -(-int(room.ctypes.data) // 64) * 64
            copies[at] = room
            ctypes.memmove(at, array.ctypes.data, array.nbytes)
            return at

        def download(at: int, array: np.ndarray) -> None:
            ctypes.memmove(array.ctypes.data, at, array.nbytes)

        return Device(upload, lambda call: run_call(library, call), download, copies.clear)

    return get


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


def test_the_stand_in_passes(stand_in, rng):
    everything(stand_in, rng)


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
