"""The streaming product on a GPU: every kind of cut against NumPy, chains of launches that overlap, bits that do not change.

Recorded in tools/results/gpu_tests.jsonl (`tools/gpu_tests.py --check`).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from runtime.kernels_cu import linear_stream
from runtime.kernels_cu.linear_skinny import Dims
from runtime.kernels_cu.linear_stream import AT_ONCE, Config, candidates, widened, workspace_bytes
from runtime.ops import OPS
from tests.compare import check_bitwise, check_close

pytestmark = pytest.mark.gpu
bf16 = ml_dtypes.bfloat16
CONFIGS = [
    Config(16, 1, 1, 11, 132),
    Config(16, 1, 1, 20, 32),
    Config(16, 2, 1, 6, 132),
    Config(16, 1, 2, 3, 264),
    Config(16, 2, 2, 3, 132),
    Config(16, 3, 1, 4, 100),
    Config(16, 4, 1, 3, 66),
    Config(16, 1, 2, 6, 132, early=AT_ONCE, ahead=16),
    Config(16, 2, 1, 6, 112, early=6, ahead=8),
    Config(16, 1, 1, 11, 264, early=AT_ONCE, ahead=32),
    Config(16, 4, 1, 6, 132, ahead=4),
    Config(16, 2, 2, 6, 132, early=18, ahead=-3),
    Config(16, 2, 1, 12, 132, early=AT_ONCE, ahead=-6),
    Config(16, 2, 1, 12, 112, early=AT_ONCE, carried=True),
    Config(16, 2, 1, 6, 132, early=6, carried=True),
    Config(16, 1, 1, 11, 264, early=AT_ONCE, carried=True),
    Config(16, 2, 2, 6, 132, early=18, carried=True, kept=True),
    Config(16, 2, 1, 12, 112, early=AT_ONCE, kept=True),
]


def named(config: Config) -> str:
    return str(config).replace(", carried=False", "").replace(", kept=False", "")


@pytest.fixture(scope="module")
def device():
    from runtime.kernels_cu.device import CupyDevice

    device = CupyDevice()
    if device.arch != linear_stream.ARCH:
        pytest.skip(f"built for {linear_stream.ARCH}, this is {device.arch}")
    return device


class Case:
    """x [16, K], `layers` square products one after the other, each the next one's x; or one of N rows."""

    def __init__(self, device, rng, n: int, k: int, layers: int = 1) -> None:
        self.device, self.n, self.k = device, n, k
        self.x = rng.standard_normal((64, k)).astype(bf16)
        self.w = [(rng.standard_normal((n, k)) * k**-0.5).astype(bf16) for _ in range(layers)]
        self.at = [self.put(w) for w in self.w]
        self.rows, self.outs = self.put(self.x), [device.alloc(64 * n * 4) for _ in range(layers)]
        self.room: dict[str, int] = {}

    def put(self, array: np.ndarray) -> int:
        address = self.device.alloc(array.nbytes)
        self.device.upload(address, array.view(np.uint16) if array.dtype == bf16 else array)
        return address

    def runs(self, config: Config, m: int, float_out: bool = False, seq: int = 0, room: dict[str, int] | None = None) -> list:
        config = widened(config, m)
        dims = Dims.plain(m, self.n, self.k)
        room = room or {name: self.device.alloc(size) for name, size in workspace_bytes(dims, config).items()}
        functions = self.device.functions(config.source, config.defines(), config.entries)
        inputs = [self.rows, *self.outs[:-1]]
        at = [room | {"w": w, "x": x, "out": out, "seq": seq} for w, x, out in zip(self.at, inputs, self.outs, strict=True)]
        return [self.device.prepare(linear_stream.call(config, dims, one, float_out), functions) for one in at]

    def result(self, m: int, kind, layer: int = -1) -> np.ndarray:
        out = np.empty((m, self.n), kind)
        self.device.download(self.outs[layer], out.view(np.uint16) if kind is bf16 else out)
        return out


