"""Measures speculation end to end on one machine: `python tools/bench_serve.py --help`."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from runtime.env import load_env
from server.background import BackgroundServer
from server.client import ApiClient, ServerRefused
from server.options import WideHelp, add_model_options, load_from, model_of
from tools.bench_report import BASELINE, Cell, live_table, markdown_table, provenance_of, read_records, record_of
from tools.bench_targets import EngineTarget, HttpTarget, Question, Target

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ROOT / "tests" / "fixtures" / "heldout_prompts.json"
METHODS = f"{BASELINE},dflash:7,ddtree:7,ddtree:8,ddtree:16,ddtree:32"

HELP = """\
Generates the same answers with several speculation methods and reports tokens/s, the speed-up over no speculation in the same run,
accepted tokens a step and by depth, and latencies. Methods take turns prompt by prompt and medians over prompts are shown, so that a
noisy machine hits all alike. The answers must be the same text whatever the method (speculation is lossless); the last column counts
how many are, and any difference makes the exit code 1. BLAS threads without a core of their own stall: set OPENBLAS_NUM_THREADS to no
more than the cores that are free.
"""

EXAMPLES = """\
methods:  none · dflash:DEPTH (a chain) · ddtree:NODES (a tree) · ddtree:auto (chosen each step)

examples:
  a first look, about a minute
    python tools/bench_serve.py --prompts 4 --max-tokens 48 --methods none,ddtree:16
  the table of the README
    python tools/bench_serve.py --prompts 32 --max-tokens 128 --temperature 0 0.8 --markdown
  several streams at once
    python tools/bench_serve.py --concurrency 1 4 16
  through HTTP, or a server that runs already (one row, nothing to compare with)
    python tools/bench_serve.py --via http
    python tools/bench_serve.py --base-url http://127.0.0.1:8000
"""


def speculation_for(method: str) -> dict[str, Any] | None:
    """The speculative_config that a method's short name stands for. Raises ValueError naming it."""
    match = re.fullmatch(r"(none)|(dflash|chain|ddtree):(\d+)|ddtree:(auto)", method)
    if match is None:
        raise ValueError(f"--methods: {method!r} is none of none, dflash:DEPTH, ddtree:NODES, ddtree:auto")
    if match[1]:
        return None
    if match[4]:
        return {"method": "ddtree", "tree_budget": "auto"}
    if match[2] == "ddtree":
        return {"method": "ddtree", "tree_budget": int(match[3])}
    return {"method": "dflash", "num_speculative_tokens": int(match[3])}


def read_questions(path: Path, count: int, thinking: bool = True) -> list[Question]:
    """The first `count` prompts of a JSON list of strings or {"q": …}. Raises ValueError if there are fewer."""
    entries = json.loads(path.read_text(encoding="utf-8"))
    texts = [entry["q"] if isinstance(entry, Mapping) else entry for entry in entries]
    if len(texts) < count or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"--prompts {count}: {path} holds {len(texts)} prompts, each must be a string or an object with q")
    return [Question(text, seed, thinking) for seed, text in enumerate(texts[:count])]


def blocks_of(questions: Sequence[Question], size: int) -> list[Sequence[Question]]:
    return [questions[at : at + size] for at in range(0, len(questions), size)]


def measure(
    targets: Mapping[str, Target], questions: Sequence[Question], max_tokens: int, temperature: float, concurrency: int
) -> Iterator[dict[str, Cell]]:
    """Yields the cells after each block of each method. The order of methods rotates from block to block."""
    cells = {method: Cell(method, temperature, concurrency) for method in targets}
    names = list(targets)
    for number, block in enumerate(blocks_of(questions, concurrency)):
        turn = number % len(names)
        for method in names[turn:] + names[:turn]:
            samples, wall_s = targets[method].run(block, max_tokens, temperature)
            cells[method].add(samples, wall_s)
            yield cells


def open_targets(args: argparse.Namespace, stack: ExitStack, note: Callable[[str], None]) -> dict[str, Target]:
    """One target for each method, all loaded at once; closed by the stack."""
    if args.base_url:
        client = ApiClient(args.base_url, args.api_key or load_env().api_key)
        return {"server": HttpTarget(client, f"{client.model()} at {args.base_url}")}
    targets: dict[str, Target] = {}
    for method in args.methods.split(","):
        config = speculation_for(method)
        note(f"loading {method}")

        def load(config: dict[str, Any] | None = config) -> Any:
            return load_from(args, speculative_config=config, max_num_seqs=max(args.concurrency), served_model_name="bench")

        if args.via == "http":
            server = stack.enter_context(BackgroundServer(load))
            loaded = server.service.loaded
            targets[method] = HttpTarget(ApiClient(server.url), loaded.summary if loaded else "")
        else:
            targets[method] = EngineTarget(load())
        stack.callback(targets[method].close)
    return targets


