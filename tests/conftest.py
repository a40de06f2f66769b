"""Fixtures and the marks gpu, multi_gpu and slow."""

from __future__ import annotations

import ctypes
import os
import shutil

# Two workers, or a test and the server it started, share the cores: BLAS threads that wait for each other there made
# steps of 60 ms take 4 s. Set before NumPy loads its BLAS.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("RUNTIME_CHECK_SHAPES", "1")  # tests look at every op call

import numpy as np
import pytest

from runtime.cuda_loading import gpu_count
from runtime.env import load_env

TEST_LEVEL = load_env().test_level
SANITIZED = load_env().shim_sanitize
LONGEST = ("test_lossless.py", "test_distribution.py")  # minutes each: a file that starts last, ends alone (--dist loadfile)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
    marked = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu")]
    devices = gpu_count() if marked else 0
    for item in marked:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1
        if devices < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {devices}"))
    if TEST_LEVEL < 2:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: set RUNTIME_TEST_LEVEL=2"))


@pytest.fixture(scope="session")
def test_level() -> int:
    """RUNTIME_TEST_LEVEL: 1 small grids, 2 wide, 3 everything."""
    return TEST_LEVEL


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with the same seed in every test."""
    return np.random.default_rng(20260412)


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """shim(source, defines) compiles tests/kcpu/<source> as C++ and loads it; once for each set of constants."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ for the CPU shim")
    if SANITIZED and not hasattr(ctypes.CDLL(None), "__asan_poison_memory_region"):
        pytest.fail("RUNTIME_SHIM_SANITIZE=1 needs LD_PRELOAD=$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0")
    from tests.shim_device import Shim  # only here: most tests have no kernels

    base = tmp_path_factory.getbasetemp()  # of a worker of pytest-xdist: a folder in that of the run
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kcpu"
    folder.mkdir(exist_ok=True)
    return Shim(folder, SANITIZED)
