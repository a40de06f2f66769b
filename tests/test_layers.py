"""A file imports lower layers only: the table is setup.cfg's [threshold:layers], every import counts, also those inside functions."""

from __future__ import annotations

import ast
import configparser
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("runtime", "model", "server", "tools")


@dataclass(frozen=True)
class Table:
    """Layer of each entry, and the layers that a layer may import."""

    layer_of_entry: dict[str, str]
    may_import: dict[str, frozenset[str]]

    def find_entry(self, module: str) -> str | None:
        """The entry that stands for a module: itself or the package it lies in."""
        parts = module.split(".")
        names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
        return next((name for name in names if name in self.layer_of_entry), None)


def read_table(path: Path = ROOT / "setup.cfg") -> Table:
    config = configparser.ConfigParser(interpolation=None)
    config.optionxform = str  # type: ignore[assignment,method-assign]
    config.read(path)
    layer_of_entry: dict[str, str] = {}
    may_import: dict[str, frozenset[str]] = {}
    for layer, line in config["threshold:layers"].items():
        entries, _, allowed = line.partition("|")
        may_import[layer] = frozenset(allowed.split())
        for entry in entries.split():
            if entry in layer_of_entry:
                raise ValueError(f"{entry} stands in {layer_of_entry[entry]} and in {layer}")
            layer_of_entry[entry] = layer
    return Table(layer_of_entry, may_import)


def module_files(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the project by its dotted name; a package's own file is `package.__init__`."""
    files = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            files[".".join(path.relative_to(root).with_suffix("").parts)] = path
    return files


def imports_of(module: str, source: str, modules: set[str]) -> set[str]:
    """Project modules that a source text imports, wherever the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {resolve(alias.name, modules) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, *([base] if base else [])])
            for alias in node.names:
                deeper = f"{base}.{alias.name}"
                known = deeper in modules or f"{deeper}.__init__" in modules
                found.add(resolve(deeper if known else base, modules))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "import_module", "importlib.import_module"):
            if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                found.add(resolve(node.args[0].value, modules))
    return {name for name in found if name.split(".")[0] in PACKAGES} - {module}


def resolve(name: str, modules: set[str]) -> str:
    return f"{name}.__init__" if f"{name}.__init__" in modules else name


def violations(sources: dict[str, str], table: Table) -> list[str]:
    """What the table forbids, one line for each import; and modules that no layer names."""
    modules = set(sources)
    bad = []
    for module, source in sources.items():
        entry = table.find_entry(module)
        if entry is None:
            bad.append(f"{module} stands in no layer of setup.cfg [threshold:layers]")
            continue
        layer = table.layer_of_entry[entry]
        for target in sorted(imports_of(module, source, modules)):
            other = table.find_entry(target)
            if other is None:
                bad.append(f"{module} imports {target}, which stands in no layer")
            elif other != entry and table.layer_of_entry[other] not in table.may_import[layer]:
                allowed = ", ".join(sorted(table.may_import[layer]))
                bad.append(f"{module} ({layer}) imports {target} ({table.layer_of_entry[other]}); {layer} may import {allowed}")
    return bad


def import_cycle(sources: dict[str, str]) -> list[str]:
    """One cycle of imports at module level, or nothing."""
    modules = set(sources)
    edges = {}
    for module, source in sources.items():
        top = ast.Module([n for n in ast.parse(source).body if isinstance(n, (ast.Import, ast.ImportFrom))], [])
        edges[module] = imports_of(module, ast.unparse(top), modules) & modules
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(edges[module]):
            cycle = visit(target, [*path, module])
            if cycle:
                return cycle
        done.add(module)
        return []

    return next((cycle for module in sorted(modules) if (cycle := visit(module, []))), [])


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {name: path.read_text(encoding="utf-8") for name, path in module_files().items()}


def test_every_file_imports_lower_layers_only(sources: dict[str, str]) -> None:
    assert len(sources) > 10
    bad = violations(sources, read_table())
    assert not bad, "\n".join(bad)


def test_no_import_cycle(sources: dict[str, str]) -> None:
    assert not import_cycle(sources)


def test_table_names_six_layers_and_existing_or_planned_files_once() -> None:
    table = read_table()
    assert list(table.may_import) == ["L0", "L1", "L2", "L3", "L4", "L5", "L6"]
    for layer, allowed in table.may_import.items():
        assert all(other <= layer for other in allowed), f"{layer} may import a higher layer"
    assert "L2" not in table.may_import["L2"], "backends must not import each other"
    assert not {"L2", "L4", "L5", "L6"} & table.may_import["L3"], "a model must not import a backend"


MUTATIONS = [
    ("runtime.types", "from runtime.engine import Engine"),
    ("runtime.null", "def f():\n    import runtime.kernels_np.mla"),
    ("runtime.null", "from runtime import kernels_np"),
    ("runtime.kernels_np.mla", "from runtime.null import NullBackend"),
    ("runtime.kernels_np.mla", "from ..null import NullBackend"),
    ("model.kimi_k26", "def load():\n    from runtime import null"),
    ("model.kimi_k26", "import importlib\nimportlib.import_module('runtime.comm')"),
    ("runtime.scheduler", "from runtime import LLM"),
    ("runtime.pages", "if True:\n    import tools.serve"),
    ("runtime.brand_new", "x = 1"),
    ("runtime.pages", "import server.brand.new"),
]


@pytest.mark.parametrize(("module", "source"), MUTATIONS)
def test_a_violating_file_is_caught(sources: dict[str, str], module: str, source: str) -> None:
    known = {
        "runtime.__init__": "", "runtime.engine": "", "runtime.null": "", "runtime.comm": "", "runtime.kernels_np.__init__": "",
        "runtime.kernels_np.mla": "", "runtime.scheduler": "", "tools.serve": "", "server.brand.new": "",
    }  # fmt: skip
    assert not violations(known, read_table())
    bad = violations({**known, module: source}, read_table())
    if (module, source) == MUTATIONS[-1]:
        assert bad == [f"{module} (L1) imports server.brand.new (L6); L1 may import L0, L1"]
    assert len(bad) == 1, bad


def test_a_cycle_is_caught() -> None:
    assert import_cycle({"runtime.a": "from runtime import b", "runtime.b": "import runtime.c", "runtime.c": "import runtime.a"})
    assert not import_cycle({"runtime.a": "from runtime import b", "runtime.b": "def f():\n    import runtime.a"})
