"""A GPU's free memory, and whether anybody else is on it: equal readings mean something only for a process that is alone."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable


def free_bytes() -> int | None:
    """Free memory of the first GPU, by a context of this process's own; None where there is no GPU or no CuPy."""
    try:
        import cupy

        free: int = cupy.cuda.runtime.memGetInfo()[0]
    except Exception:  # CuPy's own errors are not to be named without it
        return None
    return free


def compute_processes() -> list[int] | None:
    """Process ids that nvidia-smi sees on the GPUs; None where it is missing or fails. Inside a container it may see none."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [int(line) for line in found.stdout.split() if line.isdigit()]


def company(free: Callable[[], object], expected: int = 1, idle_s: float = 1.0) -> str | None:
    """Why free memory says nothing about this process: others are on the GPU; None if it seems to be alone.

    free: reads it. expected: processes that belong here. Looks at pytest-xdist, then at nvidia-smi, then whether readings change
    over idle_s in which this process does nothing.
    """
    if (workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) != "1":
        return f"{workers} test processes share the GPU; run this one without -n"
    seen = compute_processes() or []
    if len(seen) > expected:
        return f"{len(seen)} processes hold GPU memory ({', '.join(map(str, seen))}), {expected} expected"
    first = free()
    for _ in range(5):
        time.sleep(idle_s / 5)
        if (now := free()) != first:
            return f"free GPU memory changes while this process is idle: {first}, then {now}"
    return None
