"""A checkpoint folder is refused for each way it can be damaged, and read back bit for bit where it is whole."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model.tiny import make_tiny
from model.weights import Checkpoint, CheckpointError, legal_tp_sizes
from tests.model.damage import EXPERT, HEAD, SHARD, STORED, edit_json, edit_shard, join, refusal

DEMO = Path(__file__).parents[2] / "model" / "demo"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("weights") / "tiny", seed=3, moe_intermediate_size=96)


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


# ---- reading ---------------------------------------------------------------------------------------------------------------


def decode(words: np.ndarray) -> list[list[int]]:
    """INT4 codes by plain integer division, digit by digit."""
    rows = []
    for row in words.tolist():
        digits: list[int] = []
        for word in row:
            unsigned = word % 2**32
            for _ in range(8):
                digits.append(unsigned % 16)
                unsigned //= 16
        rows.append(digits)
    return rows


def test_reads_every_tensor_as_the_library_does(whole: Path) -> None:
    with Checkpoint.open(whole) as ckpt:
        stored = {n.removeprefix("language_model."): t for file in whole.glob("*.safetensors") for n, t in load_file(file).items()}
        assert ckpt.names() == sorted(stored)
        assert ckpt.total_bytes == sum(t.nbytes for t in stored.values())
        for name, tensor in stored.items():
            read = ckpt.get(name)
            assert read.dtype == tensor.dtype and ckpt.shape(name) == tensor.shape and read.tobytes() == tensor.tobytes()
        assert ckpt.dtype("lm_head.weight") == "bf16" and ckpt.get("lm_head.weight").dtype == ml_dtypes.bfloat16
        assert ckpt.dtype("model.layers.1.mlp.gate.e_score_correction_bias") == "f32"
        assert ckpt.dtype(f"{EXPERT}.weight_packed") == "i32"


def test_codes_are_the_nibbles_lowest_first(whole: Path) -> None:
    ckpt = Checkpoint.open(whole)
    codes, scale = ckpt.get_w4(EXPERT)
    words = load_file(whole / SHARD)[f"{STORED}.weight_packed"]
    assert codes.dtype == np.uint8 and codes.shape == (128, 96) and scale.shape == (128, 3) and scale.dtype == ml_dtypes.bfloat16
    assert codes.tolist() == decode(words)
    assert codes.tolist() != [list(reversed(row)) for row in decode(words)]  # the comparison notices another nibble order
    assert words.min() < 0  # and the sign bit of a word is part of a code


def test_code_zero_is_read(copy: Path) -> None:
    def zero(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{STORED}.weight_packed"] = np.full((128, 12), -0x10000000, np.int32)  # 0xF0000000

    edit_shard(copy, SHARD, zero)
    codes, _ = Checkpoint.open(copy).get_w4(EXPERT)
    assert codes.reshape(-1, 8).tolist() == [[0] * 7 + [15]] * (128 * 12)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_tensor_parallel_parts_join_to_the_whole(tmp_path: Path, tp: int) -> None:
    ckpt = Checkpoint.open(make_tiny(tmp_path / "tiny", drafter=False))

    def parts(size: int) -> list[slice]:
        return [slice(r * size // tp, (r + 1) * size // tp) for r in range(tp)]

    for name in ("lm_head.weight", "model.layers.0.self_attn.o_proj.weight"):
        full, (rows, cols) = ckpt.get(name), ckpt.shape(name)
        assert np.array_equal(np.concatenate([ckpt.get(name, cut) for cut in parts(rows)]), full)
        assert np.array_equal(np.concatenate([ckpt.get(name, None, cut) for cut in parts(cols)], 1), full)
    codes, scale = ckpt.get_w4(EXPERT)
    by_cols = [ckpt.get_w4(EXPERT, None, cut) for cut in parts(128)]
    by_rows = [ckpt.get_w4(EXPERT, cut) for cut in parts(128)]
    for pairs, axis in ((by_cols, 1), (by_rows, 0)):
        assert np.array_equal(np.concatenate([c for c, _ in pairs], axis), codes)
        assert np.array_equal(np.concatenate([s for _, s in pairs], axis), scale)
    both, both_scale = ckpt.get_w4(EXPERT, slice(5, 9), slice(32, 96))
    assert np.array_equal(both, codes[5:9, 32:96]) and np.array_equal(both_scale, scale[5:9, 1:3])
    assert not np.array_equal(both, codes[5:9, 40:104])


def test_a_vector_is_cut_by_rows_alone(whole: Path) -> None:
    ckpt = Checkpoint.open(whole)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert np.array_equal(ckpt.get(name, slice(2, 5)), ckpt.get(name)[2:5])
    with pytest.raises(CheckpointError, match=r"e_score_correction_bias has shape \(8,\): it can not be cut by cols"):
        ckpt.get(name, None, slice(0, 1))


@pytest.mark.parametrize("cut", [slice(0, 129), slice(-3, None), slice(4, 4), slice(8, 4), slice(0, 8, 2)])
def test_slices_outside_a_tensor_are_refused(whole: Path, cut: slice) -> None:
    with pytest.raises(CheckpointError, match=r"norm.weight: rows slice\(.*inside 0:128 with step 1"):
        Checkpoint.open(whole).get("model.norm.weight", cut)


def test_a_cut_through_a_group_names_the_legal_sizes(whole: Path) -> None:
    with pytest.raises(CheckpointError, match=r"columns 0:48 .*96 inputs.* group of 32.*tensor-parallel sizes \[1, 3\]"):
        Checkpoint.open(whole).get_w4(EXPERT, None, slice(0, 48))
    assert legal_tp_sizes(2048) == [1, 2, 4, 8, 16, 32, 64]


def test_an_unknown_name_is_refused(whole: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no tensor 'model.nothing' among its 101"):
        Checkpoint.open(whole).get("model.nothing")


def test_progress_counts_the_bytes_of_reads_alone(whole: Path) -> None:
    seen: list[tuple[str, int]] = []
    ckpt = Checkpoint.open(whole, progress=lambda name, n: seen.append((name, n)))
    assert seen == []
    ckpt.get("lm_head.weight", slice(0, 10))
    assert seen == [("lm_head.weight", 10 * 128 * 2)]
    for name in ckpt.names():
        ckpt.get(name)
    assert sum(n for _, n in seen[1:]) == ckpt.total_bytes


def test_a_slice_reads_no_more_than_itself(tmp_path: Path) -> None:
    """256 MB on disk, 4 KB of it wanted: resident memory must not follow the file."""
    data = tmp_path / "model.safetensors"
    rows, cols = 1 << 16, 2048
    header = {"w": {"dtype": "BF16", "shape": [rows, cols], "data_offsets": [0, rows * cols * 2]}}
    join(data, header, b"")
    with data.open("r+b") as file:
        file.truncate(data.stat().st_size + rows * cols * 2)  # sparse
    (tmp_path / "config.json").write_text("{}")
    before = resident_bytes()
    part = Checkpoint.open(tmp_path).get("w", slice(100, 101))
    assert part.shape == (1, cols)
    assert resident_bytes() - before < 32 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# ---- the files of the demo and of a drafter --------------------------------------------------------------------------------


def test_demo_opens() -> None:
    ckpt = Checkpoint.open(DEMO)
    assert len(ckpt.names()) == 921 and ckpt.total_bytes == 24402304 and ckpt.quantised
    assert ckpt.text_config["model_type"] == "kimi_k2" and ckpt.config["model_type"] == "kimi_k25"
    codes, scale = ckpt.get_w4("model.layers.1.mlp.experts.0.gate_proj")
    assert codes.shape == (128, 384) and codes.min() >= 1 and codes.max() == 15 and np.isfinite(scale.astype(np.float32)).all()


def test_drafter_opens_with_and_without_a_model_prefix(copy: Path) -> None:
    plain = Checkpoint.open(copy / "drafter")
    names, fc = plain.names(), plain.get("fc.weight")
    assert not plain.quantised and "layers.1.self_attn.q_norm.weight" in plain and len(names) == 25
    plain.close()
    file = copy / "drafter" / "model.safetensors"
    save_file({f"model.{n}": t for n, t in load_file(file).items()}, file)
    prefixed = Checkpoint.open(copy / "drafter")
    assert prefixed.names() == names and np.array_equal(prefixed.get("fc.weight"), fc)


def test_vision_tensors_are_skipped(copy: Path) -> None:
    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["vision_tower.patch_embed.proj.weight"] = np.zeros((3, 4), np.float32)
        tensors["mm_projector.linear_1.weight"] = np.zeros((3, 4), np.float32)

    edit_shard(copy, HEAD, add, keep_index=False)
    ckpt = Checkpoint.open(copy)
    assert len(ckpt.names()) == 101 and not [n for n in ckpt.names() if "vision" in n or "mm_" in n]


def test_code_in_a_folder_never_runs(copy: Path) -> None:
    bomb = f"open({str(copy / 'ran')!r}, 'w').close()\n"
    for name in ("modeling_kimi.py", "configuration_kimi.py", "sitecustomize.py", "conftest.py"):
        (copy / name).write_text(bomb)
    (copy / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.")
    edit_json(
        copy / "config.json", lambda c: c.update(auto_map={"AutoConfig": "configuration_kimi.Config", "AutoModel": "modeling_kimi.Model"})
    )
    before = set(sys.modules)
    ckpt = Checkpoint.open(copy)
    ckpt.get("lm_head.weight")
    assert not (copy / "ran").exists()
    assert not {name for name in set(sys.modules) - before if "kimi" in name and not name.startswith("model.")}


# ---- what the model expects ------------------------------------------------------------------------------------------------


def spec_of(ckpt: Checkpoint) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (ckpt.shape(name), ckpt.dtype(name)) for name in ckpt.names()}


def test_expect_lists_all_faults_at_once(whole: Path) -> None:
    ckpt = Checkpoint.open(whole)
    spec = spec_of(ckpt)
    ckpt.expect(spec)
    spec["lm_head.weight"] = ((500, 128), "bf16")
    spec["model.norm.weight"] = ((128,), "f32")
    spec["model.layers.9.input_layernorm.weight"] = ((128,), "bf16")
    del spec["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError) as caught:
        ckpt.expect(spec)
    assert str(caught.value).splitlines()[1:] == [
        f"  {HEAD}: lm_head.weight has shape (512, 128), expected (500, 128)",
        f"  {HEAD}: model.norm.weight is bf16, expected f32",
        "  missing model.layers.9.input_layernorm.weight: expected bf16 (128,)",
        "  model-00001-of-000003.safetensors: unexpected model.layers.0.mlp.up_proj.weight: bf16 (256, 128)",
    ]


def test_expect_counts_what_it_does_not_list(whole: Path) -> None:
    with pytest.raises(CheckpointError, match="and 89 more"):
        Checkpoint.open(whole).expect({})


# ---- INT4 triples ----------------------------------------------------------------------------------------------------------

BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop(f"{STORED}.weight_shape"), f"weight_packed has no {EXPERT}.weight_shape beside it"),
        (lambda t: t.pop(f"{STORED}.weight_scale"), f"weight_packed has no {EXPERT}.weight_scale beside it"),
        (lambda t: t.pop(f"{STORED}.weight_packed"), f"weight_scale has no {EXPERT}.weight_packed beside it"),
        (lambda t: t.update({f"{STORED}.weight_scale": np.ones((128, 2), BF16)}), "weight_scale has shape (128, 2), but"),
        (lambda t: t.update({f"{STORED}.weight_scale": np.ones((127, 3), BF16)}), "(128, 12) needs (128, 3)"),
        (lambda t: t.update({f"{STORED}.weight_packed": np.ones((128, 11), np.int32)}), "expected [n, k/8] with k a multiple of 32"),
        (lambda t: t.update({f"{STORED}.weight_packed": np.ones(1536, np.int32)}), "has shape (1536,), expected [n, k/8]"),
        (lambda t: t.update({f"{STORED}.weight_packed": np.ones((128, 12), np.float32)}), "weight_packed is f32, expected i32"),
        (lambda t: t.update({f"{STORED}.weight_scale": np.ones((128, 3), np.float32)}), "weight_scale is f32, expected bf16"),
        (lambda t: t.update({f"{STORED}.weight_shape": np.ones(3, np.int32)}), "weight_shape has shape (3,), expected (2,)"),
        (lambda t: t.update({f"{STORED}.weight_zero_point": np.ones((16, 3), np.int32)}), "asymmetric or reordered INT4"),
        (lambda t: t.update({f"{STORED}.weight_g_idx": np.ones(96, np.int32)}), "asymmetric or reordered INT4"),
    ],
)
def test_a_triple_that_does_not_fit(copy: Path, change: Callable[[dict[str, np.ndarray]], Any], text: str) -> None:
    edit_shard(copy, SHARD, change, keep_index=False)
    message = refusal(copy)
    assert text in message and SHARD in message and EXPERT in message


def test_a_weight_shape_that_says_something_else(copy: Path) -> None:
    edit_shard(copy, SHARD, lambda t: t.update({f"{STORED}.weight_shape": np.array([96, 128], np.int32)}))
    ckpt = Checkpoint.open(copy)
    with pytest.raises(CheckpointError, match=r"weight_shape says \(96, 128\), but .*weight_packed \(128, 12\) holds \(128, 96\)"):
        ckpt.get_w4(EXPERT)
    ckpt.get_w4("model.layers.1.mlp.experts.2.down_proj")


# ---- quantisation schemes --------------------------------------------------------------------------------------------------


def blocks(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [config["quantization_config"], config["text_config"]["quantization_config"]]


def weights_of(block: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = block["config_groups"]["group_0"]["weights"]
    return found


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda b: b.update(quant_method="fp8"), "quant_method is 'fp8', known is 'compressed-tensors'"),
        (lambda b: b.update(quant_method="gptq"), "quant_method is 'gptq'"),
        (lambda b: b.update(format="nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized', known is 'pack-quantized'"),
        (lambda b: b.update(quantization_status="frozen"), "quantization_status is 'frozen'"),
        (lambda b: b.update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is {'num_bits': 8}, known is None"),
        (lambda b: b.update(config_groups={}), "config_groups is {}"),
        (lambda b: b["config_groups"].update(group_1={"weights": None}), "group_1.weights.num_bits is None, known is 4"),
        (lambda b: b["config_groups"].update(group_1=3), "group_1.weights.num_bits is None, known is 4"),
        (lambda b: weights_of(b).update(num_bits=8), "group_0.weights.num_bits is 8, known is 4"),
        (lambda b: weights_of(b).update(type="float"), "weights.type is 'float', known is 'int'"),
        (lambda b: weights_of(b).update(symmetric=False), "weights.symmetric is False, known is True"),
        (lambda b: weights_of(b).update(group_size=128), "weights.group_size is 128, known is 32"),
        (lambda b: weights_of(b).update(strategy="channel"), "weights.strategy is 'channel', known is 'group'"),
        (lambda b: weights_of(b).update(actorder="group"), "weights.actorder is 'group', known is None"),
        (lambda b: b["config_groups"]["group_0"].update(input_activations={"num_bits": 8}), "input_activations is"),
    ],
)
def test_unknown_quantisation(copy: Path, level: int, change: Callable[[dict[str, Any]], Any], text: str) -> None:
    edit_json(copy / "config.json", lambda config: change(blocks(config)[level]))
    message = refusal(copy)
    assert text in message and "config.json: quantization_config" in message


def test_one_quantization_config_is_enough(copy: Path) -> None:
    edit_json(copy / "config.json", lambda config: config.pop("quantization_config"))
    assert Checkpoint.open(copy).quantised
    edit_json(copy / "config.json", lambda config: config.update(quantization_config=config["text_config"].pop("quantization_config")))
    assert Checkpoint.open(copy).quantised
    edit_json(copy / "config.json", lambda config: config.pop("quantization_config"))
    assert f"{EXPERT}.weight_packed is quantised, but config.json has no quantization_config" in refusal_of(copy, EXPERT)


def refusal_of(folder: Path, prefix: str) -> str:
    """The refusal of a folder whose only triple is `prefix`, so that the list of faults is not cut."""
    only = [f"language_model.{prefix}.weight_{part}" for part in ("packed", "scale", "shape")]

    def reduce(tensors: dict[str, np.ndarray]) -> None:
        for name in [n for n in tensors if ".experts." in n and n not in only]:
            del tensors[name]

    edit_shard(folder, SHARD, reduce, keep_index=False)
    return refusal(folder)


def test_a_bf16_checkpoint_needs_no_quantization_config(tmp_path: Path) -> None:
    save_file({"w": np.arange(8).reshape(2, 4).astype(BF16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2"}')
    ckpt = Checkpoint.open(tmp_path)
    assert not ckpt.quantised and ckpt.get("w", slice(1, 2), slice(1, 3)).tolist() == [[5, 6]]
    with pytest.raises(CheckpointError, match=r"no tensor 'w\.weight_packed'"):
        ckpt.get_w4("w")


def test_config_forms(copy: Path, tmp_path: Path) -> None:
    nested = Checkpoint.open(copy)
    flat = Checkpoint.open(make_tiny(tmp_path / "flat", seed=3, flat_config=True, moe_intermediate_size=96))
    assert flat.names() == nested.names() and flat.text_config is flat.config and nested.text_config is nested.config["text_config"]
    assert flat.text_config == nested.text_config
    edit_json(copy / "config.json", lambda config: config.update(text_config=[]))
    assert "text_config is []" in refusal(copy)
    (copy / "config.json").write_text('{"a": 1, "a": 2}')
    assert "config.json: the key 'a' stands twice" in refusal(copy)
