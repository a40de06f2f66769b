"""The terminal chat: what it sends, keeps and prints, against a server of its own."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from model.tiny import make_tiny
from server.client import ApiClient, ServerRefused
from tools.chat import Conversation, Figures, print_answer, run_dialogue

ROOT = Path(__file__).resolve().parents[2]


def event(delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


CLOSING = {
    "choices": [],
    "usage": {"completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}},
    "metrics": {"speculative_decoding": {"mean_acceptance_length": 2.5}},
}


class ScriptedClient(ApiClient):
    """Gives each stream the same events and keeps the bodies."""

    def __init__(self, *events: dict[str, Any] | Exception) -> None:
        super().__init__("http://nowhere")
        self.bodies: list[Mapping[str, Any]] = []
        self.closed = 0
        self._events = events

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        self.bodies.append(body)
        try:
            for one in self._events:
                if isinstance(one, Exception):
                    raise one
                yield one
        finally:
            self.closed += 1


ANSWER = (
    event({"role": "assistant", "content": ""}),
    event({"reasoning_content": "hm "}),
    event({"reasoning_content": "yes"}),
    event({"content": "4"}),
    event({"content": "2"}),
    event({}, "stop"),
    CLOSING,
)


def test_an_answer_joins_the_conversation() -> None:
    client = ScriptedClient(*ANSWER)
    conversation = Conversation(client, {"max_tokens": 7})
    pieces = list(conversation.ask("q"))
    assert pieces == [("reasoning", "hm "), ("reasoning", "yes"), ("content", "4"), ("content", "2")]
    assert client.bodies[0]["messages"] == [{"role": "user", "content": "q"}]
    assert client.bodies[0]["max_tokens"] == 7
    assert conversation.messages[1] == {"role": "assistant", "reasoning_content": "hm yes", "content": "42"}
    list(conversation.ask("again"))
    assert [message["role"] for message in client.bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert (conversation.figures.tokens, conversation.figures.cached, conversation.figures.acceptance_length) == (5, 3, 2.5)


def test_an_answer_that_is_stopped_leaves_no_trace_and_closes_the_stream() -> None:
    client = ScriptedClient(*ANSWER)
    conversation = Conversation(client)
    answer = conversation.ask("q")
    next(answer)
    answer.close()  # type: ignore[attr-defined]
    assert conversation.messages == []
    assert client.closed == 1


def test_a_failure_leaves_no_trace() -> None:
    conversation = Conversation(ScriptedClient(ANSWER[0], ServerRefused(500, "broken")))
    with pytest.raises(ServerRefused, match="broken"):
        list(conversation.ask("q"))
    assert conversation.messages == []


def test_commands() -> None:
    client = ScriptedClient(*ANSWER)
    conversation = Conversation(client)
    list(conversation.ask("q"))
    conversation.command("/system be brief")
    assert conversation.messages == [{"role": "system", "content": "be brief"}]
    list(conversation.ask("q"))
    conversation.command("/new")
    assert conversation.messages == [{"role": "system", "content": "be brief"}], "the system message stays"
    conversation.command("/think off")
    conversation.command("/set temperature 0.5")
    conversation.command("/set max_tokens 9")
    list(conversation.ask("q"))
    assert client.bodies[-1]["chat_template_kwargs"] == {"thinking": False}
    assert (client.bodies[-1]["temperature"], client.bodies[-1]["max_tokens"]) == (0.5, 9)
    assert "can not be set" in conversation.command("/set colour red")
    assert "no number" in conversation.command("/set seed red")
    assert "/quit" in conversation.command("/anything")
    with pytest.raises(EOFError):
        conversation.command("/quit")


def printed(pieces: list[tuple[str, str]]) -> str:
    out = io.StringIO()
    print_answer(Console(file=out, force_terminal=False, width=40), iter(pieces))
    return out.getvalue()


def test_text_is_printed_as_it_is() -> None:
    text = "[bold]x[/bold] :smile: " + "word " * 30 + "\n    indented"
    assert printed([("content", text)]) == text + "\n"
    assert printed([("reasoning", "hm"), ("content", "a")]).split() == ["hm", "a"]


def test_a_dialogue_goes_on_after_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["", "/help", "first", "second"])
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=200)

    def next_line(*_: object, **__: object) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(console, "input", next_line)
    run_dialogue(console, Conversation(ScriptedClient(event({"content": "half"}), ServerRefused(503, "the queue is full"))))
    assert out.getvalue().count("the queue is full") == 2
    assert "/think on|off" in out.getvalue()


def test_the_figures_line() -> None:
    line = Figures(tokens=11, first_s=0.5, total_s=1.5, cached=3, acceptance_length=2.5, finish="length").line()
    assert line == "11 tokens · first after 0.50 s · 10.0 tokens/s · 2.50 tokens a step · 3 prompt tokens cached · stopped at max_tokens"
    assert "tokens/s" not in Figures(tokens=1, first_s=0.5, total_s=0.5).line()


def run_chat(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "chat.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)


def test_one_question_to_a_model_of_its_own(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny")
    done = run_chat(str(tiny), "--prompt", "hi", "--max-tokens", "6", "--no-think", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert "tokens" in done.stderr
    assert "tokens" not in done.stdout, "standard output is the answer alone"


def test_what_is_not_usable_is_one_line() -> None:
    for options in (("/nowhere",), ("--base-url", "http://127.0.0.1:9"), ("--base-url", "ftp://x")):
        done = run_chat(*options, "--prompt", "x")
        assert done.returncode == 2
        assert "chat: error:" in done.stderr
        assert "Traceback" not in done.stderr
