"""The state of a session before its plan: the model is whole on every rank, and its first step runs as with DDP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.model.optimizers import Optimizers
from mdcs.model.units import ModelUnit
from mdcs.profiler.first_step import FirstStep
from mdcs.runtime import optimizer_state
from mdcs.runtime.buffers import broadcast
from mdcs.runtime.state_dict import units_of
from mdcs.runtime.validation import RunOptions

if TYPE_CHECKING:
    from mdcs.runtime.checkpointing import ResumeInfo


class WholeModel:
    """A model without a plan. ``first`` listens to its first step. Methods do what those of :class:`mdcs.Session`
    do."""

    def __init__(
        self, model: nn.Module, optimizers: Optimizers, units: Sequence[ModelUnit], options: RunOptions
    ) -> None:
        self.model, self.optimizers, self.options = model, optimizers, options
        self._device = units[0].parameters[0][1].device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        modules = [module for unit in units for module in unit.modules]
        self.first = FirstStep(model, optimizers.members, options, modules)

    def evaluate(self, weights: str | None) -> AbstractContextManager[None]:
        """Run without gradients. ``weights``: optimizer state that takes the place of parameters; None: none."""
        return self._with_weights(weights, torch.no_grad())

    def full_parameters(
        self, names: Sequence[str], writeback: bool, weights: str | None
    ) -> AbstractContextManager[None]:
        """Hold whole parameters in the model, which they are."""
        units_of(self.model, (), names, "full_parameters()")
        return self._with_weights(weights, self._written_back() if writeback else nullcontext())

    @contextmanager
    def _with_weights(self, weights: str | None, context: AbstractContextManager[Any]) -> Iterator[None]:
        found = [(p, own[weights]) for p, own in self.optimizers.state.items() if weights in own]
        with optimizer_state.exchanged(found), context:
            yield

    @contextmanager
    def _written_back(self) -> Iterator[None]:
        yield
        with torch.no_grad():
            for p in self.model.parameters() if dist.is_initialized() else ():
                broadcast(p.data, None)

    def state_dict(self, keep: bool, cpu: bool) -> dict[str, Tensor]:
        """Return a copy of the model's state dict if this rank is to ``keep`` it, else an empty one."""
        named = self.model.state_dict() if keep else {}
        return {name: v.to("cpu", copy=True) if cpu else v.clone() for name, v in named.items()}

    def resume(self, path: Path) -> ResumeInfo | None:
        """Load a checkpoint, whole. Collective."""
        from mdcs.runtime.checkpointing import resume_whole  # late: importing DCP takes most of a second

        return resume_whole(path, self.model, self.optimizers.members, self._device)
