from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.checked import CheckedBackend
from runtime.null import Call, NullBackend, NullComm, PackedShape, ShapeOnly, call_cost, shape_of
from runtime.ops import OPS, Op
from runtime.shapes import ShapeError, parse


def bf16(*shape: int) -> ShapeOnly:
    return ShapeOnly(shape, "bf16")


def test_the_vocabulary_is_complete() -> None:
    assert all(callable(getattr(NullBackend, name)) for name in OPS)
    assert NullBackend.linear.__name__ == "linear"


def test_calls_are_counted_by_symbols() -> None:
    ops = NullBackend()
    for width in (8, 8, 16):
        ops.linear(bf16(3, 4), bf16(width, 4), out=bf16(3, width))
    assert ops.calls == {
        Call("linear", (("M", 3), ("K", 4), ("N", 8))): 2,
        Call("linear", (("M", 3), ("K", 4), ("N", 16))): 1,
    }


def test_cost_of_a_call_is_the_vocabularys() -> None:
    call = Call("linear", (("M", 3), ("K", 4), ("N", 8)))
    assert call_cost(call, {}) == OPS["linear"].cost({"M": 3, "K": 4, "N": 8})
    assert call_cost(call, {"M": 64}) == OPS["linear"].cost({"M": 64, "K": 4, "N": 8})


def test_a_wrong_call_is_refused_and_not_counted() -> None:
    ops = NullBackend()
    with pytest.raises(ShapeError, match="K is 4 in x"):
        ops.linear(bf16(3, 4), bf16(8, 5), out=bf16(3, 8))
    with pytest.raises(ShapeError, match="out missing"):
        ops.linear(bf16(3, 4), bf16(8, 4))
    with pytest.raises(TypeError, match="outputs go by keyword"):
        ops.linear(bf16(3, 4), bf16(8, 4), bf16(3, 8))
    with pytest.raises(AttributeError):
        ops.no_such_op()
    assert not ops.calls


def test_memory_is_counted_and_not_held() -> None:
    ops = NullBackend()
    ops.param(bf16(1 << 20, 1 << 20))
    ops.param(np.zeros((2, 3), np.int32))
    ops.param_w4(PackedShape(384, 4096, 7168))
    ops.zeros((61, 1 << 30, 576))
    ops.buffer("x", (4, 8))
    ops.buffer("x", (2, 8))
    assert ops.weight_bytes == (1 << 41) + 24 + 384 * 4096 * 7168 * 9 // 16
    assert ops.cache_bytes == 61 * (1 << 30) * 1152
    assert ops.buffers == {"x": 64}


def test_arithmetic_on_a_shape_is_an_error() -> None:
    for attempt in (lambda a: a + 1, lambda a: a * a, lambda a: a.sum(), lambda a: float(a)):
        with pytest.raises((TypeError, AttributeError)):
            attempt(bf16(2, 3))


def test_shape_of_knows_numpy_dtypes() -> None:
    assert shape_of(np.zeros((2, 3), np.float32)) == ShapeOnly((2, 3), "f32")
    assert shape_of(np.zeros(4, np.uint64)) == ShapeOnly((4,), "u64")
    with pytest.raises(KeyError):
        shape_of(np.zeros(3, np.complex64))
    with pytest.raises(ValueError, match="dtype 'f64' is unknown"):
        ShapeOnly((1,), "f64")


dims = st.lists(st.integers(0, 5), min_size=1, max_size=4)
index = st.one_of(st.integers(-6, 6), st.slices(6), st.just(Ellipsis))


@given(dims, st.lists(index, min_size=1, max_size=4).filter(lambda keys: keys.count(Ellipsis) <= 1))
def test_indexing_is_numpys(shape: list[int], keys: list) -> None:
    array, key = np.zeros(shape, np.int32), tuple(keys)
    try:
        wanted = array[key].shape
    except IndexError:
        with pytest.raises(IndexError):
            shape_of(array)[key]
        return
    assert shape_of(array)[key].shape == wanted


def test_reshape() -> None:
    assert bf16(6, 4).reshape(3, -1).shape == bf16(6, 4).reshape((3, 8)).shape == (3, 8)
    with pytest.raises(ValueError, match="holds 24 elements"):
        bf16(6, 4).reshape(5, 5)
    with pytest.raises(ValueError, match="holds 24 elements"):
        bf16(6, 4).reshape(5, -1)


