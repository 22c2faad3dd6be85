"""``parallelize``: takes a model, its optimizer and a plan; returns the interface of the training loop."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.emulation import Emulation
from mdcs.model.optimizers import GivenOptimizers, Optimizers
from mdcs.model.units import ModelUnit
from mdcs.plan.plan import Plan
from mdcs.runtime import state_dict
from mdcs.runtime.engine import Engine
from mdcs.runtime.errors import OverBudget, RunError
from mdcs.runtime.executor import with_index
from mdcs.runtime.gradient_scaling import LossScale
from mdcs.runtime.gradients import Gradients, Scaler
from mdcs.runtime.initialization import InitFunction
from mdcs.runtime.optimizer_calls import OptimizerCalls
from mdcs.runtime.optimizer_dicts import OptimizerDicts
from mdcs.runtime.step_trace import StepRecord
from mdcs.runtime.validation import RunOptions
from mdcs.telemetry.timeline import Interval
from mdcs.torch_compat import without_autograd

if TYPE_CHECKING:
    from mdcs.runtime.checkpointing import Checkpoints, ResumeInfo, SaveHandle


def parallelize(
    model: nn.Module,
    optimizer: GivenOptimizers,
    plan: Plan,
    units: list[ModelUnit],
    *,
    group: dist.ProcessGroup | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    loss_scale: LossScale | None = None,
    broadcast_buffers: bool | None = None,
    timeout_s: float = 300.0,
    emulate: Emulation | None = None,
    init: InitFunction | None = None,
    device: torch.device | str = "cpu",
    over_budget: str = "warn",
) -> Parallel:
    """Train ``model`` as ``plan`` says: :func:`mdcs.parallelize` with a plan, which says what the options are.

    Collective: the plan's hash is checked, and parameters are broadcast from rank 0. Raises PlanError (it names ranks with
    another plan), ValueError for a plan that does not fit the model and for a parameter that would not be trained, and
    RunError, naming rank, step and message, for later failures.
    """
    options = RunOptions(
        clip_norm, clip_value, loss_scale, broadcast_buffers, timeout_s, emulate, init, with_index(device), over_budget
    )
    return Parallel(Engine(model, Optimizers(optimizer), plan, units, group, options), units)


def resume(parallel: Parallel, path: str | Path) -> ResumeInfo | None:
    """Resume from a checkpoint of :meth:`Parallel.checkpoint`, on any number of ranks and with any plan. Collective.

    ``path`` is the root passed to ``checkpoint``, or the folder of a step. From a root the newest usable checkpoint is
    read, with a warning for every newer one. Returns the step and the loop's extra; None where there is no checkpoint
    yet. With the same number of ranks and the same plan training continues bit for bit. Raises CheckpointError, by
    name, if no checkpoint is usable or if it belongs to another model or optimizer.
    """
    return parallel._resume(Path(path))


class Parallel(Gradients, OptimizerDicts):
    """A model in training. ``plan`` is the running plan; :meth:`close` (or leaving a ``with`` block) ends the run.

    ``optimizer`` is the loop's own. Its ``step()`` is :meth:`step`, its ``state_dict()`` :meth:`optimizer_state_dict`, and its
    ``load_state_dict()`` :meth:`load_optimizer_state_dict`, so trainers and schedules of the learning rate use it as ever;
    after ``step()`` there is nothing for ``zero_grad()`` to do. ``optimizers`` are all of them, of which ``optimizer`` is the
    first.
    """

    def __init__(self, engine: Engine, units: list[ModelUnit]) -> None:
        super().__init__(engine)
        self.units = units
        self.model, self.plan, self.rank = engine.model, engine.plan, engine.rank
        self.optimizers = engine.optimizers.members
        self.optimizer = self.optimizers[0]
        self._checkpoints: Checkpoints | None = None
        self._resumed_after = 0
        self._calls = OptimizerCalls(self.optimizers, self)

    def __enter__(self) -> Parallel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.close()
        else:  # the state of the other ranks is unknown
            self.tell(error)
            self._end(f"rank {self.rank} left the run with {type(error).__name__}", failed=True)

    # -- training -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """End an iteration. Updates may still be in flight: each is done before its unit is used again.

        After fewer than ``plan.micro_steps`` passes the gradients of these passes are used, on every rank. Raises
        RunError if there was no pass, and for changes by the loop that the updates did not see. With
        ``over_budget="raise"`` a step that took more bytes than the budget has ends the run on every rank.
        """
        try:
            self._engine.end_step()
        except OverBudget as error:
            self.__exit__(OverBudget, error)  # the other ranks would wait for this one
            raise

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss to call ``backward`` on; ``loss`` itself where there is no ``loss_scale``."""
        return self.scaler.scale(loss)

    @property
    def scaler(self) -> Scaler:
        """The ``loss_scale`` in the form of torch.amp.GradScaler, for a loop that has one."""
        return Scaler(self._options.loss_scale, self._calls.step)

    def drain(self) -> None:
        """Finish all messages in flight and every update: before evaluation, state dicts and exit.

        Parameters of dp units can then be read, and changed alike on all ranks, until the next forward pass.
        """
        self._engine.drain("drain()")

    def abandon(self) -> None:
        """Give up the current iteration on every rank, as if its batches did not exist: the response to an exception.

        The ranks may be at different places of a forward pass. Raises RunError if updates of the iteration have begun;
        without ``plan.cross_iteration`` none begins before :meth:`step`.
        """
        self._engine.abandon()

    def drops_gradients(self) -> bool:
        """Give up the iteration for the optimizer's ``zero_grad()``, between two passes; return whether this could be done."""
        if not self._can_drop():
            return False
        self.abandon()
        return True

    def _can_drop(self) -> bool:
        sequencer = self._engine.sequencer
        is_between = sequencer.has_gradients and (sequencer.at_turn or sequencer.after_micro_step)
        return is_between and not (self._engine.is_closed or sequencer.updates_begun)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let passes in the block add their gradients to ``.grad`` on each rank alone, any passes in any order.

        As with DDP, the last backward pass of the step comes after the block, and its gradients on top of these; without
        one, :meth:`step` reduces them. ``zero_grad()`` drops them. Units are whole meanwhile. Every rank enters a block at
        the same place of the step.
        """
        engine = self._engine
        engine.refuse_if_exported("no_sync()")
        side, before = engine.sequencer.side, engine.sequencer.side.accumulates
        side.accumulates = True
        try:
            yield
        finally:
            side.accumulates = before

    def evaluate(self, *, weights: str | None = None) -> AbstractContextManager[None]:
        """Run forward passes without gradients (``torch.no_grad()``), any number per rank; :meth:`drain` included.

        ``weights``: optimizer state that takes the place of the parameters in the block, such as "average" of
        :class:`mdcs.WithAverage`. Shards are exchanged, so no rank has a whole copy. Raises ValueError for an unknown one.

        Units that are sharded at rest are gathered once if the budget has room for all of them, else for every forward.
        In the second case a rank waits at the end for the ranks that have more batches.
        """
        return self._engine.export_params("evaluate()", self._evaluate, weights=weights)

    @contextmanager
    def _evaluate(self) -> Iterator[None]:
        with torch.no_grad(), self._engine.evaluation.run():
            yield
        self._engine.buffers.register()

    def pause(self) -> AbstractContextManager[None]:
        """Leave the block's seconds out of :meth:`records` and :meth:`last_period`: work that is not training.

        Evaluations, checkpoints and state dicts are left out by themselves, their drain is not.
        """
        return self._engine.recorder.pause()

    def replan(self) -> None:
        """Measure the next step, and go on with the plan that is made of it.

        Call it on every rank, between two steps. The measured step runs as with DistributedDataParallel, with the whole
        model on every rank, above the budget if need be; of a run that was sharded from its start two steps are measured,
        as it is. Weights, optimizer state, buffers and schedules go on bit for bit. Gradients that are watched, and peaks of
        memory, begin anew. Raises RunError where updates have masters, and for runs with ``emulate`` or ``group``.
        """
        raise RunError("replan() needs a run that mdcs.parallelize() started")

    # -- state --------------------------------------------------------------------------------------------------

    def full_parameters(
        self, *names: str, rank0_only: bool = False, cpu: bool = False, writeback: bool = False, weights: str | None = None
    ) -> AbstractContextManager[None]:
        """Hold copies of whole parameters in the model, on every rank or on rank 0, on its device or on the ``cpu``;
        drains first. With ``names`` of parameters only of the units that have them. ``weights``: as in :meth:`evaluate`.

        With ``writeback`` rank 0's changes reach every rank; without it, and if the block raises, changes are lost.
        Unless on the ``cpu``, the device holds the whole model, and one more unit at first, besides the shards.
        Raises ValueError for an unknown name. Collective.
        """
        engine, keep = self._engine, not rank0_only or self.rank == 0
        group = engine.groups.message_group
        units = state_dict.units_of(self.model, engine.storages, names, "full_parameters()")
        hold = functools.partial(
            state_dict.full_parameters, engine.storages, engine.unsharder, units, keep=keep, cpu=cpu, writeback=writeback,
            group=group,
        )  # fmt: skip
        call = f"full_parameters({'writeback=True' if writeback else ''})"
        return engine.export_params(call, hold, needs_ranks=True, weights=weights)

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
        fits = engine.unsharder.fits(sum(sizes) + max(sizes))
        cpu = cpu or not fits
        with self.pause():
            state = state_dict.full_state_dict(
                self.model, engine.storages, engine.unsharder, keep=not rank0_only or self.rank == 0, cpu=cpu
            )
        on_device = {name: value for name, value in state.items() if value.device == engine.storages[0].device}
        engine.excess.hand_out(on_device, fits)
        return state

    @without_autograd()
    def load_state_dict(self, full: dict[str, Tensor]) -> None:
        """Load a plain model's state dict (the same on every rank). Raises KeyError or ValueError by name."""
        self._engine.drain("load_state_dict()")
        state_dict.load_full_state_dict(self.model, self._engine.storages, full)

    @property
    def steps(self) -> int:
        """Iterations done, including those before a resumed checkpoint."""
        return self._resumed_after + self._engine.sequencer.step - 1

    @without_autograd()
    def checkpoint(self, root: str | Path, *, extra: Any = None, keep: int | None = None, wait: bool = True) -> SaveHandle:
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
        with self.pause():
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

    # -- what happened ------------------------------------------------------------------------------------------

    def records(self, *, flush: bool = False) -> list[StepRecord]:
        """Return the finished iterations not returned before; the last one only with ``flush``, after :meth:`drain`.

        Times are taken whether or not they are read, and those of the last 128 unread steps are kept: on CUDA four events for
        each message and one for each slot, a few hundred thousand for a plan of many messages. Read them, or accept that.
        """
        return self._engine.recorder.finished(self._engine.sequencer.step - (1 if flush else 2), flush)

    def last_period(self) -> tuple[float, float, list[Interval]]:
        """Return (begin, end, intervals) of the last whole period, from first backward slot to first backward slot.

        Seconds on the machine's monotonic clock: ranks of one machine can be compared.
        """
        return self._engine.recorder.last_period()

    def memory(self) -> dict[str, Any]:
        """Return peak bytes by category since the start or :meth:`reset_memory`.

        - ``predicted``: the ledger's, kept during the run.
        - ``measured``: the allocator's; None where nothing is measured.
        - ``retries``: how often the allocator had to free cached memory to serve a request (None on CPU). Each stops
          the device.
        """
        engine = self._engine
        with engine.account.lock:
            predicted = dict(engine.account.peak)
        return {"predicted": predicted, "measured": engine.meter.peaks(), "retries": engine.executor.retries()}

    def memory_by_slot(self) -> list[Any]:
        """Return the last :class:`mdcs.telemetry.timeline.SlotMemory` of every slot of a period."""
        return [m for _, m in sorted(self._engine.sequencer.memory.items())]

    def watch_memory(self) -> None:
        """Measure every slot from now on, for :meth:`memory_by_slot`. Off by default on CUDA: a reading takes time."""
        self._engine.sequencer.watches_memory = True

    def reset_memory(self) -> None:
        """Restart the peaks of :meth:`memory`."""
        self._engine.reset_memory()

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self, *, whole: bool = True) -> None:
        """End the run, on every rank: each rank then has the whole plain model, for any loop or another plan.

        The current iteration is given up. The optimizer gets the whole state of a plain loop. Without ``whole``, the
        optimizer's state is lost and parameters that are not whole on this rank raise when they are used. The same
        happens, with one warning, if the run was sharded from its start and the budget has no room for the whole model with
        the optimizer's state; and if gathering fails: after an error, when a rank does not take part within ``timeout_s``,
        or when updates of an iteration have begun. Waits for a checkpoint that is being written; if it fails, raises
        RunError after closing.
        """
        if self._engine.is_closed:
            return
        self._engine.refuse_if_exported("close()")
        unwritten: RunError | None = None
        try:
            if self._checkpoints is not None:
                self._checkpoints.finish()
        except RunError as e:  # close all the same: the model is not affected
            unwritten = e
        why = "it was closed without gathering them" if not whole else "they are made up: no rank has sent anything"
        failed = False
        if whole and self._engine.options.emulate is None:
            why = self._too_large()
            if why and self.rank == 0:
                warnings.warn(
                    f"closed in pieces: {why}. Before the end, call parallel.checkpoint(folder), or "
                    "parallel.state_dict(rank0_only=True, cpu=True)", stacklevel=2,
                )  # fmt: skip
            elif not why and (why := self._engine.make_plain()):
                failed = True
                warnings.warn(f"rank {self.rank}: closed without the optimizer's state: {why}", stacklevel=2)
        self._end(why, failed=failed)
        if unwritten is not None:
            raise unwritten

    def _too_large(self) -> str:
        """Return why a rank cannot have the whole model, and "" if it can."""
        return ""

    def _end(self, why: str, *, failed: bool = False) -> None:
        if self._checkpoints is not None and not self._engine.is_closed:
            self._checkpoints.leave()
        if not self._engine.is_closed:
            self._calls.end()
        self._engine.end(why, failed=failed)

    def tell(self, error: BaseException) -> None:
        """Send the other ranks an error that ends this rank's part, as leaving a ``with`` block does."""
        self._engine.failures.publish(error)

    def undo(self, weights: Mapping[nn.Parameter, Tensor]) -> None:
        """Close, and restore the tensors that the model had before ``parallelize``: the training leaves no trace."""
        self._end("")
        for storage in self._engine.storages:
            storage.guard.open()
        for p, tensor in weights.items():
            p.data, p.grad = tensor, None
