"""Ten thousand random token sequences in random chunks: the pieces joined are the one-shot decode."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from model.tokenizer import Tokenizer

T = Tokenizer.load(Path(__file__).parents[2] / "model" / "demo")
BYTE = {T.token_bytes(i)[0]: i for i in range(T.vocab_size) if len(T.token_bytes(i)) == 1}
TEXT = "naïve 삼겹살 👍🏽 👨‍👩‍👧 世界 e\u0301\u200d\ufffd ďábel\r\n\t"
COUNT = 10_000


def sequence(rng: np.random.Generator) -> list[int]:
    """Bytes of any value, whole and half characters, tokens and control tokens, in runs of one kind."""
    ids: list[int] = []
    special, raw = list(T.special.values()), TEXT.encode()
    for _ in range(rng.integers(1, 7)):
        size = int(rng.integers(1, 9))
        match rng.integers(4):
            case 0:
                ids += [BYTE[b] for b in rng.integers(0, 256, size).tolist()]
            case 1:
                at = int(rng.integers(len(raw)))
                ids += [BYTE[b] for b in raw[at : at + size]]
            case 2:
                ids += rng.integers(0, T.vocab_size, size).tolist()
            case _:
                ids += [special[i] for i in rng.integers(0, len(special), 1 + size // 4).tolist()]
    return ids


def chunks(ids: list[int], rng: np.random.Generator) -> list[list[int]]:
    cuts = np.flatnonzero(rng.random(len(ids)) < rng.random()).tolist()
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def test_ten_thousand_sequences_in_random_chunks() -> None:
    rng, differing, split = np.random.default_rng(11), 0, 0
    for _ in range(COUNT):
        ids, skip = sequence(rng), bool(rng.integers(2))
        whole = T.decode(ids, skip)
        for parts in (chunks(ids, rng), [[token] for token in ids]):
            stream = T.stream(skip)
            differing += "".join(stream.push(part) for part in parts) + stream.flush() != whole
        split += "".join(T.decode(part, skip) for part in parts) != whole
    assert differing == 0
    assert split > COUNT // 3, "decoding each chunk alone would not do: the mutation"
