"""Products of more than 16 rows, as cuBLASLt wants them described.

The launch side is not implemented: no library is loaded here yet. `describe` says which matrices, leading dimensions and
strides a row-major out = x w^T is in cuBLAS's column-major terms, so that planning at load (heuristics and timing, never
during a capture) and `cublasLtMatmul` in the capture need no further thought about order.
"""

from __future__ import annotations

from dataclasses import dataclass

R_16BF, R_32F, COMPUTE_32F = 14, 0, 68  # cudaDataType, cublasComputeType_t
OP_N, OP_T = 0, 1
WORKSPACE_BYTES = 32 << 20  # what Hopper's algorithms ask for


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
