"""Writes a random model folder: `python -m tools.make_tiny --help`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.tiny import make_tiny
from model.weights import Checkpoint

HELP = """\
Writes a seeded random model, drafter and tokenizer in exactly the files of a Kimi K2.6 checkpoint: sharded safetensors, INT4
experts, nested config.json. It speaks gibberish at full speed; use it to test shapes, sharding and serving without a download.
"""

EXAMPLES = """\
--set takes any key of config.json's text model, or with draft_ in front any key of the drafter's; values are JSON.

examples:
  a model of 4.6 MB with a two-layer drafter
    python -m tools.make_tiny /tmp/tiny
  deeper, more experts
    python -m tools.make_tiny /tmp/deep --set num_hidden_layers=6 --set n_routed_experts=64 --set num_experts_per_tok=8
  widths that eight ranks can share
    python -m tools.make_tiny /tmp/wide --set num_attention_heads=8 --set hidden_size=512 --set moe_intermediate_size=256
  no YaRN, blocks of four
    python -m tools.make_tiny /tmp/plain --set rope_scaling=null --set draft_block_size=4
  Kimi K2's flat config.json and plain tensor names, without a drafter
    python -m tools.make_tiny /tmp/k2 --flat-config --no-drafter
"""


def parse_setting(text: str) -> tuple[str, Any]:
    """KEY=VALUE with a JSON value; raises argparse's error naming the text."""
    key, equals, value = text.partition("=")
    try:
        if not (key and equals):
            raise ValueError("there is no KEY= in it")
        return key, json.loads(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=JSON, such as num_hidden_layers=4 ({error})") from None


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tools.make_tiny", description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("path", type=Path, help="folder to write; made if absent, refused if it holds a model")
    parser.add_argument("--seed", type=int, default=0, help="same seed and sizes, same bytes (default 0)")
    setting = "change a config key; may be repeated"
    parser.add_argument("--set", dest="settings", metavar="KEY=JSON", type=parse_setting, action="append", default=[], help=setting)
    parser.add_argument("--no-drafter", dest="drafter", action="store_false", help="leave the DFlash drafter out")
    parser.add_argument("--flat-config", action="store_true", help="no text_config, no language_model. prefix (K2, K2-Thinking)")
    parser.add_argument("--rope-parameters", action="store_true", help="transformers 5's spelling of the rotary keys")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        folder = make_tiny(
            args.path,
            args.seed,
            drafter=args.drafter,
            flat_config=args.flat_config,
            rope_parameters=args.rope_parameters,
            **dict(args.settings),
        )
    except (ValueError, TypeError, FileExistsError) as error:
        parser.error(str(error))
    for part in (folder, *([folder / "drafter"] if args.drafter else [])):
        with Checkpoint.open(part) as made:
            print(f"{part}: {len(made.names())} tensors, {made.total_bytes / 1e6:.1f} MB")
            for file in sorted(p for p in part.iterdir() if p.is_file()):
                print(f"  {file.name:<36} {file.stat().st_size:>12,} B")
    print(f"\nserve it:  python tools/serve.py {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
