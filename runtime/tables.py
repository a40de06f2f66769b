"""Page tables of a batch as one array, kept from one step to the next: of 64 sequences few get a page in a step."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from runtime.sequence import Sequence
from runtime.types import I32


class PageTables:
    """The tables that the last step was planned with. Its draft is done with them too: before pages come and go they are still true."""

    def __init__(self) -> None:
        self._batch: list[Sequence] = []
        self._edits: list[int] = []  # Sequence.page_edits as the tables show them
        self._pages: I32 = np.zeros((0, 0), np.int32)

    def find(self, batch: list[Sequence]) -> I32 | None:
        """[B, P] padded with the null page, if these are the tables at hand."""
        same = batch == self._batch and [sequence.page_edits for sequence in batch] == self._edits
        return self._pages if same else None

    def of(self, batch: list[Sequence]) -> I32:
        """As `find`, made if need be: a new array each time, since plans that were handed over keep theirs."""
        edits = [sequence.page_edits for sequence in batch]
        known = self._edits if batch == self._batch else []
        if edits != known:
            self._pages = _tables(batch, edits, known, self._pages)
            self._batch, self._edits = batch, edits
        return self._pages


def _tables(batch: SequenceOf[Sequence], edits: list[int], known: list[int], tables: I32) -> I32:
    """tables: of the same batch when its page_edits were `known`; only what has changed since is written where they are as wide as
    needed, known [] means that there are none.
    """
    widest = max(sequence.page_count for sequence in batch)
    if known and widest == tables.shape[1]:
        pages, changed = tables.copy(), [b for b, (now, then) in enumerate(zip(edits, known, strict=True)) if now != then]
    else:
        pages, changed = np.zeros((len(batch), widest), np.int32), list(range(len(batch)))
    for b in changed:
        held = batch[b].page_count
        pages[b, :held], pages[b, held:] = batch[b].pages, 0
    return pages
