#!/usr/bin/env python3
"""Shows that with --batch-invariant a row's logits do not depend on its bucket, its place or its company, and what that costs.

    python tools/bench_invariance.py --json tools/results/invariance_h200.jsonl
    python tools/bench_invariance.py kimi-k26 --load-format dummy --hf-overrides '{"num_hidden_layers": 8}' --spec-method none

One token after 150 others is computed alone, then in every bucket to 256, at several places among chunks of two other streams, and
its logits are compared bit for bit. The cost of a bucket is its graph's time over that of the fastest configuration, full, in
--streams streams of --ctx tokens: as chains, and as draft trees, whose keys the invariant mode copies (with --spec-method ddtree).
Then texts of --prompts prompts, with and without draft trees, in the invariant mode: all must be equal. Needs a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.chat_template import ChatTemplate
from model.tokenizer import Tokenizer
from runtime import loading
from runtime.config import EngineConfig, SpeculativeConfig
from runtime.cuda_loading import find_gpu
from runtime.cuda_worker import CudaWorker
from runtime.engine import Engine
from runtime.graph.probe import Probe, chains
from runtime.load_config import LoadConfig
from runtime.speculate import NoSpeculation, Speculator, TreeSpeculation
from runtime.stream import TextStream
from runtime.types import F32, I32, Emission, Request, SamplingParams
from server.options import WideHelp, add_model_options, model_of, speculative_of
from tools.bench_moe import provenance
from tools.cut_drafter import fitting_drafter
from tools.record_traces import read_prompts

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CTX, TOKEN, COMPANIES = 150, 77, 2
PAGES_EACH = 8  # of 64: room for a chunk of 256 after nothing, or one token after 150
PROMPTS = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "heldout_prompts.json"
TEXTS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=48, logprobs=0),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, max_tokens=48, logprobs=0),
}
Said = list[tuple[int, float]]  # of a text: tokens and their log-probabilities


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket's record: places and companies compared, those whose bits were equal, times of the full graph over chains and
    over draft trees (None where none are verified)."""

    M: int
    compared: int
    equal: int
    us: float
    fastest_us: float
    tree_us: float | None = None
    tree_fastest_us: float | None = None

    @property
    def cost(self) -> float:
        return self.us / self.fastest_us - 1

    @property
    def tree_cost(self) -> float | None:
        return self.tree_us / self.tree_fastest_us - 1 if self.tree_us and self.tree_fastest_us else None


