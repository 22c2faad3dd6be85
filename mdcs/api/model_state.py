"""The parameters, the optimizers' state and the checkpoints of a session."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mdcs.model.optimizers import parameters_of
from mdcs.model.units import ModelUnit
from mdcs.plan.plan import Plan
from mdcs.runtime import optimizer_state, unshard
from mdcs.runtime.engine import Engine
from mdcs.torch_compat import without_autograd

if TYPE_CHECKING:
    from mdcs.runtime.checkpointing import Checkpoints, SaveHandle


class ModelState:
    """The model and the optimizers of a session."""

    def __init__(self, run: Engine, units: list[ModelUnit]) -> None:
        self.model, self.units, self.rank, self._options = run.model, units, run.rank, run.options
        self._optimizers = run.optimizers
        self.optimizers = self._optimizers.members
        self.optimizer = self.optimizers[0]
        self._engine = run
        self._checkpoints: Checkpoints | None = None
        self._resumed_after = 0  # steps before this session

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
        engine = self._engine
        units = unshard.units_of(self.model, engine.storages, names, "full_parameters()")
        hold = functools.partial(
            unshard.full_parameters, engine.unsharder, units, keep=self._keeps(rank0_only), cpu=cpu,
            writeback=writeback, group=engine.groups.message_group,
        )  # fmt: skip
        call = f"full_parameters({'writeback=True' if writeback else ''})"
        return engine.export_params(call, hold, needs_ranks=True, weights=weights)

    def _keeps(self, rank0_only: bool) -> bool:
        return not rank0_only or self.rank == 0

    @without_autograd()
    def state_dict(self, *, rank0_only: bool = False, cpu: bool = False) -> dict[str, Tensor]:
        """Return the whole model's state dict for the plain model, on every rank or on rank 0 (else empty); drains
        first.

        Units are gathered one by one. With ``cpu``, and where the budget has no room for the result, the result is on
        the CPU and the device holds no more than one whole unit. Collective.
        """
        engine = self._engine
        engine.drain("state_dict()", needs_ranks=True)
        sizes = [storage.full_bytes for storage in engine.storages]
        fits, keep = engine.unsharder.fits(sum(sizes) + max(sizes)), self._keeps(rank0_only)
        with engine.recorder.pause():
            return unshard.full_state_dict(self.model, engine.unsharder, keep=keep, cpu=cpu or not fits)

    @without_autograd()
    def load_state_dict(self, full: dict[str, Tensor]) -> None:
        """Load a plain model's state dict (the same on every rank). Raises KeyError or ValueError by name."""
        self._engine.drain("load_state_dict()")
        unshard.load_full_state_dict(self.model, self._engine.storages, full)

    @without_autograd()
    def optimizer_state_dict(self, *, rank0_only: bool = False, cpu: bool = False) -> Any:
        """Return the ``optimizer.state_dict()`` of a plain loop, on every rank or on rank 0 (else empty); drains first.

        A list of them where there are several optimizers. Units are gathered one by one, and kept on the CPU with
        ``cpu``. State of masters has their precision. Collective.
        """
        dicts = self._optimizer_states(self.optimizers, keep=self._keeps(rank0_only), cpu=cpu)
        return dicts if len(dicts) > 1 else dicts[0]

    def _optimizer_states(
        self, optimizers: Sequence[torch.optim.Optimizer], *, keep: bool = True, cpu: bool = False
    ) -> list[dict[str, Any]]:
        """Return the state dict of each of the ``optimizers``, empty unless ``keep``; drains first. Collective."""
        self._engine.drain("optimizer_state_dict()", needs_ranks=True)
        only = {p for optimizer in optimizers for p in parameters_of(optimizer)}
        state = self._engine.optimizer_state.full(keep=keep, cpu=cpu, only=only)
        return [optimizer_state.to_state_dict(optimizer, state) if keep else {} for optimizer in optimizers]

    @without_autograd()
    def load_optimizer_state_dict(self, saved: Any) -> None:
        """Load a plain loop's ``optimizer.state_dict()``, or :meth:`optimizer_state_dict` (the same on every rank).

        Options, such as the learning rate, are loaded too. Raises ValueError for the state of another optimizer.
        """
        dicts = [saved] if isinstance(saved, Mapping) else list(saved)
        if len(dicts) != len(self.optimizers):
            counts = f"there are {len(self.optimizers)} optimizers, and {len(dicts)} state dicts"
            raise ValueError(f"{counts}: give one for each")
        self._load(list(zip(self.optimizers, dicts, strict=True)))

    def _load(self, given: Sequence[tuple[torch.optim.Optimizer, Mapping[str, Any]]]) -> None:
        """Load options and state of the ``given`` optimizers; others keep theirs. Drains first. Collective."""
        engine, loaded = self._engine, [optimizer for optimizer, _ in given]
        engine.drain("load_optimizer_state_dict()")
        others = {p for optimizer in self.optimizers if optimizer not in loaded for p in parameters_of(optimizer)}
        state: dict[Any, Any] = dict(engine.optimizer_state.full(keep=True, cpu=True, only=others)) if others else {}
        for optimizer, saved in given:
            state |= optimizer_state.from_state_dict(optimizer, saved)
        named = [list(zip(s.names, s.parameters, strict=True)) for s in engine.storages]
        optimizer_state.histories(named, engine.updates.updates, state)  # refuses a shape before anything is loaded
        for optimizer, saved in given:
            optimizer_state.load_options(optimizer.param_groups, saved)
        engine.optimizer_state.load(state)

    # Calls of one of the optimizers (:class:`mdcs.runtime.loop_access.OptimizerCalls`).

    def check_options(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RunError if the optimizer's options have changed since the iteration's updates."""
        changed = self._engine.updates.changed_option(optimizer)
        if changed is not None:
            raise self._engine.place.error(
                f"{changed[1]} of {type(optimizer).__name__} was changed after the first optimizer's step(), which "
                "updates the parameters of all: change it before backward or after the last step()"
            )

    @without_autograd()
    def state_dict_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the ``state_dict()`` that this optimizer has in a plain loop; drains first. Collective."""
        return self._optimizer_states([optimizer])[0]

    @without_autograd()
    def load_state_dict_of(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        """Load a plain loop's ``state_dict()`` of this optimizer. Collective where there are several optimizers."""
        self._load([(optimizer, saved)])

    def _reduce(self) -> None:
        """Let the reductions of this iteration be sent. Raises RunError before backward has ended."""
        sequencer = self._engine.sequencer
        self._engine.check("clip_grad_norm_()")
        sequencer.end_short()
        if not sequencer.at_turn or not sequencer.step_pending:
            raise self._engine.place.error("clip_grad_norm_() comes between backward and step()")

    def _run_norm(self) -> float | None:
        """Return the gradients' norm before clipping, for which the host waits; None if nothing has been clipped yet.
        """
        engine = self._engine
        number = engine.sequencer.first_number + engine.wire.messages.last_reduction
        if engine.update_scale.is_needed and number < engine.wire.queue.issued and not engine.is_closed:
            engine.wire.wait_for_norm(number)
        if engine.update_scale.norm is None:
            return None
        with engine.executor.on_comm_stream():
            return float(engine.update_scale.norm)

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
