"""Shape checks with named symbols: the small language of op signatures.

    x: [M, H] bf16, w: [N, H] bf16, eps: float -> out: [M, N] bf16

A parameter is `name: [dims] dtype`, `name: inout [dims] dtype`, or a scalar `name: float`. A
dimension is a symbol, a number, or an expression of symbols (`A*U`, `2*F`, `L+R`, `K//8`). `w4` is a
packed INT4 weight whose dims are its logical [E, N, K]. An `int` scalar binds its own name.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, NoReturn

Dim = int | str | ast.expr  # a number, a plain symbol, or an expression of symbols
Form = tuple[tuple[int, ...], Any]  # what a check sees of a value: shape and dtype

# What an array may hold for each dtype of a signature. bf16 in the NumPy reading is a float32
# array of bf16-rounded values, so both are accepted; a float64 that slipped in is not.
DTYPES: dict[str, tuple[str, ...]] = {
    "bf16": ("bfloat16", "float32"),
    "f32": ("float32",),
    "i16": ("int16",),
    "i32": ("int32",),
    "i64": ("int64",),
    "u8": ("uint8",),
    "u32": ("uint32",),
    "u64": ("uint64",),
    "bool": ("bool",),
    "w4": ("w4",),
}
SCALARS = ("int", "float")
_OPERATORS: tuple[type[ast.operator], ...] = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv)


class ShapeError(ValueError):
    """An array does not fit its op's signature; the text names op, symbol, both values and both arrays."""


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter. dims is None for a scalar."""

    name: str
    dtype: str
    dims: tuple[Dim, ...] | None
    inout: bool = False

    @property
    def shape_text(self) -> str:
        return "" if self.dims is None else "[" + ", ".join(dim_text(d) for d in self.dims) + "]"


@dataclass(frozen=True, eq=False)  # parse() gives one object for one text: identity is equality
class Signature:
    """Parameters in order; an inout parameter stands among the inputs."""

    text: str
    inputs: tuple[Param, ...]
    outputs: tuple[Param, ...]

    @cached_property
    def params(self) -> tuple[Param, ...]:
        return self.inputs + self.outputs

    @cached_property
    def symbols(self) -> frozenset[str]:
        """Names that bind() returns."""
        dims = [d for p in self.params for d in p.dims or ()]
        named = {d for d in dims if isinstance(d, str)}.union(*(_names(d) for d in dims if isinstance(d, ast.expr)))
        return frozenset(named | {p.name for p in self.params if p.dtype == "int"})


def dim_text(dim: Dim) -> str:
    return ast.unparse(dim).replace(" ", "") if isinstance(dim, ast.expr) else str(dim)


@cache
def parse(text: str) -> Signature:
    """Reads a signature; ValueError quotes the part that can not be read."""
    left, arrow, right = text.partition("->")
    inputs = tuple(_parse_param(part, text) for part in _split(left))
    outputs = tuple(_parse_param(part, text) for part in _split(right)) if arrow else ()
    signature = Signature(text, inputs, outputs)
    names = [p.name for p in signature.params]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"signature {text!r}: {name!r} is named twice")
    for param in outputs:
        if param.dims is None or param.inout:
            raise ValueError(f"signature {text!r}: output {param.name!r} must be a plain array")
    _check_bindable(signature)
    return signature


def _check_bindable(sig: Signature) -> None:
    """Every symbol must be read off a plain dimension or be the one unknown of an expression."""
    bound = {d for p in sig.params for d in p.dims or () if isinstance(d, str)} | {p.name for p in sig.params if p.dtype == "int"}
    pending = [d for p in sig.params for d in p.dims or () if isinstance(d, ast.expr)]
    while pending:
        ready = [d for d in pending if len(_names(d) - bound) <= 1]
        if not ready:
            raise ValueError(f"signature {sig.text!r}: {', '.join(map(dim_text, pending))} can not be solved for their symbols")
        for expr in ready:
            bound |= _names(expr)
        pending = [d for d in pending if d not in ready]


def _split(text: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char in "[(") - (char in "])")
        if char == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    parts.append(current)
    return [part.strip() for part in parts if part.strip()]


def _parse_param(part: str, text: str) -> Param:
    name, colon, rest = (piece.strip() for piece in part.partition(":"))
    if not colon or not name.isidentifier():
        raise ValueError(f"signature {text!r}: {part!r} is not `name: type`")
    inout = rest.startswith("inout ")
    rest = rest.removeprefix("inout ").strip()
    if not rest.startswith("["):
        if rest not in SCALARS or inout:
            raise ValueError(f"signature {text!r}: {part!r} is neither an array nor one of {', '.join(SCALARS)}")
        return Param(name, rest, None)
    inner, bracket, dtype = rest[1:].rpartition("]")
    dtype = dtype.strip()
    if not bracket or dtype not in DTYPES:
        raise ValueError(f"signature {text!r}: {part!r} does not end in one of {', '.join(DTYPES)}")
    dims = tuple(_parse_dim(d, text) for d in _split(inner))
    if dtype == "w4" and len(dims) != 3:
        raise ValueError(f"signature {text!r}: {part!r}: a w4 weight has three dims, [E, N, K]")
    return Param(name, dtype, dims, inout)


def _parse_dim(dim: str, text: str) -> Dim:
    try:
        tree = ast.parse(dim, mode="eval").body
    except SyntaxError:
        raise ValueError(f"signature {text!r}: dimension {dim!r} can not be read") from None
    if isinstance(tree, ast.Constant) and type(tree.value) is int:
        return tree.value
    if isinstance(tree, ast.Name):
        return tree.id
    for node in ast.walk(tree):
        integer = isinstance(node, ast.Constant) and type(node.value) is int
        if not integer and not isinstance(node, (ast.BinOp, ast.Name, ast.Load, *_OPERATORS)):
            raise ValueError(f"signature {text!r}: dimension {dim!r} may hold symbols, integers and + - * // only")
    return tree


def _names(expr: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(expr) if isinstance(node, ast.Name)}


def _value(expr: ast.expr, bound: Mapping[str, int]) -> int:
    if isinstance(expr, ast.Constant):
        return int(expr.value)  # type: ignore[arg-type]  # _parse_dim let integers pass only
    if isinstance(expr, ast.Name):
        return bound[expr.id]
    if not isinstance(expr, ast.BinOp):
        raise TypeError(f"{ast.dump(expr)} is no dimension")
    left, right = _value(expr.left, bound), _value(expr.right, bound)
    match expr.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case _:
            return left // right


def bind(op_name: str, signature: Signature | str, arrays: Mapping[str, Any]) -> dict[str, int]:
    """Checks every array against the signature and returns the value of every symbol.

    `arrays` maps each parameter's name to a NumPy-like array (shape, dtype), a packed weight (E, N,
    K) or a scalar. Plain symbols are bound first, then expressions are checked against them, or
    solved for their one unknown. ShapeError names op, symbol, both values and both arrays. A set of
    shapes seen before costs a few microseconds.
    """
    sig = parse(signature) if isinstance(signature, str) else signature
    if len(arrays) != len(sig.params) or any(p.name not in arrays for p in sig.params):
        _raise_names(op_name, sig, arrays)
    return dict(_bind_forms(op_name, sig, tuple([_form(op_name, p, arrays[p.name]) for p in sig.params])))


def _raise_names(op_name: str, sig: Signature, arrays: Mapping[str, Any]) -> NoReturn:
    names = {p.name for p in sig.params}
    missing, extra = sorted(names - arrays.keys()), sorted(arrays.keys() - names)
    said = [f"{', '.join(missing)} missing"] if missing else []
    said += [f"{', '.join(extra)} not in the signature"] if extra else []
    raise ShapeError(f"{op_name}: {'; '.join(said)}; the signature is {sig.text}")


def _form(op_name: str, param: Param, value: Any) -> Form:
    """What bind needs to know of a value: (shape, dtype), or ((), number) of an int scalar."""
    try:
        if param.dtype == "w4":
            packed = getattr(value, "packed", value)  # a backend may wrap the weight it was given
            return (packed.E, packed.N, packed.K), "w4"
        if param.dims is not None:
            return tuple(value.shape), value.dtype
    except AttributeError:
        wanted = f"{param.shape_text} {param.dtype}"
        raise ShapeError(f"{op_name}: {param.name} wants {wanted} and got {type(value).__name__}") from None
    integer = not isinstance(value, bool) and hasattr(value, "__index__")
    number = integer or (param.dtype == "float" and hasattr(value, "__float__"))
    if not number or isinstance(value, bool) or getattr(value, "shape", ()) != ():
        raise ShapeError(f"{op_name}: {param.name} wants {param.dtype} and got {value!r} ({type(value).__name__})")
    return (), (int(value) if param.dtype == "int" else 0)


@lru_cache(maxsize=8192)
def _bind_forms(op_name: str, sig: Signature, forms: tuple[Form, ...]) -> dict[str, int]:
    bound: dict[str, int] = {}
    origin: dict[str, str] = {}
    later: list[tuple[Param, int, ast.expr, tuple[int, ...]]] = []
    for param, (shape, dtype) in zip(sig.params, forms, strict=True):
        if param.dims is None:
            if param.dtype == "int":
                _bind_symbol(op_name, param.name, dtype, f"{param.name} = {dtype}", bound, origin)
            continue
        _check_form(op_name, param, shape, dtype)
        for axis, (dim, size) in enumerate(zip(param.dims, shape, strict=True)):
            if isinstance(dim, str):
                _bind_symbol(op_name, dim, size, f"{param.name} {list(shape)}", bound, origin)
            elif isinstance(dim, ast.expr):
                later.append((param, axis, dim, shape))
            elif dim != size:
                raise ShapeError(f"{op_name}: dimension {axis} of {param.name} {list(shape)} is {size}; {param.shape_text} wants {dim}")
    while later:
        ready = [entry for entry in later if len(_names(entry[2]) - bound.keys()) <= 1]
        for param, axis, expr, shape in ready:
            _check_expression(op_name, param, axis, expr, shape, bound, origin)
        later = [entry for entry in later if entry not in ready]
    return bound


def _check_form(op_name: str, param: Param, shape: tuple[int, ...], dtype: Any) -> None:
    name = getattr(dtype, "name", str(dtype))
    if name != param.dtype and name not in DTYPES[param.dtype]:  # a shape without memory names its dtype as we do
        raise ShapeError(f"{op_name}: {param.name} {list(shape)} is {name}; the signature wants {param.dtype}")
    wanted = len(param.dims or ())
    if len(shape) != wanted:
        raise ShapeError(f"{op_name}: {param.name} {list(shape)} has {len(shape)} dimensions; {param.shape_text} has {wanted}")


def _bind_symbol(op_name: str, symbol: str, size: int, where: str, bound: dict[str, int], origin: dict[str, str]) -> None:
    if bound.setdefault(symbol, size) != size:
        raise ShapeError(f"{op_name}: {symbol} is {bound[symbol]} in {origin[symbol]} but {size} in {where}")
    origin.setdefault(symbol, where)


def _check_expression(
    op_name: str, param: Param, axis: int, expr: ast.expr, shape: tuple[int, ...], bound: dict[str, int], origin: dict[str, str]
) -> None:
    """Binds the expression's one unknown symbol, or checks its value if there is none."""
    unknown = _names(expr) - bound.keys()
    where = f"{param.name} {list(shape)}"
    given = ", ".join(f"{name} = {bound[name]} from {origin[name]}" for name in sorted(_names(expr) - unknown))
    if not unknown:
        wanted = _value(expr, bound)
        if wanted != shape[axis]:
            raise ShapeError(f"{op_name}: {dim_text(expr)} is {wanted} ({given}) but {shape[axis]} in {where}")
        return
    symbol = unknown.pop()
    size = _solve(expr, shape[axis], bound)
    if size is None or size < 0 or _value(expr, {**bound, symbol: size}) != shape[axis]:
        raise ShapeError(f"{op_name}: no {symbol} makes {dim_text(expr)} ({given}) equal to {shape[axis]} in {where}")
    _bind_symbol(op_name, symbol, size, f"{where}, {dim_text(expr)}", bound, origin)


def _solve(expr: ast.expr, total: int, bound: Mapping[str, int]) -> int | None:
    """The value of the one unbound symbol that makes expr equal to total; None if there is none."""
    if isinstance(expr, ast.Name):
        return total
    if not isinstance(expr, ast.BinOp):
        return None
    left_known = not _names(expr.left) - bound.keys()
    known = _value(expr.left if left_known else expr.right, bound)
    rest = expr.right if left_known else expr.left
    match expr.op:
        case ast.Add():
            return _solve(rest, total - known, bound)
        case ast.Sub():
            return _solve(rest, known - total if left_known else known + total, bound)
        case ast.Mult() if known != 0 and total % known == 0:
            return _solve(rest, total // known, bound)
        case _:
            return None
