"""A generated token stream becomes text, and ends where the request says: the one place that decides it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from runtime.types import SamplingParams


class TokenText(Protocol):
    """Turns tokens into text bit by bit; the model's tokenizer makes one for each request."""

    def push(self, ids: Sequence[int], /) -> str: ...

    def flush(self) -> str: ...


class Pushed(NamedTuple):
    """What one push added: `kept` tokens of it belong to the output, the stop token included."""

    kept: int
    text: str
    finish: str | None = None  # stop | length | abort
    stop_reason: int | str | None = None  # the stop string or the stop token id; None for end of sequence


_GOES_ON = tuple(Pushed(kept, "") for kept in range(32))


class _StopString:
    """Finds one stop string in text that comes in bits (Knuth, Morris, Pratt: no character is read twice).

    `matched` is the length of the longest end of the text so far that the stop begins with: exactly
    what must be held back.
    """

    __slots__ = ("_back", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        back = [0] * len(stop)  # back[i]: longest proper border of stop[: i + 1]
        k = 0
        for i in range(1, len(stop)):
            while k and stop[i] != stop[k]:
                k = back[k - 1]
            if stop[i] == stop[k]:
                k += 1
            back[i] = k
        self._back = back

    def feed(self, text: str, live: bool) -> int:
        """Length of `text` up to the end of the first match in it, 0 if none. Not live: matches pass unnoticed."""
        stop, back, k = self.stop, self._back, self.matched
        i, size, whole = 0, len(text), len(stop)
        while i < size:
            if k == 0:
                i = text.find(stop[0], i)
                if i < 0:
                    break
                k = 1
            else:
                while k and stop[k] != text[i]:
                    k = back[k - 1]
                if stop[k] != text[i]:
                    continue  # k is 0: find skips on from here
                k += 1
            i += 1
            if k == whole:
                if live:
                    return i
                k = back[k - 1]
        self.matched = k
        return 0


class TextStream:
    """One request's tokens in, its text out, cut at whatever comes first.

    Tokens count one by one, so the result does not depend on how they are grouped into pushes:

    - end of sequence (unless ignore_eos) or a stop token: finish "stop"; the token is kept, its text
      only with include_stop_str_in_output;
    - a stop string: "stop"; the token that completes it is kept, text from the match on is not (with
      include_stop_str_in_output: text after it). If one token completes several, the match that
      begins first counts, then the longer;
    - token number max_tokens: "length", unless it is one of the above.

    None of the stops counts within the first min_tokens tokens. Text that a stop string may begin
    with is held back until that is decided.
    """

    __slots__ = ("_count", "_ends", "_eos", "_finish", "_held", "_include", "_limit", "_min", "_stop_reason", "_stops", "_text")

    def __init__(self, token_stream: TokenText, params: SamplingParams, eos_ids: frozenset[int]) -> None:
        self._text = token_stream
        self._eos = frozenset() if params.ignore_eos else eos_ids
        self._ends = self._eos | frozenset(params.stop_token_ids)
        self._stops = [_StopString(stop) for stop in dict.fromkeys(params.stop)]
        self._include = params.include_stop_str_in_output
        self._limit = params.max_tokens
        self._min = params.min_tokens
        self._count = 0
        self._held = ""
        self._finish: str | None = None
        self._stop_reason: int | str | None = None

    @property
    def finish(self) -> str | None:
        """stop, length or abort once ended, else None."""
        return self._finish

    @property
    def ends(self) -> frozenset[int] | None:
        """Tokens that may end it before its limit; None: its text may."""
        return None if self._stops else self._ends

    def foresee(self, tokens: Sequence[int]) -> Pushed | None:
        """What `push` will say of the next tokens, all but the text, at a tenth of its time; None where the text may end it."""
        if self._stops or self._finish is not None:
            return None
        if self._ends.isdisjoint(tokens) and (self._limit is None or self._count + len(tokens) < self._limit):
            return _GOES_ON[len(tokens)] if len(tokens) < len(_GOES_ON) else Pushed(len(tokens), "")
        for kept, token in enumerate(tokens, 1):
            if token in self._ends and self._count + kept > self._min:
                return Pushed(kept, "", "stop", None if token in self._eos else int(token))
            if self._count + kept == self._limit:
                return Pushed(kept, "", "length")
        return Pushed(len(tokens), "")

    def push(self, tokens: Sequence[int]) -> Pushed:
        """Takes the next tokens. After the end nothing is kept and the finish is repeated."""
        if self._finish is not None:
            return Pushed(0, "", self._finish, self._stop_reason)
        text = ""
        kept = 0
        for token in tokens:
            kept += 1
            self._count += 1
            live = self._count > self._min
            if live and token in self._ends:
                text += self._end_at_token(token)
                break
            last = self._count == self._limit
            new = self._text.push((token,))
            if last:
                new += self._text.flush()
            if new:
                text += self._until_stop(new, live) if self._stops else new
            if self._finish is not None:
                break
            if last:
                text += self._held
                self._held = ""
                self._finish = "length"
                break
        return Pushed(kept, text, self._finish, self._stop_reason)

    def flush(self) -> str:
        """Releases held text and the rest of a broken character, for a request that something else ends.

        More tokens may follow; what was released is no longer part of a stop string.
        """
        if self._finish is not None:
            return ""
        text = self._held + self._text.flush()
        self._held = ""
        for stop in self._stops:
            stop.matched = 0
        return text

    def abort(self) -> Pushed:
        """Ends the stream from outside, releasing what is held. A stream that has ended stays as it ended."""
        if self._finish is not None:
            return Pushed(0, "", self._finish, self._stop_reason)
        text = self.flush()
        self._finish = "abort"
        return Pushed(0, text, "abort")

    def _end_at_token(self, token: int) -> str:
        self._finish = "stop"
        self._stop_reason = None if token in self._eos else int(token)
        shown = self._text.push((token,)) if self._include else ""
        text = self._held + shown + self._text.flush()
        self._held = ""
        return text

    def _until_stop(self, new: str, live: bool) -> str:
        """What of held + new can go out; ends the stream if a stop string is complete."""
        best: tuple[int, int, str] | None = None  # (begin, -length, stop) in held + new
        hold = 0
        for scan in self._stops:
            end = scan.feed(new, live)
            if end:
                size = len(scan.stop)
                found = (len(self._held) + end - size, -size, scan.stop)
                best = found if best is None or found < best else best
            elif scan.matched > hold:
                hold = scan.matched
        text = self._held + new
        if best is None:
            self._held = text[len(text) - hold :]
            return text[: len(text) - hold]
        begin, minus_size, self._stop_reason = best
        self._finish = "stop"
        self._held = ""
        return text[: begin - minus_size if self._include else begin]
