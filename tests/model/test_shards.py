"""A checkpoint folder is refused for each way its files can be damaged or disagree, naming file, tensor and both values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from model.tiny import make_tiny
from model.weights import Checkpoint, CheckpointError
from tests.model.damage import HEAD, SHARD, edit_index, edit_shard, join, refusal, split


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("weights") / "tiny", seed=3, moe_intermediate_size=96)


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


# ---- damaged files ---------------------------------------------------------------------------------------------------------


def test_a_missing_shard_is_named(copy: Path) -> None:
    (copy / SHARD).unlink()
    assert f"lacks 1 of the 3 shards of its index; download them:\n  {SHARD}: not in the folder" in refusal(copy)


def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    assert "is not a folder" in refusal(tmp_path / "nowhere")
    assert "config.json is missing" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_text("")
    assert "neither model.safetensors.index.json nor model.safetensors; it holds config.json, pytorch_model.bin" in refusal(tmp_path)


def last_tensor(path: Path) -> tuple[str, int]:
    header, _ = split(path)
    header.pop("__metadata__", None)
    name = max(header, key=lambda n: header[n]["data_offsets"][1])
    start, stop = header[name]["data_offsets"]
    return name, stop - start


@pytest.mark.parametrize("file", [SHARD, HEAD])
@pytest.mark.parametrize("whole_tensor", [False, True])
def test_a_shard_cut_short_is_named_with_the_missing_bytes(copy: Path, file: str, whole_tensor: bool) -> None:
    name, nbytes = last_tensor(copy / file)
    lost = nbytes if whole_tensor else 1
    raw = (copy / file).read_bytes()
    (copy / file).write_bytes(raw[:-lost])
    text = refusal(copy)
    assert f"{file} is cut short" in text and f", {lost} missing; 1 tensors are incomplete ({name})" in text
    (copy / file).write_bytes(raw)
    Checkpoint.open(copy)  # the restored file passes: it was the cut that was refused


@pytest.mark.parametrize("keep", [0, 7, 8, 100])
def test_a_shard_cut_inside_its_header(copy: Path, keep: int) -> None:
    (copy / SHARD).write_bytes((copy / SHARD).read_bytes()[:keep])
    assert f"{SHARD}: its {keep} bytes can not hold the" in refusal(copy)


def test_bytes_after_the_last_tensor(copy: Path) -> None:
    with (copy / SHARD).open("ab") as file:
        file.write(b"\0" * 16)
    assert f"16 unknown bytes follow {last_tensor(copy / SHARD)[0]}" in refusal(copy)


def by_offset(header: dict[str, Any]) -> list[str]:
    return sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])


@pytest.mark.parametrize(("shift", "what"), [(-4, "overlaps"), (4, "leaves a hole after")])
def test_overlaps_and_holes(copy: Path, shift: int, what: str) -> None:
    header, data = split(copy / SHARD)
    first, second = by_offset(header)[3:5]
    header[second]["data_offsets"] = [x + shift for x in header[second]["data_offsets"]]
    join(copy / SHARD, header, data)
    start, end = header[second]["data_offsets"][0], header[first]["data_offsets"][1]
    assert f"{SHARD}: {second} starts at byte {start} and {what} {first}, which ends at {end}" in refusal(copy)


def test_two_tensors_on_the_same_bytes(copy: Path) -> None:
    header, data = split(copy / SHARD)
    first, second = by_offset(header)[:2]
    header[second] = dict(header[first])
    join(copy / SHARD, header, data)
    assert "overlaps" in refusal(copy)


def test_a_shape_that_its_bytes_can_not_hold(copy: Path) -> None:
    header, data = split(copy / HEAD)
    header["language_model.lm_head.weight"]["shape"] = [511, 128]
    join(copy / HEAD, header, data)
    assert f"lm_head.weight bf16 (511, 128) needs {511 * 256} bytes" in refusal(copy)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"dtype": "F4", "shape": [512, 128], "data_offsets": [0, 4]}, "has dtype f4; known are"),
        ({"dtype": "BF16", "shape": [-512, 128], "data_offsets": [0, 4]}, "expected dtype, shape and two data_offsets"),
        ({"dtype": "BF16", "shape": [True], "data_offsets": [0, 2]}, "expected dtype, shape and two data_offsets"),
        ({"dtype": "BF16", "shape": [2], "data_offsets": [0, 2, 4]}, "expected dtype, shape and two data_offsets"),
        ({"dtype": 7, "shape": [2], "data_offsets": [0, 4]}, "expected dtype, shape and two data_offsets"),
        ([], "expected dtype, shape and two data_offsets"),
    ],
)
def test_nonsense_in_a_header(copy: Path, entry: Any, text: str) -> None:
    header, data = split(copy / HEAD)
    header["language_model.lm_head.weight"] = entry
    join(copy / HEAD, header, data)
    message = refusal(copy)
    assert text in message and HEAD in message and "lm_head.weight" in message


def test_a_header_that_is_no_json(copy: Path) -> None:
    join(copy / HEAD, b'{"a": ', b"")
    assert f"{HEAD}: not valid JSON" in refusal(copy)
    join(copy / HEAD, b"[1, 2]", b"")
    assert f"{HEAD}: holds a JSON list; expected an object" in refusal(copy)


def test_a_name_that_stands_twice_in_a_header(copy: Path) -> None:
    raw, data = split(copy / HEAD)
    name = "language_model.lm_head.weight"
    text = json.dumps(raw)[:-1] + f', "{name}": {json.dumps(raw[name])}}}'
    join(copy / HEAD, text.encode(), data)
    assert f"{HEAD}: the key '{name}' stands twice in one JSON object" in refusal(copy)


# ---- the index against the shards ------------------------------------------------------------------------------------------


def test_a_name_that_stands_twice_in_the_index(copy: Path) -> None:
    path = copy / "model.safetensors.index.json"
    name = "language_model.model.norm.weight"
    path.write_text(path.read_text().replace('"weight_map": {', f'"weight_map": {{ "{name}": "{HEAD}",'))
    assert json.loads(path.read_text())["weight_map"][name] == HEAD  # a plain parser sees nothing
    assert f"index.json: the key '{name}' stands twice" in refusal(copy)


def test_the_index_names_a_tensor_that_the_shard_lacks(copy: Path) -> None:
    edit_index(copy, lambda index: index["weight_map"].update({"language_model.model.extra": HEAD}))
    assert f"{HEAD}: lacks language_model.model.extra, which the index puts there" in refusal(copy)


def test_a_shard_holds_a_tensor_that_the_index_lacks(copy: Path) -> None:
    edit_index(copy, lambda index: index["weight_map"].pop("language_model.model.norm.weight"))
    assert f"{HEAD}: holds language_model.model.norm.weight, which the index lacks" in refusal(copy)


def test_a_tensor_in_two_shards(copy: Path) -> None:
    norm = "language_model.model.norm.weight"
    edit_shard(copy, SHARD, lambda tensors: tensors.update({norm: np.ones(128, ml_dtypes.bfloat16)}))
    assert f"{SHARD}: holds {norm}, which the index puts into {HEAD}: one tensor in two shards" in refusal(copy)


def test_two_spellings_of_one_name(copy: Path) -> None:
    edit_shard(copy, SHARD, lambda tensors: tensors.update({"lm_head.weight": np.ones((512, 128), ml_dtypes.bfloat16)}), keep_index=False)
    assert "language_model.lm_head.weight" in refusal(copy) and "are both lm_head.weight" in refusal(copy)


def test_total_size(copy: Path) -> None:
    total = Checkpoint.open(copy).total_bytes
    edit_index(copy, lambda index: index["metadata"].update(total_size=total + 2))
    assert f"total_size is {total + 2}, but the shards hold {total} bytes" in refusal(copy)
    edit_index(copy, lambda index: index.pop("metadata"))
    Checkpoint.open(copy)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "..", "", 5])
def test_the_index_can_not_point_out_of_the_folder(copy: Path, file: Any) -> None:
    edit_index(copy, lambda index: index["weight_map"].update({"language_model.model.norm.weight": file}))
    assert f"language_model.model.norm.weight lies in {file!r}; expected the name of a file" in refusal(copy)


@pytest.mark.parametrize("weight_map", [None, {}, []])
def test_an_index_without_a_map(copy: Path, weight_map: Any) -> None:
    edit_index(copy, lambda index: index.update(weight_map=weight_map))
    assert "weight_map is" in refusal(copy)


def test_a_shard_replaced_after_opening_is_refused(copy: Path) -> None:
    ckpt = Checkpoint.open(copy)
    (copy / HEAD).write_bytes((copy / HEAD).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{HEAD} changed after it was checked"):
        ckpt.get("lm_head.weight")