def test_collectives() -> None:
    comm = NullComm(4)
    comm.all_reduce(bf16(3, 8))
    comm.all_gather(ShapeOnly((3, 8), "f32"), out=ShapeOnly((3, 32), "f32"))
    assert sorted(comm.calls) == [("all_gather", 3, 128), ("all_reduce", 3, 16)]
    with pytest.raises(ValueError, match=r"out is \[3, 8\]"):
        comm.all_gather(ShapeOnly((3, 8), "f32"), out=ShapeOnly((3, 8), "f32"))
    solo = NullComm(1)
    solo.all_reduce(bf16(3, 8))
    assert not solo.calls


class Doubler:
    """A backend of one op and one helper."""

    def silu_mul(self, x: np.ndarray, *, out: np.ndarray) -> None:
        out[:] = x[:, : out.shape[1]] * 2

    def zeros(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros(shape, np.float32)


def test_a_checked_backend_runs_right_calls_and_stops_wrong_ones() -> None:
    checked = CheckedBackend(Doubler())
    x, out = np.ones((2, 6), np.float32), checked.zeros((2, 3))
    checked.silu_mul(x, out=out)
    assert (out == 2).all()
    wrong = np.full((2, 4), 7.0, np.float32)
    with pytest.raises(ShapeError, match=r"silu_mul: 2\*F is 8 .* but 6 in x"):
        checked.silu_mul(x, out=wrong)
    assert (wrong == 7).all(), "the op ran before it was checked"
    with pytest.raises(AttributeError):
        _ = checked.linear


def size_of(dim: ast.expr, value: dict[str, int]) -> int:
    """Evaluates a dimension apart from runtime.shapes."""
    if isinstance(dim, ast.BinOp):
        left, right = size_of(dim.left, value), size_of(dim.right, value)
        return {"Add": left + right, "Sub": left - right, "Mult": left * right}[type(dim.op).__name__]
    return value[dim.id] if isinstance(dim, ast.Name) else dim.value  # type: ignore[attr-defined]


def make_shapes(op: Op, value: dict[str, int]) -> dict[str, Any]:
    """Arguments of an op by name, without memory, for given values of its symbols."""
    arguments: dict[str, Any] = {}
    for param in parse(op.signature).params:
        if param.dims is None:
            arguments[param.name] = value[param.name] if param.dtype == "int" else 0.5
            continue
        parts = param.shape_text[1:-1].split(",")
        shape = tuple(size_of(ast.parse(part.strip(), mode="eval").body, value) for part in parts)
        arguments[param.name] = PackedShape(*shape) if param.dtype == "w4" else ShapeOnly(shape, param.dtype)
    return arguments


def call_null(op: Op, arguments: dict[str, Any]) -> Call:
    ops, signature = NullBackend(), parse(op.signature)
    inputs = [arguments[p.name] for p in signature.inputs]
    getattr(ops, op.name)(*inputs, **{p.name: arguments[p.name] for p in signature.outputs})
    return next(iter(ops.calls))


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_every_op_takes_its_own_shapes_and_no_others(op: Op) -> None:
    value = {symbol: 3 + i for i, symbol in enumerate(sorted(parse(op.signature).symbols, reverse=True))}  # all different, k below E
    arguments = make_shapes(op, value)
    call = call_null(op, arguments)
    assert dict(call.symbols) == value
    cost = call_cost(call, {"keys": 100, "row_keys": 100})
    assert cost.bytes > 0 and cost.flops >= 0
    for name, array in arguments.items():
        if isinstance(array, ShapeOnly):
            flat = {**arguments, name: ShapeOnly((*array.shape, 1), array.dtype)}
            with pytest.raises(ShapeError, match=rf"^{op.name}: {name} "):
                call_null(op, flat)
            other = "u8" if array.dtype != "u8" else "i32"
            with pytest.raises(ShapeError, match=rf"^{op.name}: {name} .* is {other}"):
                call_null(op, {**arguments, name: ShapeOnly(array.shape, other)})
