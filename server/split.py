"""Cuts the delivered text of one choice into reasoning and content, by token id.

Text reaches us later than its tokens (half characters and possible stop strings are held back), so
the cut is found in tokens and applied to characters: a </think> that the model spells in ordinary
tokens, or one that arrives in the middle of an accepted run, can not move it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from model.reasoning import ReasoningSplitter


class TextOfTokens(Protocol):
    def push(self, ids: Sequence[int], /) -> str: ...


class ReasoningCut:
    """Applies a ReasoningSplitter's verdict to text.

    `stream` must be fresh and decode as the delivered text was decoded; `shown` gives the characters
    that each token which may end the reasoning stands for in that text. </think> loses its text, the
    begin of a tool-call section keeps it, as content.
    """

    def __init__(self, splitter: ReasoningSplitter, stream: TextOfTokens, shown: Mapping[int, int]) -> None:
        self._splitter = splitter
        self._stream = stream
        self._shown = shown
        self._decoded = 0  # characters that the tokens up to the cut stand for
        self._delivered = 0  # characters handed out so far
        self._stop, self._resume = (0, 0)  # reasoning ends before _stop, content begins at _resume
        self.reasoning_tokens = 0

    @property
    def in_reasoning(self) -> bool:
        return self._splitter.in_reasoning

    def push(self, tokens: Sequence[int], text: str) -> tuple[str, str]:
        """(reasoning, content) of the text that came with these tokens, or that was held back before."""
        if self.in_reasoning:
            self._find(tokens)
        start = self._delivered
        self._delivered += len(text)
        if self.in_reasoning:
            return text, ""
        return text[: max(self._stop - start, 0)], text[max(self._resume - start, 0) :]

    def _find(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._decoded += len(self._stream.push((token,)))
            reasoning, content = self._splitter.push((token,))
            self.reasoning_tokens += len(reasoning)
            if not self.in_reasoning:
                self._stop = self._decoded - self._shown[token]
                self._resume = self._stop if content else self._decoded
                return
