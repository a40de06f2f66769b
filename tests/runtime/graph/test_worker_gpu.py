"""The CUDA worker on a GPU: graph = eager, dead rows, speculation, memory, many streams.

    python -m pytest -q -m gpu tests/runtime/graph

Recorded in tools/results/gpu_tests.jsonl (`tools/gpu_tests.py --check`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from runtime import LLM, SamplingParams, cuda_worker, loading, sampling
from runtime.config import SpeculativeConfig
from runtime.graph.driver import Listed
from runtime.graph.probe import Probe
from runtime.kernels_cu.plan_io import MOST_UNIONS
from runtime.plan import pack_draft, pack_plan
from runtime.speculate import NoSpeculation, TreeSpeculation
from tests.compare import check_bitwise
from tests.device_plans import poison
from tests.runtime.graph.device_worlds import DeviceWorld, open_world, requests_for, state
from tests.runtime.graph.test_experts_shim import hit_by_layer
from tests.runtime.graph.worlds import bits_of
from tests.worlds import Got, run
from tools.bench_invariance import compare, prepare, row_bits
from tools.gpu_memory import company

pytestmark = pytest.mark.gpu
GAP = 0.15  # of two scores at which another order of sums may choose the other token
FLIPPED, MOST_FLIPPED = 1.5, 6  # a router that finds two experts equally good may take the other: then logits move by more
TOKENS = 16


@pytest.fixture(scope="module")
def world() -> DeviceWorld:
    return open_world()


@pytest.fixture(scope="module")
def invariant() -> DeviceWorld:
    return open_world((1, 2, 8, 16, 24, 64, 128, 256), batch_invariant=True)


def put(world: DeviceWorld, program, probe: Probe, live: int) -> None:
    """A plan of `live` rows, taps or streams for a program to read."""
    worker = world.worker
    number = worker._next()
    if program.kind == "step":
        pack_plan(probe.step(live, min(program.out_rows, live)), worker._layout, worker._plan.blob.host)
        worker._plan.set_number(number)
    else:
        plan = probe.draft(0, live) if program.kind == "context" else probe.draft(live, 0)
        pack_draft(plan, worker._draft_layout, worker._draft_plan.blob.host)
        worker._draft_plan.set_number(number)


def results_of(world: DeviceWorld, program, live: int) -> dict[str, np.ndarray]:
    depth = world.worker.limits.draft_depth
    world.worker.driver.device.synchronize()
    assert world.worker.driver.failure() is None
    rows = {"step": min(program.out_rows, live), "block": live * depth, "context": 0}[program.kind]
    found = state(world.worker, program, rows)
    if program.kind == "step":
        found["taps"] = world.worker.host(program.arrays["taps"])[:live]
    return found


@pytest.fixture(scope="module")
def probe(world) -> Probe:
    return Probe(8, 200, world.worker.limits.vocab_size, world.worker.limits.num_pages, 64)


def test_a_graph_is_the_eager_launches_bit_for_bit(world, probe):
    """Every program, full: steps of every bucket and variant, contexts, blocks."""
    for program in world.worker.programs():
        eager = Listed([record.run for record in program.records], world.worker.driver.device.stream)
        put(world, program, probe, program.rows)
        eager.launch()
        want = results_of(world, program, program.rows)
        assert program.captured and sum(program.graph.nodes.values()) >= len(program.records)
        put(world, program, probe, program.rows)
        program.graph.launch()
        for name, got in results_of(world, program, program.rows).items():
            check_bitwise(got, want[name], f"{program.name}: {name}")


@pytest.mark.parametrize("value", [0xFF, 0x7E])
def test_what_dead_rows_hold_changes_nothing(world, probe, value):
    """Buckets half full, over buffers of NaN and of large numbers."""
    for program in world.worker.programs():
        live = program.rows // 2 + program.rows % 2
        put(world, program, probe, live)
        program.graph.launch()
        want = results_of(world, program, live)
        poison(world.worker.backend, ("taps",) if program.kind != "step" else (), value)
        put(world, program, probe, live)
        program.graph.launch()
        for name, got in results_of(world, program, live).items():
            check_bitwise(got, want[name], f"{program.name}: {name}")


def score_gap(got: Got, want: Got, place: int, seed: int, pos: int, temperature: float) -> float:
    """By how much the token that was drawn at a place beat the other one, on the want side: logits at temperature 0."""
    truth = want.logprobs[place]
    logp = dict(zip(truth.rank_ids, truth.rank_logprobs, strict=True)) | {truth.token: truth.logprob}
    mine, theirs = got.tokens[place], want.tokens[place]
    if mine not in logp:
        return np.inf
    if not temperature:
        return abs(logp[theirs] - logp[mine])
    noise = temperature * (log_noise(seed, pos, theirs) - log_noise(seed, pos, mine))
    return abs(logp[theirs] - logp[mine] - noise)


def log_noise(seed: int, pos: int, token: int) -> float:
    """log E of a token's draw, as runtime/sampling.py keys it."""
    counter, key = np.array([[token // 4], [pos], [0], [sampling.TOKEN_DRAW]], np.uint32), np.array([[seed], [0]], np.uint32)
    return float(np.log(sampling._exponential(sampling.philox(counter, key)[token % 4])[0]))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_changes_no_text_but_near_ties(world, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=TOKENS, logprobs=20)
    prompts = world.prompts(200)
    requests = requests_for(prompts, params)
    want = run(world.engine(NoSpeculation()), requests)
    trees = TreeSpeculation(world.worker, SpeculativeConfig(tree_budget=16))
    got = run(world.engine(trees), requests)
    gaps = []
    for request in requests:
        mine, theirs = got[request.id], want[request.id]
        if mine.tokens == theirs.tokens:
            continue
        place = next(i for i, (a, b) in enumerate(zip(mine.tokens, theirs.tokens, strict=False)) if a != b)
        gaps.append(score_gap(mine, theirs, place, request.seed, len(request.prompt) + place, temperature))
    known = [gap for gap in gaps if np.isfinite(gap)]  # else the token was none of the 20 likeliest there
    assert len(gaps) <= 20 and max(known, default=0.0) < FLIPPED, f"{len(gaps)} of 200 texts differ, at gaps of {sorted(gaps)}"
    assert sum(gap >= GAP for gap in gaps) <= MOST_FLIPPED, f"gaps of {sorted(gaps)}"
    assert sum(g.accepted for g in got.values()) > 0.1 * sum(len(g.tokens) for g in want.values())


def test_many_streams_and_no_memory_kept(world):
    """64 streams at once, again and again: the same free memory, every page given back, one number of graphs. Must run alone."""
    if reason := company(world.worker.driver.free_bytes):
        pytest.skip(f"free memory says nothing: {reason}")
    params = SamplingParams(temperature=0.7, max_tokens=TOKENS)
    trees = TreeSpeculation(world.worker, SpeculativeConfig(tree_budget=8))
    engine = world.engine(trees)
    prompts = world.prompts(192)
    run(engine, requests_for(prompts[:64], params))
    before, arena = world.worker.driver.free_bytes(), world.worker.backend.arena.nbytes
    for first in (0, 64, 128):
        got = run(engine, [replace(r, id=f"{first}-{r.id}") for r in requests_for(prompts[first : first + 64], params)])
        assert all(g.finish in ("length", "stop") for g in got.values())
    assert engine.stats().pages_used == 0 and world.worker.backend.arena.nbytes == arena
    after = world.worker.driver.free_bytes()
    if after != before and (reason := company(world.worker.driver.free_bytes)):
        pytest.skip(f"free memory says nothing: {reason}")
    assert after == before


@pytest.mark.parametrize("rows", [1, 7, 64, 200])
def test_a_step_says_how_many_experts_its_layers_hit(world, probe, rows):
    """Captured, in a bucket with dead rows, against NumPy on the choices of the launches one by one."""
    plan = probe.step(rows, min(rows, 8))
    hit = hit_by_layer(world.worker, plan)
    assert len(hit) <= MOST_UNIONS and min(hit) > 0
    assert world.worker.step(plan).experts == pytest.approx(np.mean(hit))


def test_an_invariant_rows_bits_are_its_own(invariant):
    """One token after 150, in every bucket to 256, at several places, alone and in two companies each."""
    worker = invariant.worker
    prepare(worker, np.random.default_rng(3))
    want = row_bits(worker, 1, 0, 0)
    assert np.isfinite(want).all()
    for rows in worker.sizes[1:]:
        compared, equal = compare(worker, rows, want)
        assert compared >= 4 and equal == compared, f"{rows} rows: {compared - equal} of {compared} differ"


def test_mutation_another_past_has_other_bits(invariant):
    worker = invariant.worker
    found = []
    for seed in (3, 4):
        prepare(worker, np.random.default_rng(seed))
        found.append(row_bits(worker, 8, 3, 0))
    assert not np.array_equal(*found)


def plain_and_drafted(world: DeviceWorld, params: SamplingParams, count: int) -> tuple[dict[str, Got], dict[str, Got]]:
    """The same requests without drafts, and with trees of 16 nodes in steps that hold other streams' prompts, too."""
    requests = requests_for(world.prompts(count), params)
    trees = TreeSpeculation(world.worker, SpeculativeConfig(tree_budget=16))
    return run(world.engine(NoSpeculation()), requests), run(world.engine(trees), requests)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_invariant_trees_change_no_bit_of_a_text(invariant, temperature):
    """Tokens and log-probabilities of 96 texts: no near-tie is left to explain."""
    params = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=48, logprobs=2)
    plain, drafted = plain_and_drafted(invariant, params, 96)
    want, got = bits_of(plain), bits_of(drafted)
    different = [key for key in want if got[key] != want[key]]
    assert not different, f"{len(different)} of 96 differ, {different[0]}: {got[different[0]]}, plain {want[different[0]]}"
    assert sum(g.accepted for g in drafted.values()) > 0.1 * sum(len(g.tokens) for g in plain.values())


def test_mutation_without_private_pages_bits_differ(monkeypatch):
    monkeypatch.setattr(loading, "path_pages", lambda *_: None)
    monkeypatch.setattr(cuda_worker, "check_plan", lambda *_: None)
    world = open_world((1, 16, 64, 256), batch_invariant=True)
    plain, drafted = plain_and_drafted(world, SamplingParams(temperature=0.0, max_tokens=48, logprobs=2), 32)
    assert bits_of(drafted) != bits_of(plain)


def test_the_public_way_and_the_definitions_text():
    """LLM on "auto": its greedy text is NumPy's in bfloat16 up to near-ties; buckets are captured on request."""
    options = {"speculative_config": "none", "max_model_len": 512, "max_num_seqs": 8}
    gpu = LLM("demo", backend="auto", cudagraph_capture_sizes=[1, 8, 64], max_num_batched_tokens=256, **options)
    assert " cuda bfloat16" in gpu.loaded.summary and "graphs of 4 sizes" in gpu.loaded.summary
    captured = gpu.loaded.engine.capture()
    assert captured == gpu.loaded.engine.capture([8]) > 4
    cpu = LLM("demo", backend="numpy", dtype="bfloat16", **options)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=20)
    prompts = ["def fibonacci(n):", "The capital of France", "import numpy as np\n", "1, 2, 3, 4,"]
    same = 0
    for mine, theirs in zip(gpu.generate(prompts, params), cpu.generate(prompts, params), strict=True):
        got, want = mine.outputs[0], theirs.outputs[0]
        for place, (a, b) in enumerate(zip(got.token_ids, want.token_ids, strict=False)):
            if a != b:
                truth = want.logprobs[place]
                assert truth.logprob - dict(zip(truth.rank_ids, truth.rank_logprobs, strict=True))[a] < FLIPPED
                break
            same += 1
    assert same > TOKENS * len(prompts) // 2
