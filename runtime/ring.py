"""From rank 0 to the others: a ring of records in shared memory, each a plan's bytes (`runtime.plan`)
or a list of sizes to capture.

    slot     [kind, sequence | record bytes]     the sequence word is written last: who sees it sees the record
    reader   [sequence, answer]                  a cache line each: the last record that this reader is done with

A record may be written over once every reader is done with it, so a reader works on the bytes where they lie.
"""

from __future__ import annotations

from runtime.shared import LINE, SharedBlock, Watch
from runtime.types import Array

SLOTS = 4
STOP, STEP, DRAFT, CAPTURE = 1, 2, 3, 4  # kinds of records


class PlanRing:
    """Both ends of a ring for records of at most record_bytes, at byte `at` of a block; all ranks give the same numbers."""

    def __init__(self, block: SharedBlock, at: int, record_bytes: int, readers: int, watch: Watch) -> None:
        stride = _slot_bytes(record_bytes)
        self._words, self._watch, self._readers = block.words, watch, readers
        self._heads = [(at + slot * stride) // 8 for slot in range(SLOTS)]
        self._records = [block.array(at + slot * stride + LINE, record_bytes) for slot in range(SLOTS)]
        self._done = [(at + SLOTS * stride + reader * LINE) // 8 for reader in range(readers)]
        self._sequence = 0

    @staticmethod
    def nbytes(record_bytes: int, readers: int) -> int:
        """Bytes of the block that a ring takes."""
        return SLOTS * _slot_bytes(record_bytes) + readers * LINE

    # The writer's end.

    def record(self) -> Array:
        """Where the next record goes, [record_bytes] u8; waits until no reader needs what lies there."""
        self._wait_done(self._sequence + 1 - SLOTS)
        return self._records[(self._sequence + 1) % SLOTS]

    def publish(self, kind: int) -> None:
        """Hands the record to every reader."""
        self._sequence += 1
        head = self._heads[self._sequence % SLOTS]
        self._words[head] = kind
        self._words[head + 1] = self._sequence

    def answers(self) -> list[int]:
        """What each reader answered to the last record; waits until all are done with it."""
        self._wait_done(self._sequence)
        return [self._words[done + 1] for done in self._done]

    def _wait_done(self, sequence: int) -> None:
        for reader, done in enumerate(self._done):
            if self._words[done] < sequence:
                what = f"rank {reader + 1} has not finished record {sequence}"
                self._watch.wait(lambda done=done: self._words[done] >= sequence, what)  # type: ignore[misc]

    # A reader's end.

    def next(self) -> tuple[int, Array]:
        """(kind, bytes) of the next record, whenever it comes. Read in place; `finish` gives it back."""
        self._sequence += 1
        at = self._heads[self._sequence % SLOTS] + 1
        self._watch.wait(lambda: self._words[at] == self._sequence, "no record", patient=True)
        return self._words[at - 1], self._records[self._sequence % SLOTS]

    def finish(self, reader: int, answer: int = 0) -> None:
        """Says that this reader is done with the last record, and its answer, 64 bits."""
        done = self._done[reader]
        self._words[done + 1] = answer
        self._words[done] = self._sequence


def _slot_bytes(record_bytes: int) -> int:
    return LINE + -(-record_bytes // LINE) * LINE
