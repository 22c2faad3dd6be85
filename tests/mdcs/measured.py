"""Profiles of slots and bytes alone, measured in a few steps of the ranks that are there, for any world and link."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

from torch import Tensor, nn

import mdcs
from mdcs.api.offline import rehearse
from mdcs.model.optimizers import GivenOptimizers, Optimizers
from mdcs.model.units import ModelUnit
from mdcs.planner.recompute import KEEP, Planned
from mdcs.profiler import consensus
from mdcs.profiler.measurement import Measurement
from mdcs.profiler.running_steps import RunningSteps, with_recomputation
from mdcs.profiler.slot_recorder import SlotRecorder
from mdcs.profiler.stages import Ran, Stage

LINK = mdcs.Link.uniform(1.0, 50.0)


def measure_profile(
    model: nn.Module, units: list[ModelUnit], step: Callable[[], Tensor], optimizer: GivenOptimizers, *, world: int = 2,
    link: mdcs.Link = LINK, iterations: int = 1, recompute: bool = False, **options: Any,
) -> mdcs.Profile:  # fmt: skip
    """The profile, with no costs of messages but the link's."""
    measuring = Measurement(
        units, Optimizers(optimizer), units[0].parameters[0][1].device, recompute=Planned() if recompute else KEEP,
        iterations=iterations, **options,
    )  # fmt: skip

    def stages() -> Generator[Stage, Ran, mdcs.Profile]:
        profiles, _ = yield from measuring._slots(measuring.provisional(measuring.unmeasured()))
        return profiles[0]

    profile = rehearse(stages(), model, optimizer, units, [step])
    return dataclasses.replace(profile, world=world, link=link)


def recorded(
    model: nn.Module, units: list[ModelUnit], step: Callable[[], Tensor], optimizer: GivenOptimizers, choice: dict[int, bool]
) -> SlotRecorder:
    """The record of a step in which these units compute their activations again."""
    measuring = Measurement(units, Optimizers(optimizer), units[0].parameters[0][1].device)

    def stages() -> Generator[Stage, Ran, SlotRecorder]:
        [profile], _ = yield from measuring._slots(measuring.provisional(measuring.unmeasured()))
        plan = measuring.provisional(*with_recomputation(profile, choice))
        ran = yield Stage(plan, 2, RunningSteps)
        assert isinstance(ran.heard, RunningSteps)
        return ran.heard.recorder

    return rehearse(stages(), model, optimizer, units, [step])


class _AtOnce(threading.Thread):
    def start(self) -> None:
        self.run()


def plans_are_made_at_once() -> contextlib.AbstractContextManager[Any]:
    """Let training wait for its plans: the steps until one is chosen are then the same in every run."""
    return mock.patch.object(consensus, "Thread", _AtOnce)
