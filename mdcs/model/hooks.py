"""Module and gradient hooks that turn passes into slots, which the profiler measures and the runtime schedules.

A slot begins when the forward of a unit's module begins, or when the gradient of its output is ready. Slots follow the
order of execution, so modules called twice, tied parameters and nested units need no special case. Parameters can be
used without a call of their module (``F.linear(x, self.embedding.weight)``, ``block.forward(x)``): the guard of closed
parameters tells (:meth:`Hooks.used_outside`). And outputs can be out of the hooks' reach, in a closure for example:
then a backward slot begins with the unit's first gradient, or with the first computation of a backward pass.

Reentrant checkpoints (``torch.utils.checkpoint(…, use_reentrant=True)``) are backward passes inside of a backward pass.
In forward their modules run in a custom autograd function, without gradients. Backward runs the modules again, and then
a backward pass of their own. The outer pass cannot know which parameters an inner pass reaches, and the reverse; so
both sets are followed here (:class:`ReentrantPasses`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from mdcs.model.guard import tensors_in
from mdcs.model.units import ModelUnit, UnsupportedModel
from mdcs.torch_compat import (
    ModuleHook,
    at_end_of_backward,
    backward_pass,
    base_of,
    in_function_forward,
    is_backward_compiled,
    may_hold_checkpoints,
    transforms,
    will_get_gradient,
)


class Listener(Protocol):
    """Receives the events of a pass, in order. Units are indices into the list that the hooks were made for.

    A *side pass* brings no gradient that is the step's: a forward pass without gradients, one through a model whose
    parameters are frozen for it, ``torch.autograd.grad``, ``backward(inputs=…)``, and every pass while
    :attr:`accumulates`. What it adds to ``.grad`` stays there.
    """

    @property
    def accumulates(self) -> bool:
        """Return whether all passes are side passes now."""

    def forward_begin(self, unit: int) -> None:
        """A forward slot of the unit begins: its parameters are used from now on."""

    def forward_end(self, unit: int) -> None:
        """A module of the unit returned: the forward slot goes on until the next one begins."""

    def backward_begin(self, unit: int) -> None:
        """A backward slot of the unit begins: the gradient of one of its outputs is ready."""

    def used_outside(self, unit: int, is_side: bool) -> None:
        """A closed parameter of the unit is used in forward without a call of the unit's modules."""

    def recomputed(self, unit: int) -> None:
        """The unit's forward runs again inside backward (activation checkpointing) and uses the parameters now."""

    def recomputing(self, unit: int) -> Callable[[], AbstractContextManager[None]]:
        """Return the context in which the plan lets the unit's forward, which runs now, run again."""
        return contextlib.nullcontext

    def gradient(self, unit: int, index: int, parameter: nn.Parameter) -> None:
        """The gradient of this pass for the unit's parameter ``index`` is in ``parameter.grad``."""

    def backward_end(self) -> None:
        """The backward pass is over: no more gradients follow."""

    def side_begin(self, unit: int, in_backward: bool) -> None:
        """The unit is used in a side pass from now on."""

    def side_end(self, unit: int) -> None:
        """A module of the unit returned, in the forward of a side pass."""

    def side_backward_end(self) -> None:
        """The backward of a side pass is over."""


