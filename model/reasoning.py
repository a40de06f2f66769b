"""Whether a prompt leaves the model inside its reasoning; model/tool_parser.py finds where that ends."""

from __future__ import annotations

from collections.abc import Sequence


def starts_in_reasoning(prompt_ids: Sequence[int], think_begin_id: int) -> bool:
    """Whether a prompt leaves the model inside its reasoning: its last token opens it.

    Only the end of the prompt counts: earlier turns hold closed reasoning of their own.
    """
    return len(prompt_ids) > 0 and prompt_ids[-1] == think_begin_id
