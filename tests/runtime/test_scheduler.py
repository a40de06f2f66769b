"""Who gets rows and pages: order, admission, chunks, trees that shrink, preemption."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import pytest

from runtime.pages import PagePool
from runtime.rows import Share
from runtime.scheduler import Scheduler, _level
from runtime.sequence import Sequence
from runtime.stats import EngineStats
from runtime.stream import TextStream
from runtime.types import DraftTree
from tests.language import Letters, make_request

PAGE = 4


def make_scheduler(num_pages: int = 101, *, max_seqs: int = 8, max_rows: int = 64, max_len: int = 200, caching: bool = True) -> Scheduler:
    pool = PagePool(num_pages, PAGE, caching)
    return Scheduler(pool, EngineStats(), max_seqs=max_seqs, max_rows=max_rows, max_len=max_len, last_draftable=max_len - 8)


def add(scheduler: Scheduler, name: str, length: int, max_tokens: int = 50, first: int | None = None) -> Sequence:
    prompt = np.arange(length) + (sum(map(ord, name)) * 1000 if first is None else first)
    request = make_request(name, prompt, max_tokens=max_tokens)
    sequence = Sequence(request, request.sampling, TextStream(Letters(), request.sampling, frozenset()), PAGE)
    scheduler.add(sequence)
    return sequence


def finish_step(scheduler: Scheduler, shares: SequenceOf[Share], accepted: int = 0) -> None:
    """As if the step had run: every tree emits its bonus and up to `accepted` nodes."""
    for share in shares:
        sequence = share.sequence
        sequence.computed = share.start + share.before
        if share.tree is not None:
            emitted = 1 + min(accepted, share.nodes - 1)
            sequence.computed += emitted
            sequence.append([7] * emitted)
        scheduler.give_back(sequence)
    scheduler.check()


def rows_of(shares: SequenceOf[Share]) -> list[tuple[str, int, int]]:
    return [(share.sequence.id, share.start, share.count) for share in shares]


def line(token: int, nodes: int) -> DraftTree:
    place = np.arange(nodes + 1)
    return DraftTree(np.array([token, *range(nodes)], np.int32), (place - 1).astype(np.int16), place.astype(np.int16))


def test_chunks_follow_one_another_in_order_of_arrival() -> None:
    scheduler = make_scheduler(max_rows=20)
    add(scheduler, "a", 30)
    add(scheduler, "b", 15)
    seen = []
    for _ in range(4):
        shares = scheduler.schedule({})
        seen.append(rows_of(shares))
        assert sum(share.count for share in shares) <= 20
        finish_step(scheduler, shares)
    assert seen == [[("a", 0, 20)], [("a", 20, 10), ("b", 0, 10)], [("a", 30, 1), ("b", 10, 5)], [("a", 31, 1), ("b", 15, 1)]]


def test_a_chunk_that_stops_short_draws_nothing() -> None:
    scheduler = make_scheduler(max_rows=8)
    add(scheduler, "a", 12)
    [first] = scheduler.schedule({})
    assert (first.before, first.tree) == (8, None)
    finish_step(scheduler, [first])
    [second] = scheduler.schedule({})
    assert (second.before, second.nodes) == (3, 1) and second.tree is not None
    assert second.tree.token.tolist() == [second.sequence.newest]


def test_seats_and_order() -> None:
    scheduler = make_scheduler(max_seqs=2)
    for name in "abc":
        add(scheduler, name, 4)
    assert [name for name, *_ in rows_of(scheduler.schedule({}))] == ["a", "b"]
    scheduler.remove(scheduler.running[0])
    assert [s.id for s in scheduler.running] == ["b"] and [s.id for s in scheduler.waiting] == ["c"]
    finish_step(scheduler, scheduler.schedule({}))
    assert [s.id for s in scheduler.running] == ["b", "c"]
    scheduler.remove(scheduler.running[1])
    scheduler.remove(scheduler.running[0])
    assert scheduler.pool.held == 0 and not scheduler.has_work


def decoding(scheduler: Scheduler, count: int, length: int = 5) -> list[Sequence]:
    members = [add(scheduler, chr(ord("a") + i), length) for i in range(count)]
    for _ in range(20):
        if not scheduler.waiting and all(s.pending == 1 for s in members):
            return members
        finish_step(scheduler, scheduler.schedule({}))
    raise AssertionError("not all decode after 20 steps")


def test_roots_are_the_decoding_sequences_with_room() -> None:
    scheduler = make_scheduler(max_len=32)
    [a] = decoding(scheduler, 1)
    add(scheduler, "new", 9)
    [root] = scheduler.roots(16, 7)
    assert (root.id, root.pos, root.token, root.nodes, root.depth) == ("a", a.computed, a.newest, 16, 7)
    assert root.tokens.tolist() == a.tokens.tolist() and root.pages.tolist() == a.pages.tolist()
    a.append([1] * (a.left - 3))
    a.computed = a.length - 1
    a.add_pages(scheduler.pool.take(scheduler.pool.pages_for(a.length) - a.page_count))
    assert not scheduler.roots(16, 7), "a block from here on would reach past the last position"
    scheduler.last_draftable = 1000
    assert not scheduler.roots(0, 7) and not scheduler.roots(16, 0)


def test_room_ends_with_the_tokens_left_and_the_context() -> None:
    scheduler = make_scheduler(max_len=20)
    scheduler.last_draftable = 1000
    a, b = add(scheduler, "a", 5, max_tokens=4), add(scheduler, "b", 13)
    finish_step(scheduler, scheduler.schedule({}))
    assert {(r.id, r.nodes, r.depth) for r in scheduler.roots(16, 7)} == {("a", 14, 2), ("b", 6, 7)}
    a.append([1, 1])
    a.computed = a.length - 1
    assert [r.id for r in scheduler.roots(16, 7)] == ["b"], "one token left: nothing to draft"
    assert b.length + 6 == 20


def test_trees_leave_a_quarter_of_the_rows_to_prompts() -> None:
    scheduler = make_scheduler(max_rows=40)
    members = decoding(scheduler, 4)
    assert {r.nodes for r in scheduler.roots(16, 7)} == {9}, "36 rows beside the four roots"
    add(scheduler, "long", 100)
    roots = scheduler.roots(16, 7)
    assert [r.nodes for r in roots] == [6, 6, 7, 7], "26 rows beside the four roots and a quarter for the prompt"
    shares = scheduler.schedule({r.id: line(r.token, 16) for r in roots})
    assert rows_of(shares)[-1] == ("long", 0, 10) and sum(share.count for share in shares) == 40
    assert [share.nodes for share in shares[:4]] == [17, 11, 1, 1], "trees larger than the room are cut in order"
    assert all(share.tree is not None and share.tree.token[0] == s.newest for share, s in zip(shares, members, strict=False))


def test_short_prompts_do_not_reserve_more_than_they_need() -> None:
    scheduler = make_scheduler(max_rows=40)
    decoding(scheduler, 4)
    add(scheduler, "short", 3)
    assert sum(r.nodes for r in scheduler.roots(16, 7)) == 33, "40 rows less four roots and the prompt's three"


@pytest.mark.parametrize(
    ("wishes", "total", "shares"),
    [([5, 5, 5], 9, [3, 3, 3]), ([1, 9, 9], 11, [1, 5, 5]), ([9, 1], 20, [9, 1]), ([4, 4], 1, [0, 1]), ([], 5, []), ([3], 0, [0])],
)
def test_level(wishes: list[int], total: int, shares: list[int]) -> None:
    assert _level(wishes, total) == shares


def test_trees_are_cut_to_the_pages_that_are_left() -> None:
    """A root has its page; its tree gets what is free, after everybody's root and after admission."""
    scheduler = make_scheduler(num_pages=6, caching=False)
    a, b = decoding(scheduler, 2, length=6)
    assert (a.length, scheduler.pool.available) == (8, 1) or scheduler.pool.available == 1
    shares = scheduler.schedule({s.id: line(s.newest, 12) for s in (a, b)})
    rows = {share.sequence.id: share.count for share in shares}
    assert rows["a"] == (a.page_count * PAGE - a.computed) and a.page_count == 3
    assert rows["b"] == (2 * PAGE - b.computed)
    finish_step(scheduler, shares)
    assert scheduler.stats.preemptions == 0


