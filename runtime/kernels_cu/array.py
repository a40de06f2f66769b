"""Arrays of device memory as the model files see them: shape, dtype and address, no arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

WIDTHS = {"bf16": 2, "f32": 4, "i16": 2, "i32": 4, "i64": 8, "u8": 1, "u32": 4, "u64": 8, "bool": 1}
NUMPY: dict[str, Any] = {
    "bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32), "i16": np.dtype(np.int16), "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64), "u8": np.dtype(np.uint8), "u32": np.dtype(np.uint32), "u64": np.dtype(np.uint64), "bool": np.dtype(np.bool_),
}  # fmt: skip
NAMES = {kind: name for name, kind in NUMPY.items()}


def steps_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in numbers, of an array whose numbers lie one after the other."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """address: of the first number. dtype: "bf16", "f32", "i32" … (WIDTHS). strides: from entry to entry of each axis, in numbers.

    It does not own its memory. Indexing and reshaping give views; arithmetic on it is a TypeError.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in WIDTHS:
            raise ValueError(f"dtype {self.dtype!r} is unknown; known: {', '.join(WIDTHS)}")
        if not self.strides:
            object.__setattr__(self, "strides", steps_of(self.shape))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * WIDTHS[self.dtype]

    @property
    def contiguous(self) -> bool:
        steps = zip(self.shape, self.strides, steps_of(self.shape), strict=True)
        return self.size == 0 or all(size == 1 or have == want for size, have, want in steps)

    @property
    def flat(self) -> int:
        """The address of numbers that lie one after the other; ValueError if they do not."""
        if not self.contiguous:
            raise ValueError(f"an array of {list(self.shape)} with strides {list(self.strides)} is not contiguous; this operand must be")
        return self.address

    def __len__(self) -> int:
        return self.shape[0]

    def reshape(self, *shape: int | tuple[int, ...]) -> DeviceArray:
        """The same numbers in another shape; one dimension may be -1. ValueError for another count or a strided array."""
        wanted: tuple[int, ...] = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape  # type: ignore[assignment]
        if -1 in wanted:
            rest = math.prod(n for n in wanted if n != -1)
            wanted = tuple(self.size // max(rest, 1) if n == -1 else n for n in wanted)
        if math.prod(wanted) != self.size:
            raise ValueError(f"{list(self.shape)} holds {self.size} numbers; {list(wanted)} wants {math.prod(wanted)}")
        return DeviceArray(self.flat, wanted, self.dtype)

    def __getitem__(self, key: Any) -> DeviceArray:
        """Integers and slices of step 1, as NumPy reads them."""
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) > self.ndim:
            raise IndexError(f"{len(keys)} indices into {list(self.shape)}")
        first, shape, strides = 0, [], []
        for size, step, part in zip(self.shape, self.strides, keys, strict=False):
            if isinstance(part, slice):
                begin, end, stride = part.indices(size)
                if stride != 1:
                    raise IndexError(f"a slice of step {stride}; views of device memory take step 1 only")
                first += begin * step
                shape.append(max(end - begin, 0))
                strides.append(step)
            elif not -size <= part < size:
                raise IndexError(f"index {part} into a dimension of {size} of {list(self.shape)}")
            else:
                first += part % size * step
        rest = len(keys)
        return DeviceArray(
            self.address + first * WIDTHS[self.dtype],
            (*shape, *self.shape[rest:]),
            self.dtype,
            (*strides, *self.strides[rest:]),
        )


def dtype_name(array: Any) -> str:
    """ "bf16" of a NumPy array of ml_dtypes.bfloat16, and so on; ValueError for a dtype that no signature knows."""
    try:
        return NAMES[array.dtype]
    except KeyError:
        raise ValueError(f"an array of {array.dtype}; device arrays hold {', '.join(WIDTHS)}") from None
