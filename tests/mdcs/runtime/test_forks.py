"""A process forked in a run ends as it likes, and the run goes on."""

from __future__ import annotations

import gc
import os
import signal
import time

import pytest

from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import How, Job, parallel_for, train


def forking(strategy: str, error: bool) -> tuple[int, int]:
    """Status of a child that leaves the with block, and the steps of the parent, which waits for it."""
    job, child = Job("line-8-16-4", steps=2), -1
    try:
        with parallel_for(job, How(strategy)) as (made, parallel, optimizer):
            train(job, made, parallel, optimizer)
            child = os.fork()
            if not child:
                if error:
                    raise RuntimeError("the child's own")
                return 0, 0  # leaves the block as a program that is done
            status = _status(child)
            train(job, made, parallel, optimizer)
            return status, parallel.steps
    finally:
        if not child:
            signal.alarm(5)  # what follows is the end of a program: nothing is left but garbage
            made = parallel = optimizer = None
            gc.collect()
            os._exit(0)


def _status(child: int) -> int:
    for _ in range(100):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize(("strategy", "error"), [("dp", False), ("fsdp", False), ("fsdp", True)])
def test_a_child_that_leaves_the_run_ends_and_the_run_goes_on(two: Ranks, strategy: str, error: bool) -> None:
    assert two.run(forking, strategy, error) == [(0, 4)] * 2