def test_a_tree_of_another_root_is_refused() -> None:
    scheduler = make_scheduler()
    [a] = decoding(scheduler, 1)
    with pytest.raises(RuntimeError, match=f"root is token {a.newest + 1}, the newest token is {a.newest}"):
        scheduler.schedule({"a": line(a.newest + 1, 3)})


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_pages=9, max_len=24, caching=False)
    a, b, c = decoding(scheduler, 3, length=5)
    d = add(scheduler, "d", 4)
    for _ in range(20):
        if scheduler.stats.preemptions:
            break
        finish_step(scheduler, scheduler.schedule({}))
    assert [s.id for s in scheduler.running] == ["a", "b"] and [s.id for s in scheduler.waiting] == ["c", "d"]
    assert (c.page_count, c.computed, c.preemptions) == (0, 0, 1) and c.length > 5, "it keeps its tokens"
    for _ in range(20):
        if b not in scheduler.running:
            break
        finish_step(scheduler, scheduler.schedule({}))
    assert [s.id for s in scheduler.waiting] == ["b", "c", "d"]
    scheduler.remove(a)
    shares = scheduler.schedule({})
    assert shares[0].sequence is b and (shares[0].start, shares[0].count) == (0, b.length), "all of it is computed again"
    assert d in scheduler.waiting


