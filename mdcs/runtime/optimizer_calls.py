"""The loop's own optimizers drive the run: their calls do what they do in a plain loop."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from mdcs.runtime.errors import RunError
from mdcs.torch_compat import count_as_scheduled


class Run(Protocol):
    """Does what the calls ask for."""

    def step(self) -> None:
        """End an iteration."""

    def drops_gradients(self) -> bool:
        """Give up an iteration that has gradients and no updates yet; return whether there was one."""
        ...

    def check_options(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RunError if the optimizer's options have changed since the iteration's updates."""

    def state_dict_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict as in a plain loop."""
        ...

    def load_state_dict_of(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        """Load the optimizer's state dict of a plain loop."""


class OptimizerCalls:
    """Redirects ``step``, ``zero_grad``, ``state_dict`` and ``load_state_dict`` of the optimizers to ``run`` until
    :meth:`end`.

    All ranks must make each of these calls. The other members, such as ``param_groups``, are the optimizer's own, so
    schedules of the learning rate work, whether they are made before or after. Where there are several optimizers, the
    first ``step`` ends the iteration, for all of them; each must be called once an iteration, in any order.

    ``stepped``: the optimizers whose ``step`` has been called in this iteration.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], run: Run) -> None:
        self._run = weakref.ref(run)  # the optimizers must not keep a run alive that the loop has dropped
        self._before = [(optimizer, self._redirect(optimizer)) for optimizer in optimizers]
        self.stepped: list[torch.optim.Optimizer] = []

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """End the iteration, if no other optimizer's step has done so."""
        run, missing = self._running(), [o for o, _ in self._before if o not in self.stepped]
        if len(missing) in (0, len(self._before)):
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
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

    def _running(self) -> Run:
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

        def state_dict(receiver: torch.optim.Optimizer) -> dict[str, Any]:
            return self._running().state_dict_of(receiver)

        def load_state_dict(receiver: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
            self._running().load_state_dict_of(receiver, state_dict)

        count_as_scheduled(step)
        calls: dict[str, Callable[..., Any]] = {
            "step": step, "zero_grad": zero_grad, "state_dict": state_dict, "load_state_dict": load_state_dict,
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

    def refusal(what: str) -> Any:
        def hook(*_: Any) -> None:
            raise RunError(f"rank {rank}: {what}")

        return hook

    on_shards = "the optimizer's state is on shards while a plan runs: use parallel."
    return [
        optimizer.register_step_pre_hook(refusal("call step() of the optimizer itself, or parallel.step()")),
        optimizer.register_state_dict_pre_hook(refusal(f"{on_shards}optimizer_state_dict()")),
        optimizer.register_load_state_dict_pre_hook(refusal(f"{on_shards}load_optimizer_state_dict()")),
    ]
