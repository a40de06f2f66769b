"""Chats with a model in the terminal: `python tools/chat.py --help`."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from runtime.env import load_env
from server.background import BackgroundServer
from server.client import ApiClient, ServerRefused
from server.options import WideHelp, add_model_options, load_from, speculative_of

HELP = """\
A conversation in the terminal, streamed as it is written: reasoning dim, the answer plain, then one line of figures. It talks to a
running server (--base-url), or loads a model into a server of its own for as long as it runs. Ctrl-C stops an answer; Ctrl-D leaves.
"""

EXAMPLES = """\
examples:
  the demo model
    python tools/chat.py
  a server that runs already
    python tools/chat.py --base-url http://127.0.0.1:8000
  one question, the answer alone on standard output
    python tools/chat.py --prompt 'What is os.path.join?' --temperature 0
"""

COMMANDS = """\
/new             forget the conversation
/system TEXT     set the system message (and forget the conversation)
/think on|off    let the model reason first, or not
/set NAME VALUE  temperature, top_p, max_tokens or seed
/help            this list
/quit            leave (Ctrl-D does too)"""

SETTINGS: dict[str, Callable[[str], float]] = {"temperature": float, "top_p": float, "max_tokens": int, "seed": int}


@dataclass(slots=True)
class Figures:
    """Of one answer."""

    tokens: int = 0
    first_s: float = 0.0
    total_s: float = 0.0
    cached: int = 0
    acceptance_length: float | None = None
    finish: str | None = None

    def line(self) -> str:
        rest_s = self.total_s - self.first_s
        parts = [f"{self.tokens} tokens", f"first after {self.first_s:.2f} s"]
        if self.tokens > 1 and rest_s > 0:
            parts.append(f"{(self.tokens - 1) / rest_s:.1f} tokens/s")
        if self.acceptance_length is not None:
            parts.append(f"{self.acceptance_length:.2f} tokens a step")
        if self.cached:
            parts.append(f"{self.cached} prompt tokens cached")
        if self.finish == "length":
            parts.append("stopped at max_tokens")
        return " · ".join(parts)


@dataclass(slots=True)
class Conversation:
    """Messages so far and the settings of the next answer."""

    client: ApiClient
    settings: dict[str, Any] = field(default_factory=dict)
    thinking: bool = True
    messages: list[dict[str, str]] = field(default_factory=list)
    figures: Figures = field(default_factory=Figures)

    def ask(self, text: str) -> Iterator[tuple[str, str]]:
        """("reasoning" | "content", text) pieces of the answer, which joins the messages once it is complete.

        An answer that is stopped or fails leaves the messages as they were. Raises ServerRefused, OSError.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        body = {
            "messages": asked,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"thinking": self.thinking},
            **self.settings,
        }
        self.figures = figures = Figures()
        joined = {"reasoning_content": "", "content": ""}
        begin_s = time.perf_counter()
        for event in self.client.stream("/v1/chat/completions", body):
            self._note(event)
            for choice in event["choices"]:
                figures.finish = choice["finish_reason"] or figures.finish
                for name, kind in (("reasoning_content", "reasoning"), ("content", "content")):
                    piece = choice["delta"].get(name)
                    if piece:
                        figures.first_s = figures.first_s or time.perf_counter() - begin_s
                        joined[name] += piece
                        yield kind, piece
        figures.total_s = time.perf_counter() - begin_s
        self.messages = [*asked, {"role": "assistant", **{name: piece for name, piece in joined.items() if piece or name == "content"}}]

    def _note(self, event: dict[str, Any]) -> None:
        usage = event.get("usage")
        if usage:
            self.figures.tokens = usage["completion_tokens"]
            self.figures.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        speculation = (event.get("metrics") or {}).get("speculative_decoding")
        if speculation:
            self.figures.acceptance_length = speculation["mean_acceptance_length"]

    def command(self, line: str) -> str:
        """Carries out a line that begins with a slash; what to tell the user. Raises EOFError to leave."""
        name, _, rest = line[1:].partition(" ")
        if name in ("quit", "exit"):
            raise EOFError
        if name == "new":
            self.messages = [message for message in self.messages if message["role"] == "system"]
            return "a new conversation"
        if name == "system":
            self.messages = [{"role": "system", "content": rest}] if rest else []
            return "a new conversation with this system message" if rest else "a new conversation without a system message"
        if name == "think" and rest in ("on", "off"):
            self.thinking = rest == "on"
            return f"reasoning is {rest}"
        if name == "set":
            return self._set(*rest.partition(" ")[::2])
        return COMMANDS

    def _set(self, name: str, value: str) -> str:
        if name not in SETTINGS:
            return f"{name or 'nothing'} can not be set; {', '.join(SETTINGS)} can"
        try:
            self.settings[name] = SETTINGS[name](value)
        except ValueError:
            return f"{name}: {value!r} is no number"
        return f"{name} is {self.settings[name]}"