def test_admission_leaves_a_page_for_each_that_runs() -> None:
    scheduler = make_scheduler(num_pages=8, caching=False)  # 7 pages
    decoding(scheduler, 2, length=4)  # 5 tokens each: 2 pages each
    add(scheduler, "big", 8)  # 2 pages, and 2 to spare: not with 3 left
    assert [share.sequence.id for share in scheduler.schedule({})] == ["a", "b"]
    scheduler.remove(scheduler.running[1])
    assert [share.sequence.id for share in scheduler.schedule({})] == ["a", "big"]


def test_found_pages_are_shared_and_the_newest_token_is_computed() -> None:
    scheduler = make_scheduler(num_pages=12)
    a = add(scheduler, "a", 8, first=0)
    scheduler.schedule({})
    for i in range(2):
        scheduler.pool.register(int(a.pages[i]), a.key(i))
    b, c = add(scheduler, "b", 8, first=0), add(scheduler, "c", 9, first=0)
    assert rows_of(scheduler.schedule({})) == [("c", 8, 1), ("a", 0, 8), ("b", 4, 4)], "one token to go is a root, not a chunk"
    assert b.pages[0] == c.pages[0] == a.pages[0] and c.pages[1] == a.pages[1] != b.pages[1]
    assert (b.cached_tokens, c.cached_tokens) == (4, 8)
    assert (scheduler.stats.prefix_queries, scheduler.stats.prefix_hits) == (25, 12)


@pytest.mark.parametrize("seed", range(6))
def test_something_always_moves(seed: int) -> None:
    """Few pages, many sequences, trees of all sizes: every step computes rows, the oldest gains, all end."""
    rng = np.random.default_rng(seed)
    scheduler = make_scheduler(num_pages=16, max_seqs=6, max_rows=12, max_len=60, caching=bool(seed % 2))
    left = [add(scheduler, f"s{i}", int(rng.integers(1, 30)), max_tokens=int(rng.integers(1, 31))) for i in range(25)]
    for _ in range(4000):
        if not left:
            break
        oldest, before = scheduler.running[0] if scheduler.running else None, scheduler.running[0].computed if scheduler.running else 0
        roots = scheduler.roots(int(rng.integers(0, 9)), 7)
        shares = scheduler.schedule({r.id: line(r.token, int(rng.integers(0, r.nodes + 1))) for r in roots})
        assert shares and sum(share.count for share in shares) <= 12
        assert all(share.tree is None or share.start + share.count <= 60 for share in shares)
        held = [page for share in shares for page in share.sequence.pages.tolist()]
        assert scheduler.pool.caching or len(set(held)) == len(held)
        finish_step(scheduler, shares, accepted=int(rng.integers(0, 3)))
        assert oldest is None or oldest.computed > before
        for sequence in [s for s in left if s.left <= 0]:
            left.remove(sequence)
            scheduler.remove(sequence)
    assert not left and scheduler.pool.available == scheduler.pool.capacity
    assert scheduler.stats.preemptions > 0, "or the pages were not few"
