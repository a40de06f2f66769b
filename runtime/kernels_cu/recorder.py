"""How an op becomes launches: checked against its signature, its scratch taken from the arena, appended to a list, not run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from runtime.chunks import ChunkShape
from runtime.cost import ZERO_COST, Cost
from runtime.hw import HARDWARE, Hardware
from runtime.kernels_cu._call import Call
from runtime.kernels_cu.arena import Arena
from runtime.kernels_cu.array import NUMPY, DeviceArray, dtype_name
from runtime.kernels_cu.chunk_attention import room_for
from runtime.kernels_cu.device import Device, Runnable
from runtime.kernels_cu.plan_io import MOST_UNIONS
from runtime.kernels_cu.residency import Loader
from runtime.kernels_cu.tree_paths import PathPages
from runtime.ops import OPS
from runtime.shapes import bind, parse
from runtime.source import Source, W4Source
from runtime.types import Array
from runtime.w4 import W4, expert_bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One prepared launch. symbols: of the op's signature, on the first launch of an op; the others have none."""

    op: str
    symbols: Mapping[str, int]
    run: Runnable

    def cost(self, known: Mapping[str, float] | None = None) -> Cost:
        """The op's cost on its first launch, nothing on the others. known: what no shape holds (keys, distinct), or a symbol's
        true value where the bucket is not full (M, B, I)."""
        return OPS[self.op].cost({**self.symbols, **(known or {})}) if self.symbols else ZERO_COST


@dataclass(frozen=True, slots=True)
class Live:
    """Addresses of counts (i32) in device memory: how much of a bucket's fixed capacity is live. 0: this recording has none.

    rows: of the rows that gather_rows picks, and with them of sample's and top_logprobs'.
    """

    rows: int = 0
    moves: int = 0
    adjust_seq: int = 0
    adjust_row: int = 0
    masks: int = 0


@dataclass(frozen=True, slots=True)
class DeviceW4:
    """Packed INT4 experts on the device: E matrices [N, K], `runtime.w4`'s bytes at `address`."""

    address: int
    E: int
    N: int
    K: int
    read_exponent: Callable[[], int]
    interleaved: bool

    @property
    def exponent(self) -> int:
        """As `W4.exponent`; waits for weights that are on their way."""
        return self.read_exponent()


@dataclass(frozen=True, slots=True)
class Routing:
    """A router's product that waits for its experts: logits [M, E] f32, and what makes choices of them."""

    logits: int
    bias: int
    scale: float
    expert: DeviceArray
    weight: DeviceArray


@dataclass(frozen=True, slots=True)
class Chunks:
    """The rows that a recording attends un-absorbed: address of their marks, keys that there is room for, addresses of the lists."""

    rest: int
    room: int
    lists: Mapping[str, int]


