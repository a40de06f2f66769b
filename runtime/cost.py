"""Cost arithmetic: the flops and bytes that any implementation of an op must pay."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.hw import Hardware


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call must compute, read and write, whatever the kernel: the roofline's denominator.

    A multiply-add counts 2 flops. Bytes are those of device memory, each operand once, weights in
    their stored width. Costs add with `+` and repeat with `*`; what an implementation pays on top
    (re-reads, padding) is not a Cost.
    """

    flops: float = 0.0
    read_bytes: float = 0.0
    write_bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.read_bytes + other.read_bytes, self.write_bytes + other.write_bytes)

    def __mul__(self, times: float) -> Cost:
        return Cost(self.flops * times, self.read_bytes * times, self.write_bytes * times)

    __rmul__ = __mul__

    @property
    def bytes(self) -> float:
        return self.read_bytes + self.write_bytes

    def read_us(self, hw: Hardware) -> float:
        """Microseconds that the bytes take at the machine's best read rate; writes count as reads."""
        return self.bytes / hw.read_bps * 1e6

    def compute_us(self, hw: Hardware) -> float:
        """Microseconds that the flops take at the machine's dense bf16 rate."""
        return self.flops / hw.tensor_flops * 1e6

    def floor_us(self, hw: Hardware) -> float:
        """The least time on `hw`: the larger of reading and computing, perfectly overlapped.

        Floors of several ops in sequence add as times, so sum floor_us, not Costs, for a step.
        """
        return max(self.read_us(hw), self.compute_us(hw))


ZERO_COST = Cost()
