"""Where the demo's training text comes from: permissively licensed Python sources and documentation, by name, licence and hash.

Most of it is Python that is installed beside torch in the training environment; the CPython sources and the documentation,
which no package brings, travel in one archive (`python -m tools.train_demo.archive`). Two per cent of the files, chosen by a
hash of their key, are held out and never trained on. The rule is that of the study model that this one is compared with, so
its held-out prompts and texts are held out here too.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

SMALLEST, LARGEST = 200, 300_000  # characters of a file: neither stubs nor tables
HELD_OUT = 50  # one file in so many is held out
PROMPT_ONLY = 8  # of the further packages one file in so many gives prompts for the drafter and is not trained on
MODELS_KEPT = 10  # of transformers' models one folder in so many: they are near copies of each other

SKIPPED = re.compile(
    r"/(tests?|testing|_internal|idle_test|site-packages|__pycache__|lib2to3|encodings|pydoc_data|_vendor|vendored|extern|externals|"
    r"unicode_data|turtledemo|tomllib_data|thirdparty|third_party|rubi|lexers|_refs|_meta)/|_pb2\.py$|holonomicerrors|onnx/_internal/"
)


@dataclass(frozen=True, slots=True)
class Source:
    """One source of text. name is the first part of its files' keys; folder lies in site-packages, or "" if the archive brings it.

    core sources are those of the study model and are weighted more; dist is the distribution that says the version, version
    that of an archived source.
    """

    name: str
    licence: str
    folder: str
    dist: str
    core: bool
    version: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """One file: `key` decides what it is used for, kind is py, rst or txt."""

    source: str
    key: str
    kind: str
    text: str
    core: bool

    @property
    def held_out(self) -> bool:
        return digest(self.key) % HELD_OUT == 0

    @property
    def prompt_only(self) -> bool:
        return not self.core and digest(self.key) % PROMPT_ONLY == 1


def digest(key: str) -> int:
    return int(hashlib.sha1(key.encode()).hexdigest(), 16)


ARCHIVED = (
    Source("cpython-3.11", "PSF-2.0", "", "", True, "3.11.7"),
    Source("cpython-3.13", "PSF-2.0", "", "", True, "3.13.0"),
    Source("python3.11-doc", "PSF-2.0, examples 0BSD", "", "", True, "3.11.2-6+deb12u9"),
    Source("sqlite3-doc", "public domain", "", "", True, "3.40.1-2+deb12u2"),
)

_CORE = {
    "BSD-3-Clause": "torch sympy mpmath networkx numpy httpx httpcore fsspec click jinja2",
    "BSD-2-Clause": "pygments",
    "Apache-2.0": "transformers huggingface_hub requests",
    "MIT": "rich anyio urllib3 markdown_it",
}
_FURTHER = {
    "BSD-3-Clause": "scipy pandas sklearn statsmodels skimage seaborn werkzeug joblib toolz numba torchvision patsy",
    "Apache-2.0": "accelerate aiohttp chex diffrax equinox flax jax lightning lineax numpyro onnx optax optimistix peft "
    "sentence_transformers timm torchmetrics xarray coverage",
    "MIT": "botorch gpytorch linear_operator torch_geometric onnxscript formulaic einops e3nn typer narwhals fontTools _pytest",
    "Python-2.0 style": "matplotlib",
}
_DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "markdown_it": "markdown-it-py",
    "_pytest": "pytest",
    "sentence_transformers": "sentence-transformers",
    "linear_operator": "linear-operator",
    "torch_geometric": "torch-geometric",
}


def _installed(table: dict[str, str], core: bool) -> Iterator[Source]:
    for licence, names in table.items():
        for name in names.split():
            yield Source(name, licence, name, _DISTRIBUTIONS.get(name, name), core)


INSTALLED = (*_installed(_CORE, True), *_installed(_FURTHER, False))
SOURCES = (*ARCHIVED, *INSTALLED)


def keeps(source: str, path: str) -> bool:
    """Whether a file is read at all; `path` begins with "/" and is relative to the source's folder."""
    if SKIPPED.search(path):
        return False
    if source == "transformers" and "/models/" in path:
        return digest(path.split("/models/")[1].split("/")[0]) % MODELS_KEPT == 0
    return True


def read_text(path: Path) -> str | None:
    """A file's text if it is UTF-8 and of a sensible length."""
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    return text if SMALLEST < len(text) < LARGEST else None


def read_tree(source: Source, root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py")):
        relative = path.as_posix()[len(root.as_posix()) :]
        text = read_text(path) if keeps(source.name, relative) else None
        if text is not None:
            yield Document(source.name, source.name + relative, "py", text, source.core)


def read_archive(path: Path) -> Iterator[Document]:
    """Documents of the archive: xz-compressed lines of JSON, {"source", "key", "kind", "text"}."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            entry = json.loads(line)
            yield Document(entry["source"], entry["key"], entry["kind"], entry["text"], True)


def read_all(archive: Path, packages: Path, sources: Iterable[Source] = INSTALLED) -> list[Document]:
    """Every document once: the archive's, then those of the installed packages. A package that is absent is left out."""
    seen: set[bytes] = set()
    kept = []

    def add(documents: Iterable[Document]) -> None:
        for document in documents:
            mark = hashlib.sha1(document.text.encode("utf-8", "surrogatepass")).digest()
            if mark not in seen:
                seen.add(mark)
                kept.append(document)

    add(read_archive(archive))
    for source in sources:
        if (packages / source.folder).is_dir():
            add(read_tree(source, packages / source.folder))
    return kept


def manifest(documents: Sequence[Document], archive: Path) -> dict[str, Any]:
    """What was read: of each source the version, licence, files, characters and SHA-256 of the texts in order; the archive's hash."""
    by_source: dict[str, list[Document]] = {}
    for document in documents:
        by_source.setdefault(document.source, []).append(document)
    entries = {}
    for source in SOURCES:
        mine = by_source.get(source.name)
        if not mine:
            entries[source.name] = {"licence": source.licence, "files": 0}
            continue
        whole = hashlib.sha256()
        for document in mine:
            whole.update(f"{document.key}\n{document.text}\n".encode("utf-8", "surrogatepass"))
        entries[source.name] = {
            "version": _version(source),
            "licence": source.licence,
            "files": len(mine),
            "held_out": sum(d.held_out for d in mine),
            "characters": sum(len(d.text) for d in mine),
            "sha256": whole.hexdigest(),
        }
    return {"archive_sha256": hashlib.sha256(archive.read_bytes()).hexdigest(), "sources": entries}


def _version(source: Source) -> str:
    if source.version:
        return source.version
    try:
        return metadata.version(source.dist)
    except metadata.PackageNotFoundError:
        return "unknown"
