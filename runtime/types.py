"""Values of a step: what the scheduler, the executors and the streams hand to each other.

Every array states its shape and dtype. The letters are the same everywhere:

    M rows of a bucket        B sequences          T nodes of a tree (root included)
    D draft depth             K choices a depth    W 64-bit words of ancestor bits
    H hidden                  A heads              L latent, R rope, N nope, U value, C = L + R
    E experts, k a token      F expert width       G quantisation group
    V vocabulary              S cache slots        P pages of a sequence
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from runtime.constraint import Constraint, StructuredOutputs

I16 = NDArray[np.int16]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]
Bools = NDArray[np.bool_]
Array = NDArray[Any]

MAX_LOGPROBS = 20  # OpenAI's ceiling for top_logprobs
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64  # each may become an adjustment of every row while min_tokens holds
MAX_LOGIT_BIAS = 1024
MAX_CHOICES = 8
MAX_PRIORITY = 1 << 20
# SamplingParams.extra_args, what vLLM calls vllm_xargs over HTTP: name -> (type, lowest, highest)
EXTRA_ARGS: dict[str, tuple[type, float, float]] = {
    "tree_budget": (int, 0, 1023),  # most draft nodes of this request in a step; 0: it is not drafted for
    "draft_weight": (float, 0.1, 10.0),  # what a token of it is worth beside those of others, where all share one node budget
    "tpot_target_ms": (float, 0.1, 1e6),  # time an output token may take: behind it the weight grows, ahead of it it falls
}
GREEDY_TEMPERATURE = 1e-5  # below this a temperature means argmax


class InvalidRequest(ValueError):
    """A request that can not be served as it stands; `field` names the offending parameter."""

    def __init__(self, field_name: str, message: str) -> None:
        super().__init__(f"{field_name}: {message}")
        self.field = field_name


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and where a generation ends. Field names and defaults are vLLM's.

    A token is a function of the target's logits on its own path, these values and
    (seed, position): never of the batch, the draft tree or the bucket.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16  # None: up to the context
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # alternatives a token; 0: the drawn token's alone
    structured_outputs: StructuredOutputs | None = None
    priority: int = 0  # lower is served earlier under scheduling_policy "priority"; vLLM takes it beside the parameters
    extra_args: Mapping[str, float] = field(default_factory=dict)  # EXTRA_ARGS

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        object.__setattr__(self, "extra_args", dict(self.extra_args or {}))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self.check()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    def check(self) -> None:
        """Raises InvalidRequest naming the field, its value and the legal range."""
        bounded: tuple[tuple[str, float, float], ...] = (
            ("temperature", 0.0, 2.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", 0.0, 2.0),
        )
        for name, low, high in bounded:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not low <= value <= high:
                raise InvalidRequest(name, f"{value!r} is not a number in [{low}, {high}]")
        if self.top_p == 0.0:
            raise InvalidRequest("top_p", "0 keeps no token; it must be above 0 and at most 1")
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("repetition_penalty", "0 divides by zero; it must be above 0 and at most 2")
        for name, low, high in (
            ("n", 1, MAX_CHOICES),
            ("top_k", 0, 2**31 - 1),
            ("min_tokens", 0, 2**31 - 1),
            ("seed", -(2**63), 2**63 - 1),
            ("max_tokens", 1, 2**31 - 1),
            ("logprobs", 0, MAX_LOGPROBS),
            ("priority", -MAX_PRIORITY, MAX_PRIORITY),
        ):
            value = getattr(self, name)
            if value is None and name in ("seed", "max_tokens", "logprobs"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise InvalidRequest(name, f"{value!r} is not an integer in [{low}, {high}]")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"{self.min_tokens} is above max_tokens {self.max_tokens}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest("stop", f"{len(self.stop)} stop strings; at most {MAX_STOP_STRINGS}")
        if any(not isinstance(s, str) or not 0 < len(s) <= MAX_STOP_CHARS for s in self.stop):
            raise InvalidRequest("stop", f"each stop must be a string of 1 to {MAX_STOP_CHARS} characters")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest("stop_token_ids", f"{len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest("logit_bias", f"{len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS}")
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias) or not -100.0 <= bias <= 100.0:
                raise InvalidRequest("logit_bias", f"{bias!r} for token {token} is not in [-100, 100]")
        for name, given in self.extra_args.items():
            _check_extra(name, given)

    def check_tokens(self, vocab_size: int) -> None:
        """Raises InvalidRequest if a token id lies outside [0, vocab_size)."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", tuple(self.logit_bias))):
            for token in ids:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                    raise InvalidRequest(name, f"token id {token!r} is outside the vocabulary [0, {vocab_size})")

    def replace(self, **changes: Any) -> SamplingParams:
        return dataclasses.replace(self, **changes)


