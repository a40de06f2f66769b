"""Products of more than 16 rows by cuBLASLt: described, an algorithm chosen at load, run or captured afterwards.

`describe` says which matrices, leading dimensions and strides a row-major out = x w^T is in cuBLAS's column-major terms.
`Lt.prepare` chooses an algorithm for it and returns what runs; only that may happen in a capture.

    fastest      up to eight suggestions, each timed with cold weights; one choice for every (shape, strides, alignment)
    invariant    one algorithm for all M of an (N, K): no split of K, fit for every M of PROBES, and the same rows with the same
                 bits at each of them, on the weights themselves; the fastest over PROBES

Choices are kept on disk by (device, library version), for an algorithm's bytes hold for one version only. On one H200,
N = K = 7168, the best of eight was 2.5 % faster than cublasGemmEx: what this brings is control, not speed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from runtime.kernels_cu.device import Device

R_16BF, R_32F, COMPUTE_32F = 14, 0, 68  # cudaDataType, cublasComputeType_t
OP_N, OP_T = 0, 1
WORKSPACE_BYTES = 32 << 20  # what Hopper's algorithms ask for
SUGGESTIONS = 8
PROBES = (1, 17, 64, 256, 1024)  # rows at which an invariant algorithm must fit and agree
PROBE_BYTES = 256 << 20  # of results; more rows than fit are not probed
_PATTERN_ROWS = 16
_ITEM = {R_16BF: 2, R_32F: 4}


@dataclass(frozen=True, slots=True)
class Layout:
    """A column-major matrix: element (r, c) of batch b lies at b batch_stride + c ld + r, in numbers of `kind`."""

    kind: int
    rows: int
    cols: int
    ld: int
    batch_stride: int


@dataclass(frozen=True, slots=True)
class Product:
    """D = op(A) op(B) for each of `batch`: A the weights, transposed, B the activations, D the result."""

    a: Layout
    b: Layout
    d: Layout
    op_a: int
    op_b: int
    batch: int
    compute: int = COMPUTE_32F


def describe(
    m: int, n: int, k: int, *, x_row: int, out_row: int, heads: int = 1, x_head: int = 0, out_head: int = 0, float_out: bool = False
) -> Product:
    """out [M, heads, N] = x [M, heads, K] w [heads, N, K]^T, with strides in numbers as in `linear_skinny.Dims`.

    Row-major w [N, K] is column-major [K, N] with ld K, so A is that, transposed; x is column-major [K, M] with ld x_row, out
    [N, M] with ld out_row. Raises ValueError where a row is longer than the step to the next.
    """
    if heads == 1 and (x_row < k or out_row < n):
        raise ValueError(f"linear_lt: rows of {k} and {n} numbers, but strides of {x_row} and {out_row}")
    weights = Layout(R_16BF, k, n, k, n * k)
    activations = Layout(R_16BF, k, m, x_row, x_head)
    result = Layout(R_32F if float_out else R_16BF, n, m, out_row, out_head)
    return Product(weights, activations, result, OP_T, OP_N, heads)


class Library(Protocol):
    """What is asked of cuBLASLt (`_cublaslt.CublasLt`). An algorithm is its opaque bytes."""

    @property
    def version(self) -> int: ...
    def open(self, product: Product, alignment: tuple[int, int, int]) -> Any: ...
    def suggest(self, problem: Any, most: int, workspace_bytes: int, split_k: bool) -> list[bytes]: ...
    def workspace_bytes(self, problem: Any, algo: bytes) -> int | None: ...
    def describe(self, algo: bytes) -> str: ...
    def multiplier(
        self, problem: Any, algo: bytes, a: int, b: int, d: int, workspace: int, workspace_bytes: int
    ) -> Callable[[int], None]: ...


class Watch(Protocol):
    """Microseconds of a run with cold weights (`_timing.Stopwatch`)."""

    def cold_us(self, run: Callable[[int], None]) -> float: ...


@dataclass(frozen=True, slots=True)
class LtProduct:
    """A product with its algorithm: run(stream) enqueues it or records it in a capture. keep: owners of the memory."""

    product: Product
    algo: bytes
    how: str
    run: Callable[[int], None]
    keep: tuple[Any, ...] = ()

    def __str__(self) -> str:
        p = self.product
        return f"{'cublasLtMatmul':<20} M {p.b.cols} N {p.a.cols} K {p.a.rows}{f' x{p.batch}' if p.batch > 1 else ''} {self.how}"


class Lt:
    """cuBLASLt on one device: library, workspace, the algorithms chosen so far. For one stream at a time (one workspace).

    folder: where choices are kept, None: nowhere.
    """

    def __init__(self, device: Device, library: Library, watch: Watch, folder: Path | None = None) -> None:
        self.device, self.library, self._watch = device, library, watch
        self._file = folder / f"{device.gpu}-{library.version}.json" if folder else None
        self._known: dict[str, str] = _read(self._file)
        self._workspace = device.alloc(WORKSPACE_BYTES)

    def prepare(self, product: Product, a: int, b: int, d: int, *, invariant: bool = False, keep: tuple[Any, ...] = ()) -> LtProduct:
        """Chooses an algorithm for d = a b (addresses) unless one is known, and returns the prepared call. Not in a capture.

        The choice runs the product: d is overwritten, and for invariant the weights at a must be there already. Raises
        ValueError where nothing fits.
        """
        alignment = _alignment(product, a, b, d)
        problem, key = self.library.open(product, alignment), key_of(product, alignment, invariant)
        algo = bytes.fromhex(self._known.get(key, ""))
        if not algo or self.library.workspace_bytes(problem, algo) is None:
            algo = self._choose_invariant(product, alignment, a) if invariant else self._choose_fastest(product, problem, a, b, d)
            self._known[key] = algo.hex()
            _write(self._file, key, algo.hex())
        return LtProduct(product, algo, self.library.describe(algo), self._run(problem, algo, a, b, d), keep)

    def _run(self, problem: Any, algo: bytes, a: int, b: int, d: int) -> Callable[[int], None]:
        return self.library.multiplier(problem, algo, a, b, d, self._workspace, WORKSPACE_BYTES)

    def _choose_fastest(self, product: Product, problem: Any, a: int, b: int, d: int) -> bytes:
        algos = self.library.suggest(problem, SUGGESTIONS, WORKSPACE_BYTES, split_k=True)
        if not algos:
            raise ValueError(f"linear_lt: cuBLASLt {self.library.version} suggests no algorithm for {product}")
        if len(algos) == 1:
            return algos[0]
        times = [self._watch.cold_us(self._run(problem, algo, a, b, d)) for algo in algos]
        return algos[times.index(min(times))]

    def _choose_invariant(self, product: Product, alignment: tuple[int, int, int], a: int) -> bytes:
        rows = [m for m in PROBES if m * _row_bytes(product.d) <= PROBE_BYTES] or [PROBES[0]]
        problems = {m: self.library.open(_with_rows(product, m), alignment) for m in rows}
        algos = [algo for m in rows for algo in self.library.suggest(problems[m], SUGGESTIONS, WORKSPACE_BYTES, split_k=False)]
        fitting = [x for x in dict.fromkeys(algos) if all(self.library.workspace_bytes(p, x) is not None for p in problems.values())]
        times: dict[bytes, float] = {}
        x, out = (self.device.alloc(rows[-1] * _row_bytes(layout)) for layout in (product.b, product.d))
        try:
            self.device.upload(x, _pattern(product, rows[-1]))
            for algo in fitting:
                runs = {m: self._run(p, algo, a, x, out) for m, p in problems.items()}
                if self._rows_agree(product, runs, out):
                    times[algo] = sum(self._watch.cold_us(run) for run in runs.values())
        finally:
            self.device.free(x)
            self.device.free(out)
        if not times:
            raise ValueError(
                f"linear_lt: of {len(fitting)} algorithms without split K none gives rows the same bits at M = {rows} for {product}"
            )
        return min(times, key=lambda algo: times[algo])

    def _rows_agree(self, product: Product, runs: dict[int, Callable[[int], None]], out: int) -> bool:
        """Whether the first and last rows have the same bits at each M; the rows of x repeat every _PATTERN_ROWS."""
        seen: dict[int, bytes] = {}
        step = _row_bytes(product.d)
        for m, run in runs.items():
            run(self.device.stream)
            self.device.synchronize()
            for first in sorted({0, max(0, m - _PATTERN_ROWS)}):
                block = np.empty((min(m, _PATTERN_ROWS), step), np.uint8)
                self.device.download(out + first * step, block)
                for row, data in enumerate(_results(product, block)):
                    if not data.any():
                        raise ValueError(f"linear_lt: a row of {product} is all zero; an invariant choice needs the weights in place")
                    if seen.setdefault((first + row) % _PATTERN_ROWS, data.tobytes()) != data.tobytes():
                        return False
        return True


def _alignment(product: Product, a: int, b: int, d: int) -> tuple[int, int, int]:
    """Bytes, at most 256, of which each matrix's address is a multiple in every batch."""
    pairs = ((product.a, a), (product.b, b), (product.d, d))
    one, two, three = (math.gcd(256, at, (product.batch > 1) * layout.batch_stride * _ITEM[layout.kind]) for layout, at in pairs)
    return one, two, three


