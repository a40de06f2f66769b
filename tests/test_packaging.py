"""What setup.cfg ships: every data file beside the code is package data, extras keep one CUDA major, pyproject stays three lines."""

from __future__ import annotations

import configparser
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("runtime", "model", "server")
NOT_SHIPPED = (".md", ".pyc")  # deep dives beside kernels stay in the repository


def read_config() -> configparser.ConfigParser:
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    return config


def unshipped(files: list[str], patterns: dict[str, list[str]]) -> list[str]:
    """Data files, as paths from the root, that no package_data pattern takes along."""

    def is_taken(file: str) -> bool:
        for package, globs in patterns.items():
            folder = package.replace(".", "/") + "/"
            inside = file.removeprefix(folder)
            if file.startswith(folder) and any(fnmatch(inside, g) and inside.count("/") == g.count("/") for g in globs):
                return True
        return False

    return [file for file in files if not is_taken(file)]


def data_patterns() -> dict[str, list[str]]:
    return {package: re.split(r"[,\s]+", line.strip()) for package, line in read_config()["options.package_data"].items()}


def test_every_data_file_is_shipped() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*")) if path.is_file()]
    files = [str(path.relative_to(ROOT)) for path in paths if path.suffix not in (".py", *NOT_SHIPPED) and "__pycache__" not in path.parts]
    assert "model/demo/config.json" in files
    assert not unshipped(files, data_patterns())
    assert unshipped(["model/demo/extra/deep.bin", "runtime/x.json"], data_patterns()) == ["model/demo/extra/deep.bin", "runtime/x.json"]


@pytest.mark.parametrize(("extra", "major"), [("cuda12", "12"), ("cuda13", "13")])
def test_a_cuda_extra_pins_one_major(extra: str, major: str) -> None:
    """cuda-python left to float picks the other major beside CuPy, and pip reports no conflict."""
    lines = read_config()["options.extras_require"][extra].split()
    assert f"cupy-cuda{major}x==14.2.*" in lines
    for package in ("cuda-python", "cuda-toolkit[cublas,cudart,nvrtc]"):
        assert any(line.startswith(f"{package}=={major}.") for line in lines), package
    assert any(line.startswith(f"nvidia-nccl-cu{major}>=") for line in lines)


def test_pyproject_holds_the_build_backend_alone() -> None:
    lines = [line for line in (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines() if line.strip()]
    assert lines[0] == "[build-system]" and len(lines) == 3
