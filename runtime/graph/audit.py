"""What a graph does: launches, bytes, flops and floor of each op, and on a GPU what they took.

An op's time is that of a graph of its launches alone, all layers one after the other (so weights come from memory, not from
L2), on what the last replay left. Ops side by side overlap their heads and tails (PDL), so their sum is above the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from runtime.cost import Cost
from runtime.graph.driver import Driver
from runtime.graph.probe import Probe
from runtime.graph.programs import Program
from runtime.hw import Hardware
from runtime.kernels_cu.recorder import Recorded


@dataclass(frozen=True, slots=True)
class OpShare:
    """One op in one program. calls: of the op; launches: of kernels; us: measured, None without a GPU."""

    op: str
    calls: int
    launches: int
    bytes: float
    flops: float
    floor_us: float
    us: float | None

    @property
    def share(self) -> float | None:
        """Floor over measured time; None where either is missing."""
        return self.floor_us / self.us if self.us and self.floor_us else None


@dataclass(frozen=True, slots=True)
class ProgramAudit:
    """One program by op, in the order of first use. us: the whole graph on the device; nodes: what it holds, by kind."""

    kind: str
    rows: int
    out_rows: int
    captured: bool
    nodes: dict[str, int]
    ops: tuple[OpShare, ...]
    us: float | None

    @property
    def launches(self) -> int:
        return sum(op.launches for op in self.ops)

    @property
    def floor_us(self) -> float:
        return sum(op.floor_us for op in self.ops)

    def as_json(self) -> dict[str, Any]:
        total = {"launches": self.launches, "floor_us": self.floor_us}
        ops = [{**asdict(op), "share": op.share} for op in self.ops]
        named = {name: getattr(self, name) for name in ("kind", "rows", "out_rows", "captured", "us")}
        return {**named, **total, "nodes": dict(self.nodes), "ops": ops}


@dataclass(frozen=True, slots=True)
class Audit:
    """All programs of a worker. arena_bytes: of buffers and scratch; steady: no memory was taken by replaying them."""

    gpu: str
    hw: Hardware
    programs: tuple[ProgramAudit, ...]
    arena_bytes: int
    steady: bool

    def as_json(self) -> dict[str, Any]:
        return {
            "gpu": self.gpu,
            "hardware": self.hw.name,
            "arena_bytes": self.arena_bytes,
            "steady": self.steady,
            "programs": [program.as_json() for program in self.programs],
        }


def audit_program(
    program: Program, driver: Driver, hw: Hardware, known: Mapping[str, float], repeats: int, time_ops: bool = True
) -> ProgramAudit:
    """Counts and prices a program's launches for a full bucket, and times them where the driver can. known: as `Recorded.cost`'s."""
    ops = []
    for op, records in group_ops(program.records).items():
        costs = [record.cost(known) for record in records]
        total = sum(costs, Cost())
        calls = sum(bool(record.symbols) for record in records) or len(records)
        floor_us = sum(cost.floor_us(hw) for cost in costs)
        op_us = driver.time_us(driver.capture([record.run for record in records]), repeats) if repeats and time_ops else None
        ops.append(OpShare(op, calls, len(records), total.bytes, total.flops, floor_us, op_us))
    us = driver.time_us(program.graph, repeats) if repeats else None
    return ProgramAudit(program.kind, program.rows, program.out_rows, program.captured, dict(program.graph.nodes), tuple(ops), us)


def step_known(records: Iterable[Recorded], probe: Probe, rows: int) -> dict[str, float]:
    """What the costs of a step of `rows` rows need: those that its split_chunks takes are chunk_attention's, the rest tree_mla's."""
    split = next((record.symbols for record in records if record.op == "split_chunks" and record.symbols), None)
    return probe.known(rows, split["least"], split["room"]) if split else probe.known(rows)


def group_ops(records: Iterable[Recorded]) -> dict[str, list[Recorded]]:
    """Launches by op, in the order of first use. A router's product and its choices count with `moe_w4`, which ends them."""
    found: dict[str, list[Recorded]] = {}
    for record in records:
        found.setdefault(_MERGED.get(record.op, record.op), []).append(record)
    return found


_MERGED = {"route": "moe_w4"}  # without fresh logits and choices the experts' kernels would find their counters spent


def dot(program: Program) -> str:
    """The graph as DOT text: a chain, one node a launch, named by its op and what is launched."""
    lines = [f'digraph "{program.name}" {{', "  rankdir=TB; node [shape=box, fontname=monospace, fontsize=9];"]
    names = [_quoted(f"{record.op}: {' '.join(str(record.run).split())}") for record in program.records]
    lines += [f"  n{i} [label={name}];" for i, name in enumerate(names)]
    lines += [f"  n{i} -> n{i + 1};" for i in range(len(names) - 1)]
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
