"""Calls of the training loop between its passes, for the run under a plan: gradients, state dicts, the optimizers'
state."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from mdcs.model.module_hooks import tensors_in
from mdcs.model.optimizers import parameters_of
from mdcs.runtime import optimizer_state, state_dict
from mdcs.runtime.engine import Engine

Given = Sequence[tuple[torch.optim.Optimizer, Mapping[str, Any]]]
"""Optimizers, each with a state dict."""

# -- gradients


def can_drop(engine: Engine) -> bool:
    """Return whether an iteration has gradients, no pass under way, and no updates yet."""
    sequencer = engine.sequencer
    is_between = sequencer.has_gradients and (sequencer.at_turn or sequencer.after_micro_step)
    return is_between and not (engine.is_closed or sequencer.updates_begun)


def reduce(engine: Engine) -> None:
    """Let the reductions of this iteration be sent. Raises RunError before backward has ended."""
    engine.check("clip_grad_norm_()")
    engine.sequencer.end_short()
    if not engine.sequencer.at_turn or not engine.sequencer.step_pending:
        raise engine.place.error("clip_grad_norm_() comes between backward and step()")


def grad_norm(engine: Engine) -> float | None:
    """Return the gradients' norm before clipping, for which the host waits; None if nothing has been clipped yet."""
    number = engine.sequencer.first_number + engine.wire.messages.last_reduction
    if engine.update_scale.is_needed and number < engine.queue.issued and not engine.is_closed:
        engine.wire.wait_for_norm(number)
    norm = engine.update_scale.norm
    if norm is None:
        return None
    with engine.executor.on_comm_stream():
        return float(norm)


def watch_gradients(engine: Engine, units: Sequence[str]) -> None:
    """Keep the gradients that ``units`` are updated with. Raises ValueError for a unit that is frozen or not in the
    plan."""
    named = {s.name: u for u, s in enumerate(engine.storages) if s.trainable}
    for name in units:
        if name not in named:
            raise ValueError(f"watch_gradients({name!r}): give one of {', '.join(named)}")
    engine.updates.captured_gradients = {named[name]: {} for name in units}


def gradients(engine: Engine, unit: str) -> dict[str, Tensor]:
    """Return whole gradients [shape of the parameter] of a watched unit's last update; drains first. Collective."""
    engine.drain("gradients()", needs_ranks=True)
    for u, blocks in engine.updates.captured_gradients.items():
        storage = engine.storages[u]
        if storage.name == unit and len(blocks) == len(storage.blocks):
            return engine.unsharder.gather_by_parameter(u, blocks)
    raise ValueError(f"unit {unit} has no gradient: watch_gradients({unit!r}) comes before the backward that makes it")


# -- parameters


def full_parameters(
    engine: Engine, names: Sequence[str], *, keep: bool, cpu: bool, writeback: bool, weights: str | None
) -> AbstractContextManager[None]:
    """Hold copies of whole parameters, or of the optimizer state ``weights``, in the model, where ``keep``; drains
    first. Collective.
    """
    units = state_dict.units_of(engine.model, engine.storages, names, "full_parameters()")
    hold = functools.partial(
        state_dict.full_parameters, engine.storages, engine.unsharder, units, keep=keep, cpu=cpu, writeback=writeback,
        group=engine.groups.message_group,
    )  # fmt: skip
    call = f"full_parameters({'writeback=True' if writeback else ''})"
    return engine.export_params(call, hold, needs_ranks=True, weights=weights)


def full_state_dict(engine: Engine, *, keep: bool, cpu: bool) -> dict[str, Tensor]:
    """Return the whole model's state dict where ``keep``, on the CPU where the budget has no room for it; drains first.
    Collective.
    """
    engine.drain("state_dict()", needs_ranks=True)
    sizes = [storage.full_bytes for storage in engine.storages]
    fits = engine.unsharder.fits(sum(sizes) + max(sizes))
    with engine.recorder.pause():
        cpu = cpu or not fits
        state = state_dict.full_state_dict(engine.model, engine.storages, engine.unsharder, keep=keep, cpu=cpu)
    _hand_out(engine, state, fits)
    return state


def _hand_out(engine: Engine, state: object, fits: bool = True) -> None:
    device = engine.storages[0].device
    engine.excess.hand_out([tensor for tensor in tensors_in(state) if tensor.device == device], fits)


# -- the optimizers' state, as plain loops have it


def optimizer_states(engine: Engine, *, keep: bool, cpu: bool) -> list[dict[str, Any]]:
    """Return the state dict of every optimizer, empty unless ``keep``. Gathers one unit at a time; drains first.
    Collective."""
    engine.drain("optimizer_state_dict()", needs_ranks=True)
    state = engine.optimizer_state.full(keep=keep, cpu=cpu)
    _hand_out(engine, state)
    return [optimizer_state.to_state_dict(optimizer, state) if keep else {} for optimizer in engine.optimizers.members]


def optimizer_state_of(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of ``optimizer``; drains first. Collective."""
    engine.drain("optimizer_state_dict()", needs_ranks=True)
    state = engine.optimizer_state.full(keep=True, cpu=False, only=parameters_of(optimizer))
    _hand_out(engine, state)
    return optimizer_state.to_state_dict(optimizer, state)


def load_optimizer_states(engine: Engine, given: Given) -> None:
    """Load options and state of the ``given`` optimizers; others keep theirs. Drains first. Collective.

    Raises ValueError for the state of another optimizer.
    """
    engine.drain("load_optimizer_state_dict()")
    loaded = [optimizer for optimizer, _ in given]
    others = {p for optimizer in engine.optimizers.members if optimizer not in loaded for p in parameters_of(optimizer)}
    state: dict[Any, Any] = dict(engine.optimizer_state.full(keep=True, cpu=True, only=others)) if others else {}
    for optimizer, saved in given:
        state |= optimizer_state.from_state_dict(optimizer, saved)
    named = [list(zip(s.names, s.parameters, strict=True)) for s in engine.storages]
    optimizer_state.histories(named, engine.updates.updates, state)
    for optimizer, saved in given:
        optimizer_state.load_options(optimizer.param_groups, saved)
    engine.optimizer_state.load(state)


def check_options(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Raise RunError if the optimizer's options have changed since the iteration's updates."""
    changed = engine.updates.changed_option(optimizer)
    if changed is not None:
        raise engine.place.error(
            f"{changed[1]} of {type(optimizer).__name__} was changed after the first optimizer's step(), which updates "
            "the parameters of all: change it before backward or after the last step()"
        )
