"""The CPU shim itself: what it finds, alone and with AddressSanitizer, and that libraries of one process keep to themselves.

Every case runs in a process of its own, for a fault ends it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shim_device import COMPILE, ROOT, SANITIZE

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ for the CPU shim")
INCLUDED = [f"-I{ROOT / 'tests' / 'kcpu'}", f"-I{ROOT / 'runtime' / 'kernels_cu'}"]
KERNEL = r"""
#include "prim/memory.cuh"
#include "launch.h"
__attribute__((noinline)) void deep() {
  volatile char mine[80 << 10];
  for (int i = sizeof mine - 1; i >= 0; i -= 64) mine[i] = 0;
}
extern "C" void kernel(int* out, int n, int fault, void (*call)()) {
  __shared__ int sum[34];
  DYNAMIC_SMEM(raw);
  const int first = sum[threadIdx.x];                     // all ones: NaN, -1
  __syncthreads();
  sum[threadIdx.x] = threadIdx.x;
  if (threadIdx.x == 0) {
    if (call) call();
    if (fault == 1) out[n] = 1;
    if (fault == 2) sum[n + 1] = 1;
    if (fault == 3) raw[n * 4] = 1;
    if (fault == 4) *(uint4*)(raw + 8) = uint4{};
    if (fault == 5) out[0] = 1 << n;
    if (fault == 6) prim::lds128(prim::smem(raw) + 8);
    if (fault == 7) deep();
  }
  __syncthreads();
  out[threadIdx.x] = first + sum[threadIdx.x];
}
KCPU_ENTRY(kernel)
extern "C" void launch_inside() {
  static int out[33];
  kcpu::launch({1, 1, 1}, {33, 1, 1}, 33 * 4, [] { kernel(out, 33, 0, nullptr); });
}
"""
PROGRAM = """
import ctypes, sys
import numpy as np
out, fault = np.zeros(33, np.int32), int(sys.argv[1])
outer, inner = (ctypes.CDLL(path) for path in (sys.argv[2], sys.argv[-1]))
call = ctypes.cast(inner.launch_inside if len(sys.argv) == 4 else None, ctypes.c_void_p)
given = ctypes.c_void_p(out.ctypes.data), ctypes.c_int(33), ctypes.c_int(fault), call
outer.cpu_kernel((ctypes.c_int * 7)(1, 1, 1, 33, 33 * 4, 0, 1), (ctypes.c_void_p * 4)(*(ctypes.addressof(a) for a in given)))
assert (out == np.arange(33) - 1).all(), out
"""
Build = Callable[..., str]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """build(name, *flags) -> the path of a library with the kernel."""
    folder = tmp_path_factory.mktemp("shim")
    (folder / "kernel.cu").write_text(KERNEL)

    def compiled(name: str, *flags: str) -> str:
        target = folder / f"{name}.so"
        if not target.exists():
            command = [*COMPILE, "-O0", *flags, *INCLUDED, "-o", str(target), str(folder / "kernel.cu")]
            subprocess.run(command, check=True, timeout=120, env=without_preload())
        return str(target)

    return compiled


def without_preload() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def ran(fault: int, *libraries: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(fault), *libraries]
    return subprocess.run(command, env=without_preload() | environment, capture_output=True, text=True, timeout=60, check=False)


def test_what_the_shim_finds_by_itself(build: Build) -> None:
    plain = build("plain")
    assert ran(0, plain).returncode == 0
    misaligned, too_deep, twice = ran(6, plain), ran(7, plain), ran(0, plain, plain)
    assert misaligned.returncode == -6 and "16 bytes at 0x" in misaligned.stderr and "a misaligned access" in misaligned.stderr
    assert too_deep.returncode == -11, "a guard page under the stack"
    assert twice.returncode == -6 and "two threads launch kernels of one library at once" in twice.stderr


def test_libraries_of_a_process_share_nothing(build: Build) -> None:
    """A launch inside a launch: the outer one's fibers are still there. Where symbols are unique in a process, they are not."""
    assert ran(0, build("plain"), build("other")).returncode == 0
    one, two = build("unique_one", "-fgnu-unique"), build("unique_two", "-fgnu-unique")
    assert ran(0, one).returncode == 0 and ran(0, one, two).returncode != 0


SAID = {
    1: "heap-buffer-overflow",
    2: "index 34 out of bounds",
    3: "heap-buffer-overflow",
    4: "misaligned address",
    5: "shift exponent 33 is too large",
}


def test_what_is_found_with_the_sanitizer(build: Build) -> None:
    found = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("g++ without libasan")
    environment = {"LD_PRELOAD": found, "ASAN_OPTIONS": "detect_leaks=0"}
    sound = ran(0, build("sanitized", *SANITIZE), **environment)
    assert sound.returncode == 0, sound.stderr
    for fault, said in SAID.items():
        bad = ran(fault, build("sanitized"), **environment)
        assert bad.returncode != 0 and said in bad.stderr, (fault, bad.stderr)
    assert all(ran(fault, build("plain")).returncode == 0 for fault in (1, 3)), "nobody sees them otherwise"
