"""Weights on a GPU: streamed from files and written from a hash, every tensor as the host has it; small rings, many jobs.

Recorded in tools/results/gpu_tests.jsonl (`tools/gpu_tests.py --check`).
"""

from __future__ import annotations

import numpy as np
import pytest

from model import dflash, kimi_k26
from model.pack_w4 import w4_source
from model.tiny import make_tiny
from model.weights import Checkpoint
from runtime.hashed import hashed
from runtime.source import stack
from tests.model.test_dummy import dummy
from tests.runtime.kernels_cu.test_repack_w4_shim import WINDOWS
from tests.runtime.kernels_cu.test_residency import Keep, compare

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", seed=3)


@pytest.fixture(scope="module")
def device():
    from runtime.kernels_cu.device import CupyDevice

    return CupyDevice()


def backend_of(device):
    from runtime.kernels_cu.backend import CudaBackend

    return CudaBackend(device)


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 1), (4, 2)])
def test_a_rank_has_what_the_host_reads(device, folder, tp, rank):
    backend = backend_of(device)
    with Checkpoint.open(folder) as ckpt:
        config = kimi_k26.Config.from_json(ckpt.config)
        there, here = (kimi_k26.load(ckpt, config, b, rank, tp, 64) for b in (backend, Keep()))
        assert compare(backend, there, here) == 4 + 11 + 15
    with Checkpoint.open(folder / "drafter") as ckpt:
        draft = dflash.Config.from_json(ckpt.config)
        assert compare(backend, dflash.load(ckpt, draft, backend, 64), dflash.load(ckpt, draft, Keep(), 64)) == 4 + 2 * 10


def test_a_device_writes_the_host_s_bits(device):
    ckpt, config = dummy()
    backend = backend_of(device)
    there, here = (kimi_k26.load(ckpt, config, b, 1, 2, 64) for b in (backend, Keep()))
    assert compare(backend, there, here) == 4 + 11 + 15


def test_hashed_windows_have_the_definition_s_bits(device):
    from runtime.kernels_cu import fill

    functions = device.functions(fill.SOURCE, {}, fill.ENTRIES)
    for window in WINDOWS:
        want = hashed(window)
        at = device.alloc(want.nbytes)
        device.prepare(fill.call(window, at), functions).run(device.stream)
        out = np.empty(want.nbytes, np.uint8)
        device.download(at, out)
        assert out.tobytes() == want.tobytes(), window


def test_a_small_ring_mixes_nothing_up(device, folder):
    """Four slots, three readers, hundreds of copies; repacking takes staging up before the next copy."""
    from runtime.kernels_cu.residency import Loader

    with Checkpoint.open(folder) as ckpt:
        head = "lm_head.weight"
        sources = [
            ckpt.source(head),
            stack(*(ckpt.source(head, slice(i, i + 2)) for i in range(0, 60, 3))),
            ckpt.source(head, None, slice(8, 72)),
        ]
        names = [f"model.layers.1.mlp.experts.{e}." for e in range(8)]
        experts = w4_source([(ckpt.triple(f"{n}gate_proj"), ckpt.triple(f"{n}up_proj")) for n in names])
        loader = Loader(device, device.link(), threads=3, slots=4, slot_bytes=6000)
        at, want = [device.alloc(s.nbytes) for s in sources], experts.pack()
        packed = device.alloc(want.nbytes)
        for _ in range(5):
            for source, to in zip(sources, at, strict=True):
                loader.source(source, to)
            exponent = loader.experts(experts, packed)
        assert exponent() == want.exponent
        loader.close()
        for to, data in [*zip(at, (s.read() for s in sources), strict=True), (packed, want.data)]:
            out = np.empty(data.nbytes, np.uint8)
            device.download(to, out)
            assert out.tobytes() == data.tobytes()
