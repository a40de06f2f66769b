"""docs/server.md says what the code says: refused fields, paths, tests named, figures from their records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from server.openapi import BODIES, READS
from server.protocol import NOT_SERVED

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")


def between(mark: str) -> str:
    found = re.search(rf"<!-- {mark} -->\n(.*?)\n?<!-- /{mark} -->", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def refused() -> str:
    rows = [f"| `{name}` | {instead} |" for name, (_, instead) in sorted(NOT_SERVED.items())]
    return "\n".join(["| field | instead |", "|---|---|", *rows])


def figures() -> str:
    """One row a record of the soak, the oldest first."""
    lines = (ROOT / "tools" / "results" / "soak_cpu.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [_row(json.loads(line)) for line in lines]
    head = "| soak | requests | wrong | steps | MiB at the start, peak | growth after warm-up | files start, end | load | commit |"
    return "\n".join([head, "|---|---:|---:|---:|---|---:|---|---:|---|", *rows])


def measured() -> str:
    """One row a record of the server's tests."""
    lines = (ROOT / "tools" / "results" / "server_cpu.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    rows = [f"| {r['case']} | {r['said']} | `{r['cmd']}` | {r['load_average'][0]} on {r['cores']} cores |" for r in found]
    return "\n".join(["| what | measured | by | load |", "|---|---|---|---|", *rows])


def _row(r: dict[str, Any]) -> str:
    memory, files = r["rss_mib"], r["files"]
    model = r["server"].split()[0].rpartition("/")[2]
    cells = [f"{r['duration_s'] / 60:.0f} min, {model}", f"{r['requests']:,}", r["wrong"], f"{r['steps']:,.0f}"]
    cells += [f"{memory['start']}, {memory['peak']}", f"{memory['growth_after_warm_up']} MiB", f"{files['start']}, {files['end']}"]
    return f"| {' | '.join(map(str, cells))} | {r['load_average'][1]} on {r['cores']} cores | {r['commit']} |"


def test_the_tables_are_the_codes() -> None:
    for mark, table in (("refused", refused()), ("measured", measured()), ("figures", figures())):
        assert between(mark) == table, f"paste this between the {mark} marks of docs/server.md:\n{table}"


def test_every_path_is_there() -> None:
    for path in [*BODIES, *READS]:
        assert path.replace("{model_id}", "{id}") in PAGE or path == "/dashboard.json", path


def test_what_it_names_exists() -> None:
    named = set(re.findall(r"`((?:tests|tools|docs)/[\w./]+)`", PAGE))
    assert len(named) > 8 and all((ROOT / name).exists() for name in named)
