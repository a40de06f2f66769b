"""The planned memory of a rank against what the worker really allocates: weights from files, every bucket recorded, caches, peers."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

from model import dflash, kimi_k26
from model.bound import BoundModel, Drafter
from model.tiny import make_tiny
from model.weights import Checkpoint
from runtime.comm import SoloComm
from runtime.config import EngineConfig, SpeculativeConfig
from runtime.cuda_loading import path_pages
from runtime.cuda_worker import CudaWorker
from runtime.hw import HARDWARE
from runtime.kernels_cu import all_reduce, sample_ranks
from runtime.kernels_cu._tensor_map import blank_maps
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.blank import BlankDevice
from runtime.kernels_cu.peer_comm import PeerComm, PeerMemory
from runtime.loading import DRAFT_TOP_K, plan_layout
from runtime.planning import memory_per_rank
from runtime.reserve import ARCHITECTURES, CountingDriver, Reserved, reserve
from runtime.worker import Limits
from tests.runtime.graph.test_ranks_shim import SIZES, HostLarge
from tests.shim_device import ShimDevice

DEMO = Path(__file__).parents[2] / "model" / "demo"
H200 = HARDWARE["h200"]
PAGES = 9


class Idle:
    def run(self, stream: int) -> None:
        """No kernel is there."""


class HoldingDevice(ShimDevice):
    """Memory of the host, an H200's numbers, no kernels: what is allocated is, what is launched is not."""

    arch, sms, gpu = "sm_90a", 132, "h200"

    def __init__(self) -> None:
        super().__init__(lambda *_: None)
        self.asked: dict[int, int] = {}

    def alloc(self, nbytes: int) -> int:
        address = super().alloc(nbytes)
        self.asked[address] = nbytes
        return address

    def free(self, address: int) -> None:
        super().free(address)
        del self.asked[address]

    def functions(self, source, defines, entries):
        return dict.fromkeys(entries, source)

    resident = BlankDevice.resident

    def prepare(self, call, functions, keep=()):
        return Idle()

    def multiply(self, product, w, x, out, *, invariant=False, keep=()):
        return Idle()


@dataclass(frozen=True)
class Case:
    folder: Path
    tp: int
    invariant: bool
    cut: bool = False

    @property
    def config(self) -> EngineConfig:
        given = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 128, "block_size": 64}
        return EngineConfig(**given, num_pages=PAGES, batch_invariant=self.invariant)

    def checkpoints(self) -> tuple[Checkpoint, kimi_k26.Config, Checkpoint, dflash.Config]:
        ckpt, own = Checkpoint.open(self.folder), Checkpoint.open(self.folder / "drafter")
        target = replace(kimi_k26.Config.from_json(ckpt.config), cut_latent=self.cut, max_positions=128)
        return ckpt, target, own, dflash.Config.from_json(own.config)