class Hooks:
    """Installed hooks that call ``listener``, which may be replaced; :meth:`remove` removes them.

    A forward pass is a side pass or not from its outermost module on, which is ``model`` or a unit's. ``updates``: how
    often the parameters were updated, as the owner counts. ``reentrant``: shared with the listener.
    """

    def __init__(
        self, units: Sequence[ModelUnit], listener: Listener, model: nn.Module | None = None,
        reentrant: ReentrantPasses | None = None,
    ) -> None:  # fmt: skip
        self.listener = listener
        self.updates = 0
        self._end_queued = False
        self._in_side_backward = False
        self._begun: set[int] = set()  # units with a slot in this backward pass
        self._current: int | None = None  # unit of its last slot
        self._depth = self._side_depth = 0  # forwards of units under way, in passes of the step and in side passes
        self._trained = [p for unit in reversed(units) if unit.trainable for _, p in reversed(unit.parameters)]
        self.reentrant = reentrant or ReentrantPasses(self._trained)
        self._handles: list[Any] = []
        # Units around one module begin their forward in their own order, and their backward in reverse, as other units
        # do: the hook that is prepended last runs first, and so does the first of the hooks of outputs.
        for u, unit in reversed([*enumerate(units)]):
            for module in unit.modules:
                # prepend: hooks of others may read parameters, as weight_norm's does.
                before, after = self._before(u, unit), self._after(u, unit)
                self._handles.append(module.register_forward_pre_hook(ModuleHook(before), prepend=True))
                self._handles.append(module.register_forward_hook(ModuleHook(after), always_call=True))
            if unit.trainable:
                for i, (name, p) in enumerate(unit.parameters):
                    self._handles.append(p.register_post_accumulate_grad_hook(self._accumulated(u, i, name)))

        if model is not None:
            self._handles.append(model.register_forward_pre_hook(ModuleHook(self._model_begins), prepend=True))
            self._handles.append(model.register_forward_hook(ModuleHook(self._model_returned), always_call=True))

    def remove(self) -> None:
        """Remove all hooks; the listener is not called any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def in_backward(self) -> bool:
        """Return whether this code runs inside a backward pass."""
        return backward_pass() != -1

    @property
    def in_forward(self) -> bool:
        """Return whether this code runs inside a forward pass of a step."""
        return self._depth > 0

    def recomputed(self, unit: int) -> None:
        """Note that the unit's forward runs again, inside of a backward pass."""
        is_first = not self._end_queued  # the loss itself is computed again, before there is a gradient
        is_reentrant = self.reentrant.note_again(unit)
        if is_first or not self._begin_backward():
            self._begin_slot(unit)
        elif is_reentrant:
            self._continue_slot(unit)
        if not self._in_side_backward:
            self.listener.recomputed(unit)

    def recomputing(self, unit: int) -> Callable[[], AbstractContextManager[None]]:
        """Return the context in which the unit's forward, which runs now, will run again."""
        again = self.listener.recomputing(unit)

        @contextlib.contextmanager
        def noted() -> Iterator[None]:
            self.recomputed(unit)
            with again():
                yield

        return noted

    def used_outside(self, unit: int) -> None:
        """Note that a closed parameter of the unit is used without a call of the unit's modules."""
        if self.in_backward:
            self.recomputed(unit)
        else:
            self.reentrant.note_forward(unit)
            self.listener.used_outside(unit, self._side_depth > 0 or self.listener.accumulates)

    def _model_begins(self, module: nn.Module, args: Any) -> None:
        if not self.in_backward:
            self._enter(self._trained)

    def _model_returned(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.in_backward:
            self._leave()
            # The first gradients may come in a pass inside of the backward pass, and that ends before it.
            self._call_in_backward(output, "the model", Hooks._begin_backward)

    def _enter(self, trained: Sequence[nn.Parameter]) -> bool:
        """Begin a forward of a module with these parameters; return whether it belongs to a side pass."""
        if self._side_depth or self._depth:
            is_side = self._side_depth > 0
        else:  # a frozen unit alone often runs without gradients, as part of the step
            is_recorded = torch.is_grad_enabled() or in_function_forward()
            has_gradients = not trained or trained[0].requires_grad and is_recorded
            is_side = self.listener.accumulates or not has_gradients
        self._side_depth, self._depth = self._side_depth + is_side, self._depth + (not is_side)
        return is_side

    def _leave(self) -> bool:
        """End a forward; return whether it belongs to a side pass."""
        is_side = self._side_depth > 0
        self._side_depth, self._depth = max(0, self._side_depth - is_side), max(0, self._depth - (not is_side))
        return is_side

    def _before(self, unit: int, model_unit: ModelUnit) -> Any:
        trained = [p for _, p in model_unit.parameters] if model_unit.trainable else []

        def hook(module: nn.Module, args: Any) -> None:
            if self.in_backward:  # activation checkpointing
                self.recomputed(unit)
                return
            self._end_queued = False  # a backward that raised did not run its callback
            is_side = self._enter(trained)
            _refuse_transforms(model_unit)
            if is_side:
                self.listener.side_begin(unit, False)
            else:
                _refuse_compiled_autograd(model_unit)
                self.reentrant.note_forward(unit)
                self.listener.forward_begin(unit)

        return hook

    def _after(self, unit: int, model_unit: ModelUnit) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.in_backward:
                # a reentrant checkpoint runs a backward pass for what this forward computed
                if torch.is_grad_enabled():
                    self._call_in_backward(output, model_unit.name, lambda hooks: hooks._continue_slot(unit))
                return
            is_side = self._leave()
            self._call_in_backward(output, model_unit.name, lambda hooks: hooks._begin_slot(unit))
            if is_side:
                self.listener.side_end(unit)
            else:
                self.listener.forward_end(unit)

        return hook

    def _call_in_backward(self, output: Any, name: str, begin: Callable[[Hooks], Any]) -> None:
        """Call ``begin`` once in every backward pass that comes to a tensor of the output of module ``name``."""
        self_ref, updates = weakref.ref(self), self.updates

        def hook(grad: Tensor) -> None:
            hooks = self_ref()
            if hooks is not None:
                if updates != hooks.updates:
                    raise UnsupportedModel(
                        f"{name}: backward() through a forward pass of an earlier step: its weights have changed since"
                    )
                begin(hooks)

        # A parameter itself would keep the hook in later passes. Autograd rebuilds a view that is changed in place from
        # its base; the view's own hook is lost.
        tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        tensors += [base for base in map(base_of, tensors) if base is not None and base.grad_fn is not None]
        register_multi_grad_hook(tensors, hook, mode="any")

    def _accumulated(self, unit: int, index: int, name: str) -> Any:
        def hook(p: nn.Parameter) -> None:
            is_of_step = self._begin_backward()
            self.reentrant.note_gradient(p)
            if not is_of_step:
                return
            if p.grad is not None and p.grad.requires_grad:
                raise UnsupportedModel(
                    f"{name}: backward(create_graph=True) is not supported here: its gradient is taken at once. Use "
                    "torch.autograd.grad(…, create_graph=True), or put the pass into parallel.no_sync()"
                )
            if unit not in self._begun:
                self._begin_slot(unit)
            self.listener.gradient(unit, index, p)

        return hook

    def _continue_slot(self, unit: int) -> None:
        if self._current != unit:
            self._begin_slot(unit)

    def _begin_slot(self, unit: int) -> None:
        is_of_step = self._begin_backward()
        self._current = unit
        if is_of_step:
            self._begun.add(unit)
            self.listener.backward_begin(unit)
        else:
            self.listener.side_begin(unit, True)

    def _begin_backward(self) -> bool:
        """Begin the backward pass that calls this; return whether it is one of the step's."""
        if not self._end_queued:
            self._end_queued = True
            self._begun.clear()
            self._current = None
            self._in_side_backward = self.listener.accumulates or not self.reentrant.begin_backward()
            at_end_of_backward(self._end_backward)
        return not self._in_side_backward

    def _end_backward(self) -> None:
        self._end_queued = False
        self.reentrant.end_backward()
        if self._in_side_backward:
            self.listener.side_backward_end()
        else:
            self.listener.backward_end()


def _refuse_transforms(unit: ModelUnit) -> None:
    """Raise UnsupportedModel inside of torch.func: its gradients bypass the hooks, and no message can come there."""
    names = transforms()
    if names and (unit.trainable or set(names) - {"vmap", "functionalize"}):
        raise UnsupportedModel(
            f"{unit.name}: its forward runs inside of torch.func ({', '.join(names)}), where its gradients and "
            "messages cannot be followed: transform a plain copy of the model, made in parallel.full_parameters()"
        )


def _refuse_compiled_autograd(unit: ModelUnit) -> None:
    """Raise UnsupportedModel under compiled autograd: it calls hooks while tracing, when no message can be sent."""
    if is_backward_compiled():
        raise UnsupportedModel(
            f"{unit.name}: its backward would be compiled (compiled autograd), and messages have no place in it: run "
            "the step with torch._dynamo.config.compiled_autograd = False, and without compiled_autograd._enable()"
        )


class ReentrantPasses:
    """Forwards of units in reentrant checkpoints, and the gradients of trained ``parameters`` that backward brings."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._hidden: Counter[int] = Counter()  # by unit: forwards in a checkpoint that backward has not run again
        self._outer = -1  # the outermost backward pass
        self._left: dict[int, set[nn.Parameter]] = {}  # by backward pass: gradients to come; empty without checkpoints

    def note_forward(self, unit: int) -> None:
        """Note a forward of a unit outside of backward."""
        if in_function_forward():
            self._hidden[unit] += 1

    def note_again(self, unit: int) -> bool:
        """Note a forward of a unit inside of backward; return whether a reentrant checkpoint runs it with gradients."""
        if not self._hidden[unit] or not torch.is_grad_enabled():
            return False
        self._hidden[unit] -= 1
        return True

    def note_gradient(self, parameter: nn.Parameter) -> None:
        """Note that the backward pass that calls this has come to a parameter."""
        if self._left:
            self._left_now().discard(parameter)

    def begin_backward(self) -> bool:
        """Begin the outermost backward pass; return whether it brings gradients to trained parameters."""
        self._left.clear()
        self._outer = backward_pass()
        if not self._hidden.total():
            return any(map(will_get_gradient, self._parameters))
        return bool(self._left_now()) or may_hold_checkpoints()

    @property
    def has_inner(self) -> bool:
        """Return whether there are passes inside of the backward pass: parameters that have a gradient may get more."""
        return bool(self._left)

    def brings(self, unit: int, parameters: Collection[nn.Parameter]) -> bool:
        """Return whether backward may still bring gradients to these parameters of a unit."""
        if not self._left:
            return backward_pass() != self._outer or any(map(will_get_gradient, parameters))
        self._left_now()
        return self._hidden[unit] > 0 or any(not left.isdisjoint(parameters) for left in self._left.values())

    def _left_now(self) -> set[nn.Parameter]:
        now = backward_pass()
        if now not in self._left:  # its first event: autograd tells of the pass that calls, and of no other
            self._left[now] = {p for p in self._parameters if will_get_gradient(p)}
        return self._left[now]

    def end_backward(self) -> None:
        """End the outermost backward pass."""
        self._left.clear()

    def end_step(self) -> None:
        """Forget the forwards."""
        self._hidden.clear()
