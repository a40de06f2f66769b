"""What the INT4 mixture-of-experts kernel can be built and launched as, and which of it fits."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.w4 import GROUP, UNIT_BYTES, UNIT_ROWS

HEAD_BYTES = 1024  # kHead of moe_w4.cu
MAIL_BYTES = 2048  # one warp's sums of one octet, float32
MAX_SMEM_BYTES = {"sm_80": 166912, "sm_89": 101376, "sm_90a": 232448, "sm_100a": 232448, "sm_120a": 101376}
SM_SMEM_BYTES = {"sm_80": 167936, "sm_89": 102400, "sm_90a": 233472, "sm_100a": 233472, "sm_120a": 102400}
BLOCK_RESERVE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Dims:
    """A layer's shape: M rows of a bucket, E experts, top_k a token, H hidden, F expert width on this rank."""

    M: int
    E: int
    H: int
    F: int
    top_k: int

    def check(self) -> None:
        """Raises ValueError naming the symbol that the kernels cannot take."""
        for name, value, step in (("H", self.H, 64), ("F", self.F, 32)):
            if value < step or value % step:
                raise ValueError(f"moe_w4: {name} = {value} is not a positive multiple of {step}")
        if not 1 <= self.top_k <= min(32, self.E):
            raise ValueError(f"moe_w4: top_k = {self.top_k} is outside 1..{min(32, self.E)}")
        if not 1 <= self.E <= 1024:
            raise ValueError(f"moe_w4: E = {self.E} is outside 1..1024")
        if self.M < 1:
            raise ValueError(f"moe_w4: M = {self.M}; a bucket has at least one row")

    @property
    def groups(self) -> tuple[int, int]:
        return self.H // GROUP, self.F // GROUP

    @property
    def strips(self) -> tuple[int, int]:
        return 2 * self.F // UNIT_ROWS, self.H // UNIT_ROWS

    @property
    def expert_bytes(self) -> int:
        """Codes and scales of one expert, both matrices."""
        return UNIT_BYTES * sum(g * s for g, s in zip(self.groups, self.strips, strict=True))


