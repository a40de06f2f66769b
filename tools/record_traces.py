#!/usr/bin/env python3
"""Records what the drafter offers at every position of greedy texts: traces for tools/simulate.py. Runs on the CPU.

    python tools/record_traces.py --prompts questions.json --out traces.npz
    python tools/record_traces.py --prompts lines.txt --kind text --limit 8 --tokens 64 --out traces.npz

--prompts is a JSON list of strings or of objects with a key "q" (a question), or a text file of one prompt a line. Kind chat
goes through the chat template, kind text does not. The file's arrays are described in tools/replay.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from model.chat_template import ChatTemplate
from model.tokenizer import Tokenizer
from runtime import loading
from runtime.config import EngineConfig, SpeculativeConfig
from runtime.engine import Engine
from runtime.executor import Executor
from runtime.speculate import Root, Taps, Trees, make_draft_plan, roots_only
from runtime.stats import EngineStats
from runtime.stream import TextStream
from runtime.types import Array, Emission, Request, SamplingParams

Draft = tuple[Array, Array]  # ids [D, K] i32, logp [D, K] f32


class RecordingDrafter:
    """Plain decoding that asks the drafter at every step and writes down the answer."""

    nodes = 1

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.depth = executor.limits.draft_depth
        self.drafts: dict[str, dict[int, Draft]] = {}  # request id -> position of the root -> draft

    def propose(self, roots: Sequence[Root], taps: Taps, stats: EngineStats) -> Trees:
        if not roots and not len(taps):
            return list
        logits = self._executor.draft(make_draft_plan(roots, taps))
        for i, root in enumerate(roots):
            self.drafts.setdefault(root.id, {})[root.pos] = (logits.ids[i].copy(), logits.logp[i].copy())
        return partial(roots_only, roots)


@dataclass(slots=True)
class Text:
    """One prompt and what became of it."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    done: bool = False

    def add(self, emission: Emission) -> None:
        self.output += emission.tokens
        self.done = emission.finish is not None


@dataclass(frozen=True, slots=True)
class Recorder:
    """A model with its drafter, ready to write texts and note drafts."""

    executor: Executor
    config: EngineConfig
    tokenizer: Tokenizer
    template: ChatTemplate

    @staticmethod
    def open(model: str) -> Recorder:
        speculative = SpeculativeConfig(method="ddtree")
        source = loading.open_source(model, speculative)
        config = loading.fit_config(EngineConfig(max_num_seqs=16, max_num_batched_tokens=512), source, "float32")
        executor = loading.make_executor(source, config, speculative, "float32", 1)
        tokenizer = Tokenizer.load(source.path)
        return Recorder(executor, config, tokenizer, ChatTemplate.load(source.path, tokenizer))

    def record(self, prompts: Sequence[list[int]], tokens: int, progress: Callable[[int], None] = lambda _: None) -> dict[str, Array]:
        """Arrays ids, logp, tokens, prompt_length and end of tools/replay.py for these prompts, `tokens` positions at most."""
        drafter = RecordingDrafter(self.executor)

        def stream(params: SamplingParams) -> TextStream:
            return TextStream(self.tokenizer.stream(params.skip_special_tokens), params, self.tokenizer.eos_ids)

        engine = Engine(self.executor, self.config, stream, drafter, eos_ids=self.tokenizer.eos_ids)
        texts = [Text(list(prompt)) for prompt in prompts]
        params = SamplingParams(temperature=0.0, max_tokens=tokens + 2)  # no draft is made for the last two tokens
        for i, text in enumerate(texts):
            engine.submit(Request(str(i), np.array(text.prompt, np.int32), params, seed=0), text.add)
        while not all(text.done for text in texts):
            engine.step()
            progress(sum(text.done for text in texts))
        return to_arrays(texts, drafter.drafts, tokens, self.executor.limits.draft_top_k, drafter.depth)


def to_arrays(texts: Sequence[Text], drafts: dict[str, dict[int, Draft]], tokens: int, choices: int, depth: int) -> dict[str, Array]:
    """Packs texts and drafts. Positions without a draft, at a text's end, hold log-probability -inf."""
    longest = max(len(t.prompt) + len(t.output) for t in texts)
    ids = np.zeros((len(texts), tokens, depth, choices), np.uint32)
    logp = np.full(ids.shape, -np.inf, np.float16)
    written = np.zeros((len(texts), longest), np.uint32)
    for p, text in enumerate(texts):
        whole = text.prompt + text.output
        written[p, : len(whole)] = whole
        for position, (its_ids, its_logp) in drafts.get(str(p), {}).items():
            i = position - len(text.prompt)
            if 0 <= i < tokens:
                ids[p, i], logp[p, i] = its_ids, its_logp
    small = np.uint16 if max(int(ids.max(initial=0)), int(written.max(initial=0))) < 1 << 16 else np.uint32
    starts = np.array([len(t.prompt) for t in texts], np.int64)
    ends = np.array([len(t.prompt) + len(t.output) for t in texts], np.int64)
    return {"ids": ids.astype(small), "logp": logp, "tokens": written.astype(small), "prompt_length": starts, "end": ends}


def read_prompts(path: Path) -> list[str]:
    """Prompts of a JSON list or of a text file's lines. ValueError names the file and the entry."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        return [line for line in text.splitlines() if line.strip()]
    prompts = []
    for i, item in enumerate(json.loads(text)):
        prompt = item.get("q") if isinstance(item, dict) else item
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f'{path}: entry {i} is neither a text nor an object with "q"')
        prompts.append(prompt)
    return prompts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python tools/record_traces.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="demo or a checkpoint folder with a drafter (default demo)")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON list or text file")
    parser.add_argument("--kind", choices=["chat", "text"], default="chat", help="how prompts are encoded (default chat)")
    parser.add_argument("--limit", type=int, default=48, help="most prompts (default 48)")
    parser.add_argument("--tokens", type=int, default=192, help="most positions a text (default 192)")
    parser.add_argument("--out", type=Path, required=True, help=".npz file to write")
    args = parser.parse_args(argv)
    try:
        prompts = read_prompts(args.prompts)[: args.limit]
        recorder = Recorder.open(args.model)
    except (ValueError, OSError) as error:
        print(f"record_traces: {error}", file=sys.stderr)
        return 2
    if args.kind == "chat":
        encoded = [recorder.template.encode([{"role": "user", "content": prompt}], thinking=False) for prompt in prompts]
    else:
        encoded = [recorder.tokenizer.encode(prompt) for prompt in prompts]
    from rich.progress import Progress

    with Progress(transient=True) as progress:
        task = progress.add_task("texts", total=len(encoded))
        found = recorder.record(encoded, args.tokens, lambda done: progress.update(task, completed=done))
    np.savez_compressed(args.out, **{f"{args.kind}.{name}": value for name, value in found.items()})  # type: ignore[arg-type]
    print(f"wrote {len(encoded)} texts to {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
