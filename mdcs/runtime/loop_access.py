"""Access of a training loop to parameters, optimizers and model while a plan runs: in the plan's way, or refused.

Every message says what to write instead; docs/loops.md lists the mistakes of a loop.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from mdcs.model.guard import GRADIENT, THAW, changes, only_reads
from mdcs.model.hooks import Hooks
from mdcs.runtime.errors import ErrorContext, RunError
from mdcs.runtime.initialization import Buffers
from mdcs.runtime.sharded_optimizer import ShardedOptimizer
from mdcs.runtime.slot_sequencer import SlotSequencer
from mdcs.runtime.storage import UnitStorage
from mdcs.torch_compat import ModuleHook, count_as_scheduled, step_hooks, without_torch_function

# ---- closed parameters

_CONVERSIONS = {"to", "cpu", "cuda", "type", "half", "bfloat16", "float", "double"}


class ParameterAccess:
    """Decides whether a closed parameter may be used (:data:`mdcs.model.guard.Refuse`).

    ``ended``: the reason for parameters that are not whole after the end of the run; None before.
    """

    def __init__(self, place: ErrorContext) -> None:
        self._place = place
        # Weak: closed parameters must not keep the run alive.
        self._sequencer: weakref.ref[SlotSequencer] | None = None
        self._hooks: weakref.ref[Hooks] | None = None
        self.ended: str | None = None

    def follow(self, sequencer: SlotSequencer, hooks: Hooks) -> None:
        """Decide by the slot in which ``sequencer`` is; before, modules are being initialised."""
        self._sequencer, self._hooks = weakref.ref(sequencer), weakref.ref(hooks)

    def refuse(self, unit: int, name: str, what: str) -> RunError | None:
        """Return the error for a use of the unit's parameter ``name``; None allows the use, and the unit is whole."""
        sequencer = None if self._sequencer is None else self._sequencer()
        if self.ended is None and sequencer is None and self._sequencer is not None:
            self.ended = "it is gone"
        if self.ended is not None:
            return RunError(
                f"rank {self._place.rank}: {name} is in pieces, parallel is closed and could not gather it "
                f"({self.ended}): load a state dict into a plain model"
            )
        if sequencer is None:
            return self._place.error(
                f"the initialisation of a module used {name} ({what}), which is of another unit: let each initialise "
                "its own"
            )
        if what == GRADIENT:
            problem = f"{name}.grad does not hold the gradient between backward and step(). {WITH_GRADIENTS}"
            return self._place.error(problem) if sequencer.has_gradients else None
        if what == THAW:  # parameters may be frozen for some passes
            is_trained = any(name in storage.names for storage in sequencer.storages if storage.trainable)
            return None if is_trained else self._place.error(THAWED.format(name))
        hooks = None if self._hooks is None else self._hooks()
        if hooks is not None and only_reads(what) and _may_be_used(unit, sequencer, hooks.in_forward):
            hooks.used_outside(unit)
            return None
        return self._place.error(
            f"{name} cannot be used here ({what}): it is sharded (in pieces) or being updated between its layer's "
            f"passes. {_remedy(what)}"
        )


WITH_GRADIENTS = (
    "Clip with parallelize(…, clip_norm=1.0) or clip_value=, each parameter by its own norm in step() of a subclass "
    "of the optimizer; read the norm in parallel.grad_norm, scale with parallel.scaler, and call zero_grad() after "
    "step(). Leave a step out before backward, or start with clip_norm=float('inf'), which clips nothing and lets "
    "zero_grad() drop a step until step(); leave a parameter out by p.detach() in forward"
)
"""Advice for loops that use ``p.grad`` between backward and ``step()``."""


def _remedy(what: str) -> str:
    """Return what to write instead of a use outside of the layer's passes."""
    change = "To change it, write on every rank: with parallel.full_parameters(writeback=True): …"
    if changes(what):
        return f"{change}, or parallel.load_state_dict(state)" if what == "copy_" else change
    read = "To read it, write on every rank: with parallel.full_parameters(): …, or parallel.state_dict()"
    if what == ".data":  # p.data.mul_(2) as well
        return f"{read}. {change}"
    return f"To move or convert the model, close() first. {read}" if what in _CONVERSIONS else read


