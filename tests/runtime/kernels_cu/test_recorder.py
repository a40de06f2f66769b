"""Device arrays, the arena and what a recording refuses; a device that runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from runtime.kernels_cu.arena import Arena
from runtime.kernels_cu.array import DeviceArray, dtype_name
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.recorder import DeviceW4, Live
from runtime.shapes import ShapeError
from tests.shim_device import ShimDevice


class Still(ShimDevice):
    """Memory, but no kernels: a call is prepared as its own name."""

    def functions(self, source: str, defines: Mapping[str, int], entries: Any) -> Mapping[str, Any]:
        return dict.fromkeys(entries, source)

    def prepare(self, call: Any, functions: Mapping[str, Any], keep: tuple[Any, ...] = ()) -> Any:
        return call


@pytest.fixture
def ops():
    return CudaBackend(Still(lambda *_: None))


def test_views_are_numpys(rng):
    """Address and strides of every view that the models take, against NumPy's of the same memory."""
    host = np.zeros((3, 4, 5, 2), np.float32)
    there = DeviceArray(host.ctypes.data, host.shape, "f32")
    views = [
        np.s_[1],
        np.s_[:, 2],
        np.s_[:2],
        np.s_[1:, 1:3],
        np.s_[:, -1, 2:],
        np.s_[2, 3, 4, 1],
        np.s_[-2:, :, 4],
        np.s_[5:],
        np.s_[:, 4:9],
    ]
    for view in views:
        mine, numpys = there[view], host[(*view, ...) if isinstance(view, tuple) else (view, ...)]
        assert mine.shape == numpys.shape and [4 * s for s in mine.strides] == list(numpys.strides)
        assert mine.size == 0 or mine.address == numpys.ctypes.data
        assert mine.size == 0 or mine.contiguous == numpys.flags["C_CONTIGUOUS"]
    assert there.reshape(6, -1).shape == (6, 20) and there.reshape((60, 2)).flat == there.address
    assert (len(there), there.ndim, there.size, there.nbytes) == (3, 4, 120, 480)


def test_what_a_view_cannot_be_is_named():
    a = DeviceArray(4096, (3, 4), "bf16")
    for bad, said in ((lambda: a[3], "index 3 into a dimension of 3"), (lambda: a[::2], "step 2"), (lambda: a[0, 0, 0], "3 indices")):
        with pytest.raises(IndexError, match=said):
            bad()
    with pytest.raises(ValueError, match=r"\[3, 4\] holds 12 numbers; \[5, 2\] wants 10"):
        a.reshape(5, 2)
    with pytest.raises(ValueError, match=r"\[3\] with strides \[4\] is not contiguous"):
        _ = a[:, 1].flat
    with pytest.raises(ValueError, match="dtype 'f64' is unknown"):
        DeviceArray(0, (1,), "f64")
    with pytest.raises(ValueError, match="an array of float64"):
        dtype_name(np.zeros(1))


def test_a_buffer_grows_until_it_is_sealed():
    arena = Arena(ShimDevice(lambda *_: None))
    large = arena.buffer("x", (4, 8), "bf16")
    assert arena.buffer("x", (2, 8), "f32").address == large.address and large.address % 256 == 0
    assert arena.buffer("x", (5, 8), "bf16").address != large.address
    assert arena.buffer("nothing", (3, 0), "bf16").shape == (3, 0)
    assert arena.nbytes == 64 + 80
    arena.seal()
    assert arena.buffer("x", (5, 8), "bf16").nbytes == 80
    with pytest.raises(RuntimeError, match="buffer 'x' of 96 bytes, but the arena is sealed with 80 bytes"):
        arena.buffer("x", (6, 8), "bf16")
    with pytest.raises(RuntimeError, match="buffer 'y' of 2 bytes, but the arena is sealed with 0 bytes"):
        arena.buffer("y", (1,), "bf16")


def test_weights_arrive_bit_by_bit(ops, rng):
    for host in (
        rng.standard_normal((3, 5)).astype(ml_dtypes.bfloat16),
        rng.standard_normal((2, 7)).astype(np.float32).T,
        np.arange(3, dtype=np.int32),
    ):
        there = ops.param(host)
        assert there.dtype == dtype_name(host) and there.shape == host.shape
        np.testing.assert_array_equal(ops.host(there), host)
    assert ops.weight_bytes == 30 + 56 + 12
    assert not ops.host(ops.zeros((2, 3), "i32")).any()