def _check_extra(name: str, given: object) -> None:
    if name not in EXTRA_ARGS:
        raise InvalidRequest("extra_args", f"{name[:40]!r} is unknown; known: {', '.join(EXTRA_ARGS)}")
    kind, low, high = EXTRA_ARGS[name]
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not isinstance(given, (int, kind)) or not low <= given <= high:
        what = "an integer" if kind is int else "a number"
        raise InvalidRequest(f"extra_args.{name}", f"{given!r} is not {what} in [{low:g}, {high:g}]")


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. A request with n > 1 becomes n of these before it reaches the scheduler."""

    id: str
    prompt: I32  # [n]
    sampling: SamplingParams
    seed: int  # u64, resolved: the one that keys every draw
    arrived_s: float = 0.0
    cache_salt: bytes = b""  # prefix pages are shared between equal salts only
    constraint: Constraint | None = None  # sampling.structured_outputs, compiled


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Scheduler to drafter: context rows to materialise, then a block for each root.

    tap_rows index the rows of the last executed StepPlan; tap_pos and tap_slot say where the
    context K/V of that committed token goes. B may be 0 (context only), n may be 0.
    """

    root: I32  # [B] bonus token
    pos: I32  # [B] its position = committed tokens of the sequence
    pages: I32  # [B, P]
    tap_rows: I32  # [n]
    tap_pos: I32  # [n]
    tap_slot: I32  # [n]


@dataclass(frozen=True, slots=True)
class DraftLogits:
    """Drafter to tree: for each depth the K likeliest tokens, by falling log-probability.

    logp is a log-softmax over the full vocabulary, never re-normalised over the K.
    """

    ids: I32  # [B, D, K]
    logp: F32  # [B, D, K]


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Nodes of one stream; node 0 is the root (the bonus token) and parent[t] < t."""

    token: I32  # [T]
    parent: I16  # [T], parent[0] = -1
    depth: I16  # [T], depth[0] = 0

    def __len__(self) -> int:
        return len(self.token)

    @staticmethod
    def root_only(token: int) -> DraftTree:
        return DraftTree(np.array([token], np.int32), np.array([-1], np.int16), np.array([0], np.int16))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward step of the target, for all streams: the protocol between scheduler and ranks.

    Rows of a sequence are consecutive: row0[b] is its first, ctx[b] the committed tokens before
    it. A prefill chunk, a single token and a draft tree differ in nothing but their ancestor bits:
    bit j of ancestors[i] says that row i sees node j, the row row0[seq[i]] + j (itself included).
    """

    bucket: int  # M the step is launched with; rows m <= bucket are live
    token: I32  # [m]
    pos: I32  # [m] rotary position = ctx + depth
    slot: I32  # [m] cache slot of the row's own K/V
    seq: I32  # [m] sequence of the row
    ancestors: U64  # [m, W]
    ctx: I32  # [B]
    row0: I32  # [B]
    pages: I32  # [B, P]
    moves: I32  # [n, 2] slots (from, to) of the last step's accepted nodes, done first
    out_rows: I32  # [r] rows whose next token is wanted, rising
    seed: U64  # [B]
    temperature: F32  # [B] 0: argmax
    top_p: F32  # [B]
    min_p: F32  # [B]
    top_k: I32  # [B] 0: all
    logprobs: I32  # [B] alternatives wanted; -1: none, not even the drawn token's
    adjust_seq: I32  # [a, 2] (sequence, token): adjusts the logit in every row of the sequence
    adjust_seq_by: F32  # [a, 2] (scale, add): l > 0 ? l / scale : l * scale, then + add
    adjust_row: I32  # [c, 2] (row, token): the same for one row, its own path's tokens
    adjust_row_by: F32  # [c, 2]
    mask_rows: I32  # [g] out_rows whose next token is constrained, rising
    masks: U32  # [g, ceil(V / 32)] bit i % 32 of word i / 32: token i may be drawn

    @property
    def m(self) -> int:
        return len(self.token)

    @property
    def drawing(self) -> tuple[Array, ...]:
        """What op `sample` takes of a plan, after the logits and in the order of its signature."""
        own = (self.out_rows, self.seq, self.pos, self.temperature, self.top_p, self.min_p, self.top_k, self.seed, self.logprobs)
        return (*own, self.adjust_seq, self.adjust_seq_by, self.adjust_row, self.adjust_row_by, self.mask_rows, self.masks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the target said at the r out_rows of a plan, in their order."""

    target: I32  # [r] the token drawn there
    logp: F32  # [r] its log-probability in the raw distribution (before temperature and penalties)
    finite: Bools  # [r] False: the row held NaN or Inf; its token means nothing
    top_ids: I32  # [r, n] the n likeliest tokens, n = the largest logprobs of the plan (may be 0)
    top_logp: F32  # [r, n]
    step_us: float
    experts: float = 0.0  # distinct experts that a layer of rank 0 hit, mean over all of them, on a GPU over 8 at most; 0: not counted


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The walk down one tree. tokens = the accepted nodes' tokens, then the new bonus."""

    path: I32  # [n] accepted nodes, root first
    tokens: I32  # [n] target tokens along the path: what is emitted
    moves: I32  # [j, 2] (node, place) pairs with node != place, rising


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One emitted token in the raw distribution, with the alternatives asked for."""

    token: int
    logprob: float
    rank_ids: tuple[int, ...] = ()
    rank_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Emission:
    """What one step adds to one request. finish: stop | length | abort | error, or None."""

    id: str
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: str | None = None
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it
    error: str | None = None
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    accepted: int | None = None  # draft nodes accepted in this step; None: it was no speculative step
    drafted: int = 0  # draft nodes verified in this step, root not counted
    ranks: tuple[int, ...] = ()  # of the accepted nodes among their siblings, 0 the likeliest
    admitted_s: float = 0.0  # time.monotonic() when the request first got a seat; 0: never
    experts: float = 0.0  # StepResult.experts of this step
