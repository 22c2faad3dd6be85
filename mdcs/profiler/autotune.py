"""Choose the fastest plan by running a few plans for some periods each, in turns.

A prediction is wrong by some percent. Among many plans, the best predicted one is the one that the model flatters most.
"""

from __future__ import annotations

import dataclasses
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
from mdcs.plan.times import StepTimes
from mdcs.planner.trials import SuccessiveHalving
from mdcs.profiler.consensus import all_gather_object, barrier
from mdcs.profiler.model_snapshot import preserve_model
from mdcs.runtime.engine import Engine, Trained
from mdcs.runtime.validation import RunOptions
from mdcs.telemetry.memory_meter import current_meter
from mdcs.telemetry.timeline import PeriodTrace

STEPS = 8
"""Steps of a trial, per plan."""
_WARMUP = 1


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


def cost_s(plans: Sequence[Plan]) -> float:
    """Return the predicted seconds of :func:`fastest` with these plans."""
    return STEPS * sum(map(_predicted, plans))


def fastest(
    plans: Sequence[Plan],
    model: nn.Module,
    units: Sequence[ModelUnit],
    step: Callable[[], Tensor],
    optimizer: GivenOptimizers,
    *,
    emulate: Emulation | None = None,
) -> tuple[Plan, tuple[Trial, ...]]:
    """Return the plan that goes on after successive halving, and all trials in the order of ``plans``. Collective, with
    the same plans.

    The plan's outcome lists the trials. Model, buffers, optimizer state and random state are restored; gradients are
    gone. ``step`` runs the forward pass of a micro-step and returns the loss. Only on a CPU: elsewhere, and for one
    plan or one rank, the first plan is returned without trials.
    """
    if len(plans) < 2 or plans[0].world == 1 or units[0].parameters[0][1].device.type != "cpu":
        return plans[0], ()
    halving = SuccessiveHalving(len(plans), steps=STEPS * len(plans))
    while (turn := halving.turn) > 0:
        times, _ = run_periods(plans[halving.current], model, units, step, optimizer, turn - 1, emulate=emulate)
        seconds = [max(of_ranks) for of_ranks in zip(*all_gather_object([t.step_s for t in times]), strict=True)]
        for each in (seconds[0], *seconds):  # the first step of a turn, the warm-up, does not count
            halving.add(each)
    trials = tuple(
        Trial(plan, _predicted(plan), row.median_s) for plan, row in zip(plans, halving.table(), strict=True)
    )
    best = plans[halving.current]
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


def _predicted(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s
