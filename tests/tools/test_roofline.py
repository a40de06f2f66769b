from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools import roofline

ROOT = Path(__file__).resolve().parents[2]


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert roofline.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_holds_memory_and_every_bucket(capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, "--tp", "1", "8")
    assert [m["tp"] for m in report["memory"]] == [1, 8]
    assert report["memory"][1]["weight_bytes"] / 1e9 == pytest.approx(76.25 + 1.41, rel=0.01)
    assert len(report["steps"]) == 2 * len(roofline.DEFAULT_BUCKETS)
    for step in report["steps"]:
        device = [op for op in step["ops"] if op["op"] not in ("all_reduce", "all_gather")]
        assert sum(op["floor_us"] for op in device) == pytest.approx(step["floor_us"])
        assert sum(op["bytes"] for op in device) == pytest.approx(step["bytes"])


def test_what_fits_leaves_room_for_buffers_peers_and_private_pages(capsys: pytest.CaptureFixture[str]) -> None:
    (plain,), (trees,) = (run_json(capsys, "--tp", "8", "--buckets", "64", *more)["memory"] for more in ((), ("--batch-invariant",)))
    for memory in (plain, trees):
        held, parts = memory["reserved"]["device_bytes"], memory["reserved"]
        assert held == sum(parts[name] for name in ("buffers", "peers", "plans", "private"))
        assert memory["tokens_that_fit"] == int((0.9 * 150.1e9 - memory["weight_bytes"] - held) // memory["kv_token_bytes"])
    assert plain["reserved"]["private"] == 0 < trees["reserved"]["private"] and plain["reserved"]["peers"] > 16 << 20
    assert run_json(capsys, "--hw", "cpu", "--config", "demo", "--tp", "1", "--buckets", "64")["memory"][0]["reserved"] is None


def test_options_move_the_numbers_the_right_way(capsys: pytest.CaptureFixture[str]) -> None:
    def floor(*argv: str) -> float:
        return run_json(capsys, "--tp", "8", "--buckets", "64", *argv)["steps"][0]["floor_us"]

    plain = floor()
    assert floor("--hw", "rtx-pro-6000") > 2 * plain
    assert floor("--ctx", "100000", "--streams", "8") > 1.5 * plain
    assert floor("--distinct", "100") < 0.6 * plain


def test_a_pipeline_halves_what_a_rank_holds_and_not_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (run_json(capsys, "--tp", "8", "--pp", pp, "--buckets", "64") for pp in ("1", "2"))
    (whole,), (first, last) = one["memory"], two["memory"]
    assert [first["stage"], last["stage"]] == [0, 1]
    shared = 7168 * 2 + 262144 * 64 * 4  # the last norm and the rotary table, which both hold
    embedding = 163840 // 8 * 7168 * 2  # which the drafter's stage holds too
    assert first["weight_bytes"] + last["weight_bytes"] == whole["weight_bytes"] + shared + embedding
    assert first["kv_token_bytes"] + last["kv_token_bytes"] == whole["kv_token_bytes"]
    assert first["weights"]["head"] == 0 == first["weights"]["drafter"] and last["weights"]["head"] > 0
    (alone,), (piped,) = one["steps"], two["steps"]
    sent = [op for op in piped["ops"] if op["op"] == "send"]
    assert [(op["count"], op["bytes"]) for op in sent] == [(1, 64 * 2 * 7168 * (1 + 3))], "x and the taps below layer 31"
    assert piped["floor_us"] == pytest.approx(alone["floor_us"], rel=0.002)
    assert piped["link_us"] - alone["link_us"] == pytest.approx(sent[0]["floor_us"]) and 15 < sent[0]["floor_us"] < 200


def test_more_stages_than_layers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        roofline.main(["--tp", "8", "--pp", "62"])
    assert "pipeline_parallel_size 62 does not cut this model; legal: 1 to 61, its layers" in capsys.readouterr().err


def test_the_estimate_is_the_floor_at_its_share_and_the_link(capsys: pytest.CaptureFixture[str]) -> None:
    for hw in ("h200", "rtx-pro-6000"):
        for share in ("0.5", "1"):
            for step in run_json(capsys, "--tp", "8", "--hw", hw, "--share", share)["steps"]:
                assert step["link_us"] > 0
                assert step["estimate_us"] == pytest.approx(step["floor_us"] / float(share) + step["link_us"])


def test_demo_and_a_folder_and_a_file_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    paths = ("demo", str(ROOT / "model/demo"), str(ROOT / "model/demo/config.json"))
    demo, folder, file = (run_json(capsys, "--config", path, "--hw", "cpu", "--tp", "1", "--buckets", "1") for path in paths)
    assert demo["steps"] == folder["steps"] == file["steps"]
    assert demo["drafts"] == folder["drafts"] and demo["drafts"] and not file["drafts"]


def test_parts_cover_the_ops_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    """What the table's columns leave to "other" stays under a tenth of the floor."""
    covered = {op for ops in roofline.PARTS.values() for op in ops}
    for step in run_json(capsys, "--tp", "1", "8")["steps"]:
        other = sum(op["floor_us"] for op in step["ops"] if op["op"] not in covered and not op["op"].startswith("all_"))
        assert other < 0.1 * step["floor_us"]


def test_tables_name_their_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert roofline.main(["--tp", "8", "--buckets", "1", "16", "--detail"]) == 0
    text = capsys.readouterr().out
    for said in ("uniformly and independently", "tokens that fit", "moe_w4", "planned in", "4.54 TB/s"):
        assert said in text
    assert "…" not in text, "a column was cut"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--tp", "3"], "tensor_parallel_size 3"),
        (["--config", "/no/such"], "neither a built-in name"),
        (["--hw", "abacus"], "known: h200"),
        (["--buckets", "0"], "start at 1"),
        (["--distinct", "1"], "between 8 and 384"),
        (["--share", "0"], "lie in (0, 1]"),
    ],
)
def test_bad_arguments_are_explained(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as stop:
        roofline.main(argv)
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_a_file_that_is_no_config_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    for text, said in (("{", "not JSON"), ("{}", "model_type None")):
        path.write_text(text)
        with pytest.raises(SystemExit):
            roofline.main(["--config", str(path)])
        err = capsys.readouterr().err
        assert said in err and str(path) in err


def test_it_runs_as_a_script_and_teaches() -> None:
    done = subprocess.run([sys.executable, "tools/roofline.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert "examples" in done.stdout and "reading the tables" in done.stdout
