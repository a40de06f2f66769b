from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.ops import OPS
from runtime.shapes import ShapeError, bind, parse

LINEAR = "x: [M, K] bf16, w: [N, K] bf16 -> out: [M, N] bf16"


def f32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def test_parse_reads_every_kind_of_parameter() -> None:
    inputs = "x: inout [M, 2*F] bf16, w: [E, N, K] w4, pages: [B, 7] i32, first: int, eps: float"
    signature = parse(f"{inputs} -> out: [M, F] bf16, ok: [M] bool")
    assert [p.name for p in signature.inputs] == ["x", "w", "pages", "first", "eps"]
    assert [p.inout for p in signature.inputs] == [True, False, False, False, False]
    assert [p.shape_text for p in signature.params] == ["[M, 2*F]", "[E, N, K]", "[B, 7]", "", "", "[M, F]", "[M]"]
    assert signature.symbols == {"M", "F", "E", "N", "K", "B", "first"}
    assert parse("cache: inout [S] bf16 ->").outputs == ()


BAD_SIGNATURES = [
    ("x [M] bf16 -> out: [M] bf16", "not `name: type`"),
    ("x: [M] f64 -> out: [M] bf16", "does not end in one of"),
    ("x: complex -> out: [M] bf16", "neither an array nor one of"),
    ("x: [M] bf16 -> x: [M] bf16", "named twice"),
    ("x: [M**2] bf16 -> out: [M] bf16", "symbols, integers and"),
    ("x: [f(M)] bf16 -> out: [M] bf16", "symbols, integers and"),
    ("x: [M+] bf16 -> out: [M] bf16", "can not be read"),
    ("x: [L+R] bf16 -> out: [M] bf16", "can not be solved"),
    ("w: [N, K] w4 -> out: [M] bf16", "three dims"),
    ("x: [M] bf16 -> eps: float", "must be a plain array"),
    ("x: [M] bf16 -> out: inout [M] bf16", "must be a plain array"),
]


@pytest.mark.parametrize(("text", "said"), BAD_SIGNATURES)
def test_a_bad_signature_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="signature") as error:
        parse(text)
    assert said in str(error.value)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_every_signature_of_the_vocabulary_parses(op) -> None:
    signature = parse(op.signature)
    assert signature.outputs or any(p.inout for p in signature.inputs), f"{op.name} writes nothing"


def test_bind_returns_every_symbol() -> None:
    arrays = {"x": f32(3, 8), "w": f32(5, 8), "out": f32(3, 5)}
    assert bind("linear", LINEAR, arrays) == {"M": 3, "K": 8, "N": 5}


def test_the_result_is_the_callers_own() -> None:
    arrays = {"x": f32(3, 8), "w": f32(5, 8), "out": f32(3, 5)}
    bind("linear", LINEAR, arrays)["M"] = 99
    assert bind("linear", LINEAR, arrays)["M"] == 3


def test_expressions_are_checked_and_solved() -> None:
    signature = "q: [M, A*(N+R)] bf16, w: [A, L, N] bf16, cache: [S, L+R] bf16 -> out: [M, A] bf16"
    arrays = {"q": f32(2, 4 * (8 + 3)), "w": f32(4, 16, 8), "cache": f32(9, 19), "out": f32(2, 4)}
    assert bind("op", signature, arrays)["R"] == 3
    with pytest.raises(ShapeError, match=r"A\*\(N\+R\) is 44 .*R = 3.* but 48 in q \[2, 48\]|L\+R is .* but"):
        bind("op", signature, {**arrays, "q": f32(2, 48)})
    with pytest.raises(ShapeError, match=r"no R makes A\*\(N\+R\) .* equal to 45"):
        bind("op", signature, {**arrays, "q": f32(2, 45)})


def test_a_mismatch_names_op_symbol_both_values_and_both_arrays() -> None:
    with pytest.raises(ShapeError, match=r"^linear: K is 8 in x \[3, 8\] but 9 in w \[5, 9\]$"):
        bind("linear", LINEAR, {"x": f32(3, 8), "w": f32(5, 9), "out": f32(3, 5)})


