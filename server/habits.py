"""Options that users of vLLM and SGLang type out of habit: accepted where they say what is so anyway, refused by name where not."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

# Accepted: names -> the values that are right here; () for a flag that takes none. They change nothing.
GRANTED: dict[tuple[str, ...], tuple[str, ...]] = {
    ("--tool-call-parser",): ("kimi_k2", "auto"),
    ("--reasoning-parser",): ("kimi_k2", "kimi", "auto"),
    ("--enable-auto-tool-choice",): (),
    ("--enable-chunked-prefill",): (),
    ("--enable-metrics",): (),
    ("--enable-cache-report", "--enable-prompt-tokens-details"): (),
    ("--disable-log-requests", "--no-enable-log-requests"): (),
    ("--trust-remote-code",): (),  # no code of a checkpoint is ever run: none is needed
    ("--data-parallel-size", "-dp", "--dp-size"): ("1",),
    ("--quantization", "-q"): ("compressed-tensors",),
    ("--tokenizer-mode",): ("auto",),
    ("--kv-cache-dtype",): ("auto",),
    ("--attention-backend",): ("auto",),
    ("--guided-decoding-backend", "--grammar-backend", "--structured-outputs-backend"): ("auto", "guidance", "llguidance"),
}
# Refused: names -> what to do instead.
REFUSED: dict[tuple[str, ...], str] = {
    ("--chat-template",): "the checkpoint's own template is used; a request may set its switches by chat_template_kwargs",
    ("--trust-request-chat-template",): "a template out of a request is never run",
    ("--admin-api-key",): "there are no endpoints for administrators; use --api-key",
    ("--tokenizer", "--tokenizer-path"): "the tokenizer is the checkpoint's",
    ("--revision", "--tokenizer-revision", "--download-dir"): "nothing is downloaded; give a folder",
    ("--max-logprobs",): "the most is OpenAI's 20",
    ("--response-role",): "answers are the assistant's",
    ("--enable-expert-parallel", "--ep-size", "--expert-parallel-size"): "experts are split by width over --tensor-parallel-size",
    ("--enable-lora", "--lora-modules", "--lora-paths"): "there are no adapters",
    ("--swap-space", "--cpu-offload-gb"): "the weights must fit the devices",
    ("--num-scheduler-steps", "--async-scheduling"): "one step is planned at a time",
    ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"): "use --spec-tokens and --tree-budget",
    ("--disable-frontend-multiprocessing", "--api-server-count"): "there is one process in front of the engine",
    ("--root-path",): "cut the prefix off in the proxy",
    ("--enable-request-id-headers",): "ids are the server's own",
    ("--enable-response-store",): "nothing is stored",
    ("--otlp-traces-endpoint",): "use --trace, or /metrics",
}


class _Refuse(argparse.Action):
    """Ends with a line that names the option and what to do."""

    def __init__(self, option_strings: Sequence[str], dest: str, instead: str, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self._instead = instead

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None) -> None:
        parser.error(f"{option_string}: not supported; {self._instead}")


class _Grant(argparse.Action):
    """Takes one of the values that are right here, and leaves no trace."""

    def __init__(self, option_strings: Sequence[str], dest: str, values: Sequence[str], **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=None if values else 0, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self._values = tuple(values)

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None) -> None:
        if self._values and values not in self._values:
            parser.error(f"{option_string}: {str(values)[:80]!r} is not supported; {' or '.join(self._values)} is")


class BriefParser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the option that was probably meant; argparse's own error begins with thirty lines of usage."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        near = difflib.get_close_matches(unknown[1], self._option_string_actions, 1) if unknown else []
        hint = f"; did you mean {near[0]}?" if near else "; --help lists the options"
        self.exit(2, f"{self.prog}: error: {message}{hint}\n")


def add_habits(parser: argparse.ArgumentParser) -> None:
    """Adds all of them, hidden from --help but for their names."""
    names = textwrap.wrap(", ".join(names[0] for names in GRANTED), 130, break_on_hyphens=False)
    text = "\n  ".join(["They say what is so anyway; other options of vLLM and SGLang are refused by name:", *names])
    group = parser.add_argument_group("accepted from habit", text)
    for names, values in GRANTED.items():
        group.add_argument(*names, dest="_granted", action=_Grant, values=values)
    for names, instead in REFUSED.items():
        group.add_argument(*names, dest="_refused", action=_Refuse, instead=instead)
