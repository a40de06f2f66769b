"""Who gets rows and pages in the next step. By priority, then first come, first served; among equals nobody starves.

A step has room for `max_rows` rows. In order of claim:

1. every running sequence has a page for its newest token: the first in order takes from the last;
2. every decoding sequence gets one row;
3. prompts, running ones and those now admitted, have a quarter of the rows to themselves;
4. draft nodes take what is left, within the pages that are left;
5. prompts take the rest, up to `chunk` rows while anybody decodes.

So trees shrink before a prompt waits or a sequence is preempted for them. The first sequence in order
can always take every page, and no request is longer than all pages together: something always moves.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, islice

from runtime.grove import Grove, Offer
from runtime.pages import PagePool
from runtime.rows import Share
from runtime.sequence import Sequence
from runtime.speculate import Load, Roots, first_nodes
from runtime.stats import EngineStats
from runtime.tables import PageTables
from runtime.types import DraftTree

PROMPT_SHARE = 4  # prompts keep a quarter of the rows where trees would take all


@dataclass(slots=True)
class _Due:
    """Who decodes in the next step, as far as it is known without their trees."""

    shares: list[Share]
    ids: list[str]
    newest: list[int]
    nodes: int  # rows for draft nodes
    room: list[int] | None = None  # rows of each that it holds the pages for, if these were taken ahead


class Scheduler:
    """Waiting and running sequences, and the pages they hold.

    Between two steps a running sequence holds the pages of its `length` tokens and no more; pages of
    rejected draft nodes are given back with them. `running` and `waiting` are sorted by `Sequence.order`,
    and of equal priority all that run came before all that wait. `seats` and `chunk` may be lowered
    and raised between two steps (`runtime.pace`): nobody who runs is sent away for it.
    """

    def __init__(self, pool: PagePool, stats: EngineStats, *, max_seqs: int, max_rows: int, max_len: int, last_draftable: int) -> None:
        self.pool = pool
        self.stats = stats
        self.tables = PageTables()
        self.max_seqs = max_seqs
        self.max_rows = max_rows
        self.max_len = max_len
        self.seats = max_seqs  # sequences that may run now
        self.chunk = max_rows  # prompt rows of a step in which anybody decodes
        self.last_draftable = last_draftable  # last position of a root whose whole draft block has positions
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._arrivals = count()
        self._due: _Due | None = None  # the next step, between two

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        sequence.arrival = next(self._arrivals)
        self._queue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is; its pages lose a holder and registered ones stay findable."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.pool.release(sequence.cut_pages(0))

    def roots(self, nodes: int, depth: int) -> Roots:
        """The sequences to draft for, each with its room: at most `nodes` nodes, `depth` of use.

        Room ends at the context's end, at the tokens left to emit, and where all trees together would
        take more rows than rules 2 and 3 leave. Pages are not looked at: a tree that finds too few
        is cut when it is scheduled.
        """
        if min(nodes, depth) < 1:
            return Roots([], [], [], [])
        wishing, wishes, depths = list[Sequence](), list[int](), list[int]()
        decoding, last, longest = 0, self.last_draftable, self.max_len
        for sequence in self.running:
            computed, length = sequence.computed, sequence.length
            if length - computed == 1:
                decoding += 1
                left = sequence.longest - length
                if 0 < computed <= last and left > 1:
                    wish = nodes if sequence.most_nodes is None else min(nodes, sequence.most_nodes)
                    wishing.append(sequence)
                    wishes.append(wish if length + wish <= longest else longest - length)
                    depths.append(depth if left > depth else left - 1)
        prompts = decoding < len(self.running) or self.waiting
        shares = _level(wishes, self._node_rows(decoding, self._prompt_rows(with_waiting=True) if prompts else 0))
        if min(shares, default=1) < 1:
            wishing = [sequence for sequence, share in zip(wishing, shares, strict=True) if share]
            wishes = [wish for wish, share in zip(wishes, shares, strict=True) if share]
            depths = [depth for depth, share in zip(depths, shares, strict=True) if share]
            shares = [share for share in shares if share]
        return Roots(wishing, shares, depths, wishes, self.tables.find(wishing))

    def load(self) -> Load:
        """What the next step holds without draft nodes."""
        decoding = sum(s.length - s.computed == 1 for s in self.running)
        prompt = min(self._prompt_rows(with_waiting=True), self.max_rows - decoding)
        reserved = max(1, self.max_rows // PROMPT_SHARE)
        return Load(decoding, prompt, self.max_rows, reserved, sum(s.computed for s in self.running))

    def prepare(self) -> None:
        """Rules 1 and 3 of the next step, which no tree has a say in: pages of newest tokens, preemption, admission; who decodes."""
        if self._due is not None:
            return
        if not self._secure_running():
            self._admit()
        decoding = [s for s in self.running if s.length - s.computed == 1]
        prompts = self._prompt_rows() if len(decoding) < len(self.running) else 0
        self._due = _Due(
            [Share(s, s.computed, 0, 1, (), at) for at, s in enumerate(decoding)],
            [s.request.id for s in decoding],
            [s.newest for s in decoding],
            self._node_rows(len(decoding), prompts),
        )

    def expect(self, nodes: list[int]) -> list[Share]:
        """Takes pages ahead for trees of so many nodes for all who decode, if nobody else runs and few of those left are wanted. After
        `prepare`; who then gets a smaller tree gives them back with the step. The shares, without trees; [] if nothing was taken."""
        due = self._due
        if due is None or len(due.shares) != len(self.running) or len(due.shares) != len(nodes):
            return []
        size, ends = self.pool.page_size, [share.start + rows for share, rows in zip(due.shares, nodes, strict=True)]
        missing = [max(0, -(-end // size) - share.sequence.page_count) for share, end in zip(due.shares, ends, strict=True)]
        if max(ends, default=0) > self.max_len or 2 * sum(missing) > self.pool.available - len(nodes):
            return []
        for share, pages in zip(due.shares, missing, strict=True):
            if pages:
                share.sequence.add_pages(self.pool.take(pages))
        due.room = nodes
        return due.shares

    def schedule(self, trees: Mapping[str, DraftTree]) -> list[Share]:
        """Decides the next step: decoding sequences first, with their trees (by id), then chunks.

        Takes the pages of all rows, admits and preempts, where `prepare` has not. Empty only if there is no work.
        """
        self.prepare()
        due, self._due = self._due, None
        assert due is not None
        shares, nodes = due.shares, due.nodes
        grown = self._whole(due, trees)
        if grown is not None:
            for share, size in zip(shares, grown.sizes, strict=True):
                share.nodes, share.trees = size, grown
        else:
            for share in shares:
                sequence, tree = share.sequence, trees.get(share.sequence.id)
                share.trees, share.at = Grove.roots([sequence.newest]) if tree is None else [self._fit(sequence, tree, nodes)], 0
                share.nodes = len(share.trees[0])
                nodes -= share.nodes - 1
        if len(shares) < len(self.running):
            left = self.max_rows - sum(share.nodes for share in shares)
            chunk = self.chunk if shares else self.max_rows
            for sequence in self.running:
                if sequence.pending > 1 and min(left, chunk) > 0:
                    rows = min(sequence.pending, left, chunk)
                    left -= rows
                    chunk -= rows
                    shares.append(_chunk(sequence, rows))
        return shares

    def _whole(self, due: _Due, trees: Mapping[str, DraftTree]) -> Grove | None:
        """All trees in one, with their pages taken, where every sequence that decodes gets its whole tree or none has one; else None.

        64 trees are then looked at in a tenth of the time that `_fit` takes for each.
        """
        if not trees:
            return Grove.roots(due.newest)
        if not isinstance(trees, Offer) or not isinstance(grown := trees.trees, Grove) or trees.ids != due.ids:
            return None
        if len(grown.token) - len(grown) > due.nodes or grown.token.take(grown.lines.first).tolist() != due.newest:
            return None
        if grown.sizes == due.room:
            return grown
        size, longest, total, wanted = self.pool.page_size, self.max_len, 0, list[tuple[Sequence, int]]()
        for share, rows in zip(due.shares, grown.sizes, strict=True):
            end, sequence = share.start + rows, share.sequence
            if end > longest:
                return None
            if end > size * sequence.page_count:
                wanted.append((sequence, -(-end // size) - sequence.page_count))
                total += wanted[-1][1]
        if total > self.pool.available:
            return None
        for sequence, missing in wanted:
            sequence.add_pages(self.pool.take(missing))
        return grown

    def give_back(self, sequence: Sequence) -> None:
        """Returns the pages beyond the sequence's tokens: those of rejected draft nodes."""
        keep = self.pool.pages_for(sequence.length)
        if sequence.page_count > keep:
            self.pool.release(sequence.cut_pages(keep))

    def preempt(self, sequence: Sequence) -> None:
        """Sends a running sequence back to its place in the queue with all its tokens and without pages."""
        self.running.remove(sequence)
        self.pool.release(sequence.cut_pages(0))
        sequence.computed = 0
        sequence.registered = 0
        sequence.preemptions += 1
        self.stats.preemptions += 1
        self._queue(sequence)

    def check(self) -> None:
        """Raises AssertionError unless pages and sequences agree, as they do between two steps. O(pages), for tests."""
        self.pool.check(sequence.pages.tolist() for sequence in [*self.running, *self.waiting])
        for sequence in self.running:
            count, computed, length = sequence.page_count, sequence.computed, sequence.length
            if not self.pool.pages_for(computed) <= count <= self.pool.pages_for(length) or not computed < length:
                raise AssertionError(f"{sequence.id}: {count} pages, {computed} of {length} tokens computed")
        for sequence in self.waiting:
            if sequence.page_count or sequence.computed:
                raise AssertionError(f"{sequence.id} waits with {sequence.page_count} pages and {sequence.computed} tokens computed")

    def _queue(self, sequence: Sequence) -> None:
        """Puts a sequence among those that wait; at an end, in constant time, if all have one priority."""
        if not self.waiting or self.waiting[-1].order < sequence.order:
            self.waiting.append(sequence)
        elif sequence.order < self.waiting[0].order:
            self.waiting.appendleft(sequence)
        else:
            insort(self.waiting, sequence, key=lambda s: s.order)

    def _secure_running(self) -> bool:
        """Rule 1; True if a sequence was preempted for it."""
        before, size = self.stats.preemptions, self.pool.page_size
        i = 0
        while i < len(self.running):
            sequence = self.running[i]
            i += 1
            missing = -(-sequence.length // size) - sequence.page_count
            if missing <= 0:
                continue
            while missing > self.pool.available and self.running[-1] is not sequence:
                self.preempt(self.running[-1])
            if missing > self.pool.available:
                self.preempt(sequence)
            else:
                sequence.add_pages(self.pool.take(missing))
        return self.stats.preemptions > before

    def _admit(self) -> None:
        """Admits from the head of the queue while seats, rows and pages last.

        A sequence is admitted with the pages of all its tokens, so two half-done prompts never wait
        for each other, and leaves one page for each running sequence, which will soon want it. At
        least the newest token is computed again: its logits are not in the cache.
        """
        while self.waiting and len(self.running) < min(self.seats, self.max_seqs):
            decoding = sum(s.pending == 1 for s in self.running)
            if decoding + self._prompt_rows() >= self.max_rows:
                return
            sequence = self.waiting[0]
            found = self.pool.find(sequence.keys((sequence.length - 1) // self.pool.page_size)) if self.pool.caching else []
            missing = self.pool.pages_for(sequence.length) - len(found)
            if self.pool.available - self.pool.unheld(found) - missing < len(self.running):
                return
            self.waiting.popleft()
            self.pool.hold(found)
            sequence.add_pages(found)
            sequence.add_pages(self.pool.take(missing))
            sequence.computed = len(found) * self.pool.page_size
            sequence.registered = len(found)
            insort(self.running, sequence, key=lambda s: s.order)
            if sequence.cached_tokens is None:
                self._count_admission(sequence)

    def _count_admission(self, sequence: Sequence) -> None:
        sequence.cached_tokens = sequence.computed
        sequence.admitted_s = time.monotonic()
        self.stats.prompt_tokens += sequence.prompt_len
        if self.pool.caching:
            self.stats.prefix_queries += sequence.prompt_len
            self.stats.prefix_hits += sequence.computed

    def _prompt_rows(self, with_waiting: bool = False) -> int:
        """Rows that chunks could use, at most those of a step, or `chunk` while anybody decodes."""
        pending = [s.length - s.computed for s in self.running]
        decoding = pending.count(1)
        rows = sum(pending) - decoding
        most = self.chunk if decoding else self.max_rows
        free = min(self.seats, self.max_seqs) - len(self.running)
        if with_waiting and free > 0:
            for sequence in islice(self.waiting, free):
                if rows >= most:
                    break
                rows += sequence.pending
        return min(rows, most)

    def _node_rows(self, decoding: int, prompt_rows: int) -> int:
        """Rows for draft nodes after rules 2 and 3."""
        return max(0, self.max_rows - decoding - min(prompt_rows, max(1, self.max_rows // PROMPT_SHARE)))

    def _fit(self, sequence: Sequence, tree: DraftTree, nodes: int) -> DraftTree:
        """The part of a tree that rows, context and pages have room for, with its pages taken."""
        if tree.token[0] != sequence.newest:
            raise RuntimeError(f"sequence {sequence.id}: the tree's root is token {tree.token[0]}, the newest token is {sequence.newest}")
        pool, size, held, start, length = self.pool, self.pool.page_size, sequence.page_count, sequence.computed, len(tree.token)
        room = min(1 + nodes, self.max_len - start)
        if length > room or start + length > held * size:
            tree = first_nodes(tree, min(room, (held + pool.available) * size - start))
            missing = pool.pages_for(start + len(tree)) - held
            if missing > 0:
                sequence.add_pages(pool.take(missing))
        return tree


def _chunk(sequence: Sequence, count: int) -> Share:
    """The next `count` tokens; the newest, if among them, as a tree of one node."""
    if count < sequence.pending:
        return Share(sequence, sequence.computed, count, 0, ())
    return Share(sequence, sequence.computed, count - 1, 1, Grove.roots([sequence.newest]))


def _level(wishes: list[int], total: int) -> list[int]:
    """Shares `total` out so that the smallest share is as large as can be; nobody gets more than its wish."""
    shares = [0] * len(wishes)
    left = total
    if sum(wishes) <= total:
        return wishes
    by_wish = sorted(range(len(wishes)), key=lambda i: wishes[i])
    for done, i in enumerate(by_wish):
        shares[i] = min(wishes[i], left // (len(wishes) - done))
        left -= shares[i]
    return shares
