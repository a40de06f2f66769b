"""Products with few rows on sm_90a, as fast as memory is read: the call of linear_stream.cu or linear_carried.cu, and what to build it as.

It serves what `linear_skinny` does, to 64 rows. A row's bits depend on N, K and the configuration, its columns excepted, not on M.
How a launch follows another and what bounds it: docs/linear.md.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from runtime.cost import Cost
from runtime.hw import Hardware
from runtime.kernels_cu._call import Call, blocks
from runtime.kernels_cu._tensor_map import tensor_map
from runtime.kernels_cu.linear_skinny import Dims

SOURCE, CARRIED_SOURCE, ARCH = "linear_stream.cu", "linear_carried.cu", "sm_90a"
ENTRIES, CARRIED_ENTRIES = ("linear_stream", "linear_stream_f32"), ("linear_carried", "linear_carried_f32")
AT_ONCE = 1 << 20
STEP = 64  # inputs of a box
MOST_ROWS = 64
CARRIED_ROWS = 16  # of x that one warp carries: four copies a lane and box
COLUMNS = (8, 16, 24, 32, 48, 64)
SMS = 132  # of an H100 or H200
MAX_SMEM_BYTES, SM_SMEM_BYTES = 232_448, 233_472
# From the fit of docs/linear.md to the 48 readings of commit bf5e8af: a stream's share of `read_bps`; what a byte of x, from L2, costs;
# from the last box to the next launch's first, where that waits for room, and for each 16 columns; a cut tile's meeting was 2.0 us and
# four trips to L2, of which one is left. An SM's own rate: 112 of them took 0.7 us more than 132 for the square (dbf9f30, M = 1). An
# estimate: bytes under way to it for the whole rate.
_RATE, _X_COST, _GAP_US, _COLUMNS_US, _TRIP_US = 0.931, 0.31, 1.3, 0.55, 0.5
_SM_BPS, _FLIGHT_BYTES = 39e9, 36_000
# Estimated, not measured: weights that are asked for before the block meets, and x that does not stand behind them.
_CARRIED_US = 0.35
Describe = Callable[[int, int, int, int, int], Any]  # as tensor_map


class Params(ctypes.Structure):
    """`Params` of linear_stream.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "sums", "seq")),
        *((name, ctypes.c_longlong) for name in ("out_row", "out_head")),
        *((name, ctypes.c_int) for name in ("x_head", "N", "M", "tiles", "steps", "each", "more", "early", "ahead")),
    ]  # fmt: skip


class Rows(ctypes.Structure):
    """`Rows` of linear_carried.cu."""

    _fields_ = [("x", ctypes.c_void_p), ("bytes", ctypes.c_longlong)]