def places(rows: int) -> Iterator[int]:
    """Places to look at in a bucket: its ends, its middle, and one that is no multiple of anything."""
    yield from sorted({0, rows // 2, rows - 1, min(13, rows - 1)})


def own_pages(streams: int) -> I32:
    """[B, PAGES_EACH], page 0 left out."""
    return np.arange(1, streams * PAGES_EACH + 1, dtype=np.int32).reshape(streams, PAGES_EACH)


def prepare(worker: CudaWorker, rng: np.random.Generator) -> None:
    """Computes the CTX tokens that stream 0 has committed."""
    token = rng.integers(0, worker.limits.vocab_size, CTX).astype(np.int32)
    wanted, size = np.zeros(0, np.int32), worker.limits.page_size
    worker.step(chains(np.array([CTX], np.int32), np.zeros(1, np.int32), token, own_pages(1), size, wanted))


def row_bits(worker: CudaWorker, rows: int, place: int, seed: int) -> F32:
    """Logits [V] of stream 0's next token, row `place` of `rows`; chunks of two other streams stand around it."""
    rng = np.random.default_rng(seed)
    around = [(1, place), (0, 1), (2, rows - place - 1)]
    order = [stream for stream, count in around if count]
    counts = np.array([count for _, count in around if count], np.int32)
    token = rng.integers(0, worker.limits.vocab_size, rows).astype(np.int32)
    token[place] = TOKEN
    ctx = np.array([CTX if stream == 0 else 0 for stream in order], np.int32)
    worker.step(chains(counts, ctx, token, own_pages(3)[order], worker.limits.page_size, np.array([place], np.int32)))
    return worker.host(worker.program_of(rows, 1).arrays["logits"])[0]


def compare(worker: CudaWorker, rows: int, want: F32) -> tuple[int, int]:
    """(compared, equal) over places and companies."""
    found = [row_bits(worker, rows, place, 1000 * rows + 10 * place + i) for place in places(rows) for i in range(COMPANIES)]
    return len(found), sum(np.array_equal(one.view(np.uint32), want.view(np.uint32)) for one in found)


def open_worker(args: argparse.Namespace, source: loading.Source, speculative: SpeculativeConfig, invariant: bool) -> CudaWorker:
    return loading.make_gpu_executor(source, open_config(args, source, invariant), speculative, lambda _: None)


def open_config(args: argparse.Namespace, source: loading.Source, invariant: bool) -> EngineConfig:
    given = {
        "max_num_seqs": min(64, SIZES[-1]),
        "max_num_batched_tokens": SIZES[-1],
        "max_model_len": args.max_model_len,
        "num_pages": args.num_pages,
    }
    config = loading.first_config("cuda", SIZES, batch_invariant=invariant, block_size=64, **given)
    return loading.fit_config(config, source, "bfloat16", "cuda")


def times(worker: CudaWorker, args: argparse.Namespace, trees: bool = False) -> dict[int, float]:
    """Microseconds of each bucket's graph, full, every row's token wanted. trees: its rows are draft trees, not chains."""
    limits = worker.limits
    deepest = limits.draft_depth if trees else 0
    audit = worker.audit(Probe(args.streams, args.ctx, limits.vocab_size, limits.num_pages, limits.page_size, deepest), ops=False)
    return {p.rows: p.us for p in audit.programs if p.kind == "step" and p.out_rows == p.rows and p.us is not None}


def texts(engine: Engine, requests: Sequence[Request]) -> list[Said]:
    """What all requests got, run together."""
    found: dict[str, Said] = {request.id: [] for request in requests}
    open_ids = set(found)

    def take(emission: Emission) -> None:
        found[emission.id].extend((one.token, one.logprob) for one in emission.logprobs or ())
        if emission.finish is not None:
            open_ids.discard(emission.id)

    for request in requests:
        engine.submit(request, take)
    while open_ids:
        engine.step()
    return list(found.values())


def prompts_of(path: Path, tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Held-out questions in the model's chat format."""
    template = ChatTemplate.load(path, tokenizer)
    return [template.encode([{"role": "user", "content": text}], thinking=False) for text in read_prompts(PROMPTS)[:count]]


def compare_texts(worker: CudaWorker, config: EngineConfig, source: loading.Source, count: int) -> dict[str, dict[str, int]]:
    """For each way to sample: prompts, those whose text with draft trees is not the plain one, and those of which any token has a
    log-probability of other bits."""
    tokenizer = Tokenizer.load(source.path)
    prompts = prompts_of(source.path, tokenizer, count)

    def engine(speculator: Speculator) -> Engine:
        def stream(params: SamplingParams) -> TextStream:
            return TextStream(tokenizer.stream(params.skip_special_tokens), params, tokenizer.eos_ids)

        return Engine(worker, config, stream, speculator, eos_ids=tokenizer.eos_ids)

    found = {}
    for name, params in TEXTS.items():
        requests = [Request(str(i), np.asarray(p, np.int32), params, seed=1000 + i) for i, p in enumerate(prompts)]
        plain = texts(engine(NoSpeculation()), requests)
        drafted = texts(engine(TreeSpeculation(worker, SpeculativeConfig(tree_budget=16))), requests)
        found[name] = {"prompts": len(prompts), "different": differing(plain, drafted, 1), "other_bits": differing(plain, drafted, 2)}
    return found


def differing(plain: Sequence[Said], drafted: Sequence[Said], columns: int) -> int:
    """Texts that differ in the first columns of what was said: tokens alone, or log-probabilities too."""
    return sum([x[:columns] for x in a] != [x[:columns] for x in b] for a, b in zip(plain, drafted, strict=True))


def run(args: argparse.Namespace) -> tuple[list[Bucket], dict[str, dict[str, int]]]:
    weights = LoadConfig.parse(args.load_format, args.hf_overrides)
    args.spec_model = fitting_drafter(args.spec_model, weights)
    speculative = loading.fit_speculation(SpeculativeConfig.parse(speculative_of(args)), "cuda")
    source = loading.open_source(model_of(args), speculative, weights)
    worker = open_worker(args, source, speculative, invariant=True)
    said = {}
    trees = speculative.method == "ddtree"
    if trees and args.prompts:
        said = compare_texts(worker, open_config(args, source, True), source, args.prompts)
    prepare(worker, np.random.default_rng(3))
    want = row_bits(worker, 1, 0, 0)
    if not np.isfinite(want).all():
        raise RuntimeError("the row that all others are compared with is not finite")
    seen = {rows: compare(worker, rows, want) for rows in SIZES}
    own = times(worker, args), times(worker, args, trees=True) if trees else {}
    worker.close()
    del worker
    gc.collect()  # its weights make room for the other's
    other = open_worker(args, source, speculative, invariant=False)
    fastest = times(other, args), times(other, args, trees=True) if trees else {}
    found = [(rows, *seen[rows], own[0][rows], fastest[0][rows], own[1].get(rows), fastest[1].get(rows)) for rows in SIZES]
    return [Bucket(*one) for one in found], said


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=WideHelp)
    add_model_options(parser)
    group = parser.add_argument_group("invariance")
    group.add_argument("--ctx", type=int, default=512, help="committed tokens of each stream that is timed (default 512)")
    group.add_argument("--streams", type=int, default=8, help="streams that share a bucket (default 8)")
    group.add_argument("--prompts", type=int, default=200, help="texts that are compared, 0: none (default 200; with --spec-method ddtree)")
    group.add_argument("--json", type=Path, help="append the records here")
    group.add_argument("--commit", default="", help="recorded where git is not at hand")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    found, why = find_gpu()
    if not found:
        print(f"{why}: invariance is a property of kernels on a GPU; nothing was run")
        return 2
    buckets, said = run(args)
    print(f"{'M':>5}{'compared':>10}{'equal':>8}{'us':>10}{'fastest us':>12}{'cost':>8}{'trees us':>10}{'fastest us':>12}{'cost':>8}")
    for b in buckets:
        line = f"{b.M:>5}{b.compared:>10}{b.equal:>8}{b.us:>10.1f}{b.fastest_us:>12.1f}{b.cost:>8.1%}"
        print(line if b.tree_cost is None else f"{line}{b.tree_us:>10.1f}{b.tree_fastest_us:>12.1f}{b.tree_cost:>8.1%}")
    for name, counts in said.items():
        print(
            f"{name}: {counts['different']} of {counts['prompts']} texts differ between draft trees and plain decoding, "
            f"{counts['other_bits']} in the bits of a log-probability"
        )
    if args.json:
        common = {"schema": 1, "model": model_of(args), "hf_overrides": args.hf_overrides, "ctx": args.ctx, "streams": args.streams}
        common |= provenance(args.commit)
        rows = [{"kind": "bucket", **asdict(b), "cost": b.cost, "tree_cost": b.tree_cost, **common} for b in buckets]
        rows += [{"kind": "texts", "sampling": name, **counts, **common} for name, counts in said.items()]
        with args.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    exact = not any(counts["other_bits"] for counts in said.values())
    return 0 if exact and all(b.equal == b.compared for b in buckets) else 1


if __name__ == "__main__":
    sys.exit(main())
