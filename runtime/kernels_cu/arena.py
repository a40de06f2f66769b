"""Named memory of a backend: every buffer once, in the largest size that any step has asked for."""

from __future__ import annotations

import math

from runtime.kernels_cu.array import WIDTHS, DeviceArray
from runtime.kernels_cu.device import Device


class Arena:
    """Buffers by name over a device. Contents are undefined, zero when a buffer is first made.

    A buffer asked for in a larger size than before is made anew; launches recorded until then keep the old memory. So record
    the largest bucket first, then all others, then `seal`: from there on a request that does not fit is an error, because a
    graph holds addresses.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.held: dict[str, tuple[int, int]] = {}  # name -> address, bytes
        self.nbytes = 0
        self.sealed = False

    def seal(self) -> None:
        """No memory is added from now on."""
        self.sealed = True

    def take(self, name: str, nbytes: int) -> int:
        """The address of at least that many bytes. Raises RuntimeError where that needs memory of a sealed arena."""
        address, room = self.held.get(name, (0, -1))
        if room >= nbytes:
            return address
        if self.sealed:
            raise RuntimeError(
                f"buffer {name!r} of {nbytes} bytes, but the arena is sealed with {max(room, 0)} bytes of that name; "
                "record every bucket, the largest first, before sealing"
            )
        address = self._device.alloc(nbytes)
        self.held[name] = address, nbytes
        self.nbytes += nbytes
        return address

    def buffer(self, name: str, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """A view of the buffer of that name."""
        return DeviceArray(self.take(name, math.prod(shape) * WIDTHS[dtype]), shape, dtype)
