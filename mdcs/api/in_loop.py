"""A run whose plan is made at the loop's first step, which is also the profile's, and anew when asked for."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.api.autoplan import autoplan
from mdcs.api.sharded_start import STEPS, plan_of_nothing, profile_of, why_not_measured
from mdcs.model.optimizers import Optimizers
from mdcs.model.units import ModelUnit
from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.planner.pipeline import lacks_recomputation
from mdcs.planner.recompute import AUTO, KEEP
from mdcs.profile import cache
from mdcs.profile.schema import Profile
from mdcs.profiler.autoprofile import needs_rings
from mdcs.profiler.consensus import on_all_ranks, on_rank_zero
from mdcs.profiler.first_step import FirstStep
from mdcs.profiler.job_identity import described, key_of_job
from mdcs.profiler.running_steps import RunningSteps
from mdcs.runtime import optimizer_state
from mdcs.runtime.buffers import broadcast
from mdcs.runtime.departing_steps import DepartingSteps
from mdcs.runtime.engine import Engine
from mdcs.runtime.errors import RunError
from mdcs.runtime.optimizer_calls import OptimizerCalls
from mdcs.runtime.parallel import Parallel
from mdcs.runtime.state_dict import beyond_budget, units_of
from mdcs.runtime.step_trace import StepRecord
from mdcs.runtime.validation import RunOptions
from mdcs.sizes import Budget

if TYPE_CHECKING:
    from mdcs.runtime.checkpointing import ResumeInfo


class NoPlanYet(RunError, AttributeError):
    """A run has no plan in its first step: an AttributeError, so that ``hasattr()`` answers."""


class PlannedInLoop(Parallel):
    """A model in training, without a plan until the end of a step that is measured: until then it is whole on every rank.

    One that does not fit whole is sharded while it is measured, under another plan: a provisional one, or the one before.
    """

    def __init__(
        self, units: list[ModelUnit], options: RunOptions, replan_after: int | None, group: dist.ProcessGroup | None,
        **planning: Any,
    ) -> None:  # fmt: skip
        self.units, self._options, self._planning, self._group = units, options, planning, group
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._replan_after = replan_after
        self._first: FirstStep | None = None
        self._first_norm: float | None = None
        self._running: RunningSteps | None = None  # measures steps of a sharded model
        self._is_sharded = self._was_in_pieces = False  # as it does not fit whole; from the start
        self._micro_steps: int | None = None  # that the first step must have
        self._folder: Path | None = None  # of profiles, for the first step
        self._resumed_after = 0
        self._earlier = 0  # steps of this run before the present plan
        self._unread: list[StepRecord] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("_engine", "plan") or hasattr(type(self), name):  # a property asks for one of them
            raise NoPlanYet(f"rank {self.rank}: there is no plan before the end of this step, which is measured for it")
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def _run(self, engine: Engine) -> None:
        """Go on with a plan."""
        resumed_after, stepped = self._resumed_after, self._stepped
        super().__init__(engine, self.units)
        self._resumed_after, self._calls.stepped, self._all = resumed_after, stepped, engine.optimizers
        self._departures = DepartingSteps(engine, self._replan_after)

    def _measure(self, model: nn.Module, optimizers: Optimizers) -> None:
        """Let the next step be measured."""
        stepped, options = self._stepped, self._options
        self.model, self._all, self.optimizers = model, optimizers, optimizers.members
        self.optimizer = self.optimizers[0]
        self._first = FirstStep(
            model, self.optimizers, options.clip_norm, options.clip_value, self._resumed_after + 1, options.loss_scale,
            [module for unit in self.units for module in unit.modules],
        )  # fmt: skip
        self._calls = OptimizerCalls(self.optimizers, self)
        self._calls.stepped = stepped

    def _run_sharded(self, model: nn.Module, optimizers: Optimizers, micro_steps: int) -> None:
        """Go on with a provisional plan, and measure the next steps."""
        self._all, self._is_sharded, self._was_in_pieces = optimizers, True, True
        device = self.units[0].parameters[0][1].device
        with on_all_ranks(tells=self._planning["progress"]):
            plan = plan_of_nothing(
                self.units, optimizers, Budget.of(self._planning["budget"]).size, micro_steps=micro_steps,
                cross_iteration=self._planning["cross_iteration"],
                device=self._options.device if device.type == "meta" else device,
            )  # fmt: skip
        self._run(Engine(model, optimizers, plan, self.units, None, self._options))
        self._running = RunningSteps(self._engine)

    def _take_over(self, running: RunningSteps) -> None:
        """Plan with the profile of the steps so far, and hand the units over to the new plan, one by one."""
        engine = self._engine
        self._stop_measuring()
        engine.drain("replan()")
        torch.compiler.reset()  # what was compiled while operators were watched
        with torch.enable_grad(), on_all_ranks(tells=self._planning["progress"]):
            profile = profile_of(running, engine, self._planning["budget"])
            plan = autoplan(
                self.model, self.optimizers, self.units, _no_step, micro_steps=self.plan.micro_steps, profile=profile,
                **self._planning,
            )  # fmt: skip
        watched = [engine.storages[u].name for u in engine.updates.captured_gradients]
        self._unread += self._records(flush=True)
        if self._checkpoints is not None:
            self._checkpoints.finish()
        done = engine.sequencer.step - 1
        self._calls.end()
        before = engine.retire("replan()")
        self._resumed_after += done
        self._earlier += done
        try:
            options = dataclasses.replace(self._options, has_started=True)
            engine = Engine(self.model, self._all, plan, self.units, None, options, before)
        except BaseException:
            before.fail()
            raise
        self._run(engine)
        self.watch_gradients(*watched)

    def _stop_measuring(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None

    @property
    def _stepped(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose ``step()`` the loop has called in this iteration."""
        return self._calls.stepped if "_calls" in vars(self) else []

    def _begin(self, first: FirstStep) -> None:
        """End the measured step, then profile it, plan, and shard the model with the optimizer's state."""
        first.finish()
        if self._micro_steps not in (None, first.micro_steps):
            raise RunError(
                f"rank {self.rank}: the first step had {first.micro_steps} backward passes, and parallelize was given "
                f"micro_steps={self._micro_steps}"
            )
        self._calls.end()
        torch.compiler.reset()  # what was compiled in the first step has no units' hooks in it, and looks for none
        with torch.enable_grad():
            plan = self._plan(first)
        self._first_norm, self._first = first.norm, None
        first.forget()
        self._resumed_after += 1
        self._earlier += 1
        options = dataclasses.replace(self._options, has_started=True)
        self._run(Engine(self.model, self._all, plan, self.units, self._group, options))

    def _plan(self, first: FirstStep) -> Plan:
        """Plan with the profile of an earlier start, if it has kept one, else with one that is measured, and kept."""
        make = functools.partial(
            autoplan, self.model, self.optimizers, self.units, first.again, micro_steps=first.micro_steps, **self._planning
        )
        if self._folder is None:
            return make()
        others = "".join(map(described, self._planning.get("batches", ())))
        others += "" if self._planning["recompute"] in (KEEP, AUTO) else "; recomputation"
        path = self._folder / f"{key_of_job(self.model, self.units, self._all, first.in_words() + others)}.json"
        known = on_rank_zero(lambda: self._sufficient(cache.read(path), first.micro_steps))
        if known is not None and self.rank == 0 and self._planning["progress"]:
            print(f"mdcs: profile of an earlier start: {path}", file=sys.stderr, flush=True)
        plan = make(profile=known)
        if known is None and self.rank == 0:
            cache.keep(plan.job.profile, path)
        return plan

    def _sufficient(self, known: Profile | None, micro_steps: int) -> Profile | None:
        """Return the profile unless the budget needs rings, or recomputation, of which it knows nothing."""
        if known is None:
            return None
        job, budget = Job(known, micro_steps, self._planning["cross_iteration"]), Budget.of(self._planning["budget"])
        is_auto, device = self._planning["recompute"] == AUTO, self.units[0].parameters[0][1].device
        return None if needs_rings(job, budget, device) or is_auto and lacks_recomputation(job, budget) else known

    def replan(self) -> None:
        """Measure the next step, or two of a run that was sharded from its start, and go on with the plan that is made of it.
        """
        if self._first is not None:
            return
        engine = self._engine
        if why := why_not_measured(self._options, self._group, self.plan, self._is_sharded):
            raise RunError(f"rank {self.rank}: replan() {why}")
        if self._is_sharded:
            engine.drain("replan()")
            self._running = self._running or RunningSteps(engine)
            return
        engine.drain("replan()")
        self._unread += self._records(flush=True)
        done = engine.sequencer.step - 1
        if self._checkpoints is not None:
            self._checkpoints.finish()
            self._checkpoints = None
        problem = engine.make_plain()
        self._end(problem, failed=bool(problem))
        if problem:
            raise RunError(f"rank {self.rank}: replan(): {problem}")
        self._resumed_after += done
        self._earlier += done
        del self._engine, self.plan, self._departures
        self._folder = None  # another start would not know in which step this profile is that of its first one
        self._measure(engine.model, engine.optimizers)

    def _too_large(self) -> str:
        room = self.plan.budget - self.plan.reserve if self._was_in_pieces and self.plan.budget is not None else None
        return beyond_budget(self._engine.storages, self._engine.updates.updates, room)

    # -- in the first step

    def step(self) -> None:
        """End an iteration."""
        if self._first is not None:
            self._begin(self._first)
            return
        super().step()
        running = self._running
        if running is None:
            if self._departures.are_enough():
                self.replan()
            return
        running.end_step()
        if running.steps == STEPS:
            self._take_over(running)

    def drain(self) -> None:
        """Finish all messages in flight."""
        if self._first is None:
            super().drain()

    def abandon(self) -> None:
        """Give up the current iteration on every rank."""
        if self._running is not None:
            self._running.give_up()
        if self._first is None:
            super().abandon()
        else:
            self._first.forget()

    def _can_drop(self) -> bool:
        first = self._first
        return super()._can_drop() if first is None else first.micro_steps > 0 and not self._planning["cross_iteration"]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate in ``.grad``: the passes in the block are not among those that are planned."""
        first = self._first
        if first is None:
            with super().no_sync():
                yield
            return
        before, first.accumulates = first.accumulates, True
        try:
            yield
        finally:
            first.accumulates = before

    def evaluate(self, *, weights: str | None = None) -> AbstractContextManager[None]:
        """Run forward passes without gradients."""
        return super().evaluate(weights=weights) if self._first is None else self._lent(weights, torch.no_grad())

    @contextmanager
    def _lent(self, weights: str | None, context: AbstractContextManager[Any]) -> Iterator[None]:
        found = [(p, own[weights]) for p, own in self._all.state.items() if weights in own]
        with optimizer_state.exchanged(found), context:
            yield

    def pause(self) -> AbstractContextManager[None]:
        """Leave the block's seconds out of the steps' times."""
        return super().pause() if self._first is None else nullcontext()

    def full_parameters(
        self, *names: str, rank0_only: bool = False, cpu: bool = False, writeback: bool = False, weights: str | None = None
    ) -> AbstractContextManager[None]:
        """Hold whole parameters in the model, which they are until the plan is made."""
        if self._first is None:
            return super().full_parameters(*names, rank0_only=rank0_only, cpu=cpu, writeback=writeback, weights=weights)
        units_of(self.model, (), names, "full_parameters()")
        return self._lent(weights, self._written_back() if writeback else nullcontext())

    @contextmanager
    def _written_back(self) -> Iterator[None]:
        yield
        with torch.no_grad():
            for p in self.model.parameters() if dist.is_initialized() else ():
                broadcast(p.data, None)

    def state_dict(self, *, rank0_only: bool = False, cpu: bool = False) -> dict[str, Tensor]:
        """Return the whole model's state dict."""
        if self._first is None:
            return super().state_dict(rank0_only=rank0_only, cpu=cpu)
        if rank0_only and self.rank:
            return {}
        return {name: v.to("cpu", copy=True) if cpu else v.clone() for name, v in self.model.state_dict().items()}

    def load_state_dict(self, full: dict[str, Tensor]) -> None:
        """Load a plain model's state dict."""
        if self._first is None:
            super().load_state_dict(full)
        else:
            self.model.load_state_dict(full)

    def optimizer_state_dict(self, *, rank0_only: bool = False, cpu: bool = False) -> Any:
        """Return the optimizer's state dict."""
        if self._first is None:
            return super().optimizer_state_dict(rank0_only=rank0_only, cpu=cpu)
        dicts = [{} if rank0_only and self.rank else self.state_dict_of(optimizer) for optimizer in self.optimizers]
        return dicts if len(dicts) > 1 else dicts[0]

    def load_optimizer_state_dict(self, saved: Any) -> None:
        """Load a plain loop's ``optimizer.state_dict()``."""
        if self._first is None:
            super().load_optimizer_state_dict(saved)
        else:
            for optimizer, own in zip(self.optimizers, optimizer_state.as_list(saved), strict=True):
                self.load_state_dict_of(optimizer, own)

    def check_options(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RunError if the optimizer's options have changed since the iteration's updates."""
        return super().check_options(optimizer) if self._first is None else None

    def state_dict_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state dict of one of the optimizers."""
        return super().state_dict_of(optimizer) if self._first is None else type(optimizer).state_dict(optimizer)

    def load_state_dict_of(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        """Load a plain loop's state dict of one of the optimizers."""
        if self._first is None:
            super().load_state_dict_of(optimizer, saved)
        else:
            type(optimizer).load_state_dict(optimizer, dict(saved))

    def records(self, *, flush: bool = False) -> list[StepRecord]:
        """Return the finished iterations; a step that is measured has no record."""
        earlier, self._unread = self._unread, []
        return earlier + (self._records(flush) if self._first is None else [])

    def _records(self, flush: bool) -> list[StepRecord]:
        return [dataclasses.replace(r, step=self._earlier + r.step) for r in super().records(flush=flush)]

    @property
    def steps(self) -> int:
        """Iterations done."""
        return super().steps if self._first is None else self._resumed_after

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm of the last clipped iteration."""
        norm = super().grad_norm if self._first is None else self._first.norm
        return self._first_norm if norm is None else norm

    def _reduce(self) -> None:
        super()._reduce() if self._first is None else self._first.reduce()

    def close(self, *, whole: bool = True) -> None:
        """End the run."""
        if self._first is not None:
            self._stop(self._first)
            return
        if self._running is not None:
            self._running.give_up()
        super().close(whole=whole)

    def tell(self, error: BaseException) -> None:
        """Send the other ranks an error."""
        if self._first is None:
            super().tell(error)

    def _end(self, why: str, *, failed: bool = False) -> None:
        self._stop_measuring()
        if self._first is None:
            super()._end(why, failed=failed)
        else:
            self._stop(self._first)

    def _stop(self, first: FirstStep) -> None:
        first.stop()
        self._calls.end()

    def _resume(self, path: Path) -> ResumeInfo | None:
        if self._first is None:
            return super()._resume(path)
        from mdcs.runtime.checkpointing import resume_whole  # late: importing DCP takes most of a second

        resumed = resume_whole(path, self.model, self.optimizers, self.units[0].parameters[0][1].device)
        self._resumed_after = 0 if resumed is None else resumed.step
        return resumed


def _no_step() -> Tensor:
    raise AssertionError("the profile is known")
