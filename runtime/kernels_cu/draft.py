"""The drafter's small ops: the calls of draft.cu.

Grids are fixed for a bucket. Dead rows have a negative number in `alive` (the plan's seq or tap_slot; 0: none is dead);
`top_logprobs` reads how many rows are live from device memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.cost import Cost
from runtime.hw import Hardware
from runtime.kernels_cu._call import Call, blocks, f32, i32, ptr, vectors

SOURCE = "draft.cu"
ENTRIES = ("head_norm_rope", "kv_write", "top_logprobs")
SLICE = 128  # kSlice of draft.cu
ROOM_BYTES = 33_040  # sizeof(SelectRoom); the shim's test holds them to each other
MOST_TOP, MOST_IDS = 2048, 1 << 21  # kListRoom, kMostIds of prim/select.cuh
PASSES = 5  # of top_logprobs over a row: largest, sum, two of the selection, the list
_PASS_BPS = 1.0e11  # what one SM draws from L2; an estimate until a record exists


@dataclass(frozen=True, slots=True)
class Config:
    """head: width of the drafter's heads. threads: of top_logprobs' block, one block a row."""

    head: int = 128
    threads: int = 512

    def check(self) -> None:
        """Raises ValueError with the broken rule."""
        if self.head % 64 or not 64 <= self.head <= 512:
            raise ValueError(f"{self}: heads of {self.head}; a multiple of 64 up to 512")
        if self.threads % 32 or not 32 <= self.threads <= 1024 or 2048 % self.threads:
            raise ValueError(f"{self}: {self.threads} threads; whole warps that divide 2048 bins, at most 1024")

    def smem_bytes(self) -> int:
        return ROOM_BYTES

    def defines(self) -> dict[str, int]:
        return {"HEAD": self.head, "THREADS": self.threads}


def candidates(head: int) -> list[Config]:
    """Legal configurations for heads of that width, the default first."""
    return [Config(head, threads) for threads in (512, 256)]


def work(m: int, vocab: int) -> Cost:
    """What top_logprobs reads: each row PASSES times, all but the first from L2."""
    return Cost(4.0 * m * vocab * PASSES, 4.0 * m * vocab * PASSES, 0.0)


def predict_us(m: int, vocab: int, hw: Hardware, sms: int = 132) -> float:
    """top_logprobs: rows through single SMs as often as blocks queue there, or the first pass from memory."""
    return 1e6 * max(-(-m // sms) * PASSES * 4.0 * vocab / _PASS_BPS, 4.0 * m * vocab / hw.read_bps)


def head_norm_rope(
    config: Config, m: int, heads: int, eps: float, *, x: int, w: int, cos_sin: int, pos: int, out: int, alive: int = 0
) -> Call:
    """out [M, A, J] = rotate(rms_norm(x over J)) of x [M, A*J] at pos [M]."""
    config.check()
    numbers = (i32(heads), f32(eps))
    arguments = (ptr(x), ptr(w), ptr(cos_sin), ptr(pos), ptr(alive), ptr(out), *numbers)
    return Call("head_norm_rope", (blocks(heads, SLICE // 32), m, 1), SLICE, 0, arguments)


def kv_write(m: int, width: int, *, k: int, v: int, slot: int, k_cache: int, v_cache: int) -> Call:
    """k_cache[slot] = k and v_cache[slot] = v for rows of Z*J = width numbers; a slot of -1 is a dead row."""
    row = vectors("kv_write", "Z*J", width)
    arguments = (ptr(k), ptr(v), ptr(slot), ptr(k_cache), ptr(v_cache), i32(row))
    return Call("kv_write", (blocks(row, SLICE), m, 1), SLICE, 0, arguments)


def top_logprobs(config: Config, m: int, vocab: int, top: int, *, logits: int, live: int, ids: int, logp: int) -> Call:
    """ids, logp [M, K] of logits [M, V] f32, for the rows below *live."""
    config.check()
    if not 1 <= vocab <= MOST_IDS:
        raise ValueError(f"top_logprobs: V = {vocab} is outside 1..{MOST_IDS}")
    if not 1 <= top <= min(vocab, MOST_TOP):
        raise ValueError(f"top_logprobs: K = {top} is outside 1..{min(vocab, MOST_TOP)}")
    arguments = (ptr(logits), ptr(live), ptr(ids), ptr(logp), i32(vocab), i32(top))
    return Call("top_logprobs", (m, 1, 1), config.threads, config.smem_bytes(), arguments)
