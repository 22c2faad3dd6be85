"""The thread that answers the other ranks lives on after an error, and tells them of it."""

from __future__ import annotations

import time
import weakref

import torch.distributed as dist

from mdcs.runtime.errors import ErrorContext, FailureChannel
from tests.mdcs.runtime.ranks import Ranks


class Duty:
    def __init__(self) -> None:
        self.calls = 0

    def do(self, store: dist.Store) -> None:
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("out of memory")


def fail_once() -> tuple[str, bool]:
    """Return what a rank hears when rank 0 could not do its duty, and whether rank 0's thread tried again."""
    rank, duty = dist.get_rank(), Duty()
    words = FailureChannel(ErrorContext(rank), "a run", 2)
    if rank == 0:
        words.duties.append(weakref.WeakMethod(duty.do))
    deadline = time.monotonic() + 10
    while not (words.peer_failure() and (rank or duty.calls > 1)) and time.monotonic() < deadline:
        time.sleep(0.05)
    heard = words.peer_failure()
    dist.barrier()
    words.end()
    return heard, duty.calls > 1


def test_an_error_of_the_thread_that_answers_is_published(two: Ranks):
    (heard, again), (also_heard, _) = two.run(fail_once)
    assert again and heard == also_heard and "rank 0" in heard and "out of memory" in heard
