"""Kernels with one planted fault, for the CPU shim: a test that such a kernel passes proves nothing."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.shim_device import COMPILE

ROOT = Path(__file__).parents[1]


def mutant(folder: Path, file: str, old: str, new: str) -> Callable[[str, dict[str, int]], ctypes.CDLL]:
    """Like the fixture `shim`, but with `old`, which must stand in `file` of runtime/kernels_cu once, replaced by `new`."""
    kernels = folder / "kernels_cu"
    shutil.copytree(ROOT / "runtime" / "kernels_cu", kernels, ignore=shutil.ignore_patterns("*.py", "__pycache__", "tuned"))
    text = (kernels / file).read_text()
    if text.count(old) != 1:
        raise ValueError(f"{file}: {old!r} stands there {text.count(old)} times; a fault needs one place")
    (kernels / file).write_text(text.replace(old, new))

    def get(source: str, defines: dict[str, int]) -> ctypes.CDLL:
        target = folder / "mutant.so"
        if not target.exists():
            flags = [f"-D{name}={value}" for name, value in defines.items()] + [f"-I{ROOT / 'tests' / 'kcpu'}", f"-I{kernels}"]
            command = [*COMPILE, "-O0", "-w", *flags, "-o", str(target)]
            subprocess.run([*command, str(ROOT / "tests" / "kcpu" / source)], check=True)
        return ctypes.CDLL(str(target))

    return get
