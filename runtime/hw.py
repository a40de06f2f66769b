"""Machines the cost model knows: what one device can read, compute, hold and send."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device and its link to its peers.

    read_bps: bytes a second that a kernel can stream from device memory, measured where `source`
    says so. tensor_flops: dense bf16 operations a second. link_bps: bytes a second to the peers in
    one direction. link_us: one all-reduce of a single row between two devices, launch included; more devices are priced alike.
    """

    name: str
    read_bps: float
    tensor_flops: float
    memory_bytes: float
    link_bps: float
    link_us: float
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("read_bps", "tensor_flops", "memory_bytes", "link_bps"):
            value = getattr(self, field)
            if not value > 0:
                raise ValueError(f"hardware {self.name!r}: {field} is {value!r}; it must be above 0")
        if self.link_us < 0:
            raise ValueError(f"hardware {self.name!r}: link_us is {self.link_us!r}; it must be 0 or more")


HARDWARE: dict[str, Hardware] = {
    hw.name: hw
    for hw in (
        Hardware(
            "h200", 4.54e12, 751e12, 150.1e9, 367e9, 2.25,
            "measured 2026-11-29: best read of 8 GiB, 8192³ bf16 product, peer copy; link_us: one_shot of all_reduce.cu, 14 KiB, two GPUs, "
            "2026-11-30, tools/results/allreduce_h200x2.jsonl",
        ),
        Hardware("h100", 3.35e12, 989e12, 80e9, 450e9, 2.25, "H100 SXM datasheet; link_us as measured on the H200"),
        Hardware("b200", 8.0e12, 2250e12, 180e9, 900e9, 2.25, "B200 datasheet; link_us as measured on the H200"),
        Hardware(
            "rtx-pro-6000", 1.79e12, 503e12, 96e9, 64e9, 20.0,
            "RTX PRO 6000 Blackwell datasheet, PCIe 5.0 x16; link_us is an assumption",
        ),
        Hardware(
            "cpu", 39e9, 250e9, 16e9, 20e9, 5.0,
            "measured 2026-11-29 on two EPYC cores: NumPy float32 dot of 1 GiB, 3000³ product; memory and link are assumptions",
        ),
    )
}  # fmt: skip


def find_hardware(name: str) -> Hardware:
    """The entry of HARDWARE with that name; ValueError lists the known names otherwise."""
    try:
        return HARDWARE[name.lower()]
    except KeyError:
        raise ValueError(f"hardware {name!r} is unknown; known: {', '.join(HARDWARE)}") from None
