"""`experiments.job.worker` whose second rank raises in the middle of a step, in the backward pass."""

import os
import sys
from pathlib import Path

from experiments.job import worker
from launch import status
from tests.experiments import hurry  # noqa: F401

train_step = worker.train_step


def fail(gradient):
    raise ZeroDivisionError("the test fails in backward, as told")


def train_step_with_a_fault(workload, batches, engine):
    said = status.current()
    if os.environ["RANK"] == "1" and said is not None and said.step == 3:
        handle = workload.model.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        try:
            return train_step(workload, batches, engine)
        finally:
            handle.remove()
    return train_step(workload, batches, engine)


worker.train_step = train_step_with_a_fault
worker.main(Path(sys.argv[1]))
