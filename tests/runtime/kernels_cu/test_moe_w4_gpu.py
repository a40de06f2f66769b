"""The MoE kernels on a GPU: every family of configuration against the dense reference, dead rows, graphs, determinism."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from runtime.kernels_cu.device import arch_of_device
from runtime.kernels_cu.moe_config import Config, Dims
from runtime.kernels_cu.moe_w4 import build_kernels, layer_launches, workspace_bytes

pytestmark = pytest.mark.gpu
bf16 = ml_dtypes.bfloat16

DIMS = Dims(M=37, E=12, H=512, F=256, top_k=4)
PORTABLE = [
    Config(octets=1, stages=3),
    Config(octets=1, stages=3, rows13=2, rows2=1, splits13=2),
    Config(octets=2, stages=3, blocks=1, rows13=1, rows2=4, splits=2),
    Config(octets=4, stages=3, blocks=1, float_parts=False),
    Config(octets=1, groups=2, warps=8, stages=3, rows13=8, rows2=8),
]
HOPPER = [
    Config(octets=2, groups=2, stages=5, blocks=3, wgmma=True, merged=True),
    Config(octets=3, stages=3, blocks=2, wgmma=True, merged=True, batch=2, fewest=2, float_parts=False),
    Config(octets=4, stages=3, blocks=1, warps=8, rows13=8, rows2=8, wgmma=True, wide=True, batch=2, fewest=3),
    Config(octets=12, stages=3, blocks=1, warps=8, wgmma=True, wide=True, fragments=2, batch=2, fewest=6),
]


class Device:
    """A layer on the device: uploads, launches, results."""

    def __init__(self, layer, config: Config, routed: bool = False) -> None:
        import cupy as cp

        d, self.cp, self.layer = layer.dims, cp, layer
        arch = arch_of_device()
        if config.wgmma and arch != "sm_90a":
            pytest.skip(f"wgmma needs sm_90a, this is {arch}")
        self.stream = cp.cuda.Stream(non_blocking=True)
        room = {name: cp.full(size, 0xFF, cp.uint8) for name, size in workspace_bytes(d, config).items()}
        for name in ("arrived", "halves_done"):
            room[name][...] = 0
        room["w13"], room["w2"] = cp.asarray(layer.w13.data), cp.asarray(layer.w2.data)
        for name in ("x", "base"):
            room[name] = cp.asarray(getattr(layer, name).view(np.uint16))
        room["expert"], room["weight"] = cp.asarray(layer.expert), cp.asarray(layer.weight)
        self.out = room["out"] = cp.full((d.M, d.H), 0xFFFF, cp.uint16)
        if routed:
            room["logits"], room["bias"] = cp.asarray(layer.logits), cp.asarray(layer.bias)
            room["live"] = cp.asarray(np.array([-1 if m in layer.dead else 0 for m in range(d.M)], np.int32))
        self.room = room
        sms = int(cp.cuda.Device().attributes["MultiProcessorCount"])
        kernels = build_kernels(d, config, arch)
        at = {name: array.data.ptr for name, array in room.items()}
        self.launches = layer_launches(kernels, at, (layer.w13.exponent, layer.w2.exponent), sms, scale=2.5)
        cp.cuda.Device().synchronize()

    def enqueue(self) -> None:
        for launch in self.launches:
            launch.run(self.stream.ptr)

    def result(self) -> np.ndarray:
        self.stream.synchronize()
        return self.cp.asnumpy(self.out).view(bf16).astype(np.float32)

    def run(self) -> np.ndarray:
        self.enqueue()
        return self.result()


@pytest.mark.parametrize("config", PORTABLE + HOPPER, ids=str)
@pytest.mark.parametrize("rows", [1, 37])
def test_layer_matches_dense_reference(make_layer, layer_error, config, rows):
    dims = Dims(rows, DIMS.E, DIMS.H, DIMS.F, DIMS.top_k)
    layer = make_layer(dims, seed=rows, dead=(0, 20) if rows > 20 else ())
    assert layer_error(Device(layer, config).run(), layer.reference()) < 5e-3


@pytest.mark.parametrize("config", [PORTABLE[1], HOPPER[0]], ids=str)
def test_hot_expert_and_large_scales(make_layer, layer_error, config):
    layer = make_layer(DIMS, seed=2, scale=0.1, one_expert=True)
    assert layer.w13.exponent > 0
    assert layer_error(Device(layer, config).run(), layer.reference()) < 6e-3


@pytest.mark.parametrize("config", [PORTABLE[1], PORTABLE[2], HOPPER[0], HOPPER[2]], ids=str)
def test_runs_repeat_bit_for_bit_eager_and_captured(make_layer, config):
    layer = make_layer(DIMS, seed=3)
    device = Device(layer, config)
    first = device.run()
    for _ in range(5):
        device.out[...] = 0xFFFF
        device.cp.cuda.Device().synchronize()
        np.testing.assert_array_equal(device.run(), first)
    with device.stream:
        device.stream.begin_capture()
        device.enqueue()
        device.enqueue()
        graph = device.stream.end_capture()
    for _ in range(3):
        device.out[...] = 0xFFFF
        device.cp.cuda.Device().synchronize()
        graph.launch(device.stream)
        np.testing.assert_array_equal(device.result(), first)


@pytest.mark.parametrize("config", [PORTABLE[0], HOPPER[0]], ids=str)
def test_a_row_does_not_depend_on_its_company(make_layer, config):
    everyone, alone = make_layer(DIMS, seed=4), make_layer(DIMS, seed=4, dead=tuple(m for m in range(37) if m != 7))
    got = Device(alone, config).run()
    np.testing.assert_array_equal(got[7], Device(everyone, config).run()[7])
    assert np.isnan(got[:7]).all()


@pytest.mark.parametrize("rows", [1, 3, 16, 37])
def test_routing_on_the_device(make_layer, layer_error, rng, rows):
    dims = Dims(rows, DIMS.E, DIMS.H, DIMS.F, DIMS.top_k)
    layer = make_layer(dims, seed=5, dead=(1,) if rows > 1 else ())
    layer.logits = rng.standard_normal((rows, dims.E)).astype(np.float32)
    layer.logits[list(layer.dead)] = np.nan
    layer.bias = (rng.standard_normal(dims.E) * 0.1).astype(np.float32)
    score = 1 / (1 + np.exp(-layer.logits.astype(np.float64)))
    expert = np.argsort(-(score + layer.bias).astype(np.float32), axis=1, kind="stable")[:, : dims.top_k]
    picked = np.take_along_axis(score, expert, axis=1)
    device = Device(layer, PORTABLE[0], routed=True)
    got = device.run()
    layer.expert, layer.weight = expert.astype(np.int32), (picked / picked.sum(1, keepdims=True) * 2.5).astype(np.float32)
    live = [m for m in range(rows) if m not in layer.dead]
    np.testing.assert_array_equal(device.cp.asnumpy(device.room["expert"])[live], layer.expert[live])
    assert layer_error(got, layer.reference()) < 5e-3


@pytest.mark.parametrize("fault", ["code", "weight", "expert"])
def test_a_fault_shows(make_layer, layer_error, fault):
    layer = make_layer(Dims(3, DIMS.E, DIMS.H, DIMS.F, DIMS.top_k), seed=6)
    want = layer.reference()
    if fault == "code":
        layer.w13.data[layer.expert[0, 0], 0, 0, :512] ^= 0x88
    elif fault == "weight":
        layer.weight[0, 0] *= 1.3
    else:
        layer.expert[0, 0] = next(e for e in range(DIMS.E) if e not in layer.expert[0])
    assert layer_error(Device(layer, PORTABLE[0]).run(), want) > 8e-3