class Recorder:
    """Memory and the list of launches. invariant: one configuration of every op whatever the bucket, so that a row's bits are
    the same in all of them."""

    def __init__(self, device: Device, invariant: bool = False) -> None:
        self.device = device
        self.invariant = invariant
        self.hw: Hardware = HARDWARE.get(device.gpu, HARDWARE["h200"])
        self.arena = Arena(device)
        self.recorded: list[Recorded] = []
        self.weight_bytes = 0
        self.moe_layers = 0  # whose experts are here
        self.unions: list[tuple[int, int]] = []  # work lists (chunks, total) of this recording's layers that `count_experts` chose
        self._recorded_layers = 0
        self.loader: Loader | None = None
        self.live = Live()
        self.routing: Routing | None = None  # between a route and its moe_w4
        self.planned: tuple[Any, ...] | None = None  # the attention plan that this recording holds
        self.chunks: Chunks | None = None  # once split_chunks is recorded
        self.paths: PathPages | None = None  # of draft trees, and where they lie; None: trees keep their keys at node positions
        self.path_slots = DeviceArray(0, (0, 0), "bf16")
        self.single_rows = False  # nothing is drafted: a step of no more rows than there may be sequences has one of each
        self._alive: DeviceArray | None = None
        self._choices: dict[Any, Any] = {}
        self._op: tuple[str, Mapping[str, int]] = ("", {})

    # ------------------------------------------------------------ memory
    def param(self, weight: Array | Source) -> DeviceArray:
        """A weight, copied to the device as it is: bf16, f32 or an integer. A source may still be on its way until `settle`."""
        if isinstance(weight, Source):
            streamed = DeviceArray(self.device.alloc(weight.nbytes), weight.shape, weight.dtype)
            self.loading().source(weight, streamed.address)
            self.weight_bytes += weight.nbytes
            return streamed
        # as bits: NumPy copies a foreign dtype with Python's lock held, 10 ms for w_uk of Kimi K2.6, and no reader goes on
        host = np.ascontiguousarray(weight.view(np.uint16) if weight.dtype == ml_dtypes.bfloat16 else weight)
        made = DeviceArray(self.device.alloc(host.nbytes), tuple(host.shape), dtype_name(weight))
        self.device.upload(made.address, host)
        self.weight_bytes += host.nbytes
        return made

    def param_w4(self, weight: W4 | W4Source) -> DeviceW4:
        """INT4 experts in the one packed layout; a source's triples are packed on the device."""
        nbytes = weight.E * expert_bytes(weight.N, weight.K)
        address = self.device.alloc(nbytes)
        self.weight_bytes += nbytes
        self.moe_layers += weight.interleaved  # gate and up, once a layer
        if isinstance(weight, W4Source):
            exponent = self.loading().experts(weight, address)
        else:
            self.device.upload(address, np.ascontiguousarray(weight.data))
            exponent = partial(int, weight.exponent)
        return DeviceW4(address, weight.E, weight.N, weight.K, exponent, weight.interleaved)

    def settle(self) -> None:
        """All weights asked for so far are there for what the device does next; what fetched them is given back."""
        if self.loader is not None:
            self.loader.close()
            self.loader = None

    def loading(self) -> Loader:
        """What fetches weights from files: made when it is first needed, gone after `settle`."""
        if self.loader is None:
            self.loader = Loader(self.device, self.device.link())
        return self.loader

    def zeros(self, shape: tuple[int, ...], dtype: str = "bf16") -> DeviceArray:
        """A cache: memory that outlives a step."""
        empty = DeviceArray(0, tuple(shape), dtype)
        return DeviceArray(self.device.alloc(empty.nbytes), empty.shape, dtype)

    def latent_cache(self, layers: int, slots: int, width: int, paths: PathPages | None = None) -> DeviceArray:
        """The cache that tree_mla reads, [layers, slots, width] bf16; behind its last layer, in the same memory, `paths`."""
        more = paths.slots if paths is not None else 0
        whole = self.zeros((layers * slots + more, width))
        self.paths, self.path_slots = paths, whole[layers * slots :]
        return whole[: layers * slots].reshape(layers, slots, width)

    def buffer(self, name: str, shape: tuple[int, ...], dtype: str = "bf16") -> DeviceArray:
        """The buffer of that name, viewed in `shape`; contents undefined."""
        return self.arena.buffer(name, tuple(shape), dtype)

    def chunk_room(self, shape: ChunkShape) -> int:
        """Keys that a step of that shape has room to expand for chunk_attention; 0: all its rows are attended absorbed."""
        return 0 if self.invariant else room_for(shape, self.device.arch)

    def seal(self) -> None:
        """No buffer grows from now on."""
        self.arena.seal()

    def host(self, array: DeviceArray) -> Array:
        """A copy on the host of what the launches run so far have left there."""
        self.settle()
        out = np.empty(array.shape, NUMPY[array.dtype])
        self.device.download(array.flat, out.view(np.uint16) if array.dtype == "bf16" else out)
        return out

    def scratch(self, family: str, sizes: Mapping[str, int]) -> dict[str, int]:
        """Addresses of a family's scratch arrays by field: shared by all layers and buckets, zero when they are made."""
        return {field: self.arena.take(f"{family}.{field}", nbytes) for field, nbytes in sizes.items()}

    def count_experts(self, at: dict[str, int], sizes: Mapping[str, int]) -> None:
        """Gives the work list of every n-th layer a place of its own in `at`, so that it is still there when the step is done.

        n is the least that leaves MOST_UNIONS layers: the count is the mean of all layers of a model of up to 8, else of 5 to 8
        evenly spread ones. A list of its own is cold when the layer writes it: an estimated 0.5 us each, too much for all 60
        layers of Kimi K2.6 (GPU-unverified).
        """
        layer, every = self._recorded_layers, -(-self.moe_layers // MOST_UNIONS)
        self._recorded_layers += 1
        if every and layer % every == 0 and len(self.unions) < MOST_UNIONS:
            at |= self.scratch(f"moe_w4.{layer}", {name: sizes[name] for name in ("chunks", "total")})
            self.unions.append((at["chunks"], at["total"]))

    # ------------------------------------------------------------ launches
    @contextmanager
    def recording(self, alive: DeviceArray | None = None, live: Live | None = None) -> Iterator[list[Recorded]]:
        """Starts a fresh list, `recorded`, and yields it. alive [M] i32: negative where a row is dead (seq, tap_slot); None: no
        row is. live: where the counts of this recording stand."""
        self.settle()
        self.recorded, self._alive, self.live = [], alive, live or Live()
        self.unions, self._recorded_layers = [], 0
        self.routing = self.planned = self.chunks = None
        try:
            yield self.recorded
            if self.routing is not None:
                raise RuntimeError("route was recorded without the moe_w4 that makes its choices")
        finally:
            self._alive, self.live = None, Live()
            self.routing = self.planned = self.chunks = None

    def alive(self, rows: int) -> int:
        """The address of the dead rows' marks for an op over that many rows of the bucket; 0: none is dead."""
        if self._alive is None:
            return 0
        if self._alive.shape != (rows,) or self._alive.dtype != "i32":
            raise ValueError(
                f"{self._op[0]}: {rows} rows, but dead rows are marked by {list(self._alive.shape)} {self._alive.dtype}; want [{rows}] i32"
            )
        return self._alive.flat

    def counted(self, name: str) -> int:
        """The address of a live count. Raises ValueError where the recording has none."""
        address: int = getattr(self.live, name)
        if not address:
            raise ValueError(f"{self._op[0]}: recording(live=…) names no count of {name}")
        return address

    def choose(self, key: tuple[Any, ...], choice: Callable[[], T]) -> T:
        """The configuration for a key (family and shape): chosen once, for 61 layers ask."""
        if key not in self._choices:
            self._choices[key] = choice()
        made: T = self._choices[key]
        return made

    def launch(self, call: Call, functions: Mapping[str, Any], keep: tuple[Any, ...] = ()) -> None:
        self.append(self.device.prepare(call, functions, keep))

    def append(self, run: Runnable) -> None:
        """A launch of the op that is being recorded; the first of an op carries its symbols."""
        op, symbols = self._op
        self.recorded.append(Recorded(op, symbols, run))
        self._op = op, {}

    @contextmanager
    def op(self, name: str, symbols: Mapping[str, int]) -> Iterator[None]:
        self._op = name, symbols
        try:
            yield
        finally:
            self._op = "", {}


def op(body: Callable[..., None]) -> Callable[..., None]:
    """A method of the vocabulary from its launches: the call is bound to the signature of the op of that name first."""
    entry = OPS[body.__name__]
    signature = parse(entry.signature)
    names = [p.name for p in signature.inputs]

    def call(self: Recorder, *inputs: Any, **outputs: Any) -> None:
        if len(inputs) > len(names):
            raise TypeError(f"{entry.name} takes {len(names)} inputs and got {len(inputs)}; outputs go by keyword")
        symbols = bind(entry.name, signature, dict(zip(names, inputs, strict=False), **outputs))
        if math.prod(symbols.get(letter, 1) for letter in ("M", "I", "n")) == 0:
            return  # nothing to do, and no grid of nothing
        with self.op(entry.name, symbols):
            body(self, *inputs, **outputs)

    call.__name__ = entry.name
    call.__doc__ = f"{entry.signature}\n\n{entry.doc}"
    return call
