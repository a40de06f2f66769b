"""Tree attention on a GPU: both products against the definition, poison, ragged batches, bits, graphs replayed at other lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from runtime.kernels_cu.device import arch_of_device
from runtime.kernels_cu.tree_mla_config import Config, Dims, candidates, served
from runtime.ops import OPS
from tests.compare import check_bitwise, check_close
from tests.runtime.kernels_cu.mla_cases import SCALE, Batch, make_batch
from tests.runtime.kernels_cu.test_tree_mla_shim import CASES, SPLIT, SPLITS, TRIALS, with_trials
from tools.mla_rig import PLAN, Attention

pytestmark = pytest.mark.gpu
TOLERANCE = OPS["tree_mla"].tolerance
ROWS = Config(octets=8, slots=18, rows=True)
OWNED = replace(ROWS, trials=(("EARLY_KEYS", 1), ("OWNERS", 2), ("READY_FIRST", 1)))
KINDS = [Config(octets=3, slots=24, ahead=9), Config(octets=9), ROWS]  # as they are served: a merge of its own, one in place, rows


class Device(Attention):
    """A batch on the device, under the configuration as it is served; skips what the device cannot build."""

    def __init__(self, batch: Batch, config: Config) -> None:
        if config.wgmma and arch_of_device() != "sm_90a":
            pytest.skip(f"wgmma needs sm_90a, this is {arch_of_device()}")
        super().__init__(batch, served(config, batch.dims) if not config.trials else config, SCALE)


def widths(heads: int) -> list[Config]:
    """The narrowest, a middle and the widest of each family."""
    dims = Dims(90, 10, heads, 4096)
    portable = [c for c in candidates(dims, "sm_120a") if not c.ahead]
    hopper = list(candidates(dims, "sm_90a"))
    return [portable[0], portable[-1], *(hopper[i] for i in (0, 3, len(hopper) // 2, -4, -3, -2, -1))]


@pytest.mark.parametrize("config", widths(8), ids=str)
@pytest.mark.parametrize("page", [16, 48, 64])
def test_ragged_trees_match_the_definition(config, page):
    batch = make_batch(8, [9, 1, 33, 5, 17], [4096, 0, 777, 63, 64], page=page, seed=1, bucket=70, sequences=7)
    check_close(Device(batch, config).run(), batch.reference(), TOLERANCE)


@pytest.mark.parametrize("heads", [4, 5, 16, 32, 64])
@pytest.mark.parametrize("octets", [1, 4, 8, "rows"])
def test_heads(heads, octets):
    config = ROWS if octets == "rows" else next(c for c in candidates(Dims(64, 4, heads, 4096)) if c.octets == octets)
    batch = make_batch(heads, [9, 3], [1000, 130], seed=heads)
    check_close(Device(batch, config).run(), batch.reference(), TOLERANCE)


@pytest.mark.parametrize("name", TRIALS)
def test_trials_match_the_definition(name):
    batch = CASES[name][1]
    check_close(Device(batch, with_trials(name)).run(), batch.reference(), TOLERANCE)


@pytest.mark.parametrize("parts", [True, False], ids=["f32", "bf16"])
def test_owners_and_helpers(parts):
    """80 column tiles, 60 of them of 22 to 24 key tiles: 80 blocks own one each, 52 help; and again, with the counters that the first run
    left."""
    batch = make_batch(64, [20] * 4, [1500, 200, 1400, 1450], seed=5)
    device = Device(batch, replace(OWNED, float_parts=parts))
    first = device.run()
    check_close(first, batch.reference(), TOLERANCE)
    items = device.cp.asnumpy(device.room["items"]).view(np.int32).reshape(-1, 12)
    assert ((items[:80, SPLIT] == 0) & (items[:80, SPLITS] < 0)).sum() == 60
    for _ in range(3):
        check_bitwise(device.run(), first)


@pytest.mark.parametrize("config", [Config(), Config(octets=2, slots=9, producers=2, wgmma=False)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_long_chunks(config, causal):
    batch = make_batch(8, [1024], [300], seed=3, chain=True)
    check_close(Device(batch, replace(config, causal=causal)).run(), batch.reference(), TOLERANCE)


@pytest.mark.parametrize("config", [Config(), ROWS], ids=str)
def test_a_key_of_nan_reaches_its_descendants_alone(config):
    batch, healthy = (make_batch(8, [9], [700], seed=11) for _ in range(2))
    batch.cache[batch.slot[4]] = np.nan
    got = Device(batch, config).run()
    below = (batch.ancestors[:, 0] >> np.uint64(4) & np.uint64(1)).astype(bool)
    assert np.isnan(got[below]).all()
    check_bitwise(got[~below], Device(healthy, config).run()[~below])


@pytest.mark.parametrize("config", [Config(octets=1, chunk=8), Config(octets=9, chunk=8), replace(ROWS, chunk=8)], ids=str)
def test_a_row_alone_equals_the_row_in_company(config):
    both = make_batch(8, [1, 9, 4], [5000, 700, 0], seed=12)
    together = Device(both, config).run()
    for b, rows in enumerate([slice(0, 1), slice(1, 10), slice(10, 14)]):
        n = rows.stop - rows.start
        alone = Batch(
            replace(both.dims, M=n, B=1), both.q[rows].copy(), both.cache, both.pages[b : b + 1].copy(), both.ctx[b : b + 1].copy(),
            np.zeros(1, np.int32), np.zeros(n, np.int32), both.pos[rows], both.slot[rows], both.ancestors[rows].copy(),
        )  # fmt: skip
        check_bitwise(Device(alone, config).run(), together[rows], f"sequence {b} alone")


@pytest.mark.parametrize("config", KINDS, ids=str)
def test_ten_runs_agree_in_every_bit(config):
    batch = make_batch(8, [9] * 10, [2000 + 37 * b for b in range(10)], seed=5)
    device = Device(batch, config)
    first = device.run()
    for _ in range(10):
        check_bitwise(device.run(), first)


@pytest.mark.parametrize(
    ("config", "heads", "rows", "most"), [*((kind, 8, [9, 9], 4097) for kind in KINDS), (OWNED, 64, [20] * 4, 1505)], ids=str
)
def test_one_graph_serves_every_length(config, heads, rows, most):
    """Captured once, replayed with other lengths, rows and masks; the output is NaN before each replay."""
    longest = make_batch(heads, rows, [most] * len(rows), seed=6)
    device = Device(longest, config)
    device.run()
    with device.stream:
        device.stream.begin_capture()
        device.enqueue()
        graph = device.stream.end_capture()
    for seed, ctx in enumerate([1, 63, 64, 65, most - 2, most]):
        other = make_batch(heads, rows, [most] * len(rows), seed=6)
        rng = np.random.default_rng(seed)
        other.ctx[:] = ctx, *rng.integers(0, ctx + 1, len(rows) - 1)
        place = other.ctx[other.seq] + np.tile(np.arange(rows[0]), len(rows))
        other.slot[:] = other.pages[other.seq, place // 64] * 64 + place % 64
        other.pos[:] = other.ctx[other.seq] + (longest.pos - most)
        if seed % 2:
            other.seq[rows[0] :] = -1
        for name in PLAN:
            device.room[name][...] = device.cp.asarray(getattr(other, name))
        device.out[...] = 0xFFFF
        device.cp.cuda.Device().synchronize()
        graph.launch(device.stream)
        check_close(device.result(), other.reference(), TOLERANCE, f"ctx {ctx}")


@pytest.mark.parametrize("config", [Config(octets=9), Config(octets=2, slots=9, producers=2, wgmma=False)], ids=str)
def test_a_dropped_ancestor_shows(config):
    batch = make_batch(8, [9], [5], seed=15)
    want = batch.reference()
    batch.ancestors[8, 0] &= ~np.uint64(1)
    with pytest.raises(AssertionError, match="elements fail"):
        check_close(Device(batch, config).run(), want, TOLERANCE)
