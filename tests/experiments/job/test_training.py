"""Words about training beside the records of its steps."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from experiments.job import worker


def test_the_summary_has_the_mean_loss_and_the_highest_peak_of_all_ranks(monkeypatch):
    """Three ranks; no peak where one of them measures no memory."""

    def over(*ranks):
        monkeypatch.setattr(worker.dist, "all_gather_object", lambda told, own: told.__setitem__(slice(None), [own, *ranks]))
        return worker.over_ranks(SimpleNamespace(processes=3), 1.5, 10)

    assert over((2.5, 30), (2.0, 20)) == (2.0, 30) and over((2.5, 30), (2.0, None)) == (2.0, None)


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
    loss = worker.train_step(workload, iter([{}, {}]), engine)
    assert (float(loss.as_subclass(torch.Tensor)), loss.dtype) == (1.5, torch.float64)
