"""The null reading of the vocabulary: checks every call and counts it, computes nothing, holds nothing.

A full-size model can be walked through this backend in milliseconds: each op call is bound to its
signature (so a wrong shape is found) and tallied with the values of its symbols (so its bytes, flops
and floor are known). `runtime.planning` prices the tally.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from runtime.chunks import ChunkShape
from runtime.cost import Cost
from runtime.ops import OPS, Op
from runtime.shapes import DTYPES, bind, parse
from runtime.source import Source
from runtime.w4 import GROUP

TOLD_BYTES = 16  # of a row that a rank tells for an argmax; a draw or a filter tells more
_WIDTH = {"bf16": 2, "f32": 4, "i16": 2, "i32": 4, "i64": 8, "u8": 1, "u32": 4, "u64": 8, "bool": 1}
_SHORT = {numpy_name: name for name, accepted in DTYPES.items() for numpy_name in accepted if (name, numpy_name) != ("bf16", "float32")}


@dataclass(frozen=True, slots=True)
class ShapeOnly:
    """An array without memory: shape and dtype ("bf16", "f32", "i32" …). Arithmetic on it is a TypeError."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in _WIDTH:
            raise ValueError(f"dtype {self.dtype!r} is unknown; known: {', '.join(_WIDTH)}")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * _WIDTH[self.dtype]

    def __len__(self) -> int:
        return self.shape[0]

    def reshape(self, *shape: int | tuple[int, ...]) -> ShapeOnly:
        """The same elements in another shape; one dimension may be -1."""
        wanted: tuple[int, ...] = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape  # type: ignore[assignment]
        if -1 in wanted:
            rest = math.prod(n for n in wanted if n != -1)
            wanted = tuple(self.size // max(rest, 1) if n == -1 else n for n in wanted)
        if math.prod(wanted) != self.size:
            raise ValueError(f"{list(self.shape)} holds {self.size} elements; {list(wanted)} wants {math.prod(wanted)}")
        return ShapeOnly(wanted, self.dtype)

    def __getitem__(self, key: Any) -> ShapeOnly:
        """Integers and slices, as NumPy reads them."""
        keys = key if isinstance(key, tuple) else (key,)
        if Ellipsis in keys:
            at = keys.index(Ellipsis)
            keys = keys[:at] + (slice(None),) * (self.ndim - len(keys) + 1) + keys[at + 1 :]
        if len(keys) > self.ndim:
            raise IndexError(f"{len(keys)} indices into {list(self.shape)}")
        shape: list[int] = []
        for size, part in zip(self.shape, keys, strict=False):
            if isinstance(part, slice):
                shape.append(len(range(*part.indices(size))))
            elif not -size <= part < size:
                raise IndexError(f"index {part} into a dimension of {size} of {list(self.shape)}")
        return ShapeOnly((*shape, *self.shape[len(keys) :]), self.dtype)


@dataclass(frozen=True, slots=True)
class PackedShape:
    """A packed INT4 weight without memory: E experts of [N, K] codes with a bf16 scale for each 32 of K."""

    E: int
    N: int
    K: int

    @property
    def code_bytes(self) -> int:
        return self.E * self.N * self.K // 2

    @property
    def scale_bytes(self) -> int:
        return self.E * self.N * self.K // GROUP * 2

    @property
    def nbytes(self) -> int:
        return self.code_bytes + self.scale_bytes


class Call(NamedTuple):
    """One distinct op call: its name and the value of each symbol of its signature."""

    op: str
    symbols: tuple[tuple[str, int], ...]


class Collective(NamedTuple):
    """One distinct collective: its name, rows, and the bytes that a row of its result holds."""

    op: str
    rows: int
    row_bytes: int


class NullBackend:
    """Every op of the vocabulary as a method that checks shapes and counts the call.

    `calls` counts the distinct calls, `weight_bytes` and `cache_bytes` what param and zeros were
    asked for, `buffers` the named buffers in the largest size asked for.
    """

    name = "null"

    def __init__(self) -> None:
        self.calls: Counter[Call] = Counter()
        self.buffers: dict[str, int] = {}
        self.weight_bytes = 0
        self.cache_bytes = 0

    if TYPE_CHECKING:

        def __getattr__(self, op: str) -> Callable[..., None]: ...

    def param(self, array: Any) -> ShapeOnly:
        """A weight, of which only shape and dtype are kept."""
        kept = shape_of(array)
        self.weight_bytes += kept.nbytes
        return kept

    def param_w4(self, packed: Any) -> PackedShape:
        kept = PackedShape(packed.E, packed.N, packed.K)
        self.weight_bytes += kept.nbytes
        return kept

    def zeros(self, shape: tuple[int, ...], dtype: str = "bf16") -> ShapeOnly:
        cache = ShapeOnly(tuple(shape), dtype)
        self.cache_bytes += cache.nbytes
        return cache

    def buffer(self, name: str, shape: tuple[int, ...], dtype: str = "bf16") -> ShapeOnly:
        held = ShapeOnly(tuple(shape), dtype)
        self.buffers[name] = max(self.buffers.get(name, 0), held.nbytes)
        return held

    def chunk_room(self, shape: ChunkShape) -> int:
        """0: what a step must cost is counted in the absorbed form."""
        return 0

    def host(self, array: ShapeOnly) -> ShapeOnly:
        return array


class NullComm:
    """The peers of a rank that are not there: counts collectives by rows and the bytes of one."""

    rank = 0

    def __init__(self, world: int) -> None:
        self.world = world
        self.calls: Counter[Collective] = Counter()

    def all_reduce(self, x: ShapeOnly) -> None:
        if self.world > 1:
            self.calls[Collective("all_reduce", len(x), x[:1].nbytes)] += 1

    def all_reduce_norm(self, ops: Any, x: ShapeOnly, delta: ShapeOnly, w: ShapeOnly, eps: float, *, out: ShapeOnly) -> None:
        self.all_reduce(delta)
        ops.add_rms_norm(x, delta, w, eps, out=out)

    def top_logprobs(self, ops: Any, logits: ShapeOnly, *, ids: ShapeOnly, logp: ShapeOnly) -> None:
        ops.top_logprobs(logits, ids=ids, logp=logp)
        if self.world > 1:  # id and logit of each, and a sum
            self.calls[Collective("all_gather", len(ids), self.world * 8 * (ids.shape[1] + 1))] += 1

    def sample(self, ops: Any, logits: ShapeOnly, drawing: Sequence[Any], **outputs: ShapeOnly) -> None:
        ops.sample(logits, *drawing, **outputs)
        if self.world > 1:  # of each rank its best token, and whether all is finite
            self.calls[Collective("all_gather", len(logits), self.world * TOLD_BYTES)] += 1

    def all_gather(self, x: ShapeOnly, *, out: ShapeOnly) -> None:
        wanted = (x.shape[0], x.shape[1] * self.world)
        if out.shape != wanted or out.dtype != x.dtype:
            raise ValueError(f"all_gather over {self.world} ranks: out is {list(out.shape)} {out.dtype}; want {list(wanted)} {x.dtype}")
        if self.world > 1:
            self.calls[Collective("all_gather", len(out), out[:1].nbytes)] += 1


class NullNeighbours:
    """Stages that are not there: counts what is sent; what is received was counted by its sender."""

    def __init__(self, comm: NullComm) -> None:
        self._calls = comm.calls

    def receive(self, x: ShapeOnly) -> None:
        return None

    def send(self, x: ShapeOnly) -> None:
        self._calls[Collective("send", x.shape[1], x.shape[0] * x[0, :1].nbytes)] += 1


def call_cost(call: Call, known: Mapping[str, float]) -> Cost:
    """The cost of one call. `known` adds what no shape holds (keys, distinct experts) and may replace
    a symbol: the same call with M = 64 rows instead of those it was counted with."""
    return OPS[call.op].cost({**dict(call.symbols), **known})


def shape_of(array: Any) -> ShapeOnly:
    """The shape and dtype of a NumPy array or a weight's source, or of a ShapeOnly itself."""
    if isinstance(array, ShapeOnly):
        return array
    if isinstance(array, Source):
        return ShapeOnly(array.shape, array.dtype)
    return ShapeOnly(tuple(array.shape), _SHORT[array.dtype.name])


def _method(op: Op) -> Callable[..., None]:
    signature = parse(op.signature)
    positional = [p.name for p in signature.inputs]

    def call(self: NullBackend, *inputs: Any, **outputs: Any) -> None:
        if len(inputs) > len(positional):
            raise TypeError(f"{op.name} takes {len(positional)} inputs and got {len(inputs)}; outputs go by keyword")
        bound = bind(op.name, signature, dict(zip(positional, inputs, strict=False), **outputs))
        self.calls[Call(op.name, tuple(bound.items()))] += 1

    call.__name__ = op.name
    call.__doc__ = f"{op.signature}\n\n{op.doc}"
    return call


for _op in OPS.values():
    setattr(NullBackend, _op.name, _method(_op))