def allocated(case: Case) -> tuple[int, int]:
    """Device and mapped bytes of a worker of rank 0, loaded and recorded."""
    ckpt, c, own, d = case.checkpoints()
    device, part = HoldingDevice(), d.part(case.tp)
    backend, driver, config = CudaBackend(device, case.invariant), CountingDriver(device), case.config
    limits = Limits(c.vocab, 256, PAGES, 64, 128, d.depth, DRAFT_TOP_K)
    reach, slots = 128, PAGES * 64
    weights = kimi_k26.load(ckpt, c, backend, 0, case.tp, reach)
    drafting = dflash.load(own, d, backend, reach, None, 0, case.tp)
    cache = backend.latent_cache(c.layers, slots, c.cache_width, path_pages(config, limits, SpeculativeConfig(method="ddtree")))
    drafter = Drafter(part, drafting, dflash.make_cache(backend, part, slots))
    comm: Any = SoloComm()
    if case.tp > 1:  # as peers_cuda.open_memory has it
        sums, draws = all_reduce.candidates(case.tp, c.hidden, device.sms)[0], sample_ranks.default_config(case.tp, device.sms)
        regions = device.alloc(-(-sums.region_bytes(c.hidden) // 256) * 256 + draws.region_bytes())
        ranks = [all_reduce.Ranks(0, [regions] * case.tp, device.alloc(one.state_bytes()), 0) for one in (sums, draws)]
        memory = PeerMemory(sums, ranks[0], c.hidden, None, sample_ranks.Seat(draws, ranks[1]))
        comm = PeerComm(backend, 0, case.tp, HostLarge(None), memory)  # type: ignore[arg-type]
    backend.settle()
    with blank_maps():
        CudaWorker(driver, backend, comm, BoundModel(c, weights, cache, 64, reach - 1, drafter), limits, plan_layout(config, limits))
    return sum(device.asked.values()), driver.mapped_bytes


def planned(case: Case) -> tuple[int, Reserved]:
    """Weights and cache, and what comes on top."""
    _, c, _, d = case.checkpoints()
    memory = memory_per_rank(c, case.tp, d)
    return memory.weight_bytes + PAGES * 64 * memory.kv_token_bytes, reserve(c, case.tp, d, H200, case.config)


def check(got: int, want: int) -> None:
    assert got == pytest.approx(want, rel=0.02), f"planned {got / 1e6:.2f} MB, allocated {want / 1e6:.2f} MB"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {"tiny": make_tiny(tmp_path_factory.mktemp("tiny") / "model", seed=7, **SIZES), "demo": DEMO}


CASES = [(name, tp, invariant, False) for name in ("tiny", "demo") for tp in (1, 2) for invariant in (False, True)] + [
    ("tiny", 2, False, True)
]


@pytest.mark.parametrize(("name", "tp", "invariant", "cut"), CASES)
def test_the_plan_is_what_is_allocated(folders, name, tp, invariant, cut):
    """And each part of the plan that is there is needed: without any of them it is off by more."""
    case = Case(folders[name], tp, invariant, cut)
    (device, mapped), (held, more) = allocated(case), planned(case)
    check(held + more.device_bytes, device)
    check(more.mapped, mapped)
    parts = {"buffers": more.buffers, "peers": more.peers, "private": more.private}
    assert (parts["peers"] > 0, parts["private"] > 0) == (tp > 1, invariant)
    for left_out, size in parts.items():
        if size:
            with pytest.raises(AssertionError, match="planned"):
                check(held + more.device_bytes - size, device)
                pytest.fail(left_out)


@pytest.mark.parametrize("tp", [1, 8])
def test_a_full_size_plan_has_every_part(tp):
    """Kimi K2.6 at 64 or 8 heads, by hand: keys and values of 131,072 or 262,144 keys; places for draws; pages of 1,024 paths."""
    from tools.roofline import read_config

    c, d = read_config("kimi-k26")
    plain = reserve(c, tp, d, H200)
    heads = 64 // tp
    assert plain.chunks == pytest.approx(2 * 2 * heads * 128 * min(131_072 * tp, 262_144 + 1024), rel=0.02)
    assert plain.peers == pytest.approx((2 * 8 * 128 * (2 * 896 + 512) * 16 + 9 * 1024 * 896 * 16) if tp > 1 else 0, rel=0.01)
    assert plain.private == 0 and 5e7 < plain.mapped < 7e7 and plain.pinned == 24 << 24
    trees = reserve(c, tp, d, H200, replace(CASE_CONFIG, batch_invariant=True))
    assert trees.private == 1024 * 2 * 64 * 1152 and trees.chunks == 0
    assert {f.name for f in fields(Reserved)} == {"buffers", "named", "peers", "plans", "private", "mapped", "pinned"}


CASE_CONFIG = EngineConfig(max_num_batched_tokens=1024, block_size=64)


def test_gathers_of_a_cut_latent_path_are_in_it():
    """The part that a rank makes of a row of 2,112 numbers, and NCCL's parts for rows that no packet takes."""
    from tools.roofline import read_config

    c, d = read_config("kimi-k26")
    whole, cut = (reserve(replace(c, cut_latent=cut), 8, d, H200).named for cut in (False, True))
    assert "qkv_a_part" not in whole and cut["qkv_a_part"] == 1024 * 264 * 2
    assert cut["comm.gather"] == max(whole.get("comm.gather", 0), 1024 * 2112 * 2)


def test_the_bench_over_ranks_plans_what_it_builds():
    """Sixteen layers at TP 2: weights, eight streams' cache, and buffers of its buckets."""
    from tools.bench_step import Setup
    from tools.bench_step_ranks import planned_device_bytes

    setup = Setup("kimi-k26", 16, 2, (1, 64), 4096, 8, ())
    weights, planned_bytes = planned_device_bytes(setup, H200)
    cache = (8 * 65 + 1) * 64 * 16 * 1152
    rank = reserve(setup.source().target, 2, None, H200, setup.engine_config())
    assert planned_bytes == weights + cache + rank.device_bytes and 70e9 < weights < 80e9
    assert rank.named["local_logits"] == 64 * 81_920 * 4, "no larger bucket is built"


def test_a_machine_without_kernels_is_refused():
    from tools.roofline import read_config

    c, d = read_config("demo")
    assert "cpu" not in ARCHITECTURES
    with pytest.raises(ValueError, match="cpu has no kernels; h100"):
        reserve(c, 1, d, HARDWARE["cpu"])
