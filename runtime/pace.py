"""Admission under a latency target: how many sequences may run, and how long the prompt chunks beside them may be.

The time of an output token of S streams is what the node budget would reach with them, S ÷ its best rate: T(M) at the best M,
over the tokens that this M brings each stream. One more stream is admitted if the target still holds with it, and prompt
chunks take the rows that the step's time leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.curve import CostCurve
from runtime.outlook import Outlook
from runtime.price import Price
from runtime.scheduler import Scheduler

LEAST_CHUNK = 16  # prompt rows that go on whatever the target says: a prompt that waited for ever would be no latency


@dataclass(frozen=True, slots=True)
class Pace:
    """Holds the mean time of an output token (TPOT) near target_s, as far as admission can.

    curve and outlook are the speculator's own, so both learn from every step. None as outlook: plain decoding. Sequences that
    run are never sent away for the target: where contexts grow or drafts fail, it is met again when some have ended.
    """

    target_s: float
    curve: CostCurve
    outlook: Outlook | None = None

    def steer(self, scheduler: Scheduler) -> None:
        """Sets the scheduler's seats and chunk for the next step."""
        running = len(scheduler.running)
        ctx = sum(sequence.computed for sequence in scheduler.running)
        scheduler.seats = self.seats(running, scheduler.max_seqs, ctx)
        scheduler.chunk = self.chunk(max(1, running), scheduler.max_rows, ctx)

    def tpot(self, streams: int, ctx: int = 0) -> float:
        """Seconds an output token of each of so many streams, their contexts `ctx` tokens together."""
        return self._best(streams, ctx)[0]

    def seats(self, running: int, most: int, ctx: int = 0) -> int:
        """Sequences that may run: all that do, and 1, 2, 4 … more while the target holds; at least 1, at most `most`.

        A newcomer's context is taken to be the mean one.
        """
        each = ctx // max(running, 1)
        allowed, more = max(running, 1), 1
        while allowed < most and self.tpot(wanted := min(running + more, most), each * wanted) <= self.target_s:
            allowed, more = max(allowed, wanted), 2 * more
        return min(allowed, most)

    def chunk(self, streams: int, most: int, ctx: int = 0) -> int:
        """Prompt rows beside so many streams within the target: the largest bucket that is fast enough, less their rows."""
        tpot, nodes, drafted, tokens = self._best(streams, ctx)
        left_s = self.target_s * tokens - float(self.curve.host.at(streams, nodes, drafted > 0)) - self.curve.draft(drafted)
        fast = self.curve.buckets[self.curve.step(self.curve.buckets, ctx) <= left_s]
        rows = int(fast[-1]) - streams - nodes if len(fast) and tpot <= self.target_s else 0
        return min(max(rows, LEAST_CHUNK), most)

    def _best(self, streams: int, ctx: int) -> tuple[float, int, int, float]:
        """TPOT, draft nodes, streams drafted for, tokens each: of the better of plain decoding and what trees allow."""
        price = Price(self.curve, streams, ctx=ctx)
        plain_s = float(price.seconds(0, 0))
        if self.outlook is not None and self.outlook.seen:
            rate, nodes = self.outlook.best(price, streams, streams)
            if rate * plain_s > streams:
                return streams / rate, nodes, streams, rate * float(price.seconds(nodes, streams)) / streams
        return plain_s, 0, 0, 1.0
