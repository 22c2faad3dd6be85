"""A stand-in has blocks of given bytes and times, and trains like any model; only its computing waits."""

import math

import pytest
import torch

from experiments.tasks import task as waiting
from experiments.tasks.model import Timed
from mdcs.sizes import MIB


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the clock was asked to wait for, which nobody does."""
    asked: list[float] = []
    monkeypatch.setattr(waiting.Clock, "wait", lambda self, seconds: asked.append(seconds))
    return asked


def test_blocks_are_made_of_their_numbers(waits: list[float]) -> None:
    task = Timed(name="t", layers=3, block_mib=0.5, forward_ms=3, backward_ms=8, tensors=4).build()
    assert [p.numel() * 4 for p in task.model.parameters()] == [MIB // 8] * 12
    task.loss(task.model, task.example_batch(2)).backward()
    assert waits == pytest.approx([3e-3] * 3 + [2e-3] * 12)


@pytest.mark.parametrize(("checkpointing", "kept"), [(False, 3), (True, 0)])
def test_a_block_keeps_its_activations_unless_it_recomputes_them(waits: list[float], checkpointing: bool, kept: int) -> None:
    task = Timed(name="t", layers=3, block_mib=0.02, activations_mib=2, checkpointing=checkpointing).build()
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor.nbytes), lambda _: None):
        task.loss(task.model, task.example_batch(2))
    assert sizes.count(2 * MIB) == kept


def test_every_element_gets_a_gradient_and_the_loss_falls(waits: list[float]) -> None:
    task = Timed(name="t", layers=3, block_mib=0.02).build()
    batch = task.example_batch(4)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        loss = task.loss(task.model, batch)
        loss.backward()
        assert all(p.grad is not None and bool((p.grad != 0).all()) for p in task.model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert math.isfinite(losses[0]) and losses[-1] < 0.5 * losses[0]


def test_the_loss_depends_on_every_unit(waits: list[float]) -> None:
    task = Timed(name="t", layers=3, block_mib=0.02).build()
    batch = task.example_batch(4)
    before = task.loss(task.model, batch)
    for p in task.model.parameters():
        with torch.no_grad():
            p.add_(0.1)
            assert task.loss(task.model, batch) != before
            p.sub_(0.1)


class _Time:
    """Sleeps that last a little longer than they should."""

    def __init__(self, late: float) -> None:
        self.now, self.late = 100.0, late

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late


def test_what_a_wait_overslept_the_next_is_shorter_by(monkeypatch: pytest.MonkeyPatch) -> None:
    time = _Time(late=0.002)
    monkeypatch.setattr(waiting, "time", time)
    clock = waiting.Clock()
    for _ in range(10):
        clock.wait(0.03)
    assert time.now == pytest.approx(100 + 10 * 0.03 + 0.002)


def test_a_slot_takes_its_time_from_when_it_begins_once_compute_was_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    time = _Time(late=0.002)
    monkeypatch.setattr(waiting, "time", time)
    clock = waiting.Clock()
    clock.wait(0.03)
    time.now += 0.5  # for a message
    clock.wait(0.03)
    assert time.now == pytest.approx(100 + 0.032 + 0.5 + 0.032)


def test_it_says_what_it_is() -> None:
    made = Timed(name="t")
    assert (made.label, made.made_of) == ("t, timed compute", {"compute": "timed"})
