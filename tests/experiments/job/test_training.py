"""Words about training beside the records of its steps."""

from types import SimpleNamespace

import torch

from experiments.job import training


def test_the_summary_s_loss_is_the_mean_over_ranks(monkeypatch):
    """Three ranks, of which the others' losses add up to 4.5."""
    monkeypatch.setattr(training.dist, "all_reduce", lambda total: total.add_(4.5))
    workload = SimpleNamespace(device=torch.device("cpu"), processes=3)
    assert training.mean_over_ranks(workload, 1.5) == 2.0
