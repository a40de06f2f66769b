"""The text that scripted models speak: a token is a hash of the path before it; and drafters that know part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np

from runtime.types import Request, SamplingParams

EMPTY_PATH = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
TOP_K = 4  # choices a depth of every scripted drafter
SURE, UNSURE = -0.1, -3.0  # log-probabilities of rank 0 and rank 1; each further rank is one lower


def mix(a: int, b: int) -> int:
    """64-bit hash of a pair (splitmix64's finaliser)."""
    x = (a ^ (b + EMPTY_PATH + ((a << 6) & MASK) + (a >> 2))) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def path_of(tokens: Iterable[int], start: int = EMPTY_PATH) -> int:
    for token in tokens:
        start = mix(start, int(token))
    return start


@dataclass
class Language:
    """The target: which token follows a path. `say` fixes what follows a prompt."""

    vocab_size: int = 97
    said: dict[int, int] = field(default_factory=dict)

    def say(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        path = path_of(prompt)
        for token in tokens:
            self.said[path] = token
            path = mix(path, token)

    def likeliest(self, path: int) -> int:
        return self.said.get(path, mix(path, 1) % self.vocab_size)

    def draw(self, path: int, pos: int, seed: int, temperature: float, adjust: frozenset[tuple[int, float, float]] = frozenset()) -> int:
        """The token at `pos` after `path`: the likeliest, or at temperature another one in 3 of 10 cases by (seed, pos).

        Adjustments of the row change 1 of 3 tokens, by their whole set.
        """
        if temperature > 0 and mix(mix(seed, pos), path) % 10 < 3:
            return mix(mix(path, seed), pos) % self.vocab_size
        if adjust and mix(path, hash_of(adjust)) % 3 == 0:
            return mix(mix(path, 2), hash_of(adjust)) % self.vocab_size
        return self.likeliest(path)


def hash_of(adjust: frozenset[tuple[int, float, float]]) -> int:
    return path_of(int.from_bytes(repr(entry).encode(), "big") & MASK for entry in sorted(adjust))


def expected_tokens(language: Language, request: Request, max_len: int, eos: Iterable[int] = ()) -> list[int]:
    """What plain decoding gives, worked out without an engine. Knows max_tokens, EOS and stop tokens."""
    params, prompt = request.sampling, [int(t) for t in request.prompt]
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    most = min(params.max_tokens or max_len, max_len - len(prompt))
    path, out = path_of(prompt), []
    while len(out) < most:
        token = language.draw(path, len(prompt) + len(out), request.seed, 0.0 if params.greedy else params.temperature)
        out.append(token)
        path = mix(path, token)
        if token in ends and len(out) > params.min_tokens:
            break
    return out


# A drafter's guess for one root: (right tokens [D], how many guesses came before) -> ids [D, TOP_K], logp [D, TOP_K].
Guess = Callable[[list[int], int, int], tuple[np.ndarray, np.ndarray]]


def accept_runs(lengths: Sequence[int]) -> Guess:
    """Guesses that are right for exactly lengths[0] tokens, then for lengths[1] at the next root, and so on in a circle."""
    runs: Iterator[int] = cycle(lengths)

    def guess(right: list[int], number: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        run = next(runs)
        return _ranked([0 if depth < run else None for depth in range(len(right))], right, vocab_size)

    return guess


def scattered(seed: int = 0, hit: float = 0.8) -> Guess:
    """Guesses whose right token stands at a random rank, or nowhere in 1 - hit of the cases."""

    def guess(right: list[int], number: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([seed, number])
        ranks = [int(rng.choice(TOP_K, p=[0.6, 0.2, 0.15, 0.05])) if rng.random() < hit else None for _ in right]
        return _ranked(ranks, right, vocab_size)

    return guess


def _ranked(ranks: Sequence[int | None], right: Sequence[int], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array([[(token + 1 + k) % vocab_size for k in range(TOP_K)] for token in right], np.int32)
    for depth, rank in enumerate(ranks):
        if rank is not None:
            ids[depth, rank] = right[depth]
    logp = np.array([SURE] + [UNSURE - k for k in range(TOP_K - 1)], np.float32)
    return ids, np.tile(logp, (len(right), 1))


class Letters:
    """Token text for tests: token t is one letter, chr(0x100 + t)."""

    def push(self, ids: Sequence[int], /) -> str:
        return "".join(chr(0x100 + i) for i in ids)

    def flush(self) -> str:
        return ""


def make_request(id: str, prompt: Sequence[int], *, seed: int = 0, cache_salt: bytes = b"", **sampling: object) -> Request:
    params = SamplingParams(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return Request(id, np.asarray(prompt, np.int32), params, seed, cache_salt=cache_salt)
