"""Plans on a device: fixed capacities, live counts, and a dead tail that holds what must not be read.

The engine's own way there is a kernel; this is the plain one, for tests of what comes after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.kernels_cu.array import DeviceArray, dtype_name
from runtime.kernels_cu.recorder import Live
from runtime.types import DraftPlan, StepPlan

WILD = 1 << 28  # a position, token or page that lies outside everything


@dataclass(frozen=True)
class Room:
    """Capacities of a bucket: M rows, B streams, P pages a stream, W words of ancestors, I output rows, moves."""

    M: int
    B: int
    P: int
    W: int = 1
    I: int = 0  # noqa: E741
    moves: int = 4


class Fields:
    """A plan's arrays by its names, on the device; counts: addresses of what is live."""

    def __init__(self, device: Any, arrays: dict[str, tuple[np.ndarray, tuple[int, ...], Any]], counts: dict[str, int]) -> None:
        """arrays: host array, shape there, what fills the rest."""
        self._device = device
        self.arrays: dict[str, DeviceArray] = {}
        for name, (array, shape, rest) in arrays.items():
            self.put(name, array, shape, rest)
        self.live = Live(**{name: self.put(f"live_{name}", np.array([n], np.int32), (1,), 0).address for name, n in counts.items()})

    def put(self, name: str, array: np.ndarray, shape: tuple[int, ...], rest: Any) -> DeviceArray:
        whole = np.full(shape, rest, array.dtype)
        whole[tuple(slice(n) for n in array.shape)] = array
        self.arrays[name] = made = DeviceArray(self._device.alloc(whole.nbytes), shape, dtype_name(array))
        self._device.upload(made.address, whole)
        return made

    def __getattr__(self, name: str) -> DeviceArray:
        try:
            return self.__dict__["arrays"][name]
        except KeyError:
            raise AttributeError(name) from None


def place_step(device: Any, plan: StepPlan, room: Room) -> Fields:
    """Dead rows: sequence and slot -1; what they and dead streams hold besides is wild."""
    i, m, b = room.I or room.M, room.M, room.B
    return Fields(
        device,
        {
            "token": (plan.token, (m,), WILD), "pos": (plan.pos, (m,), WILD), "slot": (plan.slot, (m,), -1), "seq": (plan.seq, (m,), -1),
            "ancestors": (plan.ancestors, (m, room.W), np.uint64(0)), "ctx": (plan.ctx, (b,), WILD), "row0": (plan.row0, (b,), WILD),
            "pages": (plan.pages, (b, room.P), WILD), "moves": (plan.moves, (room.moves, 2), WILD), "out_rows": (plan.out_rows, (i,), WILD),
            "seed": (plan.seed, (b,), np.uint64(7)), "temperature": (plan.temperature, (b,), np.nan), "top_p": (plan.top_p, (b,), np.nan),
            "min_p": (plan.min_p, (b,), np.nan), "top_k": (plan.top_k, (b,), WILD), "logprobs": (plan.logprobs, (b,), WILD),
            "adjust_seq": (plan.adjust_seq, (3, 2), WILD), "adjust_seq_by": (plan.adjust_seq_by, (3, 2), np.nan),
            "adjust_row": (plan.adjust_row, (3, 2), WILD), "adjust_row_by": (plan.adjust_row_by, (3, 2), np.nan),
            "mask_rows": (plan.mask_rows, (0,), 0), "masks": (plan.masks, (0, 0), 0),
        },
        {
            "rows": len(plan.out_rows), "moves": len(plan.moves), "adjust_seq": len(plan.adjust_seq), "adjust_row": len(plan.adjust_row),
            "masks": 0,
        },
    )  # fmt: skip


def place_taps(device: Any, plan: DraftPlan, rows: int) -> Fields:
    rest = {"tap_rows": WILD, "tap_pos": WILD, "tap_slot": -1}
    arrays = {name: (getattr(plan, name), (rows,), value) for name, value in rest.items()}
    return Fields(device, arrays, {"rows": len(plan.tap_rows)})


def place_block(device: Any, plan: DraftPlan, rows: tuple[np.ndarray, np.ndarray, np.ndarray], streams: int, pages: int) -> Fields:
    """rows: of dflash.block_rows. Dead streams have ctx (`pos`) -1; `alive` marks their rows."""
    token, pos, mask_rows = rows
    each = len(token) // len(plan.root)
    arrays = {
        "pos": (plan.pos, (streams,), -1), "pages": (plan.pages, (streams, pages), WILD), "token": (token, (streams * each,), WILD),
        "row_pos": (pos, (streams * each,), WILD), "mask_rows": (mask_rows, (streams * (each - 1),), WILD),
        "alive": (np.zeros(len(token), np.int32), (streams * each,), -1),
    }  # fmt: skip
    return Fields(device, arrays, {"rows": len(mask_rows)})


def poison(backend: Any, keep: tuple[str, ...] = (), value: int = 0xFF) -> None:
    """Every byte of every buffer set (0xFF: NaN, -1), but for counters that must be zero between launches, and for `keep`."""
    for name, (address, nbytes) in backend.arena.held.items():
        if name not in keep and name.rpartition(".")[2] not in ("arrived", "halves_done", "sums"):
            backend.device.upload(address, np.full(nbytes, value, np.uint8))
