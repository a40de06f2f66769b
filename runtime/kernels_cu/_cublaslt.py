"""cuBLASLt through ctypes: the library, a product's descriptors, suggestions, and the call.

CuPy refuses cuBLAS under capture and has no cuBLASLt, so this is bound by hand: own handle, own workspace, any algorithm by
its 64 opaque bytes, which stay valid for one version of the library (cublasLt.h, "cublasLtMatmulAlgo_t"). Descriptors are
host memory and can be made without a GPU; the handle, suggestions and products need one.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.kernels_cu.linear_lt import Layout, Product

SONAMES = ("libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so")
R_32F = 0
_TRANS_A, _TRANS_B = 3, 4  # cublasLtMatmulDescAttributes_t
_BATCH_COUNT, _BATCH_STRIDE = 5, 6  # cublasLtMatrixLayoutAttribute_t
_MAX_WORKSPACE, _REDUCTIONS, _ALIGNMENT = 1, 3, (5, 6, 7, 8)  # cublasLtMatmulPreferenceAttributes_t; A, B, C, D
_SPLIT_K, _REDUCTION, _TILE, _STAGES, _ALGO_ID = 2, 3, 1, 6, 0  # cublasLtMatmulAlgoConfigAttributes_t
ALGO_BYTES = 64


class LtError(RuntimeError):
    """A cuBLASLt call that failed, or a library that can not be found."""


class Algo(ctypes.Structure):
    """cublasLtMatmulAlgo_t: opaque."""

    _fields_ = [("data", ctypes.c_uint64 * 8)]


class Suggestion(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algo", Algo),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class Problem:
    """Descriptors of one product; destroyed with it."""

    def __init__(self, library: CublasLt, product: Product, alignment: tuple[int, int, int]) -> None:
        self.product, self.alignment = product, alignment
        made: list[tuple[str, ctypes.c_void_p]] = []
        self._end = weakref.finalize(self, library.destroy, made)

        def make(kind: str, *arguments: Any) -> ctypes.c_void_p:
            handle = ctypes.c_void_p()
            library.call(f"cublasLt{kind}Create", ctypes.byref(handle), *arguments)
            made.append((kind, handle))
            return handle

        self.desc = make("MatmulDesc", ctypes.c_int(product.compute), ctypes.c_int(R_32F))
        for key, value in ((_TRANS_A, product.op_a), (_TRANS_B, product.op_b)):
            library.set("MatmulDesc", self.desc, key, ctypes.c_int32(value))

        def layout(of: Layout) -> ctypes.c_void_p:
            sizes = (ctypes.c_uint64(of.rows), ctypes.c_uint64(of.cols), ctypes.c_int64(of.ld))
            handle = make("MatrixLayout", ctypes.c_int(of.kind), *sizes)
            if product.batch > 1:
                library.set("MatrixLayout", handle, _BATCH_COUNT, ctypes.c_int32(product.batch))
                library.set("MatrixLayout", handle, _BATCH_STRIDE, ctypes.c_int64(of.batch_stride))
            return handle

        self.a, self.b, self.d = layout(product.a), layout(product.b), layout(product.d)


class CublasLt:
    """The library and one handle, made when first needed on the context that is current then.

    Raises LtError where no library is found; `tried` in its text.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path or find_library()
        self._lib = ctypes.CDLL(self.path)
        self._lib.cublasLtGetVersion.restype = ctypes.c_size_t
        self._lib.cublasLtGetStatusString.restype = ctypes.c_char_p
        self._handle: ctypes.c_void_p | None = None

    @property
    def version(self) -> int:
        """130002 is 13.0.2."""
        return int(self._lib.cublasLtGetVersion())

    @property
    def handle(self) -> ctypes.c_void_p:
        if self._handle is None:
            handle = ctypes.c_void_p()
            self.call("cublasLtCreate", ctypes.byref(handle))
            self._handle = handle
        return self._handle

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status:
            raise LtError(f"{name}: status {status}, {(self._lib.cublasLtGetStatusString(status) or b'?').decode()}")

    def set(self, kind: str, handle: ctypes.c_void_p, key: int, value: Any) -> None:
        """Sets an attribute; the library refuses a value of the wrong size."""
        self.call(f"cublasLt{kind}SetAttribute", handle, ctypes.c_int(key), ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def destroy(self, made: list[tuple[str, ctypes.c_void_p]]) -> None:
        for kind, handle in made:
            self.call(f"cublasLt{kind}Destroy", handle)

    def open(self, product: Product, alignment: tuple[int, int, int]) -> Problem:
        """Descriptors of a product. alignment: bytes that a, b and d are multiples of, batches included."""
        return Problem(self, product, alignment)

    def suggest(self, problem: Problem, most: int, workspace_bytes: int, split_k: bool) -> list[bytes]:
        """Up to `most` algorithms, likeliest first; without split_k only those that sum K in one block. Not in a capture."""
        wish = ctypes.c_void_p()
        self.call("cublasLtMatmulPreferenceCreate", ctypes.byref(wish))
        try:
            self.set("MatmulPreference", wish, _MAX_WORKSPACE, ctypes.c_uint64(workspace_bytes))
            if not split_k:
                self.set("MatmulPreference", wish, _REDUCTIONS, ctypes.c_uint32(0))
            a, b, d = problem.alignment
            for key, value in zip(_ALIGNMENT, (a, b, d, d), strict=True):
                self.set("MatmulPreference", wish, key, ctypes.c_uint32(value))
            found, got = (Suggestion * most)(), ctypes.c_int()
            layouts = (problem.a, problem.b, problem.d, problem.d)
            room = (wish, ctypes.c_int(most), found, ctypes.byref(got))
            self.call("cublasLtMatmulAlgoGetHeuristic", self.handle, problem.desc, *layouts, *room)
        finally:
            self.call("cublasLtMatmulPreferenceDestroy", wish)
        algos = [bytes(s.algo) for s in found[: got.value] if not s.state]
        return algos if split_k else [algo for algo in algos if self.split_k(algo) <= 1]

    def workspace_bytes(self, problem: Problem, algo: bytes) -> int | None:
        """Bytes of workspace that an algorithm needs for this product; None where it can not do it."""
        result, held = Suggestion(), Algo.from_buffer_copy(algo)
        layouts = (problem.a, problem.b, problem.d, problem.d)
        status = self._lib.cublasLtMatmulAlgoCheck(self.handle, problem.desc, *layouts, ctypes.byref(held), ctypes.byref(result))
        return None if status or result.state else int(result.workspace_bytes)

    def split_k(self, algo: bytes) -> int:
        """Blocks that share the inputs of one result."""
        return self._config(algo, _SPLIT_K)

    def describe(self, algo: bytes) -> str:
        """An algorithm's readable part, for tables."""
        keys = (("id", _ALGO_ID), ("tile", _TILE), ("stages", _STAGES), ("k", _SPLIT_K), ("r", _REDUCTION))
        return " ".join(f"{name}{self._config(algo, key)}" for name, key in keys)

    def _config(self, algo: bytes, key: int) -> int:
        value, written, held = ctypes.c_int32(), ctypes.c_size_t(), Algo.from_buffer_copy(algo)
        where = (ctypes.byref(value), ctypes.c_size_t(4), ctypes.byref(written))
        self.call("cublasLtMatmulAlgoConfigGetAttribute", ctypes.byref(held), ctypes.c_int(key), *where)
        return int(value.value)

    def multiplier(
        self, problem: Problem, algo: bytes, a: int, b: int, d: int, workspace: int, workspace_bytes: int
    ) -> Callable[[int], None]:
        """The call, prepared: run(stream) enqueues it, or records it where the stream captures. It keeps the descriptors."""
        one, zero, held = ctypes.c_float(1), ctypes.c_float(0), Algo.from_buffer_copy(algo)
        pointer = ctypes.c_void_p
        arguments = (
            self.handle, problem.desc, ctypes.byref(one), pointer(a), problem.a, pointer(b), problem.b, ctypes.byref(zero),
            pointer(d), problem.d, pointer(d), problem.d, ctypes.byref(held), pointer(workspace), ctypes.c_size_t(workspace_bytes),
        )  # fmt: skip

        def run(stream: int, held: Problem = problem) -> None:  # descriptors end with the problem, so the call holds it
            self.call("cublasLtMatmul", *arguments, pointer(stream))

        return run


def find_library() -> str:
    """Path or soname of cuBLASLt: the file that CuPy loads, else the usual names. Raises LtError with what was tried."""
    tried = []
    try:
        from cuda import pathfinder

        return str(pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path)
    except (ImportError, RuntimeError) as error:  # pathfinder's own errors are RuntimeErrors
        tried.append(f"cuda.pathfinder: {type(error).__name__}")
    for name in SONAMES:
        try:
            ctypes.CDLL(name)
            return name
        except OSError:
            tried.append(name)
    raise LtError(f"cuBLASLt is not installed (extras cuda12, cuda13): tried {', '.join(tried)}")