def run(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Measures everything the options ask for; one record for each row. Raises ValueError, OSError, ServerRefused."""
    for method in args.methods.split(","):
        speculation_for(method)
    questions = read_questions(args.prompt_file, args.prompts, args.thinking)
    given = [f"{name}={os.environ[name]}" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS") if os.environ.get(name)]
    cmd = [*given, "python", "tools/bench_serve.py", *args.argv]
    threads = int(given[0].partition("=")[2]) if given else os.cpu_count() or 1
    progress = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    done: list[dict[str, Any]] = []
    title = f"{args.prompts} prompts, up to {args.max_tokens} tokens each"
    with ExitStack() as stack, Live(console=console, refresh_per_second=4, transient=True) as live:
        live.update(progress)
        task = progress.add_task("loading", total=None)
        targets = open_targets(args, stack, lambda what: progress.update(task, description=what))
        more = {"model": model_of(args), "max_tokens": args.max_tokens, "prompt_file": args.prompt_file.name, "via": args.via}
        for target in targets.values():
            target.run(questions[:1], min(args.max_tokens, 16), 0.0)  # warm-up, not counted
        per_pass = sum(len(blocks_of(questions, streams)) for streams in args.concurrency) * len(targets)
        progress.reset(task, total=per_pass * len(args.temperature), description="measuring")
        for temperature in args.temperature:
            for streams in args.concurrency:
                provenance = provenance_of(cmd, threads, **more)
                rows: list[dict[str, Any]] = []
                for cells in measure(targets, questions, args.max_tokens, temperature, streams):
                    baseline = cells.get(BASELINE)
                    rows = [
                        record_of(cell, baseline, {**provenance, "summary": targets[cell.method].summary})
                        for cell in cells.values()
                        if cell.wall_s
                    ]
                    progress.advance(task)
                    live.update(Group(live_table([*done, *rows], title), progress))
                done += rows
    return done


def verdict(records: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """One sentence on losslessness, and whether all is well."""
    compared = [r for r in records if r["same_text"] and r["method"] != BASELINE]
    equal, total = sum(r["same_text"][0] for r in compared), sum(r["same_text"][1] for r in compared)
    failed = sum(r["failed"] for r in records)
    if failed:
        return f"{failed} requests failed", False
    if not compared:
        return "nothing to compare texts with (no method none in this run)", True
    if equal < total:
        return f"NOT lossless: {total - equal} of {total} answers differ from those without speculation", False
    return f"lossless: all {total} speculative answers are, character for character, those without speculation", True


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python tools/bench_serve.py", description=HELP, epilog=EXAMPLES, formatter_class=WideHelp)
    group = parser.add_argument_group("measurement")
    group.add_argument("--methods", default=METHODS, help=f"comma-separated (default {METHODS})")
    group.add_argument("--prompts", type=int, default=16, metavar="N", help="how many of the file's first prompts (default 16)")
    prompt_help = "JSON list of strings or of objects with q (default tests/fixtures/heldout_prompts.json)"
    group.add_argument("--prompt-file", type=Path, default=PROMPTS, metavar="PATH", help=prompt_help)
    group.add_argument("--no-thinking", dest="thinking", action="store_false", help="answers at once, as the demo model's card judges it")
    group.add_argument("--max-tokens", type=int, default=96, metavar="N", help="of an answer (default 96)")
    group.add_argument("--temperature", type=float, nargs="+", default=[0.0], metavar="T", help="one row each (default 0: greedy)")
    group.add_argument("--concurrency", type=int, nargs="+", default=[1], metavar="N", help="streams at once, one row each (default 1)")
    group.add_argument("--via", choices=("engine", "http"), default="engine", help="through the engine itself (default), or over HTTP")
    group.add_argument("--base-url", metavar="URL", help="measure a server that runs already")
    group.add_argument("--api-key", metavar="KEY", help="its key (default: RUNTIME_API_KEY)")
    group = parser.add_argument_group("results")
    out_help = "results file to append to (default tools/results/DATE_cpu_serve.jsonl)"
    group.add_argument(
        "--out", type=Path, default=ROOT / "tools" / "results" / f"{date.today()}_cpu_serve.jsonl", metavar="PATH", help=out_help
    )
    group.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    group.add_argument("--read", type=Path, metavar="PATH", help="measure nothing; print the table of these results")
    add_model_options(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    args.argv = [shlex.quote(part) for part in (sys.argv[1:] if argv is None else argv)]
    console = Console(stderr=args.markdown)
    if not console.is_terminal:
        console.width = 120
    try:
        if min(args.prompts, args.max_tokens, *args.concurrency) < 1:
            raise ValueError("--prompts, --max-tokens and --concurrency must be at least 1")
        records = read_records(args.read) if args.read else run(args, console)
        if not args.read:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record, sort_keys=True) + "\n" for record in records)
    except (ValueError, OSError, ServerRefused) as error:
        print(f"bench_serve: error: {error}", file=sys.stderr)
        return 2
    console.print(live_table(records, str(args.read or args.out)))
    if args.markdown:
        print(markdown_table(records))
    sentence, well = verdict(records)
    console.print(sentence, style="green" if well else "bold red", highlight=False, soft_wrap=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
