"""cuBLASLt on a GPU: plain, strided and batched products against NumPy, in a graph, and equal bits at every M where asked.

Recorded in tools/results/gpu_tests.jsonl (`tools/gpu_tests.py --check`).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from runtime.kernels_cu.linear_lt import Product, describe
from runtime.ops import OPS
from tests.compare import check_bitwise, check_close

pytestmark = pytest.mark.gpu
bf16 = ml_dtypes.bfloat16
# name -> M, N, K, heads, numbers between the ends of rows of x and of out and the next
SHAPES = {
    "plain": (24, 2112, 7168, 1, 0, 0),
    "one row": (1, 1536, 512, 1, 0, 0),
    "many rows": (1000, 1024, 768, 1, 0, 0),
    "strided": (40, 512, 256, 1, 64, 192),
    "absorb": (33, 512, 128, 8, 64, 64),
    "value": (96, 128, 512, 16, 0, 0),
}


@pytest.fixture(scope="module")
def device():
    from runtime.kernels_cu.device import CupyDevice

    return CupyDevice()


@pytest.fixture(scope="module")
def lt(device, tmp_path_factory):
    from runtime.kernels_cu import linear_lt
    from runtime.kernels_cu._cublaslt import CublasLt
    from runtime.kernels_cu._timing import Stopwatch

    return linear_lt.Lt(device, CublasLt(), Stopwatch(device), tmp_path_factory.mktemp("lt"))


def put(device, array: np.ndarray) -> int:
    address = device.alloc(array.nbytes)
    device.upload(address, array.view(np.uint16) if array.dtype == bf16 else array)
    return address


def take(device, address: int, shape, kind) -> np.ndarray:
    out = np.empty(shape, kind)
    device.download(address, out.view(np.uint16) if kind is bf16 else out)
    return out


class Case:
    """One shape on the device; results between the heads stay NaN."""

    def __init__(self, device, rng, name: str, float_out: bool) -> None:
        m, n, k, heads, gap, out_gap = SHAPES[name]
        self.device, self.kind, self.shape, self.n = device, np.float32 if float_out else bf16, (m, heads, n + out_gap), n
        x, w = rng.standard_normal((m, heads, k + gap)).astype(bf16), (rng.standard_normal((heads, n, k)) * k**-0.5).astype(bf16)
        self.want = np.einsum("mhk,hnk->mhn", x[:, :, :k].astype(np.float32), w.astype(np.float32))
        self.at = [put(device, w), put(device, x), put(device, np.full(self.shape, np.nan, self.kind))]
        self.strides = {"x_row": heads * (k + gap), "out_row": heads * (n + out_gap)}
        if heads > 1:
            self.strides |= {"heads": heads, "x_head": k + gap, "out_head": n + out_gap}
        self.size, self.float_out = (n, k), float_out

    def product(self, m: int) -> Product:
        return describe(m, *self.size, **self.strides, float_out=self.float_out)

    def result(self) -> np.ndarray:
        return take(self.device, self.at[2], self.shape, self.kind)

    def poison(self) -> None:
        blank = np.full(self.shape, np.nan, self.kind)
        self.device.upload(self.at[2], blank.view(np.uint16) if self.kind is bf16 else blank)

    def check(self) -> None:
        got, op = self.result().astype(np.float32), "linear_f32" if self.float_out else "linear"
        check_close(got[:, :, : self.n], self.want.astype(self.kind).astype(np.float32), OPS[op].tolerance, op)
        assert np.isnan(got[:, :, self.n :]).all()


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("float_out", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_is_the_definition(device, lt, rng, name, float_out, invariant):
    case = Case(device, rng, name, float_out)
    done = lt.prepare(case.product(case.shape[0]), *case.at, invariant=invariant)
    case.poison()
    done.run(device.stream)
    case.check()


@pytest.mark.parametrize("name", ["plain", "many rows", "absorb"])
def test_runs_in_a_graph_again_and_again(device, lt, rng, name):
    import cupy

    case = Case(device, rng, name, False)
    done = lt.prepare(case.product(case.shape[0]), *case.at)
    stream = cupy.cuda.ExternalStream(device.stream)
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
        done.run(device.stream)
        graph = stream.end_capture()
    for _ in range(2):
        case.poison()
        graph.launch(stream)
        case.check()


@pytest.mark.parametrize("name", ["plain", "many rows", "absorb", "value"])
def test_an_invariant_row_has_the_same_bits_at_every_m(device, lt, rng, name):
    case = Case(device, rng, name, True)
    results = {}
    for m in (1, 2, 7, 16, 17, case.shape[0]):
        case.poison()
        lt.prepare(case.product(min(m, case.shape[0])), *case.at, invariant=True).run(device.stream)
        results[m] = case.result()
    for m, result in results.items():
        check_bitwise(result[:m, :, : case.n], results[case.shape[0]][:m, :, : case.n])
