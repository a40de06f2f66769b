"""`import runtime` is quick and pulls in neither a framework nor CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = ("torch", "cupy", "cuda", "cupy_backends", "transformers", "jax", "tensorflow", "ray")
PROBE = """
import json, sys, time
start = time.perf_counter()
{imports}
print(json.dumps({{"seconds": time.perf_counter() - start, "modules": sorted({{name.split(".")[0] for name in sys.modules}})}}))
"""


def probe(imports: str) -> dict:
    """A new interpreter's time for `imports`, and the top-level modules it ended up with."""
    command = [sys.executable, "-c", PROBE.format(imports=imports)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def forbidden_in(modules: list[str]) -> list[str]:
    return [name for name in FORBIDDEN if name in modules]


def test_import_runtime_takes_a_part_of_what_numpy_takes() -> None:
    """16 ms beside 0.3 s, the best of three each: it imports NumPy when it is first used."""
    quickest = {name: min(probe(f"import {name}")["seconds"] for _ in range(3)) for name in ("runtime", "numpy", "runtime.kernels_np")}
    assert quickest["runtime"] < quickest["numpy"] / 2 < quickest["runtime.kernels_np"], "the last is the mutation"


@pytest.mark.parametrize(
    "imports",
    [
        "import runtime",
        "from runtime import LLM, SamplingParams, Engine, EngineConfig",
        "import runtime.planning, runtime.kernels_np, model.kimi_k26, model.dflash",
    ],
)
def test_neither_framework_nor_cuda_is_imported(imports: str) -> None:
    assert not forbidden_in(probe(imports)["modules"])


def test_a_forbidden_module_is_seen() -> None:
    modules = probe("import sys, types\nsys.modules['cupy.cuda'] = types.ModuleType('cupy.cuda')")["modules"]
    assert forbidden_in(modules) == ["cupy"]