def _with_rows(product: Product, m: int) -> Product:
    return replace(product, b=replace(product.b, cols=m), d=replace(product.d, cols=m))


def _row_bytes(layout: Layout) -> int:
    """From one row (column of the column-major matrix) to the next."""
    return layout.ld * _ITEM[layout.kind]


def _pattern(product: Product, m: int) -> Any:
    """x for probing: m rows with ld numbers about N(0, 1), repeating; heads lie inside a row."""
    rng = np.random.default_rng(5)
    block = rng.standard_normal((_PATTERN_ROWS, product.b.ld), np.float32).astype(ml_dtypes.bfloat16)
    return np.ascontiguousarray(np.resize(block, (m, product.b.ld)))


def _results(product: Product, block: Any) -> Any:
    """The bytes of a row's results [rows, batch, N * item] among those [rows, ld * item] of whole rows."""
    item, layout = _ITEM[product.d.kind], product.d
    last = (product.batch - 1) * layout.batch_stride + layout.rows
    if last > layout.ld:
        raise ValueError(f"linear_lt: results of {last} numbers do not lie within a row of {layout.ld}")
    shape = (len(block), product.batch, layout.rows * item)
    return np.lib.stride_tricks.as_strided(block, shape, (layout.ld * item, layout.batch_stride * item, 1))


