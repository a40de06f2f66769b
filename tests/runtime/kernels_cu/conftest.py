"""The CPU shim as a fixture."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """shim(source, defines) compiles tests/kcpu/<source> as C++ and loads it; once for each set of constants."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ for the CPU shim")
    folder, built = tmp_path_factory.mktemp("kcpu"), {}

    def get(source: str, defines: dict[str, int]) -> ctypes.CDLL:
        key = (source, *sorted(defines.items()))
        if key not in built:
            target = folder / f"{len(built)}.so"
            flags = [f"-D{name}={value}" for name, value in defines.items()]
            flags += [f"-I{ROOT / 'tests' / 'kcpu'}", f"-I{ROOT / 'runtime' / 'kernels_cu'}"]
            command = ["g++", "-x", "c++", "-std=c++17", "-O1", "-DKCPU", "-Wno-attributes", *flags, "-shared", "-fPIC"]
            subprocess.run([*command, "-o", str(target), str(ROOT / "tests" / "kcpu" / source)], check=True)
            built[key] = ctypes.CDLL(str(target))
        return built[key]

    return get
