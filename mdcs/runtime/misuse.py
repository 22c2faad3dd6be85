"""Mistakes of a training loop, each refused in a sentence that says what to do instead; docs/loops.md lists them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mdcs.model.guard import GRADIENT, THAW
from mdcs.runtime.buffers import Buffers
from mdcs.runtime.errors import RunError
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.updates import Updates
from mdcs.torch_compat import step_hooks

_THAWED = "{}: what is trained is fixed while a plan runs: close(), change requires_grad, then partition and plan again"


def unseen_change(
    optimizer: torch.optim.Optimizer, updates: Updates, storages: Sequence[UnitStorage], buffers: Buffers, world: int
) -> str | None:
    """Return a sentence about a change by the loop in this iteration that had no effect on it; None if there is none.
    """
    if len(optimizer.param_groups) != updates.groups:
        return "the optimizer got another parameter group: close(), then partition and plan with it"
    changed = updates.changed_option()
    if changed is not None:
        return (
            f"{changed[1]} of the optimizer's group {changed[0]} was changed between backward and step(), when updates "
            "may have run with its former value: change it before backward or after step()"
        )
    before, after = step_hooks(optimizer)
    if before > 1 or after:  # one is refuse_calls'
        return "a hook was put on optimizer.step(), which is not called: call it after parallel.step()"
    if optimizer.state:
        return (
            "the optimizer was given state, and its updates run elsewhere: load it before parallelize(), or with "
            "parallel.load_optimizer_state_dict()"
        )
    for storage in storages:
        if not storage.trainable:
            for name, p in zip(storage.names, storage.parameters, strict=True):
                if p.requires_grad:
                    return _THAWED.format(name)
    buffer = buffers.changed() if buffers.option is None and world > 1 else None
    if buffer is not None:
        return (
            f"buffer {buffer} changes in forward, on every rank in its own way: parallelize(…, broadcast_buffers=True) "
            "for rank 0's at every step, as with DDP, or False for each rank's own"
        )
    return None


def use(name: str, what: str, has_gradients: bool) -> str | None:
    """Return why a closed parameter cannot be used so, or None to allow the use (see :data:`mdcs.model.guard.Refuse`).

    ``has_gradients``: a backward pass has run since the last step().
    """
    if what == GRADIENT:
        if not has_gradients:
            return None
        return (
            f"the gradient of {name} was taken by the runtime: clip with parallelize(…, clip_norm=…), scale with loss_scale, "
            "read parallel.grad_norm after step(), and zero gradients only after it"
        )
    if what == THAW:
        return _THAWED.format(name)
    return (
        f"{name} cannot be used here ({what}): outside of its unit's forward and backward it is in pieces, or being "
        "updated; use parallel.state_dict(), or with parallel.full_parameters()"
    )


def left_in_pieces(name: str, why: str) -> str:
    """Return the sentence for a parameter that is not whole after the end of the run."""
    return f"{name} is in pieces, parallel is closed and could not gather it ({why}): load a state dict into a plain model"


def disagreement(answers: Sequence[tuple[int, ...]]) -> str | None:
    """Return why ranks at these (step, progress, torn), or (step,), cannot go on together; None if they can."""
    torn = [r for r, (_, *more) in enumerate(answers) if any(more[1:])]
    if torn:
        return f"updates of step {answers[torn[0]][0]} have begun, or failed, on rank {torn[0]}"
    steps = [step for step, *_ in answers]
    if len(set(steps)) > 1:
        return f"the ranks are in different steps ({', '.join(map(str, steps))})"
    return None


def refuse_calls(optimizer: torch.optim.Optimizer, rank: int) -> list[Any]:
    """Make optimizer calls that would have no effect, or lose state, raise RunError; return handles to undo this."""

    def refusal(what: str) -> Any:
        def hook(*_: Any) -> None:
            raise RunError(f"rank {rank}: {what}")

        return hook

    on_shards = "the optimizer's state is on shards while a plan runs: use parallel."
    return [
        optimizer.register_step_pre_hook(refusal("call parallel.step() in the place of optimizer.step()")),
        optimizer.register_state_dict_pre_hook(refusal(f"{on_shards}optimizer_state_dict()")),
        optimizer.register_load_state_dict_pre_hook(refusal(f"{on_shards}load_optimizer_state_dict()")),
    ]