def key_of(product: Product, alignment: tuple[int, int, int], invariant: bool) -> str:
    """Name of a choice: what it may depend on. An invariant one holds for every M."""
    a, b, d = product.a, product.b, product.d
    shape = f"M={'any' if invariant else b.cols} N={a.cols} K={a.rows}"
    batch = f" batch={product.batch} by {a.batch_stride} {b.batch_stride} {d.batch_stride}" if product.batch > 1 else ""
    return f"{shape} ld={a.ld} {b.ld} {d.ld} {'f32' if d.kind == R_32F else 'bf16'}{batch} align={' '.join(map(str, alignment))}"


def _read(file: Path | None) -> dict[str, str]:
    if file is None or not file.is_file():
        return {}
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return {}  # half a file of another time: chosen anew
    return {str(k): str(v) for k, v in held.items()} if isinstance(held, dict) else {}


def _write(file: Path | None, key: str, algo: str) -> None:
    """Adds one choice to those on disk, whole or not at all; a rank that chose at the same time may be lost, and chooses again."""
    if file is None:
        return
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    partial.write_text(json.dumps(_read(file) | {key: algo}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(partial, file)


def open_lt(device: Device) -> Lt:
    """cuBLASLt for a device. Raises LtError where the library is not installed."""
    from runtime.kernels_cu._build import cache_dir
    from runtime.kernels_cu._cublaslt import CublasLt
    from runtime.kernels_cu._timing import Stopwatch

    return Lt(device, CublasLt(), Stopwatch(device), cache_dir().parent / "lt")
