"""What the attention kernel can be built and launched as, which of it fits, and what it is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from runtime.hw import HARDWARE, Hardware

WIDTH, VALUE, TILE = 576, 512, 64
BOX_BYTES, BOXES, TAIL_BYTES = 8192, 9, 1024
ROW_OCTETS, ROW_SLOTS = 8, 18  # tree_mla_rows.cu
AHEAD = 3  # boxes; what lands while a tile's weights are made
MAX_SMEM_BYTES = {"sm_80": 166912, "sm_89": 101376, "sm_90a": 232448, "sm_100a": 232448, "sm_120a": 101376}
MOST_SPLITS, MOST_SEQUENCES, ITEM_OVERHEAD = 1024, 1024, 3  # kMostSplits, kMostSequences, kItemOverhead
L2_SHARE = 1.36  # L2's rate over the read rate: FlashMLA's 746 TFLOP/s on one H200 take 6.2 TB/s out of L2, memory gives 4.54
ROOM_WAVES = 4  # partials a block has room for
# prim/mla_trials.cuh
TRIALS = ("EARLY_KEYS", "EARLY_BOXES", "MERGE_LATER", "MERGERS", "READY_FIRST", "REHEARSED", "OWNERS", "SOFTEN_FIRST", "STAMPS")

# What builds for wgmma are served with beyond the choice of `candidates`: fields of `Config`, by kind. Readings of one H200, us, without
# and with (heads x streams x nodes x ctx). A merge of its own gains where launch, look-ups and merge are most of the time: 12.9 -> 11.7 at
# 8 x 1 x 9 x 4k; it costs 11 % at 72 columns, 3 to 6 % with rows. Early keys: 30.6 -> 28.5 at 8 x 10 x 9 x 4k, 66.4 -> 64.3 and
# 105.2 -> 103.2 with 32 and 64 heads. Nothing ahead: 235.9 -> 228.0 at 8 x 10 x 9 x 64k. The softmax first: 4,376 -> 4,267 at
# 64 x 10 x 33 x 64k, but +0.4 to 1.4 % with fewer rows.
SERVED: dict[str, dict[str, Any]] = {
    "narrow": {"trials": (("EARLY_KEYS", 1), ("MERGE_LATER", 1))},
    "wide": {"ahead": 0, "trials": (("EARLY_KEYS", 1),)},
    "rows": {"trials": (("EARLY_KEYS", 1),)},
    "many rows": {"trials": (("SOFTEN_FIRST", 1),)},
}
NARROW_OCTETS, MANY_ROWS = 4, 1024  # at most; (node, head) pairs of a sequence, at least
MERGE_BYTES = 8192  # that an SM's shared memory keeps for a block of the merge


@dataclass(frozen=True, slots=True)
class Dims:
    """A bucket: M rows, B sequences, heads on this rank, keys: the longest sequence, page_size, words: 64-bit ancestor words a row."""

    M: int
    B: int
    heads: int
    keys: int
    page_size: int = 64
    words: int = 1

    def check(self) -> None:
        """Raises ValueError naming the symbol that the kernels cannot take."""
        for name, value, most in (("heads", self.heads, 128), ("B", self.B, MOST_SEQUENCES), ("M", self.M, 1 << 16)):
            if not 1 <= value <= most:
                raise ValueError(f"tree_mla: {name} = {value} is outside 1..{most}")
        if self.page_size < 1 or self.keys < 1 or self.words < 1:
            raise ValueError(f"tree_mla: page_size = {self.page_size}, keys = {self.keys}, words = {self.words}; each is at least 1")

    @property
    def pages_each(self) -> int:
        """Entries of a sequence in the page table."""
        return -(-self.keys // self.page_size)


@dataclass(frozen=True, slots=True)
class Config:
    """One build and plan of the kernel.

    octets: query columns a tile, in eights. slots: boxes of 8 KB in the ring of keys, 9 a tile. producers: copying warps
    (one with wgmma). wgmma: Hopper's product and tensor copies. ahead: boxes of the next tile whose scores are taken before this
    tile's values are mixed in (8 slots more). causal: every sequence is a chain, ancestor words are not read. float_parts:
    partials in float32, so that split and unsplit tiles agree bit for bit; else bf16, half the bytes. chunk: key tiles a split,
    0: chosen on the device for the step's load; given, a row's numbers depend on its own keys alone. rows: tree_mla_rows.cu,
    64 query columns as the product's rows, for sequences that have that many; 8 octets, a ring of two tiles. trials: pairs of a
    name of prim/mla_trials.cuh and its value, for the benchmark; `served` adds those that a step has.
    """

    octets: int = 8
    slots: int = 17
    producers: int = 1
    wgmma: bool = True
    ahead: int = 0
    causal: bool = False
    float_parts: bool = True
    chunk: int = 0
    rows: bool = False
    trials: tuple[tuple[str, int], ...] = ()

    @property
    def columns(self) -> int:
        return 8 * self.octets

    @property
    def source(self) -> str:
        return "tree_mla_rows.cu" if self.rows else "tree_mla.cu"

    def defines(self, heads: int) -> dict[str, int]:
        """What `source` is built with."""
        both = {"HEADS": heads, "CAUSAL": int(self.causal), "PART_F32": int(self.float_parts), **dict(self.trials)}
        if self.rows:
            return both
        own = {
            "OCTETS": self.octets,
            "SLOTS": self.slots,
            "PRODUCERS": self.producers,
            "AHEAD": self.ahead,
            "USE_WGMMA": int(self.wgmma),
        }
        return both | own

    @property
    def threads(self) -> int:
        return 384 if self.wgmma else 256 + 32 * (self.producers + -(-self.columns // 32))

    def smem_bytes(self) -> int:
        return self.slots * BOX_BYTES + (BOXES + 1) * self.columns * 128 + TAIL_BYTES * (2 if self.rows else 1)

    def check(self, dims: Dims, arch: str = "sm_90a") -> None:
        """Raises ValueError with the broken rule."""
        dims.check()
        if not 1 <= self.octets <= 9:
            raise ValueError(f"{self}: {self.octets} octets of columns; 1 to 9 fit the registers")
        if self.rows and (not self.wgmma or self.ahead or (self.octets, self.slots) != (ROW_OCTETS, ROW_SLOTS)):
            raise ValueError(f"{self}: queries as rows are built for wgmma, {ROW_OCTETS} octets and {ROW_SLOTS} slots, nothing ahead")
        if unknown := [name for name, _ in self.trials if name not in TRIALS]:
            raise ValueError(f"{self}: {', '.join(unknown)} is no trial; there are {', '.join(TRIALS)}")
        if self.trials and not self.wgmma:
            raise ValueError(f"{self}: trials are of the kernels with wgmma")
        if dict(self.trials).get("MERGE_LATER") and (self.rows or self.octets > NARROW_OCTETS):
            raise ValueError(f"{self}: a merge of its own is for up to {NARROW_OCTETS} octets of columns")
        if {"OWNERS", "READY_FIRST"} & set(dict(self.trials)) and not self.rows:
            raise ValueError(f"{self}: OWNERS and READY_FIRST are of the kernel with queries as rows")
        if not 0 <= self.ahead <= BOXES:
            raise ValueError(f"{self}: {self.ahead} boxes ahead; a tile has {BOXES}")
        if not max(BOXES, 8 + self.ahead) <= self.slots <= 27:
            raise ValueError(f"{self}: {self.slots} slots; {max(BOXES, 8 + self.ahead)} to 27 with {self.ahead} boxes ahead")
        if self.smem_bytes() > MAX_SMEM_BYTES[arch]:
            raise ValueError(f"{self}: {self.smem_bytes()} bytes of shared memory, {arch} has {MAX_SMEM_BYTES[arch]}")
        if self.wgmma and (arch != "sm_90a" or self.producers != 1):
            raise ValueError(f"{self}: wgmma needs sm_90a (not {arch}) and one producer")
        if not self.wgmma and (self.producers not in (1, 2, 4) or self.octets > 4):
            raise ValueError(f"{self}: mma.sync takes 1, 2 or 4 producers and up to 4 octets (registers)")
        if not self.wgmma and arch == "sm_100a" and self.octets == 4:
            raise ValueError(f"{self}: 64 bytes of spills on {arch}; build with 3 octets")
        if self.wgmma and gcd(dims.page_size, TILE) < 16:
            raise ValueError(f"{self}: tensor copies need page_size = {dims.page_size} to be a multiple of 16; build without wgmma")
        if self.octets == 9 and dims.heads % 8:  # columns of an octet belong to several nodes: 10 to 36 bytes of spills
            raise ValueError(f"{self}: 9 octets need heads = {dims.heads} to be a multiple of 8")
        if self.chunk and -(-(dims.keys + TILE) // (self.chunk * TILE)) > MOST_SPLITS:
            raise ValueError(f"{self}: {dims.keys} keys in splits of {self.chunk} tiles are more than {MOST_SPLITS} splits")


def candidates(dims: Dims, arch: str = "sm_90a", causal: bool = False, chunk: int = 0) -> Iterator[Config]:
    """Every legal configuration worth timing: all column widths, as many slots as fit, boxes ahead where they suffice."""
    wgmma = arch == "sm_90a" and gcd(dims.page_size, TILE) >= 16
    for octets in range(1, 10):
        room = (MAX_SMEM_BYTES[arch] - TAIL_BYTES - (BOXES + 1) * octets * 1024) // BOX_BYTES
        if room < 9 or (octets - 1) * 8 >= dims.M * dims.heads:
            break
        for ahead in (0, AHEAD, BOXES) if wgmma and room >= 8 + BOXES else (0, BOXES) if room >= 8 + BOXES else (0,):
            for parts in (True,) if chunk else (True, False):
                config = Config(octets, min(room, 27), 1 if wgmma else 2, wgmma, ahead, causal, parts, chunk)
                try:
                    config.check(dims, arch)
                except ValueError:
                    continue
                yield config
    if wgmma and dims.M * dims.heads >= 32:
        for parts in (True,) if chunk else (True, False):
            yield Config(ROW_OCTETS, ROW_SLOTS, causal=causal, float_parts=parts, chunk=chunk, rows=True)


def default_config(dims: Dims, arch: str = "sm_90a", hw: Hardware | None = None, causal: bool = False, chunk: int = 0) -> Config:
    """The candidate of least predicted time, where nothing is measured; with float32 partials if they add less than 1.5 %."""
    machine = hw or HARDWARE["h200"]
    best = min(candidates(dims, arch, causal, chunk), key=lambda c: predict_us(dims, c, machine))
    exact = replace(best, float_parts=True)
    return exact if predict_us(dims, exact, machine) < 1.015 * predict_us(dims, best, machine) else best


def served(config: Config, dims: Dims, early: bool = True) -> Config:
    """`config` as it is launched in a step. early: keys may be read before the kernel ahead has ended: nothing writes them in this step.

    With `chunk` given nothing is merged later: that merge's order follows the number of splits, which rows in company change; nor are
    there owners.
    """
    if not config.wgmma:
        return config
    rows = "many rows" if dims.M * dims.heads >= MANY_ROWS * dims.B else "rows"
    made = replace(config, **SERVED[rows if config.rows else "narrow" if config.octets <= NARROW_OCTETS else "wide"])
    without = ["EARLY_KEYS", "READY_FIRST", "EARLY_BOXES"] * (not early) + ["MERGE_LATER", "OWNERS"] * bool(config.chunk)
    made = replace(made, trials=tuple(pair for pair in made.trials if pair[0] not in without))
    if dict(made.trials).get("MERGE_LATER"):  # room for the merge: where registers allow it, for both blocks that an item has
        spare = MAX_SMEM_BYTES["sm_90a"] - MERGE_BYTES * (2 if made.octets == 1 else 1) - replace(made, slots=0).smem_bytes()
        made = replace(made, slots=min(made.slots, spare // BOX_BYTES))
    return made


# ---------------------------------------------------------------- what this implementation pays
@dataclass(frozen=True, slots=True)
class Work:
    """Column tiles, splits of each (at most), items, items a block (at most), key tiles a block walks; bytes of keys read, from L2
    included, and of partials; columns without a row."""

    tiles: int
    splits: int
    items: int
    waves: int
    tiles_each: int
    key_bytes: int
    partial_bytes: int
    padded_columns: int


def most_tiles(dims: Dims, config: Config) -> int:
    """Column tiles in the worst case: every sequence ends in a partly filled one, or every row is a sequence."""
    return min(dims.M * dims.heads // config.columns + min(dims.M, dims.B), dims.M * -(-dims.heads // config.columns))


def slot_room(dims: Dims, config: Config, blocks: int) -> int:
    """Partials that the workspace holds."""
    if config.chunk:
        return most_tiles(dims, config) * -(-(dims.keys + TILE) // (config.chunk * TILE))
    return ROOM_WAVES * blocks


def choose_chunk(tiles: int, sequences: int, key_tiles: int, blocks: int, room: int) -> int:
    """tree_mla_plan's rule for equal sequences: the key tiles a split that cost least in waves x (tiles + overhead)."""
    low = max(sequences * tiles * key_tiles // (8 * blocks), -(-key_tiles // MOST_SPLITS), 1)
    best = (1 << 62, 0)
    for t in range(256):
        chunk = low + max(key_tiles - low, 0) * t * t // (255 * 255)
        chunk = -(-key_tiles // -(-key_tiles // chunk))
        ranges = -(-key_tiles // chunk)
        items = ranges * tiles * sequences
        if ranges == 1 or items <= room:
            best = min(best, (-(-items // blocks) * (chunk + ITEM_OVERHEAD), -chunk))
    return -best[1] or key_tiles


def part_length(tiles: int, sequences: int, key_tiles: int, blocks: int) -> int:
    """tree_mla_plan's even parts for equal sequences: key tiles of a part, 0 where one sequence has more column tiles than blocks."""
    if tiles > blocks:
        return 0
    return max(-(-sequences * (key_tiles + ITEM_OVERHEAD) // (blocks // tiles)), 4)


def work(dims: Dims, config: Config, blocks: int = 132) -> Work:
    """Assumes B sequences of M / B rows and `keys` keys each."""
    rows = -(-dims.M // dims.B)
    tiles = -(-rows * dims.heads // config.columns)
    key_tiles = -(-dims.keys // TILE)
    chunk = config.chunk or choose_chunk(tiles, dims.B, key_tiles, blocks, slot_room(dims, config, blocks))
    splits = -(-key_tiles // chunk)
    items = tiles * splits * dims.B
    waves = -(-items // blocks)
    each = waves * min(chunk, key_tiles)
    length = 0 if config.chunk else part_length(tiles, dims.B, key_tiles, blocks)
    if length and 32 * (length + ITEM_OVERHEAD) < 31 * waves * (chunk + ITEM_OVERHEAD):
        parts = -(-dims.B * (key_tiles + ITEM_OVERHEAD) // length)
        items = tiles * (parts + dims.B - 1)
        splits, waves, each = -(-items // (tiles * dims.B)), -(-items // (tiles * parts)), length
    partial = (4 if config.float_parts else 2) * config.columns * VALUE
    return Work(
        tiles * dims.B, splits, items, waves, each, tiles * dims.B * dims.keys * WIDTH * 2,
        0 if splits == 1 else items * partial, dims.B * tiles * config.columns - dims.M * dims.heads,
    )  # fmt: skip


def predict_us(dims: Dims, config: Config, hw: Hardware, blocks: int = 132) -> float:
    """Microseconds of a layer. Constants fit 33 configurations of bench_mla.py's eight cases on one H200, within 15 % of each.

    A key tile costs a block its bytes (at 0.9 of the block's share of the read rate, or of L2's where several column tiles read
    them) or its products and softmax, whichever is more, and some of the other: a norm of order 4. A ring of less than two tiles
    adds 0.5 us, scores that wait for the values before them 0.25 us. 6 us to launch, ramp and meet; an item costs 1 us and its
    columns, partials go at 0.62 of the read rate.
    """
    w = work(dims, config, blocks)
    busy = min(w.items, blocks)
    each = w.tiles // dims.B
    rate = 0.9 * hw.read_bps if each == 1 else min(0.9 * hw.read_bps * each, L2_SHARE * hw.read_bps)
    bytes_us = TILE * WIDTH * 2 / (rate / blocks) * 1e6 * (0.35 + 0.65 * busy / blocks)
    chain_us = 1.05 + 0.0155 * config.columns + (0.5 if config.slots < 2 * BOXES else 0.0)
    chain_us += {0: 0.25, BOXES: 0.0}.get(config.ahead, 0.02)  # between the two: not measured
    if config.rows:
        chain_us = 1.8
    if not config.wgmma:  # an expectation, not measured
        chain_us += 2.0 * TILE * (WIDTH + VALUE) * config.columns / (0.5 * hw.tensor_flops / blocks) * 1e6
    tile_us = (bytes_us**4 + chain_us**4) ** 0.25
    return float(6.0 + w.tiles_each * tile_us + w.waves * (1.0 + 0.06 * config.columns) + w.partial_bytes / (0.62 * hw.read_bps) * 1e6)