def _may_be_used(unit: int, sequencer: SlotSequencer, in_forward: bool) -> bool:
    """Return whether a closed parameter can be used now: inside of a step, or where a pass begins with it."""
    if sequencer.exported_to is not None or sequencer.entered is not None:
        return sequencer.exported_to is None
    slot = sequencer.period.slots[sequencer.next_slot]
    is_planned = slot.unit == unit and sequencer.storages[unit].is_aliased
    begins = slot.phase == "F" and (is_planned or in_forward)
    return torch.is_grad_enabled() and (begins or sequencer.accumulates)


# ---- calls of the optimizers, which drive the run


class _Run(Protocol):
    """Methods that the calls ask of :class:`mdcs.Session`."""

    def step(self) -> None: ...
    def drops_gradients(self) -> bool: ...
    def check_options(self, optimizer: torch.optim.Optimizer) -> None: ...
    def state_dict_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]: ...
    def load_state_dict_of(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None: ...


class OptimizerCalls:
    """Sends ``step``, ``zero_grad``, ``state_dict``, ``load_state_dict`` of optimizers to ``run`` until :meth:`end`.

    All ranks must make each of these calls. The other members, such as ``param_groups``, are the optimizer's own, so
    schedules of the learning rate work. Of several optimizers the first ``step`` ends the iteration, for all of them;
    each must be called once an iteration, in any order: ``stepped`` are those that have been.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], run: _Run) -> None:
        self._run = weakref.ref(run)  # the optimizers must not keep alive a run that the loop has dropped
        self._before = [(optimizer, self._redirect(optimizer)) for optimizer in optimizers]
        self.stepped: list[torch.optim.Optimizer] = []

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """End the iteration, if no other optimizer's step has done so."""
        run, missing = self._running(), [o for o, _ in self._before if o not in self.stepped]
        if len(missing) in (0, len(self._before)):
            with torch.enable_grad():
                loss = None if closure is None else closure()
            self.stepped = [optimizer]
            run.step()
            return loss
        name = type(optimizer).__name__
        if optimizer not in missing:
            raise RunError(
                f"step() of {name} was called twice, and that of {type(missing[0]).__name__} not yet: an iteration "
                "updates the parameters of all optimizers, so call step() of each once"
            )
        if closure is not None:
            raise RunError(
                f"step() of {name} has a closure, and the iteration has ended: give it to the first step() alone"
            )
        run.check_options(optimizer)
        self.stepped.append(optimizer)
        return None

    def _running(self) -> _Run:
        run = self._run()
        if run is None:
            raise RunError("the optimizer's run is gone: keep the result of parallelize() while you train")
        return run

    def _redirect(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Put the calls in the place of the optimizer's own; return what was there: a schedule's, or an outer run's."""

        def step(receiver: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self.step(receiver, closure)

        def zero_grad(receiver: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            run = self._run()
            if run is None or not run.drops_gradients():
                type(receiver).zero_grad(receiver, *args, **kwargs)

        count_as_scheduled(step)
        calls: dict[str, Callable[..., Any]] = {
            "step": step, "zero_grad": zero_grad,
            "state_dict": lambda receiver: self._running().state_dict_of(receiver),
            "load_state_dict": lambda receiver, state_dict: self._running().load_state_dict_of(receiver, state_dict),
        }  # fmt: skip
        before = {name: vars(optimizer).get(name) for name in calls}
        for name, call in calls.items():
            setattr(optimizer, name, types.MethodType(call, optimizer))
        return before

    def end(self) -> None:
        """Give the optimizers their own calls back."""
        for optimizer, calls in self._before:
            for name, before in calls.items():
                if before is not None:
                    setattr(optimizer, name, before)
                else:
                    vars(optimizer).pop(name, None)


def forbid_optimizer_calls(optimizer: torch.optim.Optimizer, rank: int) -> list[Any]:
    """Make optimizer calls that would have no effect, or lose state, raise RunError; return handles to undo this."""

    def refuse(what: str, *_: Any) -> None:
        raise RunError(f"rank {rank}: {what}")

    on_shards = "the optimizer's state is on shards while a plan runs: use parallel."
    return [
        optimizer.register_step_pre_hook(partial(refuse, "call step() of the optimizer itself, or parallel.step()")),
        optimizer.register_state_dict_pre_hook(partial(refuse, f"{on_shards}optimizer_state_dict()")),
        optimizer.register_load_state_dict_pre_hook(partial(refuse, f"{on_shards}load_optimizer_state_dict()")),
    ]


# ---- changes between steps

THAWED = "{}: requires_grad changed while a plan runs: call close(), change it, then parallelize() again"


def find_unseen_change(
    updates: ShardedOptimizer, storages: Sequence[UnitStorage], buffers: Buffers, world: int
) -> str | None:
    """Return why a change made by the training loop was not applied in this step, or None."""
    optimizers = updates.optimizers
    if len(optimizers.param_groups) != updates.groups:
        return "the optimizer got another parameter group: close(), and parallelize() anew with it"
    if (changed := updates.changed_option()) is not None:
        return (
            f"{changed[1]} of the optimizer's group {changed[0]} was changed between backward and step(), when updates "
            "may have run with its former value: change it before backward or after step()"
        )
    for optimizer in optimizers.members:
        before, after = step_hooks(optimizer)
        if before > 1 or after:  # one is forbid_optimizer_calls'
            return "a hook was put on optimizer.step(), which is not called: call it after parallel.step()"
        if optimizer.state:
            return (
                "the optimizer was given state, and its updates run elsewhere: load it before parallelize(), or with "
                "parallel.load_optimizer_state_dict()"
            )
    if (thawed := find_changed_training(storage for storage in storages if not storage.trainable)) is not None:
        return thawed
    buffer = buffers.changed() if buffers.option is None and world > 1 else None
    return None if buffer is None else (
        f"buffer {buffer} changes in forward, on every rank in its own way: parallelize(…, broadcast_buffers=True) "
        "for rank 0's at every step, as with DDP, or False for each rank's own"
    )


def find_removed_parameter(model: nn.Module, storages: Sequence[UnitStorage]) -> str | None:
    """Return why a parameter had no gradient: the training loop removed or froze it; None: no such parameter."""
    for storage in storages:
        for i in storage.unused:
            name = storage.names[i]
            try:
                is_there = model.get_parameter(name) is storage.parameters[i]
            except AttributeError:
                is_there = False
            if not is_there:
                return f"{name} was replaced or removed while a plan runs: close(), and parallelize() anew"
            if not storage.parameters[i].requires_grad:
                return THAWED.format(name)
    return None


def find_changed_training(storages: Iterable[UnitStorage]) -> str | None:
    """Return which parameter is trained now and not in the plan, or the reverse; None if there is none."""
    with without_torch_function():
        for storage in storages:
            for name, p in zip(storage.names, storage.parameters, strict=True):
                if p.requires_grad != storage.trainable:
                    return THAWED.format(name)
    return None


def refuse_state_dict(model: nn.Module, storages: Sequence[UnitStorage], place: ErrorContext) -> Any:
    """Make ``model.state_dict()`` of closed parameters raise RunError; return a handle to undo this."""

    def hook(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not keep_vars and not all(storage.guard.is_open for storage in storages):
            raise place.error(
                "model.state_dict() has no whole parameters while a plan runs. Write on every rank, not on rank 0 "
                "alone: state = parallel.state_dict(rank0_only=True, cpu=True); then save it on rank 0"
            )

    return model.register_state_dict_pre_hook(ModuleHook(hook))
