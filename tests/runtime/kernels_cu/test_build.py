"""Compiling without a GPU: every candidate, every architecture, no spills; and the cache key."""

from __future__ import annotations

import pytest

from runtime.kernels_cu import _build
from runtime.kernels_cu._build import (
    ARCHITECTURES,
    BuildError,
    Resources,
    build,
    check_resources,
    include_closure,
    nvrtc_version,
    parse_log,
)
from runtime.kernels_cu.moe_choice import candidates, default_config
from runtime.kernels_cu.moe_config import Dims
from runtime.kernels_cu.moe_w4 import route_defines

needs_nvrtc = pytest.mark.skipif(nvrtc_version() is None, reason="no NVRTC library (pip install nvidia-cuda-nvrtc cuda-bindings)")
K26 = Dims(M=64, E=384, H=7168, F=2048, top_k=8)
TINY = Dims(M=4, E=16, H=512, F=128, top_k=4)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RUNTIME_CACHE_DIR", str(tmp_path))


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dims", [K26, TINY])
def test_default_configuration_compiles_everywhere(arch, dims):
    config = default_config(dims, arch)
    config.check(dims, arch)
    entries = build("moe_w4.cu", config.defines(), arch).entries
    assert entries["moe_w4"].registers <= 255 and set(entries) == {"moe_w4", "moe_combine", "moe_pack"}
    assert set(build("moe_route.cu", route_defines(dims.E), arch).entries) == {"moe_sort", "moe_route_sort"}


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_candidate_compiles_without_spills(arch):
    done = set()
    for m in (1, 64, 1024, 4096):
        for config in candidates(Dims(m, 384, 7168, 2048, 8), arch):
            key = tuple(sorted(config.defines().items()))
            if key not in done:
                done.add(key)
                build("moe_w4.cu", config.defines(), arch)
    assert done


@needs_nvrtc
def test_a_warm_cache_gives_the_same_code(tmp_path):
    first = build("moe_route.cu", route_defines(384), "sm_90a")
    again = build("moe_route.cu", route_defines(384), "sm_90a")
    assert first.code == again.code and first.entries == again.entries
    assert len(list((tmp_path / "cubin").iterdir())) == 1


@needs_nvrtc
def test_a_broken_source_names_itself():
    with pytest.raises(BuildError, match=r"moe_w4\.cu.*NB_MAX"):
        build("moe_w4.cu", {}, "sm_90a")


def test_the_key_follows_headers(monkeypatch):
    options = ["-arch=sm_90a"]
    before = _build._digest("moe_w4.cu", "x", include_closure("moe_w4.cu"), options)
    headers = include_closure("moe_w4.cu")
    assert {"prim/platform.cuh", "prim/w4.cuh", "prim/mma.cuh"} <= set(headers)
    headers["prim/w4.cuh"] += " "
    assert _build._digest("moe_w4.cu", "x", headers, options) != before
    assert _build._digest("moe_w4.cu", "x", include_closure("moe_w4.cu"), ["-arch=sm_80"]) != before


def test_log_reader_and_gate():
    log = """ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
ptxas info    : Compiling entry function 'b' for 'sm_90a'
ptxas info    : Function properties for b
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers"""
    entries = parse_log(log)
    assert entries == {"a": Resources(168, 8, 16), "b": Resources(40, 0, 0)}
    with pytest.raises(BuildError, match="8 bytes of stack and spills 16"):
        check_resources("x.cu", "sm_90a", entries)
