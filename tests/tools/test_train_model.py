"""The training tool's networks are the runtime's: one exported checkpoint, the same numbers in torch and in NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from model import dflash, kimi_k26
from model.tiny import quantise
from model.weights import Checkpoint
from runtime import w4
from runtime.comm import SoloComm
from runtime.kernels_np import NumpyBackend
from runtime.types import DraftPlan
from tests.plans import chain_plan, page_table
from tools.train_demo import acceptance, decode, export, network, shape
from tools.train_demo.drafting import Drafter
from tools.train_demo.fit_drafter import block_loss, labels_of, thoughts_of
from tools.train_demo.optimise import orthogonal, rate

PAGE = 64
TOKENS = np.random.default_rng(1).integers(0, 4000, 40)
ROOT_AT = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature as its training would leave it: random, selection biases set, frozen, written."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("miniature")
    config = shape.target_json(shape.MINIATURE_TARGET)
    target = network.Target(shape.read_target(config))
    for layer in target.layers:
        if layer.sparse:
            layer.router.data *= 50  # scores that differ, so that experts matter
            layer.bias += 0.1 * torch.randn_like(layer.bias)
    target.freeze()
    export.write_target(target, config, path)
    draft_config = shape.drafter_json(config, shape.MINIATURE_DRAFTER, shape.MINIATURE_TAPS)
    drafter = Drafter(shape.read_drafter(draft_config))
    drafter.freeze()
    export.write_drafter(drafter, draft_config, path / "drafter")
    return path


def run_target(folder: Path, taps: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, object, object]:
    checkpoint, ops = Checkpoint.open(folder), NumpyBackend("float32")
    config = kimi_k26.Config.from_json(checkpoint.config)
    weights = kimi_k26.load(checkpoint, config, ops, 0, 1, 128)
    plan = chain_plan(TOKENS, 0, page_table(1, 2, np.random.default_rng(0)), PAGE, None)
    cache = ops.zeros((config.layers, 3 * PAGE, config.cache_width))
    logits, kept = kimi_k26.forward(ops, SoloComm(), config, weights, plan, cache, PAGE, taps)
    return logits.copy(), kept.reshape(len(TOKENS), -1).copy(), weights, plan


def test_logits_equal_the_runtimes(folder: Path) -> None:
    target = export.read_target(folder)
    ids = torch.from_numpy(TOKENS)[None]
    logits, taps, _, _ = run_target(folder, shape.MINIATURE_TAPS)
    assert np.abs(logits - target(ids)[0].numpy()).max() < 2e-4
    assert np.abs(taps - target.tap(ids, shape.MINIATURE_TAPS)[0].numpy()).max() < 2e-4
    target.layers[1].bias.zero_()
    assert np.abs(logits - target(ids)[0].numpy()).max() > 1e-2, "the selection bias must matter"


def test_block_equals_the_runtimes(folder: Path) -> None:
    target, drafter = export.read_target(folder), export.read_drafter(folder / "drafter")
    ids = torch.from_numpy(TOKENS)[None]
    anchors = torch.tensor([[ROOT_AT, 12]])
    ours = drafter(target, target.tap(ids, drafter.c.taps), ids.gather(1, anchors), anchors)[0].detach().numpy()
    _, taps, weights, steps = run_target(folder, drafter.c.taps)
    checkpoint, ops = Checkpoint.open(folder / "drafter"), NumpyBackend("float32")
    config = dflash.Config.from_json(checkpoint.config)
    mine = dflash.load(checkpoint, config, ops, 128)
    before = slice(0, ROOT_AT)
    plan = DraftPlan(
        np.array([TOKENS[ROOT_AT]], np.int32),
        np.array([ROOT_AT], np.int32),
        steps.pages,
        np.arange(ROOT_AT, dtype=np.int32),
        steps.pos[before],
        steps.slot[before],
    )
    cache = dflash.make_cache(ops, config, 3 * PAGE)
    dflash.write_context(ops, config, mine, taps, plan, cache)
    token, pos, rows = dflash.block_rows(config, plan, 127)
    theirs = dflash.block_logits(ops, SoloComm(), config, mine, weights, token, pos, rows, plan, cache, PAGE)
    assert np.abs(ours[0] - theirs).max() < 5e-4
    assert np.abs(ours[1] - theirs).max() > 1e-2, "another anchor is another block"


def test_rounding_is_the_one_on_disk(folder: Path) -> None:
    weights = torch.randn(3, 64, 96)
    scale, code = network.scales_and_codes(weights)
    for e in range(len(weights)):
        codes, scales = quantise(weights[e].numpy())
        assert np.array_equal(code[e].flatten(-2).numpy() + 8, codes)
        assert np.array_equal(scale[e].numpy(), scales.astype(np.float32))
    rounded = network.rounded(weights.requires_grad_())
    packed = w4.pack(code.flatten(-2).add(8).to(torch.uint8).numpy(), scale.numpy().astype(w4.bfloat16))
    for e in range(len(weights)):
        assert np.allclose(rounded[e].detach().numpy(), w4.dequantise(packed, e), atol=1e-6)
    rounded.sum().backward()
    assert bool((weights.grad == 1).all()), "the gradient passes straight through"


def test_a_frozen_model_is_written_exactly(folder: Path, tmp_path: Path) -> None:
    target = export.read_target(folder)
    export.write_target(target, Checkpoint.open(folder).config, tmp_path)
    again = export.read_target(tmp_path).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in target.state_dict().items())


def test_written_texts_are_greedy(folder: Path) -> None:
    """Every token behind a prompt is the argmax of one pass over the whole text; a shorter prompt starts earlier."""
    target = export.read_target(folder)
    prompts = [TOKENS[:5], TOKENS[5:14]]
    texts = decode.write(target, prompts, 24, torch.zeros(2), [], 4095)
    best = target(texts.ids).argmax(-1)
    for row, prompt in enumerate(prompts):
        start = len(prompt)
        assert texts.ids[row, :start].tolist() == prompt.tolist()
        assert texts.ids[row, start:].tolist() == best[row, start - 1 : -1].tolist()
    stop = int(texts.ids[0, 10])
    ended = decode.write(target, prompts, 24, torch.zeros(2), [stop], 4095)
    assert int(ended.end[0]) == 1 + texts.ids[0, 5:].tolist().index(stop) + 5


def test_labels_stop_at_the_end() -> None:
    ids = torch.arange(20)[None]
    label, valid = labels_of(ids, torch.tensor([[3, 15]]), torch.tensor([19]), 7)
    assert label[0, 0].tolist() == list(range(4, 11)) and valid[0, 0].all()
    assert valid[0, 1].tolist() == [True, True, True, False, False, False, False]
    logits = torch.nn.functional.one_hot(label, 20) * 50.0
    loss, accuracy = block_loss(logits, logits, label, valid)
    assert loss < 1e-6 and accuracy.tolist() == [1.0] * 7
    assert block_loss(logits.roll(1, -1), logits, label, valid)[0] > 20
    assert 10 < block_loss(logits, logits.roll(1, -1), label, valid)[0] < 40, "half of the loss is against the target's own thoughts"


def test_thoughts_are_the_targets_logits(folder: Path) -> None:
    target, ids = export.read_target(folder), torch.from_numpy(TOKENS)[None]
    pos = torch.tensor([[5, 30]])
    found = thoughts_of(target, target.tap(ids, shape.MINIATURE_TAPS), pos, 7)
    every = target(ids)[0]
    assert torch.allclose(found[0, 1], every[30:37], atol=1e-5) and torch.allclose(found[0, 0, 2], every[7], atol=1e-5)


def test_updates_are_nearly_orthogonal() -> None:
    for rows, columns in ((16, 48), (48, 16)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(2, rows, columns)))
        assert float(values.min()) > 0.6 and float(values.max()) < 1.3
    assert rate(0, 0.0) < 0.05 and rate(1000, 0.2) == 1.0 and rate(1000, 1.0) == pytest.approx(0.02)


def test_rounds_are_counted_as_an_engine_emits_them(tmp_path: Path) -> None:
    """Two texts of tokens 0, 1, 2 …: one drafted rightly to depth 3, one whose right token is the second choice at depth 2."""
    depth, choices, count = 7, 16, 13
    ids = np.full((2, count, depth, choices), 999, np.uint16) + np.arange(choices, dtype=np.uint16)
    logp = np.broadcast_to(-0.1 - np.arange(choices, dtype=np.float16), ids.shape).copy()
    for i in range(count):
        ids[0, i, :3, 0] = i + 3 + np.arange(3)  # the root of position i is token i + 2
        ids[1, i, 0, 0], ids[1, i, 1, 1] = i + 3, i + 4
    tokens = np.tile(np.arange(16, dtype=np.uint16), (2, 1))
    path = tmp_path / "traces.npz"
    lengths, ends = np.array([2, 2]), np.array([16, 16])
    np.savez(
        path, **{f"chat.{n}": v for n, v in (("ids", ids), ("logp", logp), ("tokens", tokens), ("prompt_length", lengths), ("end", ends))}
    )
    found = acceptance.judge(path, ("chat",))["chat"]
    # 13 states each. Chain: four a round in the first text (0, 4, 8, then 12: one and the bonus), two in the second (seven rounds).
    assert found["chain"] == round((4 + 4 + 4 + 2 + 6 * 2 + 2) / (4 + 7), 3)
    assert found["32"] > found["chain"], "a tree holds the second choice"
    table = found["by_depth"]
    assert table["all"]["top1"][0] == 1.0 and table["on_spine"]["top1"][1] == pytest.approx(0.5) and table["all"]["top4"][1] == 1.0
    assert table["off_spine"]["top1"][2] == 0.0
