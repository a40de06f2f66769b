"""The MoE kernels on the CPU shim against a dense float32 reference: indices, pads, dead rows, both fiber orders."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

from runtime.kernels_cu.moe_config import Config, Dims
from runtime.kernels_cu.moe_w4 import Params, fill_params, workspace_bytes

bf16 = ml_dtypes.bfloat16


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def run(layer, get, config: Config, descending: bool = False) -> np.ndarray:
    d = layer.dims
    room = {name: np.full(size, 0xFF, np.uint8) for name, size in workspace_bytes(d, config).items()}
    at = {name: address(a) for name, a in room.items()}
    room["halves_done"][:] = 0
    at |= {"w13": address(layer.w13.data), "w2": address(layer.w2.data), "x": address(layer.x)}
    params, work = fill_params(d, config, at, (layer.w13.exponent, layer.w2.exponent))
    out = np.full((d.M, d.H), np.nan, bf16)
    moe, route = get("moe_entry.cu", config.defines()), get("route_entry.cu", {"MAX_EXPERTS": 128})
    assert moe.cpu_params_bytes() == ctypes.sizeof(Params)
    chosen = [ctypes.c_void_p(address(a)) for a in (layer.expert, layer.weight)]
    route.cpu_moe_sort(*chosen, d.M * d.top_k, d.E, ctypes.byref(work), int(descending))
    moe.cpu_moe_w4(ctypes.byref(params), ctypes.c_size_t(config.smem_bytes()), int(descending))
    pointers = [ctypes.c_void_p(a) for a in (at["part"], address(layer.expert), address(layer.base), address(out))]
    moe.cpu_moe_combine(d.M, *pointers, d.top_k, config.splits, d.H)
    return out.astype(np.float32)


TINY = Dims(M=3, E=5, H=128, F=64, top_k=2)
WIDE = Dims(M=11, E=4, H=256, F=128, top_k=2)
CASES = [
    (TINY, Config(octets=1, groups=2, stages=3, blocks=1, rows13=2, rows2=2)),
    (TINY, Config(octets=1, groups=4, stages=2, blocks=1, rows13=1, rows2=1)),
    (WIDE, Config(octets=1, groups=1, stages=3, blocks=1, rows13=4, rows2=4)),
    (WIDE, Config(octets=2, groups=2, stages=3, blocks=1, rows13=2, rows2=4)),
    (WIDE, Config(octets=1, groups=1, stages=3, blocks=1, rows13=2, rows2=1)),
    (WIDE, Config(octets=2, groups=1, stages=3, blocks=1, rows13=1, rows2=4, splits=2)),
    (
        Dims(M=1, E=4, H=256, F=128, top_k=3),
        Config(octets=1, groups=1, warps=8, stages=3, blocks=1, rows13=1, rows2=2, splits=2, token_rows=1),
    ),
    (WIDE, Config(octets=1, groups=1, stages=3, blocks=1, rows13=2, rows2=1, splits13=2, claim=2)),
    (WIDE, Config(octets=2, groups=1, stages=2, blocks=1, rows13=1, rows2=1, splits13=4, splits=2, claim=4)),
    (Dims(M=2, E=3, H=64, F=32, top_k=3), Config(octets=1, groups=2, stages=2, blocks=1, rows13=1, rows2=1)),
]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(("dims", "config"), CASES)
def test_layer_matches_dense_reference(shim, make_layer, layer_error, dims, config, descending):
    layer = make_layer(dims)
    assert layer_error(run(layer, shim, config, descending), layer.reference()) < 5e-3


def test_dead_rows_write_nothing_and_reach_nobody(shim, make_layer, layer_error):
    layer = make_layer(WIDE, seed=1, dead=(0, 5, 10))
    got = run(layer, shim, CASES[3][1])
    assert np.isnan(got[[0, 5, 10]]).all()
    assert layer_error(got, layer.reference()) < 5e-3


def test_an_expert_with_more_rows_than_a_chunk(shim, make_layer, layer_error):
    layer = make_layer(Dims(M=19, E=4, H=128, F=64, top_k=2), seed=2, one_expert=True)
    assert layer_error(run(layer, shim, CASES[0][1]), layer.reference()) < 5e-3


def test_large_scales_use_the_exponent(shim, make_layer, layer_error):
    layer = make_layer(TINY, seed=3, scale=0.3)
    assert layer.w13.exponent > 0 and layer.w2.exponent > 0
    assert layer_error(run(layer, shim, CASES[0][1]), layer.reference()) < 5e-3


def test_rows_do_not_depend_on_their_company(shim, make_layer, layer_error):
    """The same token alone and among others, in another chunk size: bit for bit."""
    layer = make_layer(WIDE, seed=4)
    alone = make_layer(WIDE, seed=4, dead=tuple(m for m in range(11) if m != 7))
    config = Config(octets=2, groups=2, stages=3, blocks=1, rows13=2, rows2=4)
    np.testing.assert_array_equal(run(alone, shim, config)[7], run(layer, shim, config)[7])


@pytest.mark.parametrize("fault", ["code", "scale", "weight", "expert", "base"])
def test_a_fault_shows(shim, make_layer, layer_error, fault):
    layer = make_layer(TINY, seed=5)
    want = layer.reference()
    if fault == "code":
        layer.w13.data[layer.expert[0, 0], 0, 0, :512] ^= 0x44
    elif fault == "scale":
        layer.w2.data[layer.expert[0, 0], 0, 0, 1025::2] ^= 0x01
    elif fault == "weight":
        layer.weight[0, 0] *= 1.2
    elif fault == "expert":
        layer.expert[0, 0] = (layer.expert[0].sum() + 1) % 5
    else:
        layer.base[0] *= np.array(1.05, bf16)
    assert layer_error(run(layer, shim, CASES[0][1]), want) > 8e-3