@dataclass(frozen=True, slots=True)
class Config:
    """What moe_w4.cu lets us choose.

    octets: token octets a chunk, the most columns an item multiplies. groups: groups of 32 inputs a warp takes of a stage.
    warps: math warps a block. stages: depth of the ring. blocks: blocks an SM. rows13, rows2: warps along rows in the
    gate-up and the down product (the others split K). wgmma: Hopper's product instead of mma.sync. float_parts: per-choice
    sums kept in float32 (else bf16: half the bytes). fragments: 16-row fragments of a strip a warp multiplies, 4 or,
    with wgmma, 2 (fewer registers, so more token octets). wide: the copying warps hand registers to eight math warps.
    merged: one copying warp (wgmma). batch: fragments dequantised while others multiply.
    fewest: octets of the smallest tile built (tiles are 1, 2, 3, 4, 6, 8, 10, 12 octets; each costs registers).
    splits: items that share a down tile's K (shorter last items; their parts are added at the end). token_rows: rows that
    a stage has room for where M is below 8 octets (mma.sync), 0: all. splits13: the same for the gate-up product, whose
    last split to finish adds them. claim: down tiles that a block claims at a time.
    """

    octets: int = 1
    groups: int = 4
    warps: int = 4
    stages: int = 5
    blocks: int = 2
    rows13: int = 4
    rows2: int = 4
    wgmma: bool = False
    float_parts: bool = True
    fragments: int = 4
    wide: bool = False
    merged: bool = False
    batch: int = 1
    fewest: int = 1
    splits: int = 1
    token_rows: int = 0
    splits13: int = 1
    claim: int = 1

    @property
    def strips(self) -> int:
        """Strips times slices of K that a stage holds."""
        return self.warps * self.fragments // 4

    def wk(self, phase: int) -> int:
        """Slices of K."""
        return self.strips // (self.rows2 if phase else self.rows13)

    def defines(self) -> dict[str, int]:
        return {
            "NB_MAX": self.octets,
            "GW": self.groups,
            "CW": self.warps,
            "FJ": self.fragments,
            "STAGES": self.stages,
            "CTAS": self.blocks,
            "PART_F32": int(self.float_parts),
            "USE_WGMMA": int(self.wgmma),
            "WIDE": int(self.wide),
            "MERGED": int(self.merged),
            "JB": self.batch,
            "NB_MIN": self.fewest,
        }

    @property
    def chunk_rows(self) -> int:
        return 8 * self.octets

    @property
    def threads(self) -> int:
        return 32 * (self.warps + (4 if self.wide else 1 if self.merged else 2))

    def mail_bytes(self) -> int:
        """Shared memory in which slices of K meet; each phase has its own."""
        rows = (self.rows13, self.rows2)
        return sum(rows[p] * (self.wk(p) - 1) for p in (0, 1)) * self.octets * MAIL_BYTES

    def stages_at(self) -> int:
        return -(-(HEAD_BYTES + self.mail_bytes()) // 128) * 128

    def stage_bytes(self) -> int:
        weights = self.strips * self.groups * UNIT_BYTES
        if self.wgmma:
            tokens = self.octets * self.groups * 512
        else:
            tokens = (self.token_rows or self.chunk_rows) * self._token_row_bytes()
        return -(-(weights + tokens) // 128) * 128

    def _token_row_bytes(self) -> int:
        return max(self.wk(p) * self.groups * 64 + 16 for p in (0, 1))

    def smem_bytes(self) -> int:
        beyond = (self.chunk_rows - self.token_rows) * self._token_row_bytes() if self.token_rows else 0  # read, never used
        return self.stages_at() + self.stages * self.stage_bytes() + beyond

    def check(self, dims: Dims, arch: str = "sm_90a") -> None:
        """Raises ValueError with the broken rule."""
        dims.check()
        for name, rows, strips in (("rows13", self.rows13, dims.strips[0]), ("rows2", self.rows2, dims.strips[1])):
            if self.strips % rows or strips % rows:
                raise ValueError(f"{self}: {name} = {rows} must divide the stage's {self.strips} strips and the matrix's {strips}")
        if self.octets > (12 if self.wgmma else 4):
            raise ValueError(f"{self}: {self.octets} octets; mma.sync takes up to 4, wgmma up to 12")
        if self.wgmma and (arch != "sm_90a" or (self.rows13, self.rows2) != (self.strips, self.strips)):
            raise ValueError(f"{self}: wgmma needs sm_90a (not {arch}) and all warps along rows")
        if self.fragments != 4 and not (self.wgmma and self.fragments == 2):
            raise ValueError(f"{self}: {self.fragments} fragments a warp; 4, or 2 with wgmma")
        if self.wgmma and any(g % self.groups for g in dims.groups):
            raise ValueError(f"{self}: wgmma needs whole stages; {dims.groups} groups along K do not divide by {self.groups}")
        if self.wide and not (self.wgmma and self.warps == 8 and self.blocks == 1):
            raise ValueError(f"{self}: wide is for wgmma with 8 math warps and one block an SM")
        for name, splits, groups in (("splits13", self.splits13, dims.groups[0]), ("splits", self.splits, dims.groups[1])):
            if splits < 1 or groups % splits or (splits > 1 and self.wgmma):
                raise ValueError(f"{self}: {name} = {splits} must divide {groups} groups of K; mma.sync only")
        if self.claim > 1 and self.wgmma:
            raise ValueError(f"{self}: claim = {self.claim}; mma.sync only")
        if self.claim < 1 or dims.strips[1] // self.rows2 % self.claim:
            raise ValueError(f"{self}: claim = {self.claim} must divide the {dims.strips[1] // self.rows2} tiles of the down product")
        if self.token_rows and (self.wgmma or not min(dims.M, self.chunk_rows) <= self.token_rows <= self.chunk_rows):
            raise ValueError(f"{self}: token_rows = {self.token_rows}; a chunk may hold {min(dims.M, self.chunk_rows)}")
        if self.merged and (self.wide or not self.wgmma):
            raise ValueError(f"{self}: merged is for wgmma that is not wide")
        if not 1 <= self.fewest <= self.octets:
            raise ValueError(f"{self}: fewest = {self.fewest} is outside 1..{self.octets}")
        if self.batch not in (1, 2) or (self.batch == 2 and not self.wgmma):
            raise ValueError(f"{self}: batch = {self.batch}; 1, or 2 with wgmma")
        room = min(MAX_SMEM_BYTES[arch], SM_SMEM_BYTES[arch] // self.blocks - BLOCK_RESERVE_BYTES)
        if self.smem_bytes() > room:
            raise ValueError(f"{self}: {self.smem_bytes()} bytes of shared memory, {room} fit with {self.blocks} blocks on {arch}")

    def fits(self, dims: Dims, arch: str = "sm_90a") -> bool:
        try:
            self.check(dims, arch)
        except ValueError:
            return False
        return True