@pytest.mark.parametrize("m", [1, 16, 64])
@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_is_the_definition(device, rng, config, m):
    """Dead rows hold NaN and are not written; the rest is right, in both kinds of output."""
    case = Case(device, rng, 2112, 1536)
    seq = np.zeros(m, np.int32)
    seq[1::3] = -1
    case.x[:m][seq < 0] = np.nan
    case.device.upload(case.rows, case.x.view(np.uint16))
    want = case.x[:m].astype(np.float32) @ case.w[0].astype(np.float32).T
    for kind, op in ((bf16, "linear"), (np.float32, "linear_f32")):
        blank = np.full((m, case.n), 512, kind)
        device.upload(case.outs[0], blank.view(np.uint16) if kind is bf16 else blank)
        for run in case.runs(config, m, kind is np.float32, case.put(seq)) * 3:
            run.run(device.stream)
        got = case.result(m, kind)
        assert (got[seq < 0].astype(np.float32) == 512).all()
        check_close(got[seq == 0].astype(np.float32), want[seq == 0].astype(kind).astype(np.float32), OPS[op].tolerance, op)


@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_a_chain_of_overlapping_launches_in_a_graph(device, rng, config):
    """Each product reads what the one before has just written, all share the workspace: the bits of launches that wait for each other."""
    import cupy

    case = Case(device, rng, 1536, 1536, layers=12)
    runs = case.runs(config, 16)
    for run in runs:
        run.run(device.stream)
        device.synchronize()
    want = [case.result(16, bf16, layer) for layer in range(12)]
    assert np.isfinite(want[-1].astype(np.float32)).all() and np.abs(want[-1].astype(np.float32)).mean() > 0.1
    stream = cupy.cuda.ExternalStream(device.stream)
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
        for run in runs:
            run.run(device.stream)
        graph = stream.end_capture()
    for _ in range(20):
        for out in case.outs:
            device.upload(out, np.full((16, 1536), 0xFFFF, np.uint16))
        graph.launch(stream)
        for layer, bits in enumerate(want):
            check_bitwise(case.result(16, bf16, layer).view(np.uint16), bits.view(np.uint16))


def test_launches_of_other_configurations_share_the_cells(device, rng):
    """As in a step: each launch cuts its tiles otherwise, takes what was sent to it alone, leaves zeros, and may start at once."""
    import cupy

    case = Case(device, rng, 1536, 1536, layers=12)
    configs = [CONFIGS[5 * i % len(CONFIGS)] for i in range(12)]  # of all kinds
    assert {config.entries for config in configs} == {linear_stream.ENTRIES, linear_stream.CARRIED_ENTRIES}
    dims = Dims.plain(16, 1536, 1536)
    size = max(workspace_bytes(dims, config)["sums"] for config in configs)
    room = {"sums": device.alloc(size)}
    runs = [case.runs(config, 16, room=room)[layer] for layer, config in enumerate(configs)]
    for run in runs:
        run.run(device.stream)
        device.synchronize()
    want = [case.result(16, bf16, layer) for layer in range(12)]
    assert np.isfinite(want[-1].astype(np.float32)).all() and np.abs(want[-1].astype(np.float32)).mean() > 0.1
    stream = cupy.cuda.ExternalStream(device.stream)
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
        for run in runs * 4:
            run.run(device.stream)
        graph = stream.end_capture()
    for _ in range(50):
        for out in case.outs:
            device.upload(out, np.full((16, 1536), 0xFFFF, np.uint16))
        graph.launch(stream)
        for layer, bits in enumerate(want):
            check_bitwise(case.result(16, bf16, layer).view(np.uint16), bits.view(np.uint16))
    left = np.ones(size, np.uint8)
    device.download(room["sums"], left)
    assert not left.any()


def test_a_row_has_the_same_bits_at_every_m(device, rng):
    """To 16 rows carried or not, beyond them never."""
    case = Case(device, rng, 2112, 7168)
    for config in (Config(16, 1, 1, 11, 132), Config(16, 2, 1, 6, 132), Config(16, 2, 1, 6, 132, AT_ONCE, carried=True, kept=True)):
        found = {}
        for m in (64, 33, 16, 9, 8, 3, 1):
            case.runs(config, m, float_out=True)[0].run(device.stream)
            found[m] = case.result(m, np.float32)
        for m, rows in found.items():
            check_bitwise(rows, found[64][:m])


def test_every_candidate_is_right(device, rng):
    """At 16 rows of qkv_a's width."""
    case = Case(device, rng, 2112, 1024)
    want = case.x[:16].astype(np.float32) @ case.w[0].astype(np.float32).T
    for config in candidates(Dims.plain(16, 2112, 1024), sms=device.sms):
        device.upload(case.outs[0], np.full((16, 2112), np.nan, np.float32))
        case.runs(config, 16, float_out=True)[0].run(device.stream)
        check_close(case.result(16, np.float32), want, OPS["linear_f32"].tolerance, f"linear_f32 by {config}")
