"""Weights streamed to a device whose memory is the host's: every tensor of a checkpoint, every rank, as the host would have read it."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from model import dflash, kimi_k26
from model.tiny import make_tiny
from model.weights import Checkpoint
from runtime.hashed import hashed
from runtime.kernels_cu.array import DeviceArray
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.recorder import DeviceW4
from runtime.kernels_cu.residency import Loader
from runtime.source import FileWindow, HashWindow, Source, Triple, W4Source, one_late, stack
from runtime.w4 import W4
from tests.host_link import HostLink
from tests.shim_device import ShimDevice

bf16 = ml_dtypes.bfloat16


class Keep:
    """A backend that keeps what a host would have: arrays as stored, experts packed."""

    def param(self, weight: Any) -> np.ndarray:
        return weight.read() if isinstance(weight, Source) else np.ascontiguousarray(weight)

    def param_w4(self, weight: W4Source) -> W4:
        return weight.pack()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", seed=3)


def backend_of(shim) -> CudaBackend:
    return CudaBackend(ShimDevice(shim))


def pairs(there: Any, here: Any, where: str = "w"):
    """Every weight of a loaded model beside the one that the host would have."""
    if dataclasses.is_dataclass(here) and not isinstance(here, W4):
        for field in dataclasses.fields(here):
            yield from pairs(getattr(there, field.name), getattr(here, field.name), f"{where}.{field.name}")
    elif isinstance(here, tuple):
        for i, (a, b) in enumerate(zip(there, here, strict=True)):
            yield from pairs(a, b, f"{where}[{i}]")
    elif not isinstance(here, int):
        yield where, there, here


def compare(backend: CudaBackend, there: Any, here: Any) -> int:
    count = 0
    for where, a, b in pairs(there, here):
        count += 1
        if isinstance(b, W4):
            assert isinstance(a, DeviceW4) and (a.E, a.N, a.K, a.interleaved) == (b.E, b.N, b.K, b.interleaved), where
            data = np.empty(b.data.shape, np.uint8)
            assert a.exponent == b.exponent, where
            backend.device.download(a.address, data)
            np.testing.assert_array_equal(data, b.data, where)
        else:
            assert isinstance(a, DeviceArray) and a.shape == b.shape, where
            assert backend.host(a).tobytes() == b.tobytes(), where
    return count


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 1), (4, 2)])
def test_a_rank_has_what_the_host_reads(shim, folder, tp, rank):
    """Row cuts, column cuts of bf16 and of INT4, gate over up, transposed keys, packed experts."""
    with Checkpoint.open(folder) as ckpt:
        config = kimi_k26.Config.from_json(ckpt.config)
        backend = backend_of(shim)
        there = kimi_k26.load(ckpt, config, backend, rank, tp, 64)
        here = kimi_k26.load(ckpt, config, Keep(), rank, tp, 64)
        assert compare(backend, there, here) == 4 + 11 + 15


def test_a_drafter_has_what_the_host_reads(shim, folder):
    with Checkpoint.open(folder / "drafter") as ckpt:
        config = dflash.Config.from_json(ckpt.config)
        backend = backend_of(shim)
        assert compare(backend, dflash.load(ckpt, config, backend, 64), dflash.load(ckpt, config, Keep(), 64)) == 4 + 2 * 10


def stream(shim, sources: list[Source], experts: W4Source | None = None, **how: Any):
    """The sources' bytes, and packed experts, through a small ring over a link that copies as late as it may; at once where the
    shim's kernels, which wait for nothing, take up the copies."""
    device, link = ShimDevice(shim), HostLink(late=experts is None)
    loader = Loader(device, link, **{"threads": 3, "slots": 4, "slot_bytes": 3000} | how)
    at = [device.alloc(s.nbytes) for s in sources]
    for source, to in zip(sources, at, strict=True):
        loader.source(source, to)
    packed = 0
    if experts:
        packed = device.alloc(experts.E * experts.N * experts.K)
        exponent = loader.experts(experts, packed)
    loader.settle()
    found = []
    for source, to in zip(sources, at, strict=True):
        out = np.empty(source.nbytes, np.uint8)
        device.download(to, out)
        found.append(out.tobytes())
    if experts:
        want = experts.pack()
        out = np.empty(want.data.shape, np.uint8)
        device.download(packed, out)
        np.testing.assert_array_equal(out, want.data)
        assert exponent() == want.exponent
    loader.close()
    return found, link


