"""Nothing that came from outside is ever run or unpickled: the tree holds no call that could."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("runtime", "model", "server", "tools")
MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__"}


def offences(source: str, where: str) -> list[str]:
    """Imports and calls that could run what they read: unpicklers, eval, np.load with pickles, YAML with objects, remote code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [f"{where}:{node.lineno}: import {name.name}" for name in node.names if name.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(f"{where}:{node.lineno}: from {node.module}")
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else None
            attribute = node.func.attr if isinstance(node.func, ast.Attribute) else None
            module = node.func.value.id if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) else None
            if name in CALLS or (module == "yaml" and attribute not in ("safe_load", "safe_dump")):
                found.append(f"{where}:{node.lineno}: {name or f'{module}.{attribute}'}(…)")
            for keyword in node.keywords:
                yes = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if keyword.arg in ("allow_pickle", "trust_remote_code") and yes:
                    found.append(f"{where}:{node.lineno}: {keyword.arg}=True")
                no = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "weights_only" and no:  # torch.load's default is True since 2.6, the least that the extra takes
                    found.append(f"{where}:{node.lineno}: weights_only=False")
                if keyword.arg == "shell" and yes:
                    found.append(f"{where}:{node.lineno}: shell=True")
    return found


def test_nothing_is_unpickled_or_evaluated() -> None:
    bad = [
        offence
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for offence in offences(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    ]
    assert not bad, "\n".join(bad)


def test_each_kind_is_found() -> None:
    lines = [
        "import pickle",
        "import os, dill",
        "from marshal import loads",
        "eval('1')",
        "exec(x)",
        "np.load(p, allow_pickle=True)",
        "yaml.load(x)",
        "torch.load(x, weights_only=False)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "subprocess.run(x, shell=True)",
        "__import__(name)",
    ]
    assert all(len(offences(line, "x")) == 1 for line in lines)
    harmless = (
        "import json\nyaml.safe_load(x)\nnp.load(p, allow_pickle=False)\nre.compile('a')\ngrammars.compile(x)\nmodel.eval()\ntorch.load(x)"
    )
    assert offences(harmless, "x") == []
