"""A stand-in has the units, bytes and slots of what it stands for, and trains like any model; only its computing waits."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import mdcs
from experiments.tasks import waiting
from experiments.tasks.stand_in import Use, of_profile
from experiments.tasks.timed import Timed
from mdcs.model.hooks import Hooks
from mdcs.options import OptionError
from mdcs.profile.link import Link
from mdcs.profile.schema import Profile, Slot, Unit
from mdcs.sizes import MIB

CHAIN = ((0, 1, 2), (2, 1, 0))  # forward slots, backward slots: their units
TIED = ((0, 1, 2, 0), (0, 2, 1, 0))
NESTED = ((0, 1, 2, 3), (3, 0, 2, 1))  # 1 and 2 run inside of 0
FROZEN_FIRST = ((0, 1, 2), (2, 1))


def profile(forward: tuple[int, ...], backward: tuple[int, ...], **changes: Any) -> Profile:
    """Every forward slot takes 1 ms more than the one before it and keeps 1000 bytes more; backward takes twice as long."""
    kept = [1000 * (i + 1) for i in range(len(forward))]
    live = [sum(kept[:i]) for i in range(len(forward) + 1)]
    slots = [Slot(u, "F", 1e-3 * (i + 1), live[i], live[i + 1] + 50) for i, u in enumerate(forward)]
    slots += [Slot(u, "B", 2e-3 * (i + 1), live[-1], live[-1] + 70) for i, u in enumerate(backward)]

    def spans(unit: int) -> Unit:
        first, last = forward.index(unit), len(forward) - 1 - forward[::-1].index(unit)
        back = (backward.index(unit), len(backward) - 1 - backward[::-1].index(unit)) if unit in backward else None
        return Unit(f"u{unit}", (40 + unit,), back is not None, (first, last), back)

    units = tuple(spans(unit) for unit in range(max(forward) + 1))
    return Profile(units, tuple(slots), 2, Link.uniform(1, 10), **changes)


def saved(folder: Path, of: Profile) -> str:
    path = folder / "profile.json"
    path.write_text(of.to_json(), encoding="utf-8")
    return str(path)


class Slots:
    """Hears which slots a model runs."""

    accumulates = False

    def __init__(self) -> None:
        self.heard: list[tuple[int, str]] = []

    def forward_begin(self, unit: int) -> None:
        self.heard.append((unit, "F"))

    def backward_begin(self, unit: int) -> None:
        self.heard.append((unit, "B"))

    def forward_end(self, unit: int) -> None: ...

    def used_outside(self, unit: int, is_side: bool) -> None: ...

    def recomputed(self, unit: int) -> None: ...

    def gradient(self, unit: int, index: int, parameter: torch.nn.Parameter) -> None: ...

    def backward_end(self) -> None: ...

    def side_begin(self, unit: int, in_backward: bool) -> None: ...

    def side_end(self, unit: int) -> None: ...

    def side_backward_end(self) -> None: ...


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the clock was asked to wait for, which nobody does."""
    asked: list[float] = []
    monkeypatch.setattr(waiting.Clock, "wait", lambda self, seconds: asked.append(seconds))
    return asked


@pytest.mark.parametrize("slots", [CHAIN, TIED, NESTED, FROZEN_FIRST])
def test_the_stand_in_of_a_profile_runs_its_slots_in_its_order(tmp_path: Path, waits: list[float], slots: Any) -> None:
    source = profile(*slots)
    task = Timed(name="t", profile=saved(tmp_path, source), tensors=1).build()
    units = mdcs.partition(task.model, mdcs.ByClass(task.block_classes))
    listener = Slots()
    hooks = Hooks(units, listener)
    task.loss(task.model, task.example_batch(3)).backward()
    hooks.remove()
    assert listener.heard == [(slot.unit, slot.phase) for slot in source.slots]
    assert [unit.numel for unit in units] == [unit.numel for unit in source.units]
    assert [unit.trainable for unit in units] == [unit.trainable for unit in source.units]
    assert waits == pytest.approx([slot.seconds for slot in source.slots])


def test_what_forward_keeps_and_workspaces_are_those_of_the_slots() -> None:
    uses = of_profile(profile(*CHAIN)).uses
    assert [(use.kept, use.forward_workspace, use.backward_workspace) for use in uses] == [
        (1000, 50, 70), (2000, 50, 70), (3000, 50, 70),
    ]  # fmt: skip


def test_a_nested_unit_has_the_units_inside_of_it_between_its_forward_and_its_end() -> None:
    outer, last = of_profile(profile(*NESTED)).uses
    assert (outer.unit, [use.unit for use in outer.inner], last.unit) == (0, [1, 2], 3)


def test_an_order_that_no_modules_have_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, profile((0, 1, 2), (1, 0, 2)))
    with pytest.raises(OptionError, match="neither in the reverse order of forward nor those of nested modules"):
        Timed(name="t", profile=path)


def test_a_miniature_has_fewer_elements_and_bytes_and_the_same_times() -> None:
    source = profile(*CHAIN)
    whole, small = of_profile(source), of_profile(source, 10)
    assert [unit.numel for unit in small.units] == [4, 4, 4]
    assert [use.kept for use in small.uses] == [100, 200, 300]
    times = [[(use.forward_s, use.backward_s) for use in shape.uses] for shape in (whole, small)]
    assert times[0] == times[1]


def test_blocks_are_made_of_their_numbers(waits: list[float]) -> None:
    options = Timed(name="t", layers=3, block_mib=0.5, forward_ms=3, backward_ms=8, activations_mib=2, tensors=4)
    task = options.build()
    assert [p.numel() * 4 for p in task.model.parameters()] == [MIB // 8] * 12
    task.loss(task.model, task.example_batch(2)).backward()
    assert waits == pytest.approx([3e-3] * 3 + [2e-3] * 12)
    assert options.shape.uses[2] == Use(2, 3e-3, 8e-3, 2 * MIB)


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


def test_numbers_of_blocks_beside_a_profile_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, profile(*CHAIN))
    with pytest.raises(OptionError, match=r"^layers has no effect with model.profile, got 3$"):
        Timed(name="t", profile=path, layers=3)
    with pytest.raises(OptionError, match=r"^divisor has no effect without model.profile, got 3$"):
        Timed(name="t", divisor=3)
    with pytest.raises(OptionError, match="nowhere.json is no profile to stand in for"):
        Timed(name="t", profile=str(tmp_path / "nowhere.json"))


def test_it_says_what_it_is_and_which_profile_it_was_made_of(tmp_path: Path) -> None:
    made = Timed(name="t", profile=saved(tmp_path, profile(*CHAIN)))
    assert made.label == "t, timed compute"
    first = made.made_of
    slower = dataclasses.replace(profile(*CHAIN), world=4)
    assert first["compute"] == "timed" and Timed(name="t", profile=saved(tmp_path, slower)).made_of != first