@dataclass(frozen=True, slots=True)
class Config:
    """columns: rows of x that fit. groups: warpgroups that multiply. tall: times 64 weight rows of each. slots: boxes of the ring.
    blocks: of the grid; all SMs stream where it is a multiple of their number, two blocks of one launch share an SM at most.
    early: boxes that a block has yet to ask for when it lets the next launch start; AT_ONCE: all. ahead: boxes that it brings to L2,
    beside its ring, before it waits for the launch before; negative: so many of its ring it asks for after that, behind the first x.
    carried: a warp of its own copies the rows of x that there are, and weights wait for nobody. kept: weights may stay in L2."""

    columns: int = 16
    groups: int = 2
    tall: int = 1
    slots: int = 6
    blocks: int = SMS
    early: int = 0
    ahead: int = 0
    carried: bool = False
    kept: bool = False

    @property
    def source(self) -> str:
        return CARRIED_SOURCE if self.carried or self.kept else SOURCE

    @property
    def entries(self) -> tuple[str, str]:
        return CARRIED_ENTRIES if self.carried else ENTRIES

    def defines(self) -> dict[str, int]:
        ways = {"CARRIED": int(self.carried), "KEPT": int(self.kept)} if self.source == CARRIED_SOURCE else {}
        return {"OCTETS": self.columns // 8, "GROUPS": self.groups, "TALL": self.tall, "SLOTS": self.slots} | ways

    @property
    def rows(self) -> int:
        """Weight rows of a box."""
        return 64 * self.groups * self.tall

    @property
    def threads(self) -> int:
        return 128 * self.groups + (64 if self.carried else 32)

    @property
    def resident(self) -> int:
        """Blocks that an SM has registers for: kBlocks of linear_stream.cu."""
        units = self.tall * self.columns // 8
        return 1 if self.smem_bytes() > SM_SMEM_BYTES // 2 - 1024 or units > 4 or (self.groups > 2 and units > 2) else 2

    @property
    def slot_bytes(self) -> int:
        return 128 * (self.rows + self.columns)

    @property
    def place_bytes(self) -> int:
        """A slot and its barriers: full, empty, and carried rows landed."""
        return self.slot_bytes + (24 if self.carried else 16)

    def smem_bytes(self) -> int:
        """The ring, its barriers, one word."""
        return self.slots * self.place_bytes + 16

    def tiles(self, dims: Dims) -> int:
        """Of one head."""
        return blocks(dims.N, self.rows)

    def boxes(self, dims: Dims) -> int:
        return dims.heads * self.tiles(dims) * (dims.K // STEP)

    def grid(self, dims: Dims) -> int:
        """Blocks that have a box."""
        return min(self.blocks, self.boxes(dims))

    def overlaps(self, dims: Dims, sms: int = SMS) -> bool:
        """Whether the blocks of two such launches fit: the next one's can fetch weights while this one's finish."""
        each = 2 * blocks(self.grid(dims), sms)
        registers = self.resident if each == 2 else 65_536 // (self.threads * 128)
        return each <= registers and each * (self.smem_bytes() + 1024) <= SM_SMEM_BYTES

    def check(self, dims: Dims, arch: str = ARCH) -> None:
        """Raises ValueError with the broken rule."""
        if arch != ARCH:
            raise ValueError(f"linear_stream: built for {ARCH}, not for {arch}")
        if not 1 <= dims.M <= self.columns or self.columns not in COLUMNS:
            raise ValueError(f"{self}: columns must be of {COLUMNS} and at least M = {dims.M}")
        if dims.K < STEP or dims.K % STEP:
            raise ValueError(f"linear_stream: K = {dims.K} is not a positive multiple of {STEP}")
        for name, value in (("x_row", dims.x_row), ("x_head", dims.x_head)):
            if value % 8:
                raise ValueError(f"linear_stream: {name} = {value}; rows of x must start at multiples of 16 bytes")
        if not (self.groups >= 1 and self.tall >= 1 and self.rows <= 256):
            raise ValueError(f"{self}: {self.rows} weight rows a box, at most 256 can be copied")
        if not 2 <= self.slots <= 32 or self.smem_bytes() > MAX_SMEM_BYTES:
            raise ValueError(f"{self}: 2..32 slots; {self.smem_bytes()} bytes of shared memory, {MAX_SMEM_BYTES} fit")
        if self.blocks < 1:
            raise ValueError(f"{self}: no block")
        if self.carried and (dims.M > CARRIED_ROWS or self.ahead):
            raise ValueError(f"{self}: of M = {dims.M} rows {CARRIED_ROWS} can be carried, and ahead must be 0: weights wait for nobody")
        if not (0 <= self.early <= AT_ONCE and -self.slots < self.ahead <= AT_ONCE):
            raise ValueError(f"{self}: early must be 0..{AT_ONCE} boxes, ahead {1 - self.slots}..{AT_ONCE}")

    def fits(self, dims: Dims, arch: str = ARCH) -> bool:
        try:
            self.check(dims, arch)
        except ValueError:
            return False
        return True


def takes(dims: Dims, arch: str = ARCH) -> bool:
    """Whether it is for this kernel: rows that a build has columns for, inputs in whole boxes, the architecture."""
    return arch == ARCH and dims.M <= MOST_ROWS and dims.K % STEP == 0 and dims.x_row % 8 == 0 and dims.x_head % 8 == 0


def columns_for(m: int) -> int:
    """The narrowest build that takes M rows."""
    return next((n for n in COLUMNS if n >= m), COLUMNS[-1])


def workspace_bytes(dims: Dims, config: Config) -> dict[str, int]:
    """Bytes of the scratch array. sums must be zero before the first call, and is zero after each."""
    return {"sums": 4 * config.grid(dims) * config.rows * config.columns}


def candidates(dims: Dims, arch: str = ARCH, sms: int = SMS) -> list[Config]:
    """Legal configurations: boxes of 8 to 32 KB in rings of half or all of an SM's shared memory, one or two blocks an SM; all SMs with
    tiles cut where it falls, or as many as make whole tiles or equal parts of one; x carried or not. The next launch may start at once,
    nothing is brought ahead: within 0.7 % of the best for all twelve products at 16 rows (dbf9f30)."""
    columns, found = columns_for(dims.M), []
    for carried, (groups, tall) in product((False, True), ((1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (4, 1))):
        for share, times in ((1, 1), (2, 1), (2, 2)):
            some = Config(columns, groups, tall, blocks=times * sms, early=AT_ONCE, carried=carried)
            slots = min(32, (min(MAX_SMEM_BYTES, SM_SMEM_BYTES // share - 1024) - 16) // some.place_bytes)
            if slots >= 3:
                some = replace(some, slots=slots)
                found += [some, *(replace(some, blocks=n) for n in even_grids(dims, some, times * sms))]
    return [config for config in dict.fromkeys(found) if config.fits(dims, arch)]


def hand_overs(config: Config) -> list[Config]:
    """The same configuration, handing over otherwise: the next launch's start at the last box, one or three rings before or at once;
    half a ring before the wait, a ring, or 128 KB a block beside it, where weights wait at all. Bits and builds are the same."""
    ahead = (0,) if config.carried else (-(config.slots // 2), 0, 16 // (config.groups * config.tall))
    return [replace(config, early=e, ahead=a) for e in (0, config.slots, 3 * config.slots, AT_ONCE) for a in ahead]


def even_grids(dims: Dims, config: Config, most: int) -> list[int]:
    """The largest numbers of blocks to `most`, but not under its half, that give each block whole tiles or each tile equal blocks."""
    tiles, steps = dims.heads * config.tiles(dims), dims.K // STEP
    whole = (n for n in range(min(most, tiles), 0, -1) if tiles % n == 0)
    equal = (tiles * parts for parts in range(most // tiles, 1, -1) if steps % parts == 0)
    return [n for n in (next(whole, 0), next(equal, 0)) if 2 * n >= most and n != most]


def work(dims: Dims, config: Config) -> Cost:
    """What this implementation moves: weights once, x once for each tile, sums of cut tiles out and in."""
    weights = 2.0 * dims.heads * dims.N * dims.K
    x = 2.0 * (dims.M if config.carried else config.columns) * dims.K * dims.heads * config.tiles(dims)
    cut = 8.0 * config.rows * config.columns * config.grid(dims)  # sent, emptied; taken
    return Cost(2.0 * config.columns * dims.heads * dims.N * dims.K, weights + x + cut, 2.0 * dims.M * dims.N * dims.heads + cut)


def predict_us(dims: Dims, config: Config, hw: Hardware, sms: int = SMS, arch: str = ARCH) -> float:
    """A launch among its like: all bytes at the memory's rate, or the busiest SM's at its own, or as few as are under way allow; then
    what memory rests; room for the next launch's ring has gained nothing. Sums of cut tiles take a trip, and another for every eight
    neighbours (estimates)."""
    config.check(dims, arch)
    boxes, grid, steps = config.boxes(dims), config.grid(dims), dims.K // STEP
    rows = dims.M if config.carried else config.columns
    box_bytes = 128 * (config.rows + _X_COST * rows)
    busiest = blocks(boxes, grid) * blocks(grid, sms) * box_bytes
    flight = min(1.0, grid * min(config.slots, blocks(boxes, grid)) * config.slot_bytes / (sms * _FLIGHT_BYTES))
    cut = boxes % grid or (boxes // grid) % steps
    rest = _GAP_US + _COLUMNS_US * rows / 16 - (_CARRIED_US if config.carried else 0.0)
    if cut:
        rest += _TRIP_US * (1 + blocks(steps * grid, boxes) / 8)
    return max(boxes * box_bytes / (hw.read_bps * _RATE) / flight, busiest / _SM_BPS) * 1e6 + rest


def default_config(dims: Dims, hw: Hardware, arch: str = ARCH, sms: int = SMS) -> Config:
    """One choice for all M of an (N, K): the candidate that `predict_us` likes best at 16 rows, with the columns that M needs. x is
    carried where that was measured to be better, never by prediction."""
    found = [config for config in candidates(replace(dims, M=16), arch, sms) if not config.carried]
    if not found:
        raise ValueError(f"linear_stream: no configuration fits {dims} on {arch}")
    best = min(found, key=lambda config: predict_us(replace(dims, M=16), config, hw, sms))
    return widened(best, dims.M)


def widened(config: Config, m: int) -> Config:
    """The same configuration with the columns that M rows need, and fewer slots where those take the room; rows too many to be carried
    come with the weights, which changes no bits."""
    wide = replace(config, columns=columns_for(m), carried=config.carried and m <= CARRIED_ROWS)
    room = max(config.smem_bytes(), SM_SMEM_BYTES // 2 - 1024)
    return replace(wide, slots=max(2, min(config.slots, (room - 16) // wide.place_bytes)))


def call(config: Config, dims: Dims, at: Mapping[str, int], float_out: bool = False, describe: Describe | None = None) -> Call:
    """The launch. at: addresses by name: w, x, out, sums, and seq (0: no row is dead). float_out: out is float32.
    describe: makes the copy engine's descriptions; None: the driver."""
    config.check(dims)
    describe = describe or tensor_map
    grid, tiles = config.grid(dims), config.tiles(dims)
    each, more = divmod(config.boxes(dims), grid)
    pointers = (at[name] for name in ("out", "sums", "seq"))
    strides = (dims.out_row, dims.out_head, dims.x_head)
    params = Params(*pointers, *strides, dims.N, dims.M, tiles, dims.K // STEP, each, more, config.early, config.ahead)
    weights = describe(at["w"], dims.heads * dims.N, dims.K, 2 * dims.K, config.rows)
    entry = config.entries[int(float_out)]
    if config.carried:
        return Call(entry, (grid, 1, 1), config.threads, config.smem_bytes(), (params, weights, Rows(at["x"], 2 * dims.x_row)))
    width = max(dims.K, (dims.heads - 1) * dims.x_head + dims.K)
    rows = describe(at["x"], dims.M, width, 2 * dims.x_row, config.columns)
    return Call(entry, (grid, 1, 1), config.threads, config.smem_bytes(), (params, weights, rows))
