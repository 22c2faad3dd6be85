"""Stages of a few steps under one plan each, what times them, and plans that take turns until the fastest is known.

A prediction is wrong by some percent. Among many plans, the best predicted one is the one that the model flatters most.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mdcs.plan.plan import Plan
from mdcs.planner.trials import Standing, SuccessiveHalving
from mdcs.profiler.consensus import all_gather_object, phase
from mdcs.profiler.cost_fit import run_name
from mdcs.runtime.context import StepRecord
from mdcs.runtime.engine import Engine

_WRONG = 0.03  # error of a prediction beyond which more than two plans are tried


class Listener:
    """Measures steps of a run."""

    def end_step(self) -> None:
        """End a step."""

    def forget(self) -> None:
        """Forget the step under way, which the loop gives up."""

    def stop(self) -> None:
        """Listen no more."""


class TimedSteps(Listener):
    """Times the steps of a run from now on."""

    def __init__(self, engine: Engine) -> None:
        engine.recorder.begin_timing()


class StepClock(Listener):
    """The host's time from step to step."""

    def __init__(self, engine: Engine) -> None:
        self._ends = [time.monotonic()]

    def end_step(self) -> None:
        """End a step."""
        self._ends.append(time.monotonic())

    @property
    def median_s(self) -> float:
        """Median seconds of a step."""
        return statistics.median(b - a for a, b in itertools.pairwise(self._ends))


@dataclass(frozen=True)
class Stage:
    """So many ``steps`` of a run under one plan, with what ``listen`` makes.

    ``plan``: None: that of the stage before. ``chooses``: whether the plan may be another one after it. ``batch``:
    number of the example batch of the steps; a loop has its own. ``waits_for``: there are more steps until one rank
    says that this is done.
    """

    plan: Plan | None
    steps: int
    listen: Callable[[Engine], Listener]
    chooses: bool = True
    batch: int = 0
    waits_for: Callable[[], bool] | None = None

    def is_over(self, steps: int, engine: Engine, call: str) -> bool:
        """Return whether the stage ends after so many steps, for this ``call``. Collective."""
        if steps < self.steps or self.waits_for is None:
            return steps >= self.steps
        with engine.place.during(call):
            return any(done for (done,) in engine.groups.agree_on_call(call, self.waits_for()))


@dataclass(frozen=True)
class Ran:
    """A stage that is over: its run, between two steps, what has listened, and the records of its steps."""

    engine: Engine
    heard: Listener
    records: list[StepRecord]


@dataclass(frozen=True)
class Trial:
    """A plan that was run, with what was predicted and measured of it. The steps are those of the slowest rank."""

    plan: Plan
    standing: Standing
    is_chosen: bool

    @property
    def predicted_s(self) -> float:
        """The step's seconds, as predicted."""
        assert self.plan.prediction is not None
        return self.plan.prediction.step_s

    def row(self) -> dict[str, Any]:
        """Return the trial as plain values: milliseconds per step, and how it went in the rounds."""
        own = self.standing
        return {
            "strategy": self.plan.strategy, "scheduler": self.plan.scheduler, "messages": len(self.plan.messages),
            "predicted_ms": self.predicted_s * 1e3, "measured_ms": own.median_s * 1e3,
            "slower_ms": own.slower_s * 1e3, "interval_ms": own.interval_s * 1e3, "rounds": own.rounds,
            "steps": own.steps, "dropped": own.dropped, "chosen": self.is_chosen,
        }  # fmt: skip

    def __str__(self) -> str:
        own = self.standing
        words = ", chosen" if self.is_chosen else f", {own.slower_s * 1e3:+.1f} ± {own.interval_s * 1e3:.1f} ms"
        if own.dropped is not None:  # never of the chosen one
            words += f", dropped in round {own.dropped}"
        return (
            f"{run_name(self.plan)}, {len(self.plan.messages)} messages: {own.median_s * 1e3:.1f} ms{words} "
            f"({own.rounds} rounds, {own.steps} steps; {self.predicted_s * 1e3:.1f} ms predicted)"
        )


def take_turns(plans: Sequence[Plan], steps: int) -> Generator[Stage, Ran, tuple[Trial, ...]]:
    """Run two or more plans in turns, about ``steps`` steps in all, but at least two each; return their trials.

    With more than two plans the first two come first. If a prediction was wrong by more than :data:`_WRONG`, the faster
    one and the other plans take the second half of the steps. The plans are the same on all ranks.
    """
    if len(plans) > 2:
        steps //= 2
    trials = yield from _take_turns(plans[:2], steps)
    if len(plans) == 2 or all(abs(t.standing.median_s / t.predicted_s - 1) <= _WRONG for t in trials):
        return trials
    others = yield from _take_turns([chosen(trials), *plans[2:]], steps)
    return (*(trial for trial in trials if not trial.is_chosen), *others)


def _take_turns(plans: Sequence[Plan], steps: int) -> Generator[Stage, Ran, tuple[Trial, ...]]:
    plans = sorted(plans, key=lambda plan: _apart(plans[0], plan))  # in turns to and fro, so neighbours should be alike
    halving = SuccessiveHalving(len(plans), steps=max(steps, 2 * len(plans)))
    while (turn := halving.turn) > 0:
        phase(f"training under {run_name(plans[halving.current])}")
        ran = yield Stage(plans[halving.current], turn, TimedSteps)
        for seconds in map(max, zip(*all_gather_object([r.times.step_s for r in ran.records]), strict=True)):
            halving.add(seconds)
    return tuple(
        Trial(plan, standing, standing.candidate == halving.current)
        for plan, standing in zip(plans, halving.table(), strict=True)
    )


def chosen(trials: Sequence[Trial]) -> Plan:
    """Return the plan that is kept."""
    return next(trial.plan for trial in trials if trial.is_chosen)


def with_trials(plan: Plan, trials: Sequence[Trial]) -> Plan:
    """Return the plan with the trials in its outcome."""
    return replace(plan, outcome="; ".join([*filter(None, [plan.outcome]), *map(str, trials)]))


def _apart(plan: Plan, other: Plan) -> int:
    """Return how many bytes of units the plans cut differently, counted twice where one of them does not cut."""
    pairs = zip(plan.profile.layouts, plan.strategies, plan.blocks, other.strategies, other.blocks, strict=True)
    differ = [(layout.param_bytes, k, to) for layout, k, b, to, its in pairs if (k, b) != (to, its)]
    return sum(size * (1 + (k.sharded_update != to.sharded_update)) for size, k, to in differ)
