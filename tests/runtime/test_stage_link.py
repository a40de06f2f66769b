"""The connection between stages: records arrive whole and in order or not at all, strangers and other versions are refused."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from runtime import stage_hello
from runtime.plan import DraftLayout, PlanLayout, live_parts, pack_draft, pack_plan, unpack_draft, unpack_plan
from runtime.shared import LINE, SharedBlock, Watch
from runtime.shared_comm import SharedComm
from runtime.stage_comm import HostNeighbours, StageHost, StagePlace, exchange_as_first, exchange_as_other
from runtime.stage_hello import StageDiffers, StageRefused, answer, call, differences
from runtime.stage_link import MAGIC, Link, StageLost, accept, connect, listen
from runtime.stage_records import read_plan, receive_drafted, receive_result, send_drafted, send_plan, send_result
from runtime.types import DraftLogits, DraftPlan, StepResult
from tests.forks import on_ranks
from tests.plans import make_plan, page_table
from tests.waits import join

LAYOUT = PlanLayout(max_rows=8, max_seqs=3, max_pages=2, max_words=1, max_moves=8, max_adjust=64, mask_words=4)


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    first, second = pair()
    yield first, second
    first.close()
    second.close()


def pair(deadline_s: float = 5.0) -> tuple[Link, Link]:
    listener = listen("127.0.0.1")
    ours = connect("127.0.0.1", listener.getsockname()[1], 5.0)
    theirs, address = accept(listener, lambda: None)
    listener.close()
    assert address == "127.0.0.1"
    return Link(ours, "stage 1", deadline_s), Link(theirs, "stage 0", deadline_s)


def test_records_arrive_whole_in_order_and_by_kind(ends: tuple[Link, Link]) -> None:
    first, second = ends
    states = np.arange(2 * 3 * 400_000, dtype=np.float32).reshape(2, 3, -1).astype(ml_dtypes.bfloat16)  # more than a socket holds
    sent = threading.Thread(target=lambda: (first.send(7, b"ab", states), first.send(8)))
    sent.start()
    assert second.receive() == (7, 2 + states.nbytes)
    word, came = np.zeros(2, np.uint8), np.zeros_like(states)
    second.read(word)
    second.read(came)
    assert word.tobytes() == b"ab" and np.array_equal(came, states)
    assert second.receive() == (8, 0)
    join(sent)


def test_a_record_that_is_not_the_next_one_or_is_too_short_is_refused(ends: tuple[Link, Link]) -> None:
    first, second = ends
    first.send(7, b"abc")
    second.receive()
    with pytest.raises(StageLost, match="stage 0 sent a record with 3 bytes left, where 4 were due"):
        second.read(np.zeros(4, np.uint8))
    for magic, sequence in ((MAGIC, 3), (MAGIC + 1, 2)):
        ours, theirs = pair()
        ours.send(7)
        theirs.receive()
        ours._socket.sendall(struct.pack("<IIQQ", magic, 7, sequence, 0))
        with pytest.raises(StageLost, match=f"sent record {sequence} with magic {magic:#x}, where 2 with 0x53544745 was due"):
            theirs.receive()
        ours.close()
        theirs.close()


def test_an_end_knows_whether_it_would_wait(ends: tuple[Link, Link]) -> None:
    first, second = ends
    assert not second.ready()
    first.send(7)
    assert second.receive() == (7, 0) and not second.ready()
    first.close()
    second.close()
    assert first.ready() and second.ready(), "it would raise"


def test_a_dead_silent_or_failing_end_is_told(ends: tuple[Link, Link]) -> None:
    first, second = ends
    assert first.lost() is None and second.lost() is None
    first.set_deadline(0.2)
    begun = time.monotonic()
    with pytest.raises(StageLost, match=r"stage 1 has not answered for 0.2 s"):
        first.receive()
    assert time.monotonic() - begun < 10, "a link waits for 120 s unless told otherwise"
    vanished = TimeoutError(110, "Connection timed out")  # TCP's own word on a host that answers nothing
    assert str(first._gone(vanished, "has not answered")) == "stage 1 has gone ([Errno 110] Connection timed out)"
    second.fail("no memory")
    assert first.lost() == "stage 1 failed: no memory", "also while nobody waits"
    with pytest.raises(StageLost, match="stage 1 failed: no memory"):
        first.receive()
    second.close()
    assert "stage 1 has gone" in str(first.lost())
    with pytest.raises(StageLost, match="stage 1 has gone"):
        first.receive(lambda: None)


def test_who_waits_patiently_hears_what_else_goes_wrong(ends: tuple[Link, Link]) -> None:
    def check() -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        ends[0].receive(check)


def greet(token: str, other: str, hello: dict[str, Any], judge: Callable[[Any], str | None] = lambda _: None) -> tuple[Any, Any]:
    """What both ends make of a call: a link, or an error."""
    listener, got = listen("127.0.0.1"), []

    def serve() -> None:
        sock, _ = accept(listener, lambda: None)
        try:
            got.append(answer(sock, "stage 1", token, judge, 3.0))
        except (StageRefused, StageLost) as error:
            got.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    sock = connect("127.0.0.1", listener.getsockname()[1], 5.0)
    try:
        caller: Any = call(sock, "stage 0", other, hello, 3.0)
    except (StageRefused, StageLost) as error:
        caller = error
    thread.join(10)
    listener.close()
    return caller, got[0]


def test_ends_that_know_the_token_meet() -> None:
    caller, (link, hello) = greet("secret", "secret", {"stage": 1})
    assert hello == {"stage": 1}
    caller.send(5, b"x")
    assert link.receive() == (5, 1) and link.deadline_s == 3.0
    caller.close()
    link.close()


def test_a_stranger_is_refused_at_both_ends() -> None:
    caller, answerer = greet("secret", "guess", {})
    assert type(answerer) is StageRefused and "stage 1 does not know this launch's token" in str(answerer)
    assert isinstance(caller, StageRefused) and "token" in str(caller)


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"STGE" + bytes(60)])
def test_whoever_finds_the_port_is_turned_away(words: bytes) -> None:
    listener = listen("127.0.0.1")
    stranger = connect("127.0.0.1", listener.getsockname()[1], 5.0)
    stranger.sendall(words)
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
    stranger.close()
    sock, _ = accept(listener, lambda: None)
    with pytest.raises((StageRefused, StageLost)):
        answer(sock, "who calls", "secret", lambda _: None, 3.0)
    assert sock.fileno() == -1, "closed"
    listener.close()


def test_another_config_is_refused_with_both_values() -> None:
    told = {"max_num_seqs": 64, "backend": "cuda", "buckets": [1, 4]}
    caller, answerer = greet("t", "t", {"told": {**told, "max_num_seqs": 8}}, lambda hello: differences(told, hello["told"], "stage 1"))
    for error in (caller, answerer):
        assert "max_num_seqs is 64 here and 8 at stage 1" in str(error) and "backend" not in str(error)
    assert isinstance(answerer, StageDiffers) and isinstance(caller, StageRefused)
    assert differences(told, dict(told), "stage 1") is None
    assert differences(told, {}, "x") is not None


def test_another_protocol_is_refused_with_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    greeting = stage_hello._GREETING.pack(b"STGE", 2, bytes(32))
    theirs.sendall(greeting)
    with pytest.raises(StageRefused, match="protocol is 1 here and 2 at stage 9"):
        stage_hello._greet(ours, "stage 9")
    theirs.sendall(b"GET " + greeting[4:])
    with pytest.raises(StageRefused, match="stage 9 is no stage of this runtime: it begins with b'GET '"):
        stage_hello._greet(ours, "stage 9")
    ours.close()
    theirs.close()


def test_a_plan_travels_without_its_empty_room(ends: tuple[Link, Link]) -> None:
    first, second = ends
    plan = make_plan([[3, 9], [5]], [[-1, 0], [-1]], [4, 0], page_table(2, 2))
    blob, room = (np.zeros(LAYOUT.nbytes, np.uint8) for _ in range(2))
    room[:] = 0xAA
    pack_plan(plan, LAYOUT, blob)
    send_plan(first, 2, blob, LAYOUT)
    kind, nbytes = second.receive()
    assert kind == 2 and nbytes < LAYOUT.nbytes / 3
    read_plan(second, nbytes, room, LAYOUT)
    came = unpack_plan(room, LAYOUT)
    assert all(np.array_equal(getattr(came, name), getattr(plan, name)) for name in LAYOUT.names) and came.bucket == plan.bucket
    draft, layout = DraftPlan(*(np.array(a, np.int32) for a in ([9], [4], [[1, 2]], [0], [3], [19]))), DraftLayout(3, 2, 8)
    blob, room = (np.zeros(layout.nbytes, np.uint8) for _ in range(2))
    pack_draft(draft, layout, blob)
    send_plan(first, 3, blob, layout)
    read_plan(second, second.receive()[1], room, layout)
    assert unpack_draft(room, layout).pages.tolist() == [[1, 2]]


def test_a_plan_whose_header_lies_is_refused(ends: tuple[Link, Link]) -> None:
    first, second = ends
    blob, room = (np.zeros(LAYOUT.nbytes, np.uint8) for _ in range(2))
    pack_plan(make_plan([[3, 9]], [[-1, 0]], [4], page_table(1, 2)), LAYOUT, blob)
    header, parts = blob[: 4 * (2 + 2 * len(LAYOUT.names))].copy(), live_parts(blob, LAYOUT)
    first.send(2, header, *parts[:-1])
    with pytest.raises(StageLost, match=r"sent a plan of \d+ bytes whose header says \d+"):
        read_plan(second, second.receive()[1], room, LAYOUT)
    header.view(np.int32)[2] = 9  # rows of the first field, of which there is room for 8
    ours, theirs = pair()
    ours.send(2, header, *parts)
    with pytest.raises(StageLost, match=r"does not fit: token of a plan is \[9, 0\], the layout holds \[8, 0\]"):
        read_plan(theirs, theirs.receive()[1], room, LAYOUT)
    ours.close()
    theirs.close()


@pytest.mark.parametrize(("rows", "wanted"), [(0, 0), (3, 0), (2, 4)])
def test_results_come_back_as_they_are(ends: tuple[Link, Link], rows: int, wanted: int) -> None:
    rng = np.random.default_rng(rows)
    result = StepResult(
        rng.integers(0, 99, rows).astype(np.int32), rng.random(rows, np.float32), rng.random(rows) > 0.5,
        rng.integers(0, 99, (rows, wanted)).astype(np.int32), rng.random((rows, wanted), np.float32), 12.5, 3.25,
    )  # fmt: skip
    send_result(ends[0], result)
    came = receive_result(ends[1])
    for name in ("target", "logp", "finite", "top_ids", "top_logp"):
        got, want = getattr(came, name), getattr(result, name)
        assert got.dtype == want.dtype and np.array_equal(got, want)
    assert (came.step_us, came.experts) == (12.5, 3.25)
    drafted = DraftLogits(rng.integers(0, 9, (rows, 3, 2)).astype(np.int32), rng.random((rows, 3, 2), np.float32))
    send_drafted(ends[0], drafted)
    assert np.array_equal(receive_drafted(ends[1]).logp, drafted.logp)


def test_a_result_of_another_length_is_refused(ends: tuple[Link, Link]) -> None:
    ends[0].send(18, struct.pack("<IIdd", 1 << 31, 0, 0.0, 0.0))
    with pytest.raises(StageLost, match="sent a record of 24 bytes whose head says 19327352856"):
        receive_result(ends[1])


def test_hidden_states_of_another_size_are_refused(ends: tuple[Link, Link]) -> None:
    sender, receiver = HostNeighbours(StagePlace(0, 2, after=ends[0]), None), HostNeighbours(StagePlace(1, 2, before=ends[1]), None)
    sender.send(np.ones((1, 2, 4), np.float32))
    with pytest.raises(StageLost, match=r"stage 0 sent 32 bytes of hidden states, where \[1, 3, 4\] take 48"):
        receiver.receive(np.zeros((1, 3, 4), np.float32))


def test_all_ranks_of_all_stages_gather_and_columns_are_told_apart() -> None:
    """Two stages of two ranks, a process each: order, the smallest value, and who is a rank's column."""
    plans = pair()
    blocks = [SharedBlock.create(LINE + SharedComm.nbytes(2)) for _ in range(2)]

    def on_rank(rank: int) -> Any:
        stage, own = divmod(rank, 2)
        host = SharedComm(own, 2, blocks[stage], LINE, Watch(blocks[stage], 0, 10.0))
        exchange = None if own else exchange_as_other(plans[1], 1, 2) if stage else exchange_as_first([plans[0]], lambda: None)
        everybody = StageHost(StagePlace(stage, 2, exchange=exchange), host)
        column = everybody.column()
        mine = bytes([rank]) * 3
        states = np.full(3, 9.0 if own else 5.0, np.float32)
        host.broadcast(states)
        return (
            everybody.gather_bytes(mine),
            everybody.least(7 + rank),
            (column.rank, column.world),
            column.gather_bytes(mine),
            states.tolist(),
        )

    results = on_ranks(4, on_rank)
    for rank, (all_bytes, least, place, column, states) in enumerate(results):
        assert all_bytes == [bytes([r]) * 3 for r in range(4)] and least == 7 and states == [5.0] * 3
        assert place == (rank // 2, 2) and column == [bytes([rank % 2]) * 3, bytes([2 + rank % 2]) * 3]
    for link in plans:
        link.close()


def test_leaders_exchange_bytes(ends: tuple[Link, Link]) -> None:
    first, second = ends
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(exchange_as_other(second, 1, 2)(b"two")))
    thread.start()
    assert exchange_as_first([first], lambda: None)(b"one") == [b"one", b"two"]
    thread.join(5)
    assert answers == [[b"one", b"two"]]
