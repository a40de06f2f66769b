"""Which kernel a product of few rows gets, by record."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from runtime.kernels_cu import linear_choice, linear_stream
from runtime.kernels_cu.linear_choice import choose_stream, fastest, source_digest, tuned_key
from runtime.kernels_cu.linear_skinny import Dims

SKINNY = {"us": {"1": 10.0, "8": 12.0, "16": 20.0}, "library_us": {"1": 11.0, "8": 11.5, "16": 12.0}}
STREAM = {"us": {"1": 11.0, "8": 11.0, "16": 11.0, "32": 14.0}, "library_us": {"1": 11.5, "8": 11.5, "16": 12.0, "32": 13.0}}


def at(m: int, n: int = 64) -> Dims:
    return Dims.plain(m, n, 64)


@pytest.fixture
def record(monkeypatch):
    def put(skinny: dict, stream: dict) -> None:
        tuned = {tuned_key(at(1)): {"src": source_digest()} | skinny, tuned_key(at(1), "stream"): {"src": source_digest("stream")} | stream}
        monkeypatch.setattr(linear_choice, "read_tuned", lambda gpu: tuned)

    return put


def test_the_next_measured_m_decides(record):
    record(SKINNY, {})
    assert [fastest(at(m), "h200") for m in (1, 2, 8, 16)] == ["skinny", "library", "library", "library"]
    record(SKINNY, STREAM)
    assert [fastest(at(m), "h200") for m in (1, 2, 8, 16, 17, 32, 33)] == ["skinny", *["stream"] * 3, "library", "library", "library"]


def test_without_a_record_of_both_the_kernel_has_its_turn(record):
    record({"us": SKINNY["us"]}, {})
    assert fastest(at(8), "h200") == "skinny"
    record(SKINNY, STREAM)
    assert fastest(at(8, n=128), "h200") == "skinny" and fastest(at(17, n=128), "h200") == "library"


def test_a_time_of_another_version_of_the_kernel_does_not_count(record):
    record(SKINNY, STREAM | {"src": "another"})
    assert [fastest(at(m), "h200") for m in (1, 8, 16, 32)] == ["skinny", "library", "library", "library"]


def test_a_kernel_gets_no_product_that_it_can_not_take(record):
    record(SKINNY, STREAM)
    assert fastest(at(8), "h200", "sm_80") == "library"
    assert fastest(Dims.plain(1, 64, 96), "h200") == "skinny" and fastest(Dims.plain(1, 8, 72), "h200") == "library"


def test_a_tuned_stream_is_one_for_all_rows(record):
    tuned = linear_stream.Config(16, 1, 2, 5, 264)
    entry = {"config": asdict(tuned), "src": source_digest("stream")} | STREAM
    record(SKINNY, entry)
    found = {m: choose_stream(at(m), "h200") for m in (1, 16, 17, 64)}
    assert [config.columns for config, _ in found.values()] == [8, 16, 24, 64]
    assert all((c.groups, c.tall, c.blocks, why) == (1, 2, 264, "tuned/h200.json") for c, why in found.values())
    assert choose_stream(at(1, n=128), "h200")[1] == "default"
    record(SKINNY, entry | {"src": "another"})
    assert choose_stream(at(1), "h200")[1] == "tuned/h200.json, measured on another version of the kernel"


def test_a_carried_configuration_is_known_by_its_own_source(record):
    """And another entry's times stay valid whatever becomes of that."""
    carried = {"config": asdict(linear_stream.Config(16, 2, 1, 12, 112, carried=True))}
    digest = source_digest("stream", carried["config"])
    assert digest != source_digest("stream") == source_digest("stream", asdict(linear_stream.Config()))
    assert {digest, source_digest("stream")} == linear_choice.source_digests("stream")
    record(SKINNY, STREAM | carried | {"src": digest})
    assert fastest(at(8), "h200") == "stream" and choose_stream(at(8), "h200")[0].carried
    assert choose_stream(at(8), "h200")[1] == "tuned/h200.json" and not choose_stream(at(17), "h200")[0].carried
    record(SKINNY, STREAM | carried)
    assert fastest(at(8), "h200") == "library"


def test_the_h200_has_measured_the_head_and_the_router():
    assert fastest(Dims.plain(1, 163_840, 7168), "h200") != "skinny"
    assert fastest(Dims.plain(16, 384, 7168), "h200") != "library"
