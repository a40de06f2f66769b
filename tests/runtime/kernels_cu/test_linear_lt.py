"""cuBLASLt without a GPU: structures, the choice of algorithms over a library that multiplies on the CPU, what is kept on disk."""

from __future__ import annotations

import ctypes
import gc
import json
from dataclasses import replace

import numpy as np
import pytest

from runtime.kernels_cu import _cublaslt, linear_lt
from runtime.kernels_cu.linear_lt import PROBES, Lt, Product, describe, key_of
from tests.compare import check_bitwise
from tests.host_lt import PLAIN, RAGGED, SPLIT, HostLt
from tests.shim_calls import bf16, poisoned, random_bf16


class HostDevice:
    """Memory of the host where linear_lt wants a device."""

    arch, sms, gpu, stream = "sm_90a", 132, "host", 0

    def __init__(self) -> None:
        self.held: dict[int, np.ndarray] = {}

    def alloc(self, nbytes: int) -> int:
        room = np.zeros(nbytes + 256, np.uint8)
        address = -(-room.ctypes.data // 256) * 256
        self.held[address] = room
        return address

    def free(self, address: int) -> None:
        del self.held[address]

    def upload(self, address: int, array: np.ndarray) -> None:
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def download(self, address: int, out: np.ndarray) -> None:
        ctypes.memmove(out.ctypes.data, address, out.nbytes)

    def synchronize(self) -> None:
        pass


class Clock:
    """A watch that says what it is told, by algorithm, and remembers who was timed."""

    def __init__(self, times: dict[bytes, float]) -> None:
        self.times, self.timed = times, []

    def cold_us(self, run) -> float:
        run(0)
        algo = next(c.cell_contents for c in run.__closure__ if isinstance(c.cell_contents, bytes))
        self.timed.append(algo)
        return self.times[algo]


TIMES = {PLAIN: 3.0, SPLIT: 1.0, RAGGED: 2.0}


def make(rng, m=40, n=48, k=64, heads=1, float_out=False):
    """A product over host arrays and what it must give: x [M, heads, K+8], out [M, heads, N+16] where there are heads."""
    gap, out_gap = (8, 16) if heads > 1 else (0, 0)
    x, w = random_bf16(rng, m, heads, k + gap), random_bf16(rng, heads, n, k)
    out = poisoned(m, heads, n + out_gap, dtype=np.float32 if float_out else bf16)
    strides = {"x_row": heads * (k + gap), "out_row": heads * (n + out_gap), "heads": heads, "x_head": k + gap, "out_head": n + out_gap}
    product = describe(m, n, k, **strides, float_out=float_out)
    want = np.einsum("mhk,hnk->mhn", x[:, :, :k].astype(np.float32), w.astype(np.float32))
    return product, x, w, out, want


def prepare(lt: Lt, product: Product, x, w, out, **how):
    return lt.prepare(product, w.ctypes.data, x.ctypes.data, out.ctypes.data, **how)


@pytest.mark.parametrize(("heads", "float_out"), [(1, False), (1, True), (3, False)])
@pytest.mark.parametrize("invariant", [False, True])
def test_runs_the_product_and_nothing_else(rng, heads, float_out, invariant):
    product, x, w, out, want = make(rng, heads=heads, float_out=float_out)
    done = prepare(Lt(HostDevice(), HostLt(), Clock(TIMES)), product, x, w, out, invariant=invariant)
    out[...] = np.nan
    done.run(0)
    np.testing.assert_allclose(out[:, :, :48].astype(np.float32), want, rtol=2e-2, atol=2e-2)
    assert np.isnan(out[:, :, 48:].astype(np.float32)).all()
    assert str(done).split() == ["cublasLtMatmul", "M", "40", "N", "48", "K", "64", *([f"x{heads}"] if heads > 1 else []), done.how]


def test_takes_the_fastest_and_asks_once(rng):
    product, x, w, out, _ = make(rng)
    library, clock = HostLt(), Clock(TIMES)
    lt = Lt(HostDevice(), library, clock)
    assert prepare(lt, product, x, w, out).how == "split"
    assert clock.timed == [SPLIT, RAGGED, PLAIN] and library.asked == 1
    assert prepare(lt, product, x, w, out).how == "split" and library.asked == 1
    prepare(lt, replace(product, b=replace(product.b, cols=24), d=replace(product.d, cols=24)), x, w, out)
    assert library.asked == 2


def test_an_invariant_choice_is_one_for_all_rows(rng):
    """Neither what splits K nor what sums it in another order at another M, though both are faster; and nothing is left behind.
    In float32: 16 rows of 48 results rounded to bfloat16 would hide another order, 16 rows of 7168 do not."""
    product, x, w, out, _ = make(rng, float_out=True)
    device, library = HostDevice(), HostLt()
    lt = Lt(device, library, Clock(TIMES))
    held = len(device.held)
    assert prepare(lt, product, x, w, out, invariant=True).how == "plain"
    asked = library.asked
    results = {}
    for m in (1, 17, 33, 40):
        rows = replace(product, b=replace(product.b, cols=m), d=replace(product.d, cols=m))
        done = prepare(lt, rows, x, w, out, invariant=True)
        done.run(0)
        results[m] = out[:m].copy()
    assert library.asked == asked == len(PROBES) and len(device.held) == held
    for m, result in results.items():
        check_bitwise(result, results[40][:m])


def test_an_invariant_choice_must_fit_every_probe(rng):
    product, x, w, out, _ = make(rng, float_out=True)
    with pytest.raises(ValueError, match=r"of 1 algorithms without split K none gives rows the same bits at M = \[1, 17, 64, 256, 1024\]"):
        prepare(Lt(HostDevice(), HostLt(few=100), Clock(TIMES)), product, x, w, out, invariant=True)
    with pytest.raises(ValueError, match="needs the weights in place"):
        prepare(Lt(HostDevice(), HostLt(), Clock(TIMES)), product, x, np.zeros_like(w), out, invariant=True)
    with pytest.raises(ValueError, match="suggests no algorithm"):
        prepare(Lt(HostDevice(), HostLt(offered=()), Clock(TIMES)), product, x, w, out)


def test_choices_are_kept_by_device_and_version(rng, tmp_path):
    product, x, w, out, _ = make(rng)
    prepare(Lt(HostDevice(), HostLt(), Clock(TIMES), tmp_path), product, x, w, out)
    file = tmp_path / "host-130002.json"
    held = json.loads(file.read_text())
    assert [bytes.fromhex(v) for v in held.values()] == [SPLIT]
    library = HostLt()
    assert prepare(Lt(HostDevice(), library, Clock({}), tmp_path), product, x, w, out).how == "split" and library.asked == 0
    prepare(Lt(HostDevice(), HostLt(), Clock(TIMES), tmp_path), product, x, w, out, invariant=True)
    assert len(json.loads(file.read_text())) == 2
    file.write_text(json.dumps(dict.fromkeys(held, (b"?" * 64).hex())))  # an algorithm that this library does not know
    assert prepare(Lt(HostDevice(), HostLt(), Clock(TIMES), tmp_path), product, x, w, out).how == "split"
    file.write_text("{")
    assert prepare(Lt(HostDevice(), HostLt(), Clock(TIMES), tmp_path), product, x, w, out).how == "split"


def test_the_key_holds_what_a_choice_depends_on():
    plain = describe(40, 48, 64, x_row=64, out_row=48)
    others = [
        describe(41, 48, 64, x_row=64, out_row=48),
        describe(40, 64, 64, x_row=64, out_row=64),
        describe(40, 48, 64, x_row=128, out_row=48),
        describe(40, 48, 64, x_row=64, out_row=48, float_out=True),
        describe(40, 48, 64, x_row=128, out_row=96, heads=2, x_head=64, out_head=48),
    ]
    keys = [key_of(p, (256, 256, 256), False) for p in (plain, *others)] + [key_of(plain, (256, 16, 256), False)]
    assert len(set(keys)) == len(keys)
    assert key_of(plain, (256, 256, 256), True) == key_of(others[0], (256, 256, 256), True) != keys[0]


def test_alignment_counts_the_steps_between_heads():
    product = describe(17, 512, 128, x_row=8 * 192, out_row=8 * 576, heads=8, x_head=192, out_head=576)
    assert linear_lt._alignment(product, 4096, 4096, 4096) == (256, 128, 128)
    assert linear_lt._alignment(product, 4096 + 64, 4096, 4096) == (64, 128, 128)


def test_structures_have_the_sizes_of_the_header():
    assert (ctypes.sizeof(_cublaslt.Algo), ctypes.sizeof(_cublaslt.Suggestion)) == (_cublaslt.ALGO_BYTES, 96)


@pytest.fixture
def library():
    try:
        return _cublaslt.CublasLt()
    except _cublaslt.LtError as error:
        pytest.skip(str(error))


def test_the_library_holds_what_describe_says(library):
    """Descriptors are host memory: no GPU is needed to make them and to read them back."""
    product = describe(17, 512, 128, x_row=8 * 192, out_row=8 * 576, heads=8, x_head=192, out_head=576)
    problem = library.open(product, (256, 128, 256))

    def read(handle, key: int, kind) -> int:
        value, written = kind(), ctypes.c_size_t()
        where = (ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)), ctypes.byref(written))
        library.call("cublasLtMatrixLayoutGetAttribute", handle, ctypes.c_int(key), *where)
        return value.value

    for handle, layout in ((problem.a, product.a), (problem.b, product.b), (problem.d, product.d)):
        assert read(handle, 0, ctypes.c_uint32) == layout.kind
        assert (read(handle, 2, ctypes.c_uint64), read(handle, 3, ctypes.c_uint64)) == (layout.rows, layout.cols)
        assert (read(handle, 4, ctypes.c_int64), read(handle, 6, ctypes.c_int64)) == (layout.ld, layout.batch_stride)
        assert read(handle, 5, ctypes.c_int32) == 8
    with pytest.raises(_cublaslt.LtError, match="status 7"):
        library.set("MatrixLayout", problem.a, 2, ctypes.c_int16(3))
    assert 120000 <= library.version < 200000


class Counted(_cublaslt.CublasLt):
    """The binding without a library: what is called is noted, descriptors are numbers."""

    def __init__(self) -> None:
        self.calls, self._handle = [], ctypes.c_void_p(1)

    def call(self, name: str, *arguments) -> None:
        self.calls.append(name)


def test_descriptors_live_as_long_as_the_call_that_needs_them():
    library = Counted()
    run = library.multiplier(library.open(describe(2, 16, 32, x_row=32, out_row=16), (256, 256, 256)), PLAIN, 256, 256, 256, 0, 0)
    gc.collect()
    run(0)
    assert library.calls.count("cublasLtMatrixLayoutCreate") == 3 and library.calls[-1] == "cublasLtMatmul"
    assert not any(name.endswith("Destroy") for name in library.calls)
    del run
    gc.collect()
    assert sum(name.endswith("Destroy") for name in library.calls) == 4
