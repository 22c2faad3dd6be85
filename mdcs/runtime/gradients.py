"""Gradients in the hands of the training loop: their norm and limits, copies of them, and the loss scale.

Updates begin in backward, so the limits are options of the run. The calls of usual loops check them, and return what
they return there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mdcs.runtime.engine import Engine
from mdcs.runtime.errors import RunError
from mdcs.runtime.gradient_scaling import LossScale
from mdcs.runtime.validation import RunOptions
from mdcs.torch_compat import without_autograd


class Gradients:
    """The part of :class:`mdcs.Parallel` that is about gradients."""

    _options: RunOptions

    def __init__(self, engine: Engine) -> None:
        self._engine, self._options = engine, engine.options

    # -- limits -------------------------------------------------------------------------------------------------

    @without_autograd()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Return the global norm of this iteration's gradients before they are clipped, as FSDP's method; once all are reduced.

        Call it between backward and :meth:`step`, on every rank. Then :meth:`step` applies the gradients, and ``zero_grad()``
        or :meth:`abandon` drops them. Raises RunError unless the run clips at ``max_norm``
        (``parallelize(…, clip_norm=max_norm)``).
        """
        limit = self._options.clip_norm
        if norm_type != 2:
            raise RunError(f"clip_grad_norm_(norm_type={norm_type}): only the 2-norm is clipped; leave norm_type out")
        self._check("clip_grad_norm_", "clip_norm", max_norm, limit, "; a plan= of your own: make it with cross_iteration=False")
        self._reduce()
        return torch.tensor(self.grad_norm)

    def _reduce(self) -> None:
        """Let the reductions of this iteration be sent. Raises RunError before backward has ended."""
        engine, sequencer = self._engine, self._engine.sequencer
        engine.check("clip_grad_norm_()")
        sequencer.end_short()
        if not sequencer.at_turn or not sequencer.step_pending:
            raise engine.place.error("clip_grad_norm_() comes between backward and step()")

    def clip_grad_value_(self, clip_value: float) -> None:
        """Check that gradients are clipped at ``clip_value``, as they are when they are reduced: no rank waits for it.

        Raises RunError unless the run does so (``parallelize(…, clip_value=clip_value)``).
        """
        self._check("clip_grad_value_", "clip_value", clip_value, self._options.clip_value)

    def _check(self, call: str, option: str, value: float, limit: float | None, more: str = "") -> None:
        if limit is None or not math.isclose(float(value), limit, rel_tol=1e-6):  # it may be a tensor of floats
            so_far = "was started without clipping" if limit is None else f"clips at {limit:g}"
            raise RunError(
                f"{call}({value:g}): this run {so_far}: write parallelize(…, {option}={value:g}){more if limit is None else ''}"
            )

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm of the last clipped iteration, before clipping; after :meth:`step` that step's, for which the host
        waits.
        """
        engine = self._engine
        index = engine.sequencer.periods * engine.queue.n + engine.runner.last_reduction
        if engine.update_scale.is_needed and index < engine.queue.issued and not engine.is_closed:
            engine.transport.wait_for_norm(index)
        norm = engine.update_scale.norm
        if norm is None:
            return None
        with engine.executor.on_comm_stream():
            return float(norm)

    # -- copies -------------------------------------------------------------------------------------------------

    def watch_gradients(self, *units: str) -> None:
        """Keep the gradients that these units (by name) are updated with, from now on; no names: keep none. Costs their
        bytes.

        Raises ValueError for a unit that is frozen or not in the plan.
        """
        named = {s.name: u for u, s in enumerate(self._engine.storages) if s.trainable}
        for name in units:
            if name not in named:
                raise ValueError(f"watch_gradients({name!r}): give one of {', '.join(named)}")
        self._engine.updates.captured_gradients = {named[name]: {} for name in units}

    @without_autograd()
    def gradients(self, unit: str) -> dict[str, Tensor]:
        """Return by parameter the gradient of a watched unit's last update: averaged over ranks, clipped, unscaled,
        whole.

        Collective; drains first. Raises ValueError for a unit that is not watched, or was not updated since.
        """
        self._engine.drain("gradients()", needs_ranks=True)
        for u, blocks in self._engine.updates.captured_gradients.items():
            storage = self._engine.storages[u]
            if storage.name == unit and len(blocks) == len(storage.blocks):
                return self._engine.unsharder.gather_by_parameter(u, blocks)
        raise ValueError(f"unit {unit} has no gradient: watch_gradients({unit!r}) comes before the backward that makes it")


class Scaler:
    """torch.amp.GradScaler's calls, for a loop that keeps its lines. Without a ``loss_scale`` it is one that is not enabled.

    Its state is interchangeable with torch's.
    """

    def __init__(self, scale: LossScale | None, step: Callable[[torch.optim.Optimizer], object]) -> None:
        self._scale, self._step = scale, step

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to call ``backward`` on; ``loss`` itself where there is no ``loss_scale``."""
        return loss if self._scale is None else loss * self._scale.value

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: gradients are unscaled before they are clipped."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """End an iteration, as ``optimizer.step()``. Its updates are left out if a gradient has overflowed on any rank."""
        self._step(optimizer)

    def update(self) -> None:
        """Do nothing: the scale adapts when the gradients are reduced."""

    def is_enabled(self) -> bool:
        """Whether the run has a ``loss_scale``."""
        return self._scale is not None

    def get_scale(self) -> float:
        """Return the factor on the loss: of the next backward pass once updates are done."""
        return 1.0 if self._scale is None else self._scale.value

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's."""
        return {} if self._scale is None else self._scale.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of this one or of torch's."""
        if self._scale is not None:
            self._scale.load_state_dict(state)
