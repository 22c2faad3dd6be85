"""What a job trains, without ranks."""

import pytest
import torch

from experiments.config import checks
from experiments.job.training import train
from experiments.job.workload import Workload


def workload(*overrides: str, world: int) -> Workload:
    with checks.composing():
        config = checks.compose_config(["model=mlp", "data=digits", *overrides])
    return Workload(config, 1, world, torch.device("cpu"))


def test_too_few_held_out_samples_are_an_error_before_the_first_step(tmp_path):
    """64 ranks have a batch to train on and none to evaluate on."""
    many = workload("run.eval_every=100", "data.batch_size=4", world=64)
    next(many.batches())
    with pytest.raises(ValueError, match="digits has 179 held-out samples, fewer than one global batch of 64 ranks times 4"):
        train(tmp_path, many, None)
