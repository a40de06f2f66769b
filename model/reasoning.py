"""Where reasoning ends in a generated token stream: by token id, never by text."""

from __future__ import annotations

from collections.abc import Sequence


def starts_in_reasoning(prompt_ids: Sequence[int], think_begin_id: int) -> bool:
    """Whether a prompt leaves the model inside its reasoning: its last token opens it.

    Only the end of the prompt counts: earlier turns hold closed reasoning of their own.
    """
    return len(prompt_ids) > 0 and prompt_ids[-1] == think_begin_id


class ReasoningSplitter:
    """Splits generated ids into reasoning and content; one for each request.

    Reasoning ends at think_end_id, or at tool_section_begin_id (a model may call a tool without
    closing its reasoning). The think tokens themselves belong to neither part; the section token is
    content, for the tool parser. Text that spells "</think>" in ordinary tokens is just text.
    think_begin_id: for models whose prompt does not open the reasoning: as the first generated
    token it opens it.
    """

    __slots__ = ("_begin", "_end", "_first", "_section", "in_reasoning")

    def __init__(
        self, think_end_id: int, tool_section_begin_id: int | None, starts_in_reasoning: bool, think_begin_id: int | None = None
    ) -> None:
        self._end = think_end_id
        self._section = tool_section_begin_id
        self._begin = think_begin_id
        self._first = True
        self.in_reasoning = starts_in_reasoning

    def push(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """(reasoning ids, content ids) of these tokens, each in order."""
        reasoning: list[int] = []
        content: list[int] = []
        for token in ids:
            first, self._first = self._first, False
            if token == self._end:
                self.in_reasoning = False
            elif token == self._begin:
                self.in_reasoning = self.in_reasoning or first
            else:
                if token == self._section:
                    self.in_reasoning = False
                (reasoning if self.in_reasoning else content).append(token)
        return reasoning, content