FAULTS = [
    ({"x": f32(3, 8).astype(np.float64)}, "x [3, 8] is float64; the signature wants bf16"),
    ({"x": f32(3, 8).astype(np.float16)}, "x [3, 8] is float16"),
    ({"x": f32(24)}, "x [24] has 1 dimensions; [M, K] has 2"),
    ({"out": f32(4, 5)}, "M is 3 in x [3, 8] but 4 in out [4, 5]"),
    ({"w": None}, "w wants [N, K] bf16 and got NoneType"),
    ({"w": [[0.0]]}, "w wants [N, K] bf16 and got list"),
    ({"bias": f32(5)}, "bias not in the signature"),
]


@pytest.mark.parametrize(("change", "said"), FAULTS)
def test_faults(change: dict, said: str) -> None:
    arrays = {"x": f32(3, 8), "w": f32(5, 8), "out": f32(3, 5)}
    bind("linear", LINEAR, arrays)
    with pytest.raises(ShapeError) as error:
        bind("linear", LINEAR, {**arrays, **change})
    assert said in str(error.value)


def test_a_missing_array_is_named() -> None:
    with pytest.raises(ShapeError, match="out missing"):
        bind("linear", LINEAR, {"x": f32(3, 8), "w": f32(5, 8)})


def test_bf16_may_be_held_in_either_way() -> None:
    arrays = {"x": f32(3, 8).astype(ml_dtypes.bfloat16), "w": f32(5, 8), "out": f32(3, 5)}
    assert bind("linear", LINEAR, arrays)["M"] == 3


def test_numbers_in_dims_and_scalars() -> None:
    signature = "moves: [n, 2] i32, k: int, eps: float -> out: [n, k] f32"
    arrays = {"moves": np.zeros((3, 2), np.int32), "k": 4, "eps": 1e-5, "out": f32(3, 4)}
    assert bind("op", signature, arrays) == {"n": 3, "k": 4}
    assert bind("op", signature, {**arrays, "k": np.int64(4), "eps": np.float32(1)})["k"] == 4
    for change, said in (
        ({"moves": np.zeros((3, 3), np.int32)}, "dimension 1 of moves"),
        ({"k": 5}, r"k is 5 in k = 5 but 4 in out"),
        ({"k": 4.0}, "k wants int"),
        ({"k": True}, "k wants int"),
        ({"eps": "small"}, "eps wants float"),
        ({"eps": f32(1)}, "eps wants float"),
    ):
        with pytest.raises(ShapeError, match=said):
            bind("op", signature, {**arrays, **change})


def test_a_packed_weight_binds_its_logical_dims() -> None:
    signature = "x: [M, K] bf16, w: [E, 2*F, K] w4 -> out: [M, F] bf16"
    packed = SimpleNamespace(E=4, N=12, K=64)
    arrays = {"x": f32(2, 64), "w": packed, "out": f32(2, 6)}
    assert bind("op", signature, arrays) == {"M": 2, "K": 64, "E": 4, "F": 6}
    assert bind("op", signature, {**arrays, "w": SimpleNamespace(packed=packed)})["E"] == 4
    with pytest.raises(ShapeError, match="w wants"):
        bind("op", signature, {**arrays, "w": np.zeros((4, 12, 64), np.uint8)})
    with pytest.raises(ShapeError, match=r"2\*F is 12 .* but 14 in w \[4, 14, 64\]"):
        bind("op", signature, {**arrays, "w": SimpleNamespace(E=4, N=14, K=64)})


@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 64), st.integers(1, 9))
def test_solving_inverts_the_expression(n: int, latent: int, r: int, heads: int) -> None:
    signature = "q: [M, A*(N+R)-2*L] bf16, w: [A, L, N] bf16 -> out: [M] bf16"
    arrays = {"q": SimpleNamespace(shape=(1, heads * (n + r) - 2 * latent), dtype="bf16"), "w": f32(heads, latent, n), "out": f32(1)}
    assert bind("op", signature, arrays)["R"] == r
