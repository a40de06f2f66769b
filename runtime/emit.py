"""What a step says to each of its requests: decided at once, as the next step depends on who goes on; told when there is time.

`decide` finds which drawn tokens are kept and whether the request ends there. Tokens decide that, unless the request has stop
strings: then its text is needed, and made, at once. `tell` makes text, log-probabilities and counters of the rest, while the
device is busy with the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from runtime.accept import ranks_of
from runtime.masks import push
from runtime.rows import Share
from runtime.sequence import Sequence
from runtime.stats import EngineStats
from runtime.types import Emission, StepResult, TokenLogprob
from runtime.verdicts import Verdict

LOG = logging.getLogger(__name__)
NON_FINITE = "the model's output was not finite; the request was ended"
CONSTRAINT_FAILED = "the output could no longer be held to the requested form; the request was ended"
STREAM_FAILED = "the output could not be turned into text; the request was ended"


class ConstraintFailed(Exception):
    """A sequence's constraint gave up: a lexer or parser limit, or a fault of its own."""


@dataclass(slots=True)
class Outcome:
    """What became of one sequence's tree. text None: not made yet."""

    share: Share
    verdict: Verdict
    kept: int = 0  # of the verdict's tokens
    finish: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    text: str | None = None

    @property
    def tokens(self) -> list[int]:
        return self.verdict.tokens[: self.kept]


def goes_on(share: Share, verdict: Verdict) -> bool:
    """Whether nothing happens to a request but that it gets all drawn tokens, which are then appended. What is left of `decide`,
    the outcome and the history, can wait until the device is busy; `decide` itself does this and everything else."""
    sequence, tokens = share.sequence, verdict.tokens
    if verdict.corrupted or share.before or sequence.constraint is not None:
        return False
    try:
        pushed = sequence.foresee(tokens)
    except Exception:  # which `decide` meets again
        return False
    if pushed is None or pushed.finish is not None or pushed.kept != len(tokens):
        return False
    sequence.append(tokens)
    return True


def quiet(shares: Iterable[Share]) -> tuple[frozenset[int], int] | None:
    """Tokens that may end one of these requests, and how many each can get before one is at its limit: with fewer, and none of those,
    all of them go on. None where text or a constraint decides, or not everybody decodes."""
    ends, left = frozenset[int](), 1 << 31
    for share in shares:
        sequence = share.sequence
        if share.before or not share.nodes or sequence.constraint is not None or sequence.ends is None:
            return None
        if not sequence.ends <= ends:
            ends |= sequence.ends
        left = min(left, sequence.left)
    return ends, left


def decide(share: Share, verdict: Verdict) -> Outcome:
    """Cuts the drawn tokens where the request ends and appends what is kept. An error is this request's alone."""
    sequence, tokens, found = share.sequence, verdict.tokens, Outcome(share, verdict)
    try:
        if sequence.constraint is not None and sequence.constraint.error is not None:
            raise ConstraintFailed(sequence.constraint.error)
        pushed = sequence.foresee(tokens)
        if pushed is None:
            pushed = sequence.stream.push(tokens)
            found.text = pushed.text
        found.kept, found.finish = pushed.kept, pushed.finish
        if pushed.finish is not None:
            found.stop_reason = pushed.stop_reason
        elif pushed.kept != len(tokens):
            raise RuntimeError(f"the stream kept {pushed.kept} of {len(tokens)} tokens and goes on")
    except ConstraintFailed as failure:  # it masked nothing in this step, so the tokens drawn are not kept
        LOG.warning("request %s: %s", sequence.id, failure)
        found.text, found.finish, found.error = sequence.flush(), "error", CONSTRAINT_FAILED
    except Exception:
        found.text = found.text or ""
        _fail(found)
    if found.finish is None and verdict.corrupted:
        found.finish, found.error = "error", NON_FINITE
    if found.kept < len(tokens):
        tokens = tokens[: found.kept]
    sequence.append(tokens)
    sequence.history.push(tokens)
    if sequence.constraint is not None and found.finish is None:
        push(sequence.constraint, tokens)
    return found


def tell(found: Outcome, result: StepResult, stats: EngineStats) -> Emission:
    """What the request gets to hear; counts it. A stream that fails only now turns it into an error."""
    share, sequence, verdict = found.share, found.share.sequence, found.verdict
    if found.text is None:
        _make_text(found)
    if found.error == NON_FINITE:
        found.text = (found.text or "") + sequence.flush()
        stats.corrupted_requests += 1
    drafted, accepted = share.nodes - 1, max(0, min(len(verdict.path) - 1, found.kept))
    ranks = ranks_of(share.tree, verdict.path[1 : accepted + 1]) if drafted and share.tree is not None else ()
    if drafted:
        stats.count_draft(drafted, accepted, ranks)
    if found.finish is not None:
        stats.finished[found.finish] += 1
    return Emission(
        id=sequence.id,
        tokens=tuple(found.tokens),
        text=found.text or "",
        logprobs=_logprobs(sequence, verdict, found.kept, result),
        finish=found.finish,
        stop_reason=found.stop_reason,
        error=found.error,
        cached_tokens=sequence.cached_tokens or 0,
        accepted=accepted if drafted else None,
        drafted=drafted,
        ranks=ranks,
        admitted_s=sequence.admitted_s,
        experts=result.experts,
    )


def _make_text(found: Outcome) -> None:
    """Pushes the tokens that were kept; the stream must say what it had foreseen."""
    try:
        pushed = found.share.sequence.stream.push(found.tokens)
        if (pushed.kept, pushed.finish) != (found.kept, None if found.error else found.finish):
            raise RuntimeError(
                f"the stream foresaw {found.kept} tokens kept, end {found.finish}; it kept {pushed.kept}, end {pushed.finish}"
            )
        found.text = pushed.text
    except Exception:
        found.kept, found.text = 0, ""
        _fail(found)


def _fail(found: Outcome) -> None:
    LOG.exception("request %s: its text stream failed", found.share.sequence.id)
    found.finish, found.error = "error", STREAM_FAILED


def _logprobs(sequence: Sequence, verdict: Verdict, kept: int, result: StepResult) -> tuple[TokenLogprob, ...] | None:
    wanted = sequence.params.logprobs
    if wanted is None:
        return None
    rows = [verdict.first_out + node for node in verdict.path[:kept]]
    return tuple(
        TokenLogprob(
            token=int(result.target[row]),
            logprob=float(result.logp[row]),
            rank_ids=tuple(result.top_ids[row, :wanted].tolist()),
            rank_logprobs=tuple(result.top_logp[row, :wanted].tolist()),
        )
        for row in rows
    )
