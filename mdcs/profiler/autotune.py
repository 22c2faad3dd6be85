"""Choose the fastest plan by running a few plans for some periods each, in turns.

A prediction is wrong by some percent. Among many plans, the best predicted one is the one that the model flatters most.
"""

from __future__ import annotations

import dataclasses
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from mdcs.emulation import Emulation
from mdcs.model.optimizers import GivenOptimizers, Optimizers
from mdcs.model.units import ModelUnit
from mdcs.plan.plan import Plan
from mdcs.plan.strategy import choices
from mdcs.plan.times import StepTimes
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.pipeline import make_plan
from mdcs.planner.priority import Priority
from mdcs.planner.registry import Scheduler, StrategyPlanner
from mdcs.planner.schedulers import Dear, MgWfbp, Wfbp
from mdcs.planner.strategies import Greedy, Uniform
from mdcs.profiler.consensus import all_gather_object, barrier
from mdcs.profiler.model_snapshot import preserve_model
from mdcs.runtime.engine import Engine, Trained
from mdcs.runtime.validation import RunOptions
from mdcs.telemetry.memory_meter import current_meter
from mdcs.telemetry.timeline import PeriodTrace

ROUNDS, PERIODS = 2, 3
_WARMUP = 1
_SCHEDULERS: tuple[Scheduler, ...] = (Priority(), Dear(), MgWfbp(), Wfbp())


@dataclass(frozen=True)
class Trial:
    """A plan that was run, with predicted and measured (slowest rank) seconds per step."""

    plan: Plan
    predicted_s: float
    measured_s: float

    def __str__(self) -> str:
        name = (
            f"{self.plan.strategy} {self.plan.scheduler}"
            if self.plan.strategy != self.plan.scheduler
            else self.plan.strategy
        )
        return f"{name} {self.measured_s * 1e3:.1f} ms ({self.predicted_s * 1e3:.1f} predicted)"


def candidates(plan: Plan, count: int) -> list[Plan]:
    """Return ``plan`` and the ``count`` - 1 best heuristics' plans for its job and budget, by prediction; fewer if
    there are.

    No two have the same strategies and messages.
    """
    if count < 2:
        return [plan]
    found = {(plan.strategies, plan.messages): plan}
    for other in sorted(_heuristics(plan), key=_predicted):
        if len(found) >= count:
            break
        found.setdefault((other.strategies, other.messages), other)
    return list(found.values())


def cost_s(plans: Sequence[Plan]) -> float:
    """Return the predicted seconds of :func:`fastest` with these plans."""
    return ROUNDS * (_WARMUP + PERIODS + 1) * sum(map(_predicted, plans))


def fastest(
    plans: Sequence[Plan],
    model: nn.Module,
    units: Sequence[ModelUnit],
    step: Callable[[], Tensor],
    optimizer: GivenOptimizers,
    *,
    emulate: Emulation | None = None,
) -> tuple[Plan, tuple[Trial, ...]]:
    """Return the plan that ran fastest, and all trials in the order of ``plans``. Collective, with the same plans.

    The plan's outcome lists the trials. Plans take turns, so that a disturbance of the machine slows all of them.
    Model, buffers, optimizer state and random state are restored; gradients are gone. ``step`` runs the forward pass of
    a micro-step and returns the loss. Only on a CPU: elsewhere, and for one plan or one rank, the first plan is
    returned without trials.
    """
    if len(plans) < 2 or plans[0].world == 1 or units[0].parameters[0][1].device.type != "cpu":
        return plans[0], ()
    rounds: list[list[float]] = []
    for _ in range(ROUNDS):
        own = [
            statistics.median(
                t.step_s for t in run_periods(plan, model, units, step, optimizer, PERIODS, emulate=emulate)[0]
            )
            for plan in plans
        ]
        rounds.append([max(of_ranks) for of_ranks in zip(*all_gather_object(own), strict=True)])
    measured = [statistics.median(of_rounds) for of_rounds in zip(*rounds, strict=True)]
    trials = tuple(Trial(plan, _predicted(plan), seconds) for plan, seconds in zip(plans, measured, strict=True))
    best = min(trials, key=lambda trial: trial.measured_s).plan
    said = [best.outcome] if best.outcome else []
    return dataclasses.replace(best, outcome="; ".join([*said, f"fastest of {', '.join(map(str, trials))}"])), trials


def run_periods(
    plan: Plan,
    model: nn.Module,
    units: Sequence[ModelUnit],
    step: Callable[[], Tensor],
    optimizer: GivenOptimizers,
    count: int,
    *,
    emulate: Emulation | None = None,
) -> tuple[list[StepTimes], list[PeriodTrace]]:
    """Return the times of ``count`` steps after a warm-up, and what ran when in the periods after it.

    Restores the model, without gradients. Collective.
    """
    weights = {p: p.data for p in model.parameters()}
    records = []
    barrier()
    with (
        warnings.catch_warnings(),
        preserve_model(model, current_meter(units[0].parameters[0][1].device)),
        _preserve_optimizer_state(optimizer),
    ):
        # The model's own weights are kept beside the plan's buffers, so the budget is exceeded.
        warnings.filterwarnings("ignore", r"rank \d+, step \d+: .* above the budget")
        # Buffers are restored: each rank's own may change, whatever the run's option will be.
        options = RunOptions(emulate=emulate, broadcast_buffers=False)
        engine = Engine(Trained(model, Optimizers(optimizer), list(units)), plan, options)
        try:
            engine.recorder.begin_timing()
            for _ in range(_WARMUP + count + 1):  # one more: the last is cut short by drain()
                for _ in range(plan.micro_steps):
                    (step() / plan.micro_steps).backward()
                engine.end_step()
                records += engine.recorder.finished(engine.sequencer.step - 2, False)
            engine.drain("drain()")
        except BaseException as e:
            engine.failures.publish(e)
            raise
        finally:
            engine.end("")
            for storage in engine.storages:
                storage.guard.open()
            for p, tensor in weights.items():
                p.data, p.grad = tensor, None
    traces = [trace for step, trace in engine.recorder.traces().items() if step > _WARMUP]
    return [record.times for record in records[_WARMUP:]], traces


@contextmanager
def _preserve_optimizer_state(optimizer: GivenOptimizers) -> Iterator[None]:
    """Run updates that start without state, then restore the optimizer's state, options and attributes (its counts)."""
    members = Optimizers(optimizer).members
    before = [(each, dict(vars(each)), [dict(group) for group in each.param_groups]) for each in members]
    for each in members:
        each.state = defaultdict(dict)
    try:
        yield
    finally:
        for each, attributes, groups in before:
            vars(each).update(attributes)
            for group, options in zip(each.param_groups, groups, strict=True):
                group.clear()
                group.update(options)


def _heuristics(plan: Plan) -> Iterator[Plan]:
    strategies: list[StrategyPlanner] = [Greedy(), *(Uniform(str(k)) for k in choices(plan.profile))]
    for strategy in strategies:
        for scheduler in _SCHEDULERS:
            try:
                yield make_plan(plan.job, strategy, scheduler, budget=plan.budget)
            except InfeasibleBudget:
                break


def _predicted(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s
