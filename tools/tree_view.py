#!/usr/bin/env python3
"""Draws recorded steps as one static HTML page: every tree that was verified, what was accepted, what it was worth.

    python tools/tree_view.py --prompt "def add(a, b):" --prompt "The runtime reads" --tokens 40 --out steps.html
    python tools/tree_view.py --prompt "Why is the sky blue?" --chat --save steps.json --out steps.html
    python tools/tree_view.py --load steps.json --out steps.html

Writes text with the model under `tree_budget: auto` and keeps each step. Solid green nodes were accepted, dashed ones were not; the
number is the expected chance of acceptance, the bar of a step compares expected with realised tokens. No script, no network.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from model.chat_template import ChatTemplate
from model.tokenizer import Tokenizer
from runtime import loading
from runtime.allocate import BudgetSpeculation, Lesson
from runtime.config import AUTO, EngineConfig, SpeculativeConfig
from runtime.curve import CurveKey
from runtime.engine import Engine
from runtime.measure import device_name, measure_curve
from runtime.speculate import Root, Taps, Trees, Verified
from runtime.stats import EngineStats
from runtime.stream import TextStream
from runtime.types import DraftTree, Request, SamplingParams

NODE_W, NODE_H, LEVEL_W = 74, 20, 104
STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 24px; color: #222; background: #fff }
section { border-top: 1px solid #ddd; padding: 10px 0 }
figure { display: inline-block; margin: 6px 18px 6px 0; vertical-align: top }
.label { display: inline-block; width: 96px }
figcaption, .note { color: #666; font-size: 12px }
svg text { font: 11px ui-monospace, monospace }
.bar { display: inline-block; height: 8px; background: #7fa7c9 } .done { background: #3a8f4d }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #ddd } section { border-color: #333 } svg .ink { fill: #ddd } }
"""


