"""Long chunks' kernels without a GPU: what compiles, with how many registers, what is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.chunks import ChunkShape
from runtime.kernels_cu._build import ARCHITECTURES, build, nvrtc_version
from runtime.kernels_cu.chunk_attention import ATTEND, ATTEND_SMEM_BYTES, EXPAND, EXPAND_SMEM_BYTES, PLAN, Config, Dims, plan_call, room_for
from runtime.kernels_cu.tree_mla_config import MAX_SMEM_BYTES

needs_nvrtc = pytest.mark.skipif(nvrtc_version() is None, reason="no NVRTC library (pip install nvidia-cuda-nvrtc cuda-bindings)")
KIMI = ChunkShape(rows=1024, heads=64, latent=512, rope=64, nope=128, value=128, longest=32768, page_size=64)


@needs_nvrtc
@pytest.mark.parametrize(
    ("source", "defines"), [(EXPAND, {}), (ATTEND, Config(ping_pong=False).defines()), (ATTEND, Config().defines())], ids=str
)
def test_products_compile_without_spills_and_stay_asynchronous(source, defines):
    made = build(source, defines, "sm_90a")
    (entry,) = made.entries.values()
    assert entry.registers * 384 <= 65536 and "C75" not in made.log  # ptxas says so where it makes wgmma wait


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_plan_compiles_everywhere(arch):
    assert set(build(PLAN, {}, arch).entries) == {"split_chunks"}


def test_shared_memory_fits():
    assert max(EXPAND_SMEM_BYTES, ATTEND_SMEM_BYTES) <= MAX_SMEM_BYTES["sm_90a"]


def test_from_how_many_rows_and_with_how_much_room():
    assert KIMI.least == 171 == replace(KIMI, heads=8).least and KIMI.key_bytes == 32 << 10
    assert KIMI.room == 32768 and replace(KIMI, longest=1 << 20).room == 131072 and replace(KIMI, longest=130).room == 256
    flops = lambda rows: (2 * rows * 1088, 2 * rows * 320 + 2 * 512 * 256)  # noqa: E731  # a head and key, absorbed and not
    assert flops(170)[0] < flops(170)[1] and flops(171)[0] > flops(171)[1]


@pytest.mark.parametrize("change", [{"rows": 170}, {"latent": 256}, {"rope": 32}, {"nope": 64}, {"value": 64}, {"page_size": 24}])
def test_what_the_kernels_do_not_take_stays_absorbed(change):
    assert room_for(KIMI, "sm_90a") == KIMI.room and room_for(KIMI, "sm_100a") == 0
    assert room_for(replace(KIMI, **change), "sm_90a") == 0


def test_what_cannot_be_launched_is_named():
    with pytest.raises(ValueError, match=r"page_size = 24 to be a multiple of 16"):
        Dims(1024, 64, 4096, 24, 8, 1024).check()
    with pytest.raises(ValueError, match=r"room for 100 keys"):
        Dims(1024, 64, 4096, 64, 8, 100).check()
    with pytest.raises(ValueError, match=r"B = 1025"):
        plan_call(1024, 1025, 171, 1024, {})
    with pytest.raises(ValueError, match=r"latent 128, nope 128, value 128"):
        _ = replace(KIMI, latent=128).least
