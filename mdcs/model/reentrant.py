"""Reentrant checkpoints (``torch.utils.checkpoint(…, use_reentrant=True)``): backward passes inside of a backward pass.

In forward their modules run in a custom autograd function, without gradients. Backward runs the modules again, and then
a backward pass of their own. Before that, autograd does not know which parameters this inner pass will reach; and
inside of it, it does not tell which ones the outer pass will.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import nn

from mdcs.torch_compat import backward_pass, in_function_forward, may_hold_checkpoints, will_get_gradient


class ReentrantPasses:
    """Forwards of units that run in reentrant checkpoints, and the gradients that backward passes will bring.

    ``parameters``: those that are trained.
    """

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
        """Whether there are passes inside of the backward pass: parameters that have a gradient may get more."""
        return bool(self._left)

    def brings(self, unit: int, parameters: Collection[nn.Parameter]) -> bool:
        """Whether backward may still bring gradients to these parameters of a unit."""
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
