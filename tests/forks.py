"""Several processes for a test, by fork: quick, and the call may be a closure. Results come back by pipe.

Where a process may have a GPU's context, which no fork survives, they start afresh: then the call is a function of a module.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from runtime.env import load_env


def on_ranks(world: int, call: Callable[[int], Any], timeout_s: float = 60.0, start: str = "fork") -> list[Any]:
    """call(rank) in a process each; their results in rank order. Raises AssertionError with the traceback of one that fails."""
    context: Any = multiprocessing.get_context(start)
    timeout_s *= 10 if load_env().shim_sanitize else 1  # AddressSanitizer slows who waits in a kernel
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    ranks = [context.Process(target=_run, args=(call, rank, pipes[rank][1])) for rank in range(world)]
    for process in ranks:
        process.start()
    try:
        results = []
        for rank, (ours, _) in enumerate(pipes):
            if ours not in wait([ours, ranks[rank].sentinel], timeout_s):
                ranks[rank].join(1.0)  # the sentinel may be early
            assert ours.poll(0), f"rank {rank} has not answered, its process has exit code {ranks[rank].exitcode}"
            good, result = ours.recv()
            assert good, f"rank {rank}:\n{result}"
            results.append(result)
        return results
    finally:
        for process, pipe in zip(ranks, pipes, strict=True):
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
            for end in pipe:
                end.close()


def _run(call: Callable[[int], Any], rank: int, pipe: Any) -> None:
    try:
        pipe.send((True, call(rank)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
