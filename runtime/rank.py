"""One rank's process: reads its job, loads its share of the model, follows rank 0's plans. Started by `runtime.spawn`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback

from runtime import loading
from runtime.processes import follow
from runtime.shared import PeerLost, SharedBlock
from runtime.spawn import READY, RankJob
from runtime.stage_comm import StagePlace
from runtime.stages import StageLeader

PR_SET_PDEATHSIG = 1


class Rank:
    """A rank beside its stage's first, loaded. Raises what loading raises."""

    def __init__(self, job: RankJob) -> None:
        self._number, self._block = job.rank, SharedBlock.open(job.block)
        source = loading.open_source(job.model, job.speculative, job.weights)
        self._meeting = loading.meeting_of(source, job.config, job.speculative, job.backend, job.world)
        comm = self._meeting.comm(self._block, job.rank)
        place = StagePlace(job.stage, job.stages, job.device) if job.stages > 1 else None
        self._worker = loading.make_rank(source, job.config, job.speculative, job.activations, job.backend, comm, place=place)

    def follow(self) -> None:
        """Executes rank 0's plans until it says stop. Raises what the worker raises, and PeerLost."""
        follow(self._worker, self._meeting, self._block, self._number)
        self._worker.close()


def load_rank(job: RankJob, distributed: str = "local") -> Rank | StageLeader:
    """What a job asks for, loaded. distributed: who starts the other ranks of a stage whose first this is."""
    return Rank(job) if job.rank else StageLeader(job, distributed)


def die_with(parent: int) -> None:
    """Asks the kernel for SIGKILL when the parent's thread that started this process ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:  # it had ended before the request
        os._exit(1)


def main(argv: list[str]) -> int:
    pipe = int(argv[0])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    job = RankJob.from_json(sys.stdin.read())
    die_with(job.parent)
    try:
        rank = load_rank(job)
        os.write(pipe, READY)
        rank.follow()
    except Exception as error:
        if not isinstance(error, PeerLost):  # then the cause is another rank's to tell
            traceback.print_exc()
        with contextlib.suppress(OSError):
            os.write(pipe, f"{type(error).__name__}: {error}"[:4000].encode())
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # whatever threads the backend has left