def print_answer(console: Console, pieces: Iterator[tuple[str, str]]) -> None:
    """Prints pieces as they come: reasoning dim, content plain."""
    last = ""
    for kind, text in pieces:
        if last and kind != last:
            console.print("\n")
        last = kind
        style = "dim" if kind == "reasoning" else None
        console.print(text, style=style, end="", markup=False, highlight=False, emoji=False, soft_wrap=True)
    console.print()


def run_dialogue(console: Console, conversation: Conversation) -> None:
    """Questions from the terminal until it ends."""
    console.print("/help lists the commands", style="dim")
    while True:
        try:
            line = console.input("[bold green]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not line:
            continue
        try:
            if line.startswith("/"):
                console.print(conversation.command(line), style="dim", markup=False, highlight=False)
                continue
            answer = conversation.ask(line)
            with contextlib.closing(answer):  # type: ignore[type-var]  # a generator: closing it aborts the request
                print_answer(console, answer)
            console.print(conversation.figures.line(), style="dim", highlight=False, soft_wrap=True)
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print("\nstopped; the question and this answer are forgotten", style="yellow")
        except (ServerRefused, OSError) as error:
            console.print(f"\n{error}", style="red", markup=False, highlight=False)


def run_once(conversation: Conversation, prompt: str, output: Console, notes: Console) -> None:
    """One question; the answer on `output`, reasoning and figures on `notes`."""
    for kind, text in conversation.ask(prompt):
        target = output if kind == "content" else notes
        target.print(text, end="", markup=False, highlight=False, emoji=False, soft_wrap=True, style=None if kind == "content" else "dim")
    output.print()
    notes.print(conversation.figures.line(), style="dim", highlight=False, soft_wrap=True)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python tools/chat.py", description=HELP, epilog=EXAMPLES, formatter_class=WideHelp)
    group = parser.add_argument_group("chat")
    group.add_argument("--base-url", metavar="URL", help="a running server; without it the model below is loaded here")
    group.add_argument("--api-key", metavar="KEY", help="the server's key (default: RUNTIME_API_KEY)")
    group.add_argument("--prompt", metavar="TEXT", help="ask this one question, print the answer and leave")
    group.add_argument("--system", metavar="TEXT", help="a system message")
    group.add_argument("--no-think", dest="thinking", action="store_false", help="no reasoning before the answer")
    group.add_argument("--max-tokens", type=int, default=512, metavar="N", help="of an answer, reasoning included (default 512)")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the model's)")
    add_model_options(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    console, notes = Console(), Console(stderr=True)
    settings = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    try:
        with contextlib.ExitStack() as stack:
            url = args.base_url
            if url is None:
                speculative_of(args)
                with notes.status("loading"):
                    server = stack.enter_context(BackgroundServer(lambda: load_from(args)))
                url = server.url
                if server.service.loaded is not None:
                    notes.print(server.service.loaded.summary, style="dim", highlight=False, soft_wrap=True)
            client = ApiClient(url, args.api_key or load_env().api_key)
            conversation = Conversation(client, {k: v for k, v in settings.items() if v is not None}, args.thinking)
            if args.system:
                conversation.command(f"/system {args.system}")
            if args.prompt is not None:
                run_once(conversation, args.prompt, console, notes)
            else:
                notes.print(f"{client.model()} at {url}", style="dim", highlight=False)
                run_dialogue(console, conversation)
    except (ValueError, OSError, ServerRefused) as error:
        notes.print(f"chat: error: {error}", markup=False, highlight=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