@dataclass(frozen=True, slots=True)
class TreeRecord:
    """One tree of a step: node 0 is the root. chance: expected acceptance of each node, 1 for the root."""

    id: str
    text: list[str]
    parent: list[int]
    chance: list[float]
    path: list[int]  # accepted nodes, root first


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: its trees, and what was expected of it."""

    rows: int
    bucket: int
    drafted: int
    expected: float
    realised: int
    expected_ms: float
    step_ms: float
    trees: list[TreeRecord]
    experts: float = 0.0  # distinct ones that a layer hit, mean; 0: not counted


class RecordingBudget(BudgetSpeculation):
    """Chooses as the engine does and keeps every step."""

    def __init__(self, *args: Any, tokenizer: Tokenizer) -> None:
        super().__init__(*args)
        self._tokenizer = tokenizer
        self._trees: dict[str, tuple[DraftTree, list[float]]] = {}
        self.steps: list[StepRecord] = []

    def propose(self, roots: Sequence[Root], taps: Taps, stats: EngineStats) -> Trees:
        propose = super().propose(roots, taps, stats)

        def trees() -> list[DraftTree]:
            found = propose()
            chances: list[list[float]] = [[1.0]] * len(found)
            if self._proposed is not None:
                value = self.calibration.values(self._proposed.forest)
                kept = self._proposed.kept
                chances = [[1.0, *value[b, kept[b]].tolist()] for b in range(len(found))]
            self._trees = {root.id: (tree, chance) for root, tree, chance in zip(roots, found, chances, strict=True)}
            return found

        return trees

    def hear(self, lesson: Lesson) -> None:
        super().hear(lesson)
        last = lesson.stats.budget_records[-1]
        trees = [self._record(id, *self._trees[id], seen) for id, seen in lesson.verified.items() if id in self._trees]
        times = (last.expected_s * 1e3, last.step_s * 1e3)
        self.steps.append(StepRecord(last.rows, last.bucket, last.drafted, last.expected, last.realised, *times, trees, last.experts))

    def _record(self, id: str, tree: DraftTree, chance: list[float], seen: Verified) -> TreeRecord:
        size = 1 + seen.nodes
        text = [self._tokenizer.token_bytes(int(t)).decode("utf-8", "replace") for t in tree.token[:size]]
        return TreeRecord(id, text, tree.parent[:size].tolist(), chance[:size], [int(n) for n in seen.path])


def record(model: str, prompts: Sequence[str], tokens: int, chat: bool, temperature: float) -> list[StepRecord]:
    """Writes `tokens` tokens for every prompt at once and returns the steps."""
    config = SpeculativeConfig(method="ddtree", tree_budget=AUTO)
    source = loading.open_source(model, config)
    fitted = loading.fit_config(EngineConfig(max_num_seqs=max(16, len(prompts)), max_num_batched_tokens=512), source, "float32")
    executor = loading.make_executor(source, fitted, config, "float32", 1)
    tokenizer = Tokenizer.load(source.path)
    template = ChatTemplate.load(source.path, tokenizer)
    curve = measure_curve(executor, fitted, config, CurveKey(device_name(), source.path.name, 1))
    spec = RecordingBudget(executor, config, curve, tokenizer=tokenizer)

    def stream(params: SamplingParams) -> TextStream:
        return TextStream(tokenizer.stream(params.skip_special_tokens), params, tokenizer.eos_ids)

    engine = Engine(executor, fitted, stream, spec, eos_ids=tokenizer.eos_ids)
    open_requests = set()
    for i, prompt in enumerate(prompts):
        encode = template.encode([{"role": "user", "content": prompt}], thinking=False) if chat else tokenizer.encode(prompt)
        params = SamplingParams(temperature=temperature, max_tokens=tokens)
        engine.submit(Request(str(i), np.array(encode, np.int32), params, seed=i))
        open_requests.add(str(i))
    while open_requests:
        open_requests -= {emission.id for emission in engine.step() if emission.finish is not None}
    return spec.steps


def layout(parent: Sequence[int]) -> list[tuple[int, float]]:
    """Level and row of every node: leaves one below the other in the order of a walk, a parent level with its first child."""
    children: list[list[int]] = [[] for _ in parent]
    level = [0] * len(parent)
    for node, above in enumerate(parent):
        if above >= 0:
            children[above].append(node)
            level[node] = level[above] + 1
    row = [0.0] * len(parent)
    below = 0
    waiting = [0]
    while waiting:
        node = waiting.pop()
        row[node] = below
        if children[node]:
            waiting.extend(reversed(children[node]))
        else:
            below += 1
    return list(zip(level, row, strict=True))


def draw_tree(tree: TreeRecord) -> str:
    """One tree as SVG, left to right."""
    places = layout(tree.parent)
    accepted = set(tree.path)
    width = (max(level for level, _ in places) + 1) * LEVEL_W
    height = int(max(row for _, row in places) + 1) * (NODE_H + 6) + 4
    lines, boxes = [], []
    for node, (level, row) in enumerate(places):
        x, y = level * LEVEL_W, 2 + row * (NODE_H + 6)
        above = tree.parent[node]
        right = node in accepted
        if above >= 0:
            ax, ay = places[above][0] * LEVEL_W + NODE_W, 2 + places[above][1] * (NODE_H + 6) + NODE_H / 2
            stroke = '#3a8f4d" stroke-width="2' if right else "#bbb"
            lines.append(f'<path d="M{ax} {ay} L{x} {y + NODE_H / 2}" fill="none" stroke="{stroke}"/>')
        shown = html.escape(repr(tree.text[node])[1:-1][:9].replace(" ", "␣"))
        style = 'fill="#3a8f4d" fill-opacity="0.25" stroke="#3a8f4d"' if right else 'fill="none" stroke="#999" stroke-dasharray="3 2"'
        title = html.escape(f"{tree.text[node]!r}, expected {tree.chance[node]:.3f}, {'accepted' if right else 'not accepted'}")
        boxes.append(
            f'<g><title>{title}</title><rect x="{x}" y="{y}" width="{NODE_W}" height="{NODE_H}" rx="4" {style}/>'
            f'<text class="ink" x="{x + 4}" y="{y + 14}">{shown}</text>'
            + (f'<text x="{x + NODE_W + 2}" y="{y + 9}" fill="#888">{tree.chance[node]:.2f}</text>' if above >= 0 else "")
            + "</g>"
        )
    label = f"tree of request {html.escape(tree.id)}: {len(tree.parent) - 1} nodes, {len(tree.path) - 1} accepted"
    return f'<svg role="img" aria-label="{label}" width="{width}" height="{height}">{"".join(lines)}{"".join(boxes)}</svg>'


def page(steps: Sequence[StepRecord], title: str) -> str:
    """The whole page. Nothing in it is fetched or run."""
    tokens = sum(step.realised for step in steps)
    expected = sum(step.expected for step in steps)
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="note">{len(steps)} steps, {tokens} tokens, {expected:.1f} expected. Green: accepted. Dashed: verified, not accepted. '
        "Numbers: expected chance of acceptance.</p>",
    ]
    for number, step in enumerate(steps):
        parts.append(
            f"<section><b>step {number}</b> · M {step.rows} of bucket {step.bucket} · drafted for {step.drafted} · "
            f"{step.step_ms:.1f} ms ({step.expected_ms:.1f} expected){_experts(step)}<br>"
            f'<span class="note label">expected {step.expected:.2f}</span> {_bar("", step.expected)}<br>'
            f'<span class="note label">realised {step.realised}</span> {_bar(" done", step.realised)}<br>'
        )
        for tree in step.trees:
            caption = f"request {html.escape(tree.id)}: {len(tree.parent) - 1} nodes, {len(tree.path) - 1} accepted"
            parts.append(f"<figure>{draw_tree(tree)}<figcaption>{caption}</figcaption></figure>")
        parts.append("</section>")
    return "\n".join([*parts, "</body></html>\n"])


def _experts(step: StepRecord) -> str:
    return f" · {step.experts:.1f} experts a layer" if step.experts else ""


def _bar(kind: str, tokens: float) -> str:
    return f'<span class="bar{kind}" style="width:{tokens * 12:.0f}px"></span>'


def load_steps(path: Path) -> list[StepRecord]:
    """Steps from --save. Raises ValueError naming the file."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        return [StepRecord(**{**step, "trees": [TreeRecord(**tree) for tree in step["trees"]]}) for step in held]
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: not a record of steps ({error}); tools/tree_view.py --save writes one") from None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python tools/tree_view.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo or a checkpoint folder with a drafter (default demo)")
    parser.add_argument("--prompt", action="append", default=[], help="a prompt; give several for several streams")
    parser.add_argument("--chat", action="store_true", help="put prompts through the chat template")
    parser.add_argument("--tokens", type=int, default=48, help="tokens a prompt (default 48)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0")
    parser.add_argument("--load", type=Path, help="draw a saved record instead of running a model")
    parser.add_argument("--save", type=Path, help="also write the record as JSON")
    parser.add_argument("--out", type=Path, required=True, help="HTML file to write")
    args = parser.parse_args(argv)
    try:
        if args.load:
            steps = load_steps(args.load)
        elif args.prompt:
            steps = record(args.model, args.prompt, args.tokens, args.chat, args.temperature)
        else:
            parser.error("give --prompt or --load")
    except (ValueError, OSError) as error:
        print(f"tree_view: {error}", file=sys.stderr)
        return 2
    if args.save:
        args.save.write_text(json.dumps([asdict(step) for step in steps]), encoding="utf-8")
    args.out.write_text(page(steps, f"Draft trees, {args.load or args.model}"), encoding="utf-8")
    print(f"wrote {len(steps)} steps to {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
