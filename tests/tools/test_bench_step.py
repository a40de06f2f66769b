"""The step benchmark on the CPU shim, where it runs and times nothing, and with times put in; the planned floors without a GPU."""

from __future__ import annotations

import json

import numpy as np
import pytest
from rich.console import Console

from model.tiny import make_tiny
from runtime.graph.driver import ListDriver
from runtime.hw import HARDWARE
from runtime.planning import plan_step
from tests.shim_device import Shim, ShimDevice
from tools import bench_step
from tools.bench_step import Setup, build, measure_prompts, measure_steps, planned
from tools.step_report import OpTime, Prefill, Step, print_prefill, print_steps, write_trace

H200 = HARDWARE["h200"]


class TimedDriver(ListDriver):
    """Says that each launch took two microseconds and a graph of all of a step 1.5 a launch."""

    def __init__(self, device) -> None:
        super().__init__(device)
        self.graphs = 0

    def time_us(self, graph, repeats):
        self.graphs += 1
        launches = graph.nodes["kernel"]
        return 1.5 * launches if launches > 30 else 2.0 * launches


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("tiny") / "model", drafter=False)
    return Setup(str(folder / "config.json"), 2, 1, (1, 2), 5, 2, (3,))


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return TimedDriver(ShimDevice(Shim(tmp_path_factory.mktemp("shim"))))


@pytest.fixture(scope="module")
def worker(setup, driver):
    return build(setup, driver)


def test_every_bucket_is_run_priced_and_timed(worker, setup, tmp_path):
    steps = measure_steps(worker, setup, repeats=3)
    assert [(s.M, s.streams) for s in steps] == [(1, 1), (2, 2)]
    for step in steps:
        assert step.launches == sum(op.launches for op in step.ops.values()) > 30
        assert step.us == 1.5 * step.launches and step.host_us > 0
        assert all(op.us == 2.0 * op.launches for op in step.ops.values())
        assert 2 <= step.experts <= 2 * step.M
        want = plan_step(setup.source().target, 1, step.M, 5, worker.backend.hw, streams=step.streams, distinct=step.experts).by_op()
        want["moe_w4"] += want.pop("route")  # timed together
        for name in ("linear", "moe_w4", "linear_f32"):
            assert step.ops[name].floor_us == pytest.approx(want[name], rel=1e-6), name
        assert sum(step.stages().values()) == pytest.approx(2e-3 * step.launches)
    path = tmp_path / "trace.json"
    write_trace(path, worker.programs(), steps)
    events = json.loads(path.read_text())["traceEvents"]
    launches = [e for e in events if e.get("tid") == 2]
    assert len(launches) == sum(s.launches for s in steps) and all(e["dur"] == 2.0 for e in launches)
    assert [e["ts"] for e in launches[:3]] == [0.0, 2.0, 4.0] and "moe_w4" in {e["name"] for e in launches}


def test_distinct_experts_are_those_that_the_step_chose(worker, setup):
    """Against the choices that the experts' own launches left behind; a token twice chooses the same ones."""
    probe = bench_step.probe_of(worker, setup, 2, 5)
    plan = probe.step(2, 2)
    records = next(p for p in worker.programs() if p.kind == "step" and p.rows == 2).records
    found = bench_step.distinct_experts(worker, records, plan)
    assert found == len(np.unique(worker.host(worker.backend.buffer("expert", (2, 2), "i32"))))
    plan.token[1], plan.pos[1] = plan.token[0], plan.pos[0]
    assert bench_step.distinct_experts(worker, records, plan) <= found


def test_prompts_run_in_chunks(worker, setup):
    (found,) = measure_prompts(worker, setup, H200)
    assert (found.prompt, found.chunk) == (3, 2) and found.ms > 0
    one = bench_step.chunk_floor_us(worker, setup, 2, 0, H200) + bench_step.chunk_floor_us(worker, setup, 1, 2, H200)
    assert found.floor_ms == pytest.approx(one / 1e3) and found.tok_s == pytest.approx(3 / found.ms * 1e3)


def test_a_shard_is_smaller(setup, worker, driver):
    shard = build(Setup(setup.config, 2, 2, (1,), 5, 1, ()), driver)
    assert shard.backend.weight_bytes < 0.8 * worker.backend.weight_bytes
    assert [s.M for s in measure_steps(shard, Setup(setup.config, 2, 2, (1,), 5, 1, ()), 1)] == [1]


def test_without_a_gpu_floors_are_planned_and_say_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_step, "has_gpu", lambda: False)
    records = tmp_path / "step.jsonl"
    bench_step.main(["--buckets", "1", "64", "--ops", "--json", str(records)])
    text = capsys.readouterr().out
    assert "PLANNED" in text and "nothing was run" in text and text.count("planned") > 20 and not records.exists()
    setup = Setup("kimi-k26", 8, 1, (64,), 4096, 8, ())
    (step,) = planned(setup, H200)
    assert step.floor_us == pytest.approx(sum(op.floor_us for op in step.ops.values())) and step.share is None
    assert setup.source().target.layers == 8


STEP = Step(8, 2, 2000.0, 1500.0, 35.0, 90, {"moe_w4": OpTime(1200.0, 1000.0, 14), "embed": OpTime(3.0, 1.0, 1)})


def test_tables_and_records_state_what_was_measured(tmp_path):
    console = Console(width=120, record=True)
    print_steps([STEP], True, console)
    print_prefill([Prefill(1024, 512, 40.0, 30.0)], console)
    text = console.export_text()
    assert "0.750" in text and "25,600" in text and "0.833" in text
    path = tmp_path / "deep" / "rows.jsonl"
    setup = Setup("kimi-k26", 8, 1, (8,), 4096, 2, ())
    bench_step.write_records(path, setup, [STEP], [Prefill(1024, 512, 40.0, 30.0)], {"gpu": "x", "commit": "c", "date": "d", "cmd": "e"})
    step, prompt = map(json.loads, path.read_text().splitlines())
    assert {"layers", "tp", "M", "ctx", "ms", "floor_ms", "share", "host_us", "launches", "gpu", "commit", "date", "cmd"} <= set(step)
    assert (step["ms"], step["share"], prompt["tok_s"]) == (2.0, 0.75, 25600.0)


def test_the_plot_is_one(tmp_path):
    pytest.importorskip("matplotlib")
    from tools.step_report import draw

    draw([STEP, Step(16, 2, 3000.0, 2500.0, 35.0, 90, STEP.ops)], tmp_path / "a.svg", "steps")
    text = (tmp_path / "a.svg").read_text()
    assert "<svg" in text and text.count("<path") > 5
