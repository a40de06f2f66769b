"""Long chunks in the un-absorbed form on a GPU: company, splits, poison, bits, one graph for steps of every kind."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.kernels_cu.chunk_attention import VALUE, Config
from runtime.kernels_cu.device import arch_of_device
from runtime.ops import OPS
from tests.compare import check_bitwise, check_close
from tests.runtime.kernels_cu.chunk_cases import SCALE, UNTOUCHED, Step, make_step
from tests.shim_calls import bf16
from tools.chunk_rig import Chunks
from tools.mla_rig import as_float

pytestmark = pytest.mark.gpu
TOLERANCE = OPS["chunk_attention"].tolerance
PLAIN, TURNS = Config(ping_pong=False), Config()
NAMES = ("q", "absorbed", "cache", "w_uk", "w_uv", "pages", "ctx", "row0", "seq", "pos")


class Device(Chunks):
    """A step on the device; skips where nothing is built for it."""

    def __init__(self, step: Step, config: Config) -> None:
        import cupy as cp

        if arch_of_device() != "sm_90a":
            pytest.skip(f"built for sm_90a, this is {arch_of_device()}")
        host = {name: getattr(step, name) for name in NAMES}
        arrays = {name: cp.asarray(a.view(np.uint16) if a.dtype == bf16 else a) for name, a in host.items()}
        arrays["rest"] = cp.full(step.dims.M, -7, cp.int32)
        untouched = int(np.array(UNTOUCHED, bf16).view(np.uint16))
        arrays["value"] = cp.full((step.dims.M, step.dims.heads * VALUE), untouched, cp.uint16)
        self.stream = cp.cuda.Stream(non_blocking=True)
        super().__init__(step.dims, arrays, step.least, SCALE, config)

    def value(self) -> np.ndarray:
        self.run(self.stream)
        return as_float(self.cp.asnumpy(self.arrays["value"]))


def check(step: Step, config: Config) -> None:
    device, rest = Device(step, config), step.split()
    got = device.value()
    np.testing.assert_array_equal(device.cp.asnumpy(device.arrays["rest"]), rest)
    check_close(got, step.reference(rest), TOLERANCE)


CASES = {
    "a chunk, nothing before": {"heads": 8, "rows": [1024], "ctx": [0], "room": 1024},
    "a chunk far into a prompt": {"heads": 2, "rows": [700], "ctx": [9000], "room": 9856},
    "two chunks, a tree, a row, dead rows": {
        "heads": 4, "rows": [300, 9, 1, 200], "ctx": [400, 20, 130, 77], "trees": (1,), "bucket": 640, "sequences": 6, "room": 2048,
    },
    "no room for the second": {"heads": 8, "rows": [200, 200], "ctx": [500, 600], "room": 1024},
    "heads that fill no wave, pages of 16": {"heads": 64, "rows": [257], "ctx": [100], "page": 16},
    "a tile's edge, pages of 48": {"heads": 3, "rows": [128], "ctx": [127], "page": 48},
    "splits of a short chunk": {"heads": 1, "rows": [40], "ctx": [5000], "room": 5120},
}  # fmt: skip


@pytest.mark.parametrize("config", [PLAIN, TURNS], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_matches_the_definition(name, config):
    check(make_step(**CASES[name]), config)


@pytest.mark.parametrize("config", [PLAIN, TURNS], ids=str)
def test_ten_runs_agree_in_every_bit(config):
    device = Device(make_step(8, [256, 180], [3000, 1000], room=4608), config)
    first = device.value()
    for _ in range(10):
        check_bitwise(device.value(), first)


def test_turns_change_no_bit():
    step = make_step(8, [256, 180], [3000, 1000], room=4608)
    check_bitwise(Device(step, TURNS).value(), Device(step, PLAIN).value())


def test_a_key_of_nan_reaches_later_rows_alone():
    step, healthy = (make_step(4, [300], [40], seed=3) for _ in range(2))
    place = 40 + 170
    step.cache[step.pages[0, place // 64] * 64 + place % 64] = np.nan
    got = Device(step, PLAIN).value()
    assert np.isnan(got[170:]).all()
    check_bitwise(got[:170], Device(healthy, PLAIN).value()[:170])


def test_a_wrong_page_shows():
    step = make_step(4, [200], [130])
    want = step.reference(step.split())
    step.pages[0] = step.pages[0, ::-1].copy()
    with pytest.raises(AssertionError):
        check_close(Device(step, PLAIN).value(), want, TOLERANCE)
