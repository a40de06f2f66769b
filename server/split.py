"""Cuts the delivered text of one choice into its parts, by token id.

Text reaches us later than its tokens (half characters and possible stop strings are held back), so
parts are found in tokens and applied to characters: a marker that the model spells in ordinary
tokens, or one that arrives in the middle of an accepted run, can not move a cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from model.tool_parser import OutputMachine, Part

Piece = tuple[Part, str]


class TextOfTokens(Protocol):
    def push(self, ids: Sequence[int], /) -> str: ...


class OutputCut:
    """Applies an OutputMachine's verdict to text.

    `stream` must be fresh and decode as the delivered text was decoded; `shown` gives the characters
    that each marker token stands for in that text.
    """

    def __init__(self, machine: OutputMachine, stream: TextOfTokens, shown: Mapping[int, int]) -> None:
        self.machine = machine
        self._stream = stream
        self._shown = shown
        self._spans: deque[tuple[Part, int]] = deque()  # of text decoded and not yet delivered; marks have 0 characters

    def push(self, tokens: Sequence[int], text: str) -> list[Piece]:
        """Parts of the text that came with these tokens, or that was held back before; marks as soon as all before them is out."""
        for token in tokens:
            self._add(token)
        pieces: list[Piece] = []
        at, size = 0, len(text)
        while self._spans:
            part, length = self._spans[0]
            if length and at == size:
                return pieces
            taken = min(length, size - at)
            if taken or not length:
                _append(pieces, part, text[at : at + taken])
            at += taken
            if taken < length:
                self._spans[0] = (part, length - taken)
            else:
                self._spans.popleft()
        if at < size:  # what the end of the stream made of a broken character
            _append(pieces, self.machine.state, text[at:])
        return pieces

    def _add(self, token: int) -> None:
        machine = self.machine
        if machine.settled and not self._spans:
            return  # all that follows is content
        before = machine.state
        own, mark = machine.step(token)
        length = len(self._stream.push((token,)))
        shown = min(self._shown.get(token, length), length)
        if length > shown:  # a marker ends the half character before it
            self._spans.append((before, length - shown))
        if mark is not None:
            self._spans.append((mark, 0))
        if shown:
            self._spans.append((own, shown))


def _append(pieces: list[Piece], part: Part, text: str) -> None:
    if text and pieces and pieces[-1][0] is part:
        pieces[-1] = (part, pieces[-1][1] + text)
    else:
        pieces.append((part, text))