def test_slots_are_reused_only_when_they_are_free(shim, folder):
    """Rows that fill slots unevenly, many pieces in one slot, columns cut, more jobs than slots."""
    with Checkpoint.open(folder) as ckpt:
        head, down = "lm_head.weight", "model.layers.0.mlp.down_proj.weight"
        small = [ckpt.source("model.norm.weight"), ckpt.source(head, slice(3, 4), slice(5, 7))]
        cut = [ckpt.source(down, None, slice(32, 96)), stack(*(ckpt.source(head, slice(i, i + 2)) for i in range(0, 60, 3)))]
        sources = [*small, ckpt.source(head), *cut, ckpt.source(head, slice(7, 400)), *small]
        found, link = stream(shim, sources)
        for source, data in zip(sources, found, strict=True):
            assert data == source.read().tobytes()
        assert link.closed and link.sent > 40 and 1 < link.most <= 4


def test_experts_larger_than_a_slot_come_in_strips_and_small_ones_together(shim, folder):
    with Checkpoint.open(folder) as ckpt:
        names = [f"model.layers.1.mlp.experts.{e}." for e in range(3)]
        from model.pack_w4 import w4_source

        both = w4_source([(ckpt.triple(f"{n}gate_proj"), ckpt.triple(f"{n}up_proj")) for n in names])
        down = w4_source([(ckpt.triple(f"{n}down_proj", None, slice(32, 96)),) for n in names])
        strip = 64 * 128 * 9 // 16 + 4 * 256
        sent = []
        for source, fit in ((both, strip), (down, strip), (both, 1 << 20), (both, 2 * both.N * 128 * 9 // 16 + 4 * 256)):
            sent.append(stream(shim, [], source, slot_bytes=fit)[1].sent)
        assert sent == [3 * both.N // 64, 3, 1, 2]  # strips, one by one, all, by two
        with pytest.raises(ValueError, match="64 rows of 128 INT4 inputs are more than a slot of 4000 bytes"):
            stream(shim, [], both, slot_bytes=4000)


def test_hashed_weights_need_no_file(shim):
    def window(rows, cols, dtype="bf16", width=128):
        return HashWindow(99, 0.01, 0.002, dtype, width, rows, cols)

    def source(*windows):
        shape = (sum(w.shape[0] for w in windows), windows[0].shape[1])
        return Source(shape, windows[0].dtype, windows, tuple((lambda w=w: hashed(w)) for w in windows))

    whole, part = source(window((0, 100), (0, 128))), source(window((4, 9), (16, 80)), window((30, 31), (16, 80)))
    found, link = stream(shim, [whole, part])
    assert found == [whole.read().tobytes(), part.read().tobytes()] and link.sent == 0
    np.testing.assert_array_equal(part.read()[:5], whole.read()[4:9, 16:80])


def test_faults_of_files_are_named(shim, tmp_path):
    path = tmp_path / "short.bin"
    path.write_bytes(bytes(1000))
    window = FileWindow(path, 8, "bf16", 64, (0, 10), (0, 64))
    with pytest.raises(ValueError, match=r"short.bin ends at byte 1000, before 288 bytes of a weight"):
        stream(shim, [Source((10, 64), "bf16", (window,), (lambda: np.zeros((10, 64), bf16),))])
    wide = FileWindow(path, 0, "bf16", 4000, (0, 1), (0, 4000))
    with pytest.raises(ValueError, match=r"a row of 8000 bytes in .*short.bin is longer than a slot of 3000"):
        stream(shim, [Source((1, 4000), "bf16", (wide,), (lambda: np.zeros((1, 4000), bf16),))])


def test_a_layer_is_finished_when_the_next_is_on_its_way():
    seen: list[str] = []

    def start(i):
        seen.append(f"start {i}")
        return lambda: seen.append(f"finish {i}") or i

    assert list(one_late(start(i) for i in range(3))) == [0, 1, 2] and list(one_late(iter(()))) == []
    assert seen == ["start 0", "start 1", "finish 0", "start 2", "finish 1", "finish 2"]


def test_sources_that_do_not_fit_together_are_refused():
    def matrix(n, k, dtype="bf16"):
        return Source((n, k), dtype, (HashWindow(1, 0.0, 1.0, dtype, k, (0, n), (0, k)),), (lambda: np.zeros((n, k)),))

    with pytest.raises(ValueError, match=r"bf16 \[2, 4\], bf16 \[2, 5\]"):
        stack(matrix(2, 4), matrix(2, 5))
    one = Triple(matrix(64, 8, "i32"), matrix(64, 2))
    W4Source(((one,), (one,)), lambda: None)
    with pytest.raises(ValueError, match="all of one shape"):
        W4Source(((one,), (one, one)), lambda: None)
    with pytest.raises(ValueError, match=r"beside scales \[64, 3\]; want \[64, 2\]"):
        W4Source(((Triple(matrix(64, 8, "i32"), matrix(64, 3)),),), lambda: None)
