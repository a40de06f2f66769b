"""Calls with a wall time: in order, given up alone, no thread left that nobody needs."""

from __future__ import annotations

import gc
import threading
import time
from queue import SimpleQueue

import numpy as np
import pytest

from runtime import masks as module
from runtime.bounded import Bounded, Late
from runtime.emit import CONSTRAINT_FAILED
from runtime.masks import fill_masks
from runtime.types import DraftTree, Request, SamplingParams
from tests.pace import ratio
from tests.runtime.test_masks import Fixed
from tests.scripted import EOS, Language, ScriptedExecutor, expected_tokens, make_engine, make_request, run_all, tokens_of


def threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def until(done: object, timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while not done() and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.005)
    assert done()  # type: ignore[operator]


def test_results_come_in_order_and_errors_are_results() -> None:
    bounded: Bounded[int] = Bounded(1.0, "order")

    def fail() -> int:
        raise KeyError("x")

    found = bounded.run([lambda: 1, fail, lambda: 3])
    assert found[0] == 1 and isinstance(found[1], KeyError) and found[2] == 3
    assert bounded.run([]) == [] and threads("order") == 1 and bounded.left_behind == 0
    del bounded
    gc.collect()
    until(lambda: threads("order") == 0)


def test_a_late_call_is_given_up_alone() -> None:
    bounded: Bounded[str] = Bounded(0.2, "late")
    go, began = threading.Event(), time.monotonic()

    def stuck() -> str:
        go.wait(20)
        return "too late"

    found = bounded.run([lambda: "a", stuck, lambda: "c", stuck, lambda: "e"])  # 0.4 s, and 40 s if they were waited for
    took_s = time.monotonic() - began
    assert [f if isinstance(f, str) else type(f) for f in found] == ["a", Late, "c", Late, "e"]
    assert 0.4 <= took_s < 15.0 and bounded.left_behind == 2
    assert bounded.run([lambda: "again"]) == ["again"], "what was given up holds nobody up"
    go.set()
    until(lambda: threads("late") == 1)


def test_many_short_calls_have_their_own_time_each() -> None:
    bounded: Bounded[None] = Bounded(0.35, "short")
    assert bounded.run([lambda: time.sleep(0.05)] * 8) == [None] * 8, "0.4 s in all"


def test_a_batch_costs_little() -> None:
    bounded: Bounded[int] = Bounded(1.0, "cost")
    there, back = SimpleQueue[int](), SimpleQueue[int]()
    threading.Thread(target=lambda: [back.put(one) for one in iter(there.get, 0)], daemon=True).start()

    def hand_over() -> None:
        there.put(1)
        back.get()

    assert ratio(lambda: bounded.run([lambda: 0]), hand_over, time.perf_counter) < 30, "3: it wakes a thread and is woken"
    assert ratio(lambda: time.sleep(0.02), hand_over, time.perf_counter, rounds=1) > 30, "mutation: a thread that looks every 20 ms"
    there.put(0)


def test_masks_that_take_too_long_end_their_state_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MASKS_S", 0.25)
    monkeypatch.setattr(module, "_LOCAL", threading.local())
    go, asked = threading.Event(), []

    class Stuck(Fixed):
        def masks(self, tree: DraftTree) -> tuple[np.ndarray, np.ndarray]:
            asked.append(tree)
            go.wait(20)
            return super().masks(tree)

    stuck, good, root = Stuck({0: [1]}, 70), Fixed({0: [1]}, 70), DraftTree.root_only(0)
    rows, _ = fill_masks([(stuck, 0, root), (good, 4, root)])
    assert rows.tolist() == [4] and good.error is None and stuck.error == "its masks took too long"
    assert fill_masks([(stuck, 0, root), (good, 4, root)])[0].tolist() == [4]
    assert len(asked) == 1, "it is not asked again"
    go.set()


class Greek:
    """A constraint over a real regular expression whose masks take seconds of Rust."""

    def __init__(self) -> None:
        from llguidance import LLMatcher, LLTokenizer

        tokens = LLTokenizer("byte")
        self.matcher = LLMatcher(tokens, LLMatcher.grammar_from_regex(r"(a{1000}){3000}"), log_level=0)
        self.words = -(-tokens.vocab_size // 32)
        self.computed = threading.Event()
        self.error: str | None = None

    def start(self) -> Greek:
        return self

    def masks(self, tree: DraftTree) -> tuple[np.ndarray, np.ndarray]:
        mask = np.zeros((1, self.words), np.uint32)
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.computed.set()
        return np.zeros(1, np.int32), mask

    def prune(self, tree: DraftTree) -> DraftTree:
        return tree

    def push(self, tokens: object) -> None: ...


def test_a_grammar_that_computes_for_seconds_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MASKS_S", 0.2)
    monkeypatch.setattr(module, "_LOCAL", threading.local())
    greek, language = Greek(), Language()
    engine = make_engine(ScriptedExecutor(language))
    others = [make_request(f"{i}", [7, i], max_tokens=20, ignore_eos=True) for i in range(3)]
    held = Request("held", np.array([7, 9], np.int32), SamplingParams(max_tokens=20), 1, constraint=greek)
    got = run_all(engine, [*others, held])
    assert got["held"][-1].finish == "error" and got["held"][-1].error == CONSTRAINT_FAILED
    assert not greek.computed.is_set(), "the mask is still being computed"
    for request in others:
        assert tokens_of(got[request.id]) == expected_tokens(language, request, engine.max_model_len, [EOS])
    assert engine.stats().pages_used == 0
    until(greek.computed.is_set, 60.0)
