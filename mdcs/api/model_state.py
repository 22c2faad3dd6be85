"""The parameters, the optimizers' state and the checkpoints of a session."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mdcs.model.units import ModelUnit
from mdcs.plan.plan import Plan
from mdcs.runtime import loop_calls, state_dict
from mdcs.runtime.engine import Engine
from mdcs.runtime.optimizer_state import as_list
from mdcs.torch_compat import without_autograd

if TYPE_CHECKING:
    from mdcs.runtime.checkpointing import Checkpoints, ResumeInfo, SaveHandle


class ModelState:
    """The model and the optimizers of a session."""

    def __init__(self, run: Engine, units: list[ModelUnit]) -> None:
        self.model, self.units, self.rank, self._options = run.model, units, run.rank, run.options
        self._optimizers = run.optimizers
        self.optimizers = self._optimizers.members
        self.optimizer = self.optimizers[0]
        self._engine = run
        self._checkpoints: Checkpoints | None = None
        self._resumed_after = 0  # steps before those of the present plan

    @property
    def plan(self) -> Plan:
        """The plan that runs."""
        return self._engine.plan

    def full_parameters(
        self, *names: str, rank0_only: bool = False, cpu: bool = False, writeback: bool = False,
        weights: str | None = None,
    ) -> AbstractContextManager[None]:  # fmt: skip
        """Hold copies of whole parameters in the model, on every rank or on rank 0, on its device or on the ``cpu``;
        drains first. With ``names`` of parameters only of the units that have them. ``weights``: optimizer state in
        their place, as in :meth:`Session.evaluate`.

        With ``writeback`` rank 0's changes reach every rank; without it, and if the block raises, changes are lost.
        Unless on the ``cpu``, the device holds the whole model, and one more unit at first, besides the shards.
        Raises ValueError for an unknown name. Collective.
        """
        keep = self._keeps(rank0_only)
        return loop_calls.full_parameters(
            self._engine, names, keep=keep, cpu=cpu, writeback=writeback, weights=weights
        )

    def _keeps(self, rank0_only: bool) -> bool:
        return not rank0_only or self.rank == 0

    @without_autograd()
    def state_dict(self, *, rank0_only: bool = False, cpu: bool = False) -> dict[str, Tensor]:
        """Return the whole model's state dict for the plain model, on every rank or on rank 0 (else empty); drains
        first.

        Units are gathered one by one. With ``cpu``, and where the budget has no room for the result, the result is on
        the CPU and the device holds no more than one whole unit. Collective.
        """
        return loop_calls.full_state_dict(self._engine, keep=self._keeps(rank0_only), cpu=cpu)

    @without_autograd()
    def load_state_dict(self, full: dict[str, Tensor]) -> None:
        """Load a plain model's state dict (the same on every rank). Raises KeyError or ValueError by name."""
        self._engine.drain("load_state_dict()")
        state_dict.load_full_state_dict(self.model, self._engine.storages, full)

    @without_autograd()
    def optimizer_state_dict(self, *, rank0_only: bool = False, cpu: bool = False) -> Any:
        """Return the ``optimizer.state_dict()`` of a plain loop, on every rank or on rank 0 (else empty); drains first.

        A list of them where there are several optimizers. Units are gathered one by one, and kept on the CPU with
        ``cpu``. State of masters has their precision. Collective.
        """
        keep = self._keeps(rank0_only)
        dicts = loop_calls.optimizer_states(self._engine, keep=keep, cpu=cpu)
        return dicts if len(dicts) > 1 else dicts[0]

    @without_autograd()
    def load_optimizer_state_dict(self, saved: Any) -> None:
        """Load a plain loop's ``optimizer.state_dict()``, or :meth:`optimizer_state_dict` (the same on every rank).

        Options, such as the learning rate, are loaded too. Raises ValueError for the state of another optimizer.
        """
        dicts = as_list(saved)
        if len(dicts) != len(self.optimizers):
            counts = f"there are {len(self.optimizers)} optimizers, and {len(dicts)} state dicts"
            raise ValueError(f"{counts}: give one for each")
        loop_calls.load_optimizer_states(self._engine, list(zip(self.optimizers, dicts, strict=True)))

    # Calls of one of the optimizers (:class:`mdcs.runtime.optimizer_calls.Run`).

    def check_options(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RunError if the optimizer's options have changed since the iteration's updates."""
        loop_calls.check_options(self._engine, optimizer)

    @without_autograd()
    def state_dict_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the ``state_dict()`` that this optimizer has in a plain loop; drains first. Collective."""
        return loop_calls.optimizer_state_of(self._engine, optimizer)

    @without_autograd()
    def load_state_dict_of(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        """Load a plain loop's ``state_dict()`` of this optimizer. Collective where there are several optimizers."""
        loop_calls.load_optimizer_states(self._engine, [(optimizer, saved)])

    def watch_gradients(self, *units: str) -> None:
        """Keep the gradients that these units (by name) are updated with, from now on; no names: keep none. Costs their
        bytes.

        Raises ValueError for a unit that is frozen or not in the plan.
        """
        loop_calls.watch_gradients(self._engine, units)

    @without_autograd()
    def gradients(self, unit: str) -> dict[str, Tensor]:
        """Return by parameter the gradient of a watched unit's last update: averaged over ranks, clipped, unscaled,
        whole.

        Collective; drains first. Raises ValueError for a unit that is not watched, or was not updated since.
        """
        return loop_calls.gradients(self._engine, unit)

    @property
    def steps(self) -> int:
        """Iterations done, including those before a resumed checkpoint."""
        return self._resumed_after + self._engine.sequencer.step - 1

    @without_autograd()
    def checkpoint(
        self, root: str | Path, *, extra: Any = None, keep: int | None = None, wait: bool = True
    ) -> SaveHandle:
        """Write ``root/step-N`` for :func:`mdcs.resume` into a folder that all ranks see. Collective; drains first.

        - ``extra``: numbers, texts, containers and tensors that ``resume`` returns (a schedule's state, the place in
          the data).
        - ``keep``: delete all but the last ``keep`` checkpoints once this one is complete; None keeps all.
        - ``wait``: False copies this rank's part to the host and writes it while training goes on, one checkpoint at a
          time. If the budget has no room for the copy on a CPU, the part is written before this returns.

        Raises RunError on every rank, naming the rank that could not write; without ``wait`` in the next call or in
        :meth:`close` at the latest. Earlier checkpoints stay as they are.
        """
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}")
        self._engine.drain("checkpoint()", needs_ranks=True)
        with self._engine.recorder.pause():
            return self._checkpointing().save(Path(root), self.steps, extra, keep=keep, wait=wait)

    def _checkpointing(self) -> Checkpoints:
        if self._checkpoints is None:
            from mdcs.runtime.checkpointing import Checkpoints  # late: importing DCP takes most of a second

            self._checkpoints = Checkpoints(self._engine)
        return self._checkpoints

    @without_autograd()
    def _resume(self, path: Path) -> ResumeInfo | None:
        self._engine.drain("resume()", needs_ranks=True)
        resumed = self._checkpointing().resume(path)
        if resumed is not None:
            self._resumed_after = resumed.step - (self._engine.sequencer.step - 1)
        return resumed
