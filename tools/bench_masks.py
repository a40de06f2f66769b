#!/usr/bin/env python3
"""Times token masks: what structured output costs the host between draft and verify.

    python tools/bench_masks.py                          # 163,840 tokens, Kimi's size
    python tools/bench_masks.py --vocab demo --json rows.jsonl

Kimi's own vocabulary does not come along, so one of its size is grown out of the demo model's: tokens joined to
tokens, as merges would. Each schema is walked along an answer that it allows. `mask` is one node's; `tree` is pruning
and masking a tree of 16 nodes, the answer's next 8 tokens and a wrong sibling of each, over the nodes left. `cold` is a
first walk, whose lexer states are still to be built.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from model.grammar import GrammarCompiler, GrammarState
from model.tokenizer import Tokenizer
from runtime.constraint import StructuredOutputs
from runtime.types import DraftTree

DEMO = Path(__file__).resolve().parents[1] / "model" / "demo"
FULL = 163_840
DEPTH = 8
SCHEMAS: dict[str, tuple[dict[str, Any], str]] = {
    "any object": ({"type": "object"}, '{"name": "Alan Turing", "age": 41, "tags": ["a", "b"], "text": "the quick brown fox"}'),
    "typed": (
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "kind": {"enum": ["red", "green", "blue"]},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
            },
            "required": ["name", "age", "kind", "tags"],
            "additionalProperties": False,
        },
        '{"name": "Alan Turing", "age": 41, "kind": "green", "tags": ["alpha", "beta gamma"]}',
    ),
    "patterns": (
        {
            "type": "object",
            "properties": {"mail": {"type": "string", "format": "email"}, "id": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{6}$"}},
            "required": ["mail", "id"],
        },
        '{"mail": "a.b@example.com", "id": "AB123456"}',
    ),
}


def grown(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """A tokenizer of `size` tokens: the given one's, joined at random, then its specials."""
    rng, base = random.Random(0), [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size - len(tokenizer.special))]
    words, known = [token for token in base if len(token) > 1], set(base)
    while len(base) < size - len(tokenizer.special):
        joined = rng.choice(words) + rng.choice(base)
        if len(joined) <= 16 and joined not in known:
            known.add(joined)
            base.append(joined)
    special = {name: len(base) + i for i, name in enumerate(tokenizer.special)}
    ends = frozenset(special[name] for name, token in tokenizer.special.items() if token in tokenizer.eos_ids)
    return Tokenizer(base, special, frozenset(), ends)


def draft(tokens: list[int], rng: random.Random, vocab: int) -> DraftTree:
    """The next tokens as a chain, each beside a random one."""
    token, parent, depth, above = [tokens[0]], [-1], [0], 0
    for level, right in enumerate(tokens[1 : DEPTH + 1], 1):
        token += [right, (right + rng.randrange(1, vocab)) % vocab]
        parent += [above, above]
        depth += [level, level]
        above = len(token) - 2
    return DraftTree(np.array(token, np.int32), np.array(parent, np.int16), np.array(depth, np.int16))


def walk(state: GrammarState, ids: list[int], rng: random.Random, vocab: int) -> tuple[list[float], list[float]]:
    """Microseconds of each single mask, and of each tree's nodes."""
    single, tree = [], []
    for at in range(len(ids)):
        start = time.perf_counter()
        state.masks(DraftTree.root_only(0))
        single.append((time.perf_counter() - start) * 1e6)
        drafted = draft([0, *ids[at:]], rng, vocab)
        start = time.perf_counter()
        nodes, _ = state.masks(state.prune(drafted))
        tree.append((time.perf_counter() - start) * 1e6 / len(nodes))
        state.push([ids[at]])
    if state.error is not None:
        raise RuntimeError(f"the answer is none of its schema's: {state.error}")
    return single, tree


def measure(vocab: int | None, repeats: int) -> list[dict[str, Any]]:
    """One record a schema."""
    tokenizer = Tokenizer.load(DEMO)
    if vocab is not None:
        tokenizer = grown(tokenizer, vocab)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    start = time.perf_counter()
    compiler.prepare()
    prepare_s = time.perf_counter() - start
    rng, records = random.Random(1), []
    for name, (schema, answer) in SCHEMAS.items():
        ids = tokenizer.encode(answer)
        start = time.perf_counter()
        grammar = compiler.compile(StructuredOutputs(json=schema))
        compile_ms = (time.perf_counter() - start) * 1e3
        cold, _ = walk(grammar.start(), ids, rng, tokenizer.vocab_size)
        single, tree = [], []
        for _ in range(repeats):
            one, many = walk(grammar.start(), ids, rng, tokenizer.vocab_size)
            single += one
            tree += many
        records.append(
            {
                "schema": 1,
                "what": name,
                "vocab": tokenizer.vocab_size,
                "n": len(single),
                "prepare_s": round(prepare_s, 3),
                "compile_ms": round(compile_ms, 2),
                "cold_max_us": round(max(cold), 1),
                "mask_p50_us": round(float(np.median(single)), 1),
                "mask_p99_us": round(float(np.quantile(single, 0.99)), 1),
                "tree_node_mean_us": round(float(np.mean(tree)), 1),
                "tree_node_p50_us": round(float(np.median(tree)), 1),
                "machine": f"{platform.machine()}, one core",
                "date": datetime.date.today().isoformat(),
            }
        )
    return records


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", default=str(FULL), help=f"tokens, or 'demo' for the demo model's own (default {FULL})")
    parser.add_argument("--repeats", type=int, default=5, help="walks after the first (default 5)")
    parser.add_argument("--json", type=Path, help="append a record a schema")
    args = parser.parse_args(arguments)
    records = measure(None if args.vocab == "demo" else int(args.vocab), args.repeats)
    print(f"{'schema':12}{'compile ms':>11}{'cold max us':>13}{'mask p50':>10}{'p99':>9}{'tree, a node p50':>18}{'mean':>9}")
    for r in records:
        print(
            f"{r['what']:12}{r['compile_ms']:11.2f}{r['cold_max_us']:13.0f}{r['mask_p50_us']:10.1f}{r['mask_p99_us']:9.0f}"
            f"{r['tree_node_p50_us']:18.1f}{r['tree_node_mean_us']:9.1f}"
        )
    if args.json:
        with args.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
