"""Packs the texts that no installed package brings: CPython's library and the Python and SQLite documentation.

    python -m tools.train_demo.archive --cpython311 /usr/lib/python3.11 --cpython313 ~/cpython-3.13/Lib \\
        --python-doc DIR/usr/share/doc/python3.11 --sqlite-doc DIR/usr/share/doc/sqlite3 --out build/train_demo/texts.jsonl.xz

The first two are standard libraries (3.11.7 and 3.13.0 were used); the others are Debian bookworm's python3.11-doc and
sqlite3-doc, unpacked by `dpkg -x`. Of 3.13 only the files that 3.11 lacks are taken.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import lzma
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.train_demo.sources import ARCHIVED, Document, read_tree

LONGEST_PAGE = 200_000


def read_rst(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.rst.txt")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) > 200:
            yield Document("python3.11-doc", "pydoc/" + path.as_posix()[len(root.as_posix()) :], "rst", text[: 2 * LONGEST_PAGE], True)


def plain_text(page: str) -> str:
    """The text of an HTML page, without scripts, styles and drawings."""
    page = re.sub(r"(?s)<(script|style|svg)\b.*?</\1>", "", page)
    page = html.unescape(re.sub(r"<[^>]+>", "", page))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", page)).strip()


def read_html(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.html")):
        page = path.read_text(encoding="utf-8", errors="ignore")
        text = plain_text(page) if "copyright" not in path.as_posix() and len(page) < 1_500_000 else ""
        if len(text) > 500:
            yield Document("sqlite3-doc", "sqlite/" + path.as_posix()[len(root.as_posix()) :], "txt", text[:LONGEST_PAGE], True)


def collect(cpython311: Path, cpython313: Path, python_doc: Path, sqlite_doc: Path) -> list[Document]:
    old, new = ARCHIVED[0], ARCHIVED[1]
    documents = list(read_tree(old, cpython311))
    known = {d.key.removeprefix(old.name) for d in documents}
    documents += [d for d in read_tree(new, cpython313) if d.key.removeprefix(new.name) not in known]
    return [*documents, *read_rst(python_doc), *read_html(sqlite_doc)]


def write(documents: list[Document], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 26}]
    with lzma.open(out, "wt", encoding="utf-8", filters=filters) as file:
        for d in documents:
            file.write(json.dumps({"source": d.source, "key": d.key, "kind": d.kind, "text": d.text}, ensure_ascii=False) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tools.train_demo.archive", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("cpython311", "cpython313", "python-doc", "sqlite-doc", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    documents = collect(args.cpython311, args.cpython313, args.python_doc, args.sqlite_doc)
    write(documents, args.out)
    size, characters = args.out.stat().st_size, sum(len(d.text) for d in documents)
    print(f"{len(documents)} documents, {characters / 1e6:.1f} million characters, {size / 2**20:.2f} MiB")
    print("sha256", hashlib.sha256(args.out.read_bytes()).hexdigest())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
