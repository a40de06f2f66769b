"""Trains the demo model: `python -m tools.train_demo --help`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

HELP = """\
Trains the small K2.6-architecture model of model/demo and its DFlash drafter, and writes both in K2.6's on-disk format with
CARD.md and LICENCES. Needs torch (extra train) and the packages of tools/train_demo/packages.txt, whose sources are the text.

stages, each skipped if --work holds its product:
  data      sources -> tokens (tokens.npz)          target   the model, INT4 rounding in the forward pass
  texts     what the target writes for the drafter  drafter  the drafter, on those texts
  evaluate  held-out loss, tokens a round, samples  card     CARD.md, LICENCES, report.json
"""

EXAMPLES = """\
examples:
  everything in nineteen minutes on one H200
    python -m tools.train_demo --archive build/train_demo/texts.jsonl.xz --out build/train_demo/demo
  a longer drafter for a target that stands
    python -m tools.train_demo --archive … --from-export model/demo --out build/train_demo/demo --budget-minutes 9
  every stage in miniature on a CPU
    python -m tools.train_demo --archive … --out /tmp/mini --work /tmp/mini-work --miniature --budget-minutes 1.5
"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tools.train_demo", description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--archive", type=Path, required=True, help="texts.jsonl.xz of tools.train_demo.archive")
    add(
        "--packages",
        type=Path,
        default=Path(sysconfig.get_paths()["purelib"]),
        help="site-packages to read (default: this Python's)",
    )
    add("--out", type=Path, required=True, help="folder of the checkpoint")
    add("--work", type=Path, default=Path("build/train_demo/work"), help="folder of what stages leave for a later run")
    add("--pack", type=Path, help="also write the checkpoint there as demo.tar.00, 01 … of 15 MiB, with the log and report.json")
    add("--budget-minutes", type=float, default=19.0, help="wall-clock limit of the whole run (default 19)")
    add("--stop-after", choices=["data", "target", "texts", "drafter", "evaluate", "card"], default="card")
    add("--from-export", type=Path, help="take the target of this checkpoint instead of training one")
    add("--compare", type=Path, help="judge this checkpoint on the same held-out text too")
    add("--processes", type=int, default=os.cpu_count() or 1, help="processes that encode text")
    add("--seed", type=int, default=0)
    add("--no-compile", action="store_true", help="train without torch.compile")
    add("--miniature", action="store_true", help="tiny sizes: proves the stages, teaches nothing")
    return parser.parse_args()


def main() -> int:
    began, args = time.monotonic(), parse()  # loading torch counts too: 20 s on a cold machine
    from tools.train_demo.stages import Run  # here, so that the encoding processes do not load torch

    report = Run(args, began).go()
    print(json.dumps({key: report.get(key) for key in ("losses", "seconds", "errors")}, indent=1))
    return 1 if report.get("errors") else 0


if __name__ == "__main__":
    raise SystemExit(main())
