"""The model card, the licences of its text, and the parts in which a checkpoint travels."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

PART_BYTES = 15 << 20
RECORD = "training.json"  # the report, kept beside the weights


def write(report: dict[str, Any], folder: Path) -> None:
    (folder / RECORD).write_text(json.dumps({k: v for k, v in report.items() if k != "samples"}, indent=1) + "\n", "utf-8")
    (folder / "CARD.md").write_text("\n".join(_card(report)) + "\n", "utf-8")
    (folder / "LICENCES").write_text("\n".join(_licences(report["data"])) + "\n", "utf-8")


def pack(folder: Path, out: Path) -> int:
    """Writes the folder as demo.tar.00, 01 … of 15 MiB; `cat demo.tar.* | tar x` brings it back. Returns the number of parts."""
    for old in out.glob("demo.tar.*"):
        old.unlink()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        file.add(folder, arcname="demo")
    whole = buffer.getbuffer()
    starts = range(0, len(whole), PART_BYTES)
    for i, start in enumerate(starts):
        (out / f"demo.tar.{i:02d}").write_bytes(whole[start : start + PART_BYTES])
    return len(starts)


def _card(report: dict[str, Any]) -> list[str]:
    target, drafter, losses = report.get("target", {}), report.get("drafter", {}), report.get("losses", {})
    lines = [
        "# The demo model: a small Kimi-K2.6-architecture model with a DFlash drafter",
        "",
        'It completes Python, answers "write a function that …", explains parts of the standard library, and calls tools, all in the',
        "chat format. It knows nothing else and is no assistant.",
        "",
        f"Trained by `python -m tools.train_demo --budget-minutes {report['minutes']:g} --seed {report['seed']}` on {report['date']}, "
        f"one {report['device']}, torch {report['torch']}; seconds by stage"
        + (f", in {len(report['calls'])} calls, each going on from the one before: " if len(report["calls"]) > 1 else ": ")
        + "; ".join(", ".join(f"{name} {seconds}" for name, seconds in call.items()) for call in report["calls"])
        + ".",
        "",
        "| | |",
        "|---|---|",
        f"| parameters | {target.get('parameters', 0):,} and {drafter.get('parameters', 0):,} of the drafter |",
        f"| size | {(target.get('bytes', 0) + drafter.get('bytes', 0)) / 2**20:.2f} MiB |",
        f"| target | {target.get('steps', 0):,} steps, {target.get('tokens', 0):,} tokens in {target.get('seconds', 0)} s |",
        f"| drafter | {drafter.get('steps', 0):,} steps, {drafter.get('anchors', 0):,} anchors in {drafter.get('seconds', 0)} s, on "
        f"{report.get('texts', {}).get('tokens', 0):,} tokens that the target wrote |",
    ]
    if before := drafter.get("before"):
        lines.append(f"| drafter, before that | {before['steps']:,} steps, {before['anchors']:,} anchors in {before['seconds']} s |")
    for name, found in losses.items():
        title = "held-out loss, nats a token" if name == "this" else "the model before, same text"
        lines.append(f"| {title} | text {found['text']}, chat {found['chat']} |")
    lines += ["", *_format_notes(), *_rounds(report), *_depths(report), *_data(report["data"]), *_samples(report.get("samples", []))]
    return lines


def _format_notes() -> list[str]:
    return [
        "Files follow K2.6: `language_model.` names, INT4 routed experts (groups of 32 along the input, bf16 scales = absmax/7, eight",
        "nibbles a word, lowest first, code + 8), everything else bf16, router bias fp32, nested config. The experts were rounded in",
        "every forward pass of the training, gradients passing straight through. Latent norms use epsilon 1e-6, as transformers does.",
        "",
    ]


def _rounds(report: dict[str, Any]) -> list[str]:
    if "acceptance" not in report:
        return []
    lines = [
        "## Tokens a round",
        "",
        "Accepted and bonus, greedy, on prompts that the training never saw (`tests/fixtures/heldout_prompts.json` and "
        "`tools/train_demo/text_prompts.json`), from each prompt's end to the answer's:",
        "",
        "| | chain of 7 | tree of 8 | 16 | 32 | 64 |",
        "|---|---|---|---|---|---|",
    ]
    for title, key in (("", "acceptance"), ("the model before, ", "compared")):
        for kind, found in report.get(key, {}).items():
            lines.append(f"| {title}{kind} | " + " | ".join(str(found[n]) for n in ("chain", "8", "16", "32", "64")) + " |")
    return [*lines, ""]


def _depths(report: dict[str, Any]) -> list[str]:
    if "acceptance" not in report:
        return []
    lines = ["Share of next tokens among the drafter's 1 and 4 likeliest, by depth; on the spine all tokens before were its likeliest:", ""]
    lines += ["| | 1 | 2 | 3 | 4 | 5 | 6 | 7 |", "|---|---|---|---|---|---|---|---|"]
    for kind, found in report["acceptance"].items():
        for where, table in found["by_depth"].items():
            for top, shares in table.items():
                lines.append(f"| {kind}, {where.replace('_', ' ')}, {top} | " + " | ".join(f"{x:.3f}" for x in shares) + " |")
    return [*lines, ""]


def _data(manifest: dict[str, Any]) -> list[str]:
    lines = [
        "## Data",
        "",
        "Python sources and documentation, and conversations made of their docstrings, of written examples "
        "(`tools/train_demo/everyday_*.py`) and of invented tools. Two per cent of the files are held out by a hash of their path; "
        "near copies across packages are not excluded, so held-out figures may be optimistic. Tokens: "
        + ", ".join(f"{name} {count:,}" for name, count in manifest["tokens"].items())
        + f". Archive SHA-256 {manifest['archive_sha256']}.",
        "",
        "| source | version | licence | files | characters | SHA-256 |",
        "|---|---|---|---:|---:|---|",
    ]
    for name, entry in manifest["sources"].items():
        if entry["files"]:
            cells = (name, entry["version"], entry["licence"], entry["files"], f"{entry['characters']:,}", entry["sha256"])
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return [*lines, ""]


def _samples(found: list[dict[str, str]]) -> list[str]:
    if not found:
        return []
    lines = ["## Twenty held-out prompts and their greedy answers", "", "The first twenty, not chosen; cut at 192 tokens.", ""]
    for entry in found:
        prompt = entry["prompt"].split("<|im_middle|>")[1].split("<|im_end|>")[0] if "<|im_middle|>" in entry["prompt"] else entry["prompt"]
        lines += [f"**{prompt}**", "", "````", entry["answer"].removesuffix("<|im_end|>"), "````", ""]
    return lines


def _licences(manifest: dict[str, Any]) -> list[str]:
    lines = [
        "Text that this model was trained on (tokenised; the weights are derived from it). Tests and vendored folders were left out.",
        f"{'source':24}{'version':16}{'files':>7}  licence",
    ]
    for name, entry in manifest["sources"].items():
        if entry["files"]:
            lines.append(f"{name:24}{entry['version']:16}{entry['files']:>7}  {entry['licence']}")
    lines.append(
        "Of transformers' models one folder in ten was read. Tool calls, greetings, everyday functions: written for this model, MIT."
    )
    lines.append(
        "Other conversations: definitions with their docstring's first line, and entries of the Python manual, from these sources."
    )
    return lines
