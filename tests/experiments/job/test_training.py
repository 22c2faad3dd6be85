"""Words about training beside the records of its steps."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from experiments.job import training


def test_the_summary_s_loss_is_the_mean_over_ranks(monkeypatch):
    """Three ranks, of which the others' losses add up to 4.5."""
    monkeypatch.setattr(training.dist, "all_reduce", lambda total: total.add_(4.5))
    workload = SimpleNamespace(device=torch.device("cpu"), processes=3)
    assert training.mean_over_ranks(workload, 1.5) == 2.0


class OnDevice(torch.Tensor):
    """A tensor that is not on the host, and must not be waited for."""

    is_cpu = False

    def item(self):
        raise AssertionError("the host waits for the device")


def test_a_loss_on_a_device_is_copied_without_a_wait():
    """A step of two micro-steps, whose losses are 1 and 2."""
    losses = iter([torch.tensor(1.0).as_subclass(OnDevice), torch.tensor(2.0).as_subclass(OnDevice)])
    engine = SimpleNamespace(micro_step=lambda last: nullcontext(), loss=lambda batch: next(losses), backward=lambda loss: None)
    workload = SimpleNamespace(config=SimpleNamespace(run=SimpleNamespace(accumulation=2)))
    loss = training.train_step(workload, iter([{}, {}]), engine)
    assert (float(loss.as_subclass(torch.Tensor)), loss.dtype) == (1.5, torch.float64)
