"""The tiny and the demo model through the CUDA backend on a GPU, eagerly, against the definition in bfloat16.

    python -m pytest -q tests/runtime/kernels_cu/test_backend_gpu.py

Where the router takes the other one of two experts that are equally good in bf16, the definition follows it (`tests/near_ties.py`).
Recorded in tools/results/gpu_tests.jsonl (`tools/gpu_tests.py --check`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from model.tiny import make_tiny
from tests.compare import check_bitwise
from tests.device_plans import poison
from tests.plans import page_table
from tests.runtime.kernels_cu.test_backend_shim import SIZES, rows_of
from tests.twin import Twin, check_story, story

pytestmark = pytest.mark.gpu
DEMO = Path(__file__).parents[3] / "model" / "demo"
WIDER = {"vocab_size": 512, "n_routed_experts": 8, "num_attention_heads": 4, "hidden_size": 128, "q_lora_rank": 64}


@pytest.fixture(scope="module")
def device():
    from runtime.kernels_cu.device import CupyDevice

    return CupyDevice()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """name -> (folder, vocabulary). `wider` has a router of eight experts, which no skinny product takes."""
    made = tmp_path_factory.mktemp("tiny")
    return {
        "tiny": (make_tiny(made / "tiny", seed=3, **SIZES), SIZES["vocab_size"]),
        "wider": (make_tiny(made / "wider", seed=4, **SIZES | WIDER), WIDER["vocab_size"]),
        "demo": (DEMO, 4096),
    }


@pytest.fixture
def make(device, folders):
    def twin(name: str, page_size: int = 16, positions: int = 192, **options) -> Twin:
        pages = 2 * -(-positions // page_size) + 1
        return Twin(folders[name][0], device, positions, pages=pages, page_size=page_size, streams=3, **options)

    return twin


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("invariant", [False, True], ids=["fastest", "invariant"])
@pytest.mark.parametrize("name", ["tiny", "wider", "demo"])
def test_the_model_is_the_definitions(make, folders, name, invariant, page_size):
    """Buckets for both kinds of product, and a chunk long enough for several tiles of keys."""
    check_story(make(name, page_size, invariant=invariant), folders[name][1], buckets=(160, 16, 4), chunk=150)


def test_pages_that_tensor_copies_cannot_take(make, folders):
    check_story(make("tiny", 24, 96), folders["tiny"][1], buckets=(64, 32, 8), chunk=50)


def test_mutation_an_op_left_out_once_shows(make, folders):
    for name in ("mla_query", "tree_mla", "moe_w4", "linear", "kv_write", "block_attention"):
        with pytest.raises(AssertionError):
            check_story(make("tiny", dropped=(name,)), folders["tiny"][1])


def test_mutation_a_worse_expert_shows(make, folders):
    twin = make("tiny")
    twin.favour(0, 0.05)
    with pytest.raises(AssertionError, match=r"layer 0, row \d+: .* a gap of 0\.0[0-4]"):
        check_story(twin, folders["tiny"][1])


def test_what_dead_rows_hold_changes_nothing(make, folders):
    twin = make("demo")
    for name, _, got in story(twin, folders["demo"][1]):
        if name == "moved":  # a move is no launch to repeat
            continue
        for value in (0x00, 0x7E):
            poison(twin.ops, ("taps",), value)
            for one in twin.launches:
                one.run.run(twin.device.stream)
            check_bitwise(twin.ops.host(twin.logits)[: len(got)], got, name)


def test_ten_runs_of_a_step_agree_in_every_bit(make):
    twin = make("demo")
    pages = page_table(2, twin.each)
    first = rows_of(twin, pages, 16, True)
    for _ in range(10):
        check_bitwise(rows_of(twin, pages, 16, True), first)


@pytest.mark.parametrize("name", ["tiny", "demo"])
def test_an_invariant_row_has_the_same_bits_in_every_bucket(make, name):
    twin = make(name, invariant=True)
    pages = page_table(2, twin.each)
    first = rows_of(twin, pages, 6, False)
    assert np.isfinite(first).all()
    for bucket, company in ((8, False), (16, True), (17, False), (24, True), (64, True), (256, True)):
        check_bitwise(rows_of(twin, pages, bucket, company), first, f"bucket {bucket}")
