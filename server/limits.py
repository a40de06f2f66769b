"""Ceilings: every number, list, string and queue that a request can reach, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may ask of the server before it is refused or cut off.

    The sampling fields' own ranges (n, stop strings, logit_bias …) live in runtime.types; these
    are the transport's. A refusal names the limit and both values.
    """

    max_body_bytes: int = 8 << 20  # a 262,144-token prompt as JSON integers takes 2 MB
    max_header_bytes: int = 32 << 10
    body_timeout_s: float = 30.0  # a body that trickles in slower is dropped
    max_prompts: int = 64  # prompts in one completion request
    max_choices: int = 128  # prompts x n
    max_messages: int = 4096
    max_tools: int = 256
    queue_events: int = 256  # undelivered events for each choice while the client does not read; one above: cut off
    queue_events_lag: int = 4096  # the same while it is the server that lags behind its engine
    queue_chars: int = 1 << 20  # undelivered text for each choice, in both cases
    keep_alive_s: float = 15.0  # an SSE comment after this much silence
    write_timeout_s: float = 60.0  # one write that the client does not take
    retry_after_s: int = 1
    request_timeout_s: float = 0.0  # from arrival to the last token; 0: as long as it takes
    probe_timeout_s: float = 30.0  # for the one token of /health_generate
    compile_s: float = 5.0  # one schema or grammar; what llguidance's own limits let pass takes below 0.3 s
    max_compiling: int = 32
    inline_chars: int = 20_000  # longer prompts are encoded off the event loop (about 2 ms of tiktoken)
    max_logged_fields: int = 64  # names of unknown request fields remembered for the log
