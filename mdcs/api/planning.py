"""Plans from a profile, made on rank 0 and the same on every rank."""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.planner.apart import call_apart
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.ilp.solver import Solving
from mdcs.planner.pipeline import limit_of, unsharded_bytes
from mdcs.planner.priority import Priority
from mdcs.planner.recompute import AUTO, RecomputeRule, in_words, recompute_named
from mdcs.planner.registry import (
    JointPlanner,
    Scheduler,
    StrategyPlanner,
    decides_schedule,
    scheduler_named,
    strategy_named,
)
from mdcs.planner.trials import make_plans
from mdcs.profiler.consensus import Begun, phase
from mdcs.sizes import MIB, Budget
from mdcs.telemetry.memory_meter import unmeasured

SECONDS = 30.0
"""Default time limit of planning."""
_OTHERS, _WITHIN = 15, 6  # of the time limit, the part of a solver that proposes another plan; within a budget
T = TypeVar("T")


@dataclass(frozen=True)
class Planning:
    """Options by which a plan is made from a profile. :func:`mdcs.autoplan` describes the options.

    Planners that are named have ``seconds``; planners that are given have their own. Raises ValueError for an unknown
    name, and for ``trials`` below 1.
    """

    budget: Budget = Budget.of(None)
    recompute: str | RecomputeRule = "auto"
    strategy: str | StrategyPlanner | JointPlanner = "greedy"
    scheduler: str | Scheduler | None = None
    schedule_share: float | None = None
    trials: int = 1
    seconds: float = SECONDS

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds must be > 0, got {self.seconds!r}")
        if self.trials < 1:
            raise ValueError(f"trials must be >= 1, got {self.trials}")
        self.planners()

    @property
    def rule(self) -> RecomputeRule:
        """The rule of recomputation."""
        return recompute_named(self.recompute) if isinstance(self.recompute, str) else self.recompute

    def planners(self) -> tuple[StrategyPlanner | JointPlanner, Scheduler | None]:
        """Return the planner of strategies, and of the schedule unless the first decides it, with their time limits."""
        strategy = strategy_named(self.strategy) if isinstance(self.strategy, str) else self.strategy
        schedule = scheduler_named(self.scheduler) if isinstance(self.scheduler, str) else self.scheduler
        if schedule is None and not decides_schedule(strategy):
            schedule = Priority()
        seconds = self.seconds / (1 + (isinstance(strategy, Solving) and isinstance(schedule, Solving)))
        return (
            _within(seconds, strategy) if isinstance(self.strategy, str) else strategy,
            _within(seconds, schedule) if isinstance(self.scheduler, str) else schedule,
        )

    def plans(self, job: Job, device: torch.device) -> list[Plan]:
        """Return the plan of the job, and up to ``trials`` - 1 others that differ. Collective.

        Warns of a budget that counts no activations, where ``device`` does not tell them. Raises on every rank what
        planning raises on rank 0: InfeasibleBudget, where no plan fits.
        """
        return self.begin(job, device).result()

    def begin(self, job: Job, device: torch.device, *, beside: bool = False) -> Begun[list[Plan]]:
        """Begin to make the plans of :meth:`plans`, in a thread of rank 0. Collective. ``beside``: training goes on
        meanwhile, so what takes long is done in a process of its own.
        """
        if self.budget.is_limit and not any(slot.peak for slot in job.profile.slots):
            why = unmeasured(device) or "the profile does not have them"
            warnings.warn(f"activations count as 0 bytes of the budget: {why}", stacklevel=2)
        strategy, schedule = self.planners()
        limit = limit_of(self.budget, job, self.rule)
        solves = isinstance(strategy, Solving) or isinstance(schedule, Solving)
        phase(f"planning{_within_words(self.budget, limit)}", self.seconds if solves else None)

        seconds = self.seconds / (_OTHERS if limit is None else _WITHIN)
        made = functools.partial(
            make_plans, budget=limit, schedule_share=self.schedule_share, recompute=self.rule, trials=self.trials,
            seconds=seconds,
        )  # fmt: skip
        is_long = (solves or self.trials > 1) and all(
            each is None or type(each).__module__.startswith("mdcs.") for each in (strategy, schedule, self.rule)
        )  # a planner of the program's own may be known in this process alone

        def planned() -> list[Plan]:
            try:
                if beside and is_long:
                    return call_apart(made, job, strategy, schedule)
                return made(job, strategy, schedule)
            except InfeasibleBudget as error:
                raise error.in_words_of(self.budget, lambda: unsharded_bytes(job)) from None

        def say(plans: list[Plan]) -> None:
            if self.rule == AUTO and (line := in_words(plans[0])):
                phase(line)

        return Begun(planned, say)


def require_measured(budget: Budget, device: torch.device) -> None:
    """Raise ValueError for a budget that depends on activations where memory cannot be measured."""
    if budget.is_limit and budget.size is None and (why := unmeasured(device)):
        raise ValueError(
            f"a budget of {budget} depends on the bytes of activations: {why}, or give the budget in bytes"
        )


def say_refusals_once() -> None:
    """Let an uncaught InfeasibleBudget, which all ranks raise, be one line of rank 0 instead of a traceback of each."""
    before = sys.excepthook
    if getattr(before, "__module__", None) == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, InfeasibleBudget):
            before(kind, error, trace)
        elif not dist.is_initialized() or dist.get_rank() == 0:
            print(f"mdcs: {error}", file=sys.stderr, flush=True)

    sys.excepthook = hook


def _within_words(budget: Budget, limit: int | None) -> str:
    if limit is None:
        return ""
    return f" within {limit / MIB:.1f} MiB" + (f" ({budget})" if budget.size is None else "")


def _within(seconds: float, planner: T) -> T:
    """Return the planner with this time limit, if it uses a solver."""
    return dataclasses.replace(planner, seconds=seconds) if isinstance(planner, Solving) else planner