def test_what_a_recording_refuses_is_named(ops):
    x, w, token = ops.buffer("x", (6, 64)), ops.zeros((64,)), ops.zeros((6,), "i32")
    five = ops.zeros((5,), "i32")
    with ops.recording(five), pytest.raises(ValueError, match=r"rms_norm: 6 rows, but dead rows are marked by \[5\] i32; want \[6\] i32"):
        ops.rms_norm(x, w, 1e-5, out=x)
    with pytest.raises(ValueError, match=r"gather_rows: recording\(live=…\) names no count of rows"), ops.recording():
        ops.gather_rows(x, token, out=x)
    with pytest.raises(ShapeError, match="H is 64"), ops.recording():
        ops.rms_norm(x, ops.zeros((32,)), 1e-5, out=x)
    with pytest.raises(TypeError, match="outputs go by keyword"), ops.recording():
        ops.rms_norm(x, w, 1e-5, x)
    with pytest.raises(ValueError, match="is not contiguous"), ops.recording():
        ops.silu_mul(ops.buffer("wide", (6, 2, 64))[:, 1], out=ops.buffer("half", (6, 32)))


def routed(ops, m=2):
    router = ops.zeros((8, 64)), ops.zeros((8,), "f32")
    expert, weight = ops.buffer("expert", (m, 2), "i32"), ops.buffer("weight", (m, 2), "f32")
    return (ops.buffer("x", (m, 64)), *router, 2.5), expert, weight


def test_a_route_needs_its_experts(ops):
    """Choices are made by the first launch of the experts: a route alone would leave them unmade."""
    inputs, expert, weight = routed(ops)
    with pytest.raises(RuntimeError, match="without the moe_w4 that makes its choices"), ops.recording():
        ops.route(*inputs, expert=expert, weight=weight)
    with pytest.raises(RuntimeError, match="recorded twice"), ops.recording():
        ops.route(*inputs, expert=expert, weight=weight)
        ops.route(*inputs, expert=expert, weight=weight)
    w13, w2 = DeviceW4(4096, 8, 64, 64, int, True), DeviceW4(4096, 8, 64, 32, int, False)
    other = ops.zeros((2, 2), "i32")
    with pytest.raises(RuntimeError, match="with other choices"), ops.recording():
        ops.route(*inputs, expert=expert, weight=weight)
        ops.moe_w4(inputs[0], other, weight, w13, w2, inputs[0], out=inputs[0])
    with pytest.raises(ValueError, match="gate and up rows must be woven"), ops.recording():
        ops.moe_w4(inputs[0], expert, weight, replace(w13, interleaved=False), w2, inputs[0], out=inputs[0])


def entries(recorded):
    return [getattr(one.run, "entry", "product") for one in recorded]


def test_choices_given_are_sorted_and_choices_to_make_are_made(ops):
    inputs, expert, weight = routed(ops)
    w13, w2 = DeviceW4(4096, 8, 64, 64, int, True), DeviceW4(4096, 8, 64, 32, int, False)
    with ops.recording() as given:
        ops.moe_w4(inputs[0], expert, weight, w13, w2, inputs[0], out=inputs[0])
    with ops.recording() as made:
        ops.route(*inputs, expert=expert, weight=weight)
        ops.moe_w4(inputs[0], expert, weight, w13, w2, inputs[0], out=inputs[0])
    assert entries(given) == ["moe_sort", "moe_w4", "moe_combine"]
    assert entries(made) == ["product", "moe_route_sort", "moe_w4", "moe_combine"]  # eight experts: no whole tile of sixteen


def test_products_go_by_their_rows(ops):
    w = ops.zeros((64, 64))
    for m, skinny in ((1, True), (16, True), (17, False)):
        with ops.recording() as launches:
            ops.linear(ops.buffer("x", (m, 64)), w, out=ops.buffer("y", (m, 64)))
        assert entries(launches) == ["linear_skinny" if skinny else "product"]
    one = CudaBackend(ops.device, invariant=True)
    with one.recording() as launches:
        one.linear(ops.buffer("x", (1, 64)), w, out=ops.buffer("y", (1, 64)))
    assert entries(launches) == ["product"]


def test_one_plan_serves_the_layers_of_a_recording(ops):
    def attend(width=576, value=512):
        q, out = ops.buffer("q", (4, 2, width)), ops.buffer("u", (4, 2, value))
        ops.tree_mla(q, ops.zeros((64, width)), pages, 16, *streams, seq, seq, seq, bits, 0.1, out=out)

    pages, seq, bits = ops.zeros((2, 3), "i32"), ops.zeros((4,), "i32"), ops.zeros((4, 1), "u64")
    streams = ops.zeros((2,), "i32"), ops.zeros((2,), "i32")
    for _ in range(2):
        with ops.recording() as launches:
            attend()
            attend()
        assert entries(launches) == ["tree_mla_plan", "tree_mla", "tree_mla"]
    with pytest.raises(ValueError, match="keys of 80 and values of 64 numbers; the kernel is built for 576 and 512"), ops.recording():
        attend(80, 64)


def test_nothing_to_do_is_no_launch(ops):
    with ops.recording(live=Live()) as launches:
        ops.gather_rows(ops.buffer("x", (2, 64)), ops.zeros((0,), "i32"), out=ops.buffer("h", (0, 64)))
        ops.kv_move(ops.zeros((1, 4, 64)), ops.zeros((0, 2), "i32"))
    assert not launches
