"""A model in training: what :func:`mdcs.parallelize` returns to the loop."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mdcs.api.loop_plan import Choice
from mdcs.api.model_state import ModelState
from mdcs.model.units import ModelUnit
from mdcs.plan.plan import Plan
from mdcs.profiler.first_passes import FirstPasses
from mdcs.profiler.stages import Listener, Ran
from mdcs.runtime import unshard
from mdcs.runtime.context import StepRecord
from mdcs.runtime.engine import Engine, Trained
from mdcs.runtime.errors import OverBudget, RunError
from mdcs.runtime.gradient_scaling import Scaler
from mdcs.runtime.loop_access import OptimizerCalls
from mdcs.telemetry.timeline import Interval
from mdcs.torch_compat import without_autograd

if TYPE_CHECKING:
    from mdcs.runtime.checkpointing import ResumeInfo

_CHANGE = "a change of plans"


class Session(ModelState):
    """A model in training. :meth:`close` (or leaving a ``with`` block) ends the run.

    ``optimizer`` is the loop's own, the first of ``optimizers``. Its ``step()`` is :meth:`step`, its ``state_dict()``
    :meth:`optimizer_state_dict`, and its ``load_state_dict()`` :meth:`load_optimizer_state_dict`, so trainers and
    schedules of the learning rate use it as ever; after ``step()`` there is nothing for ``zero_grad()`` to do.

    While a session *chooses* its plan, some steps of the loop run under one plan after the other, and are measured.
    Then it *runs* under the chosen plan, until it is *closed*.
    """

    def __init__(
        self, run: Engine, units: list[ModelUnit], choice: Choice | None = None, *, was_in_pieces: bool = False
    ) -> None:
        # run: under a given plan, or the first of ``choice``. was_in_pieces: the model may not fit whole in the end.
        super().__init__(run, units)
        self._choice, self._was_in_pieces = choice, was_in_pieces
        self._heard: Listener | None = None
        self._unread: list[StepRecord] = []  # of plans before
        self._earlier_norm: float | None = None
        self._wants_times = False
        self._calls = OptimizerCalls(self.optimizers, self)
        self._listen()

    @property
    def is_choosing(self) -> bool:
        """Return whether steps are still measured to choose the plan: it may change at the end of one."""
        return self._choice is not None and self._choice.stage is not None and self._choice.stage.chooses

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.close()
        else:  # the state of the other ranks is unknown
            self._engine.failures.publish(error)
            self._end(f"rank {self.rank} left the run with {type(error).__name__}", failed=True)

    def step(self) -> None:
        """End an iteration. Updates may still be in flight: each is done before its unit is used again.

        After fewer than ``plan.micro_steps`` passes the gradients of these passes are used, on every rank. Raises
        RunError if there was no pass, and for changes by the loop that the updates did not see. With
        ``over_budget="raise"`` a step that took more bytes than the budget has ends the run on every rank.
        """
        if isinstance(self._heard, FirstPasses):
            self._heard.check()
        try:
            self._engine.end_step()
        except OverBudget as error:
            self.__exit__(OverBudget, error)  # the other ranks would wait for this one
            raise
        if self._heard is not None:
            self._heard.end_step()
            self._heard_steps += 1
            if self._stage.is_over(self._heard_steps, self._engine, _CHANGE):
                self._end_stage()

    def _listen(self) -> None:
        """Begin the stage of the choice, if there is one."""
        stage = None if self._choice is None else self._choice.stage
        if stage is not None:
            self._stage, self._heard, self._heard_steps = stage, stage.listen(self._engine), 0

    def _end_stage(self) -> None:
        """End a stage of the choice; hand the units over to the next plan, one by one, where it is another."""
        assert self._choice is not None and self._heard is not None
        engine, heard = self._engine, self._heard
        self._stop_listening()
        began = time.monotonic()
        engine.drain(_CHANGE)
        drained = time.monotonic()
        records = self._records(flush=True) if self.is_choosing else []
        self._unread += records
        self._choice.go_on(Ran(engine, heard, records))
        if self._choice.plan is not engine.plan:
            began += time.monotonic() - drained  # the choice is no part of the change
            self._change_plan(self._choice.plan)
            self._engine.recorder.note(engine.sequencer.step, handover_s=time.monotonic() - began)
        self._listen()

    def _change_plan(self, plan: Plan) -> None:
        engine = self._engine
        if self._checkpoints is not None:
            self._checkpoints.finish()
            self._checkpoints = None
        self._earlier_norm = self._run_norm()
        engine.retire(_CHANGE)
        try:
            trained = Trained(self.model, self._optimizers, self.units)
            self._engine = Engine(trained, plan, self._options, None, engine)
        except BaseException:
            for storage in engine.storages:  # some are in pieces, and some are gone
                storage.guard.close()
            engine.end("planning anew failed", failed=True)
            raise
        if self._wants_times:
            self._engine.recorder.begin_timing()

    def _stop_listening(self) -> None:
        if self._heard is not None:
            self._heard.stop()
            self._heard = None

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss [scalar] to call ``backward`` on; ``loss`` itself where there is no ``loss_scale``."""
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
        if self._heard is not None:
            self._heard.forget()
        self._engine.abandon()

    def drops_gradients(self) -> bool:
        """Give up the iteration for ``zero_grad()``, between two passes; return whether this could be done."""
        has_gradients = self._heard.has_gradients if isinstance(self._heard, FirstPasses) else None
        if has_gradients is None:
            sequencer = self._engine.sequencer
            is_between = sequencer.has_gradients and (sequencer.at_turn or sequencer.after_micro_step)
            can_drop = is_between and not (self._engine.is_closed or sequencer.updates_begun)
        else:
            can_drop = has_gradients and self._options.needs_norm
        if can_drop:
            self.abandon()
        return can_drop

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let passes in the block add their gradients to ``.grad`` on each rank alone, any passes in any order.

        As with DDP, the last backward pass of the step comes after the block, and its gradients on top of these;
        without one, :meth:`step` reduces them. ``zero_grad()`` drops them. Units are whole meanwhile. Every rank enters
        a block at the same place of the step.
        """
        self._engine.refuse_if_exported("no_sync()")
        side = self._engine.sequencer.side
        before, side.in_block = side.in_block, True
        try:
            yield
        finally:
            side.in_block = before

    def evaluate(self, *, weights: str | None = None) -> AbstractContextManager[None]:
        """Run forward passes without gradients (``torch.no_grad()``), any number per rank; :meth:`drain` included.

        ``weights``: optimizer state that takes the place of the parameters in the block, such as "average" of
        :class:`mdcs.WithAverage`. Shards are exchanged, so no rank has a whole copy. Raises ValueError for an unknown
        one.

        Units that are sharded at rest are gathered once if the budget has room for all of them, else for every forward.
        In the second case a rank waits at the end for the ranks that have more batches.
        """
        return self._engine.export_params("evaluate()", self._evaluate, weights=weights)

    @contextmanager
    def _evaluate(self) -> Iterator[None]:
        with torch.no_grad(), self._engine.evaluation.unsharded():
            yield
        self._engine.buffers.register()

    def pause(self) -> AbstractContextManager[None]:
        """Leave the block's seconds, no training, out of :meth:`records` and :meth:`last_period`. Evaluations,
        checkpoints and state dicts are left out by themselves, their drain is not.
        """
        return self._engine.recorder.pause()

    # -- gradients: updates begin in backward, so their limits are options of the run

    @without_autograd()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Return the global norm of this iteration's gradients before they are clipped, as FSDP's method; once all are
        reduced.

        Call it between backward and :meth:`step`, on every rank. Then :meth:`step` applies the gradients, and
        ``zero_grad()`` or :meth:`abandon` drops them. Raises RunError unless the run clips at ``max_norm``
        (``parallelize(…, clip_norm=max_norm)``).
        """
        if norm_type != 2:
            raise RunError(f"clip_grad_norm_(norm_type={norm_type}): only the 2-norm is clipped; leave norm_type out")
        _check_limit(
            "clip_grad_norm_", "clip_norm", max_norm, self._options.clip_norm,
            "; a plan= of your own: make it with cross_iteration=False",
        )  # fmt: skip
        if isinstance(self._heard, FirstPasses):
            self._heard.check()
        self._reduce()
        return torch.tensor(self.grad_norm)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Check that gradients are clipped at ``clip_value``, as they are when they are reduced: no rank waits for it.

        Raises RunError unless the run does so (``parallelize(…, clip_value=clip_value)``).
        """
        _check_limit("clip_grad_value_", "clip_value", clip_value, self._options.clip_value)

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm of the last clipped iteration, before clipping; after :meth:`step` that step's, for
        which the host waits.
        """
        norm = self._run_norm()
        return self._earlier_norm if norm is None else norm

    # -- what happened

    def records(self, *, flush: bool = False) -> list[StepRecord]:
        """Return the finished iterations not returned before; the last one only with ``flush``, after :meth:`drain`.

        Computing and messages are timed from the first call on (on CUDA by four events for each message and two for
        each slot): call it before the first step to have all times. The last 128 unread steps are kept.
        """
        self._wants_times = True
        earlier, self._unread = self._unread, []
        return earlier + self._records(flush)

    def _records(self, flush: bool) -> list[StepRecord]:
        engine = self._engine
        return engine.recorder.finished(engine.sequencer.step - (1 if flush else 2), flush)

    def last_period(self) -> tuple[float, float, list[Interval]]:
        """Return (begin, end, intervals) of the last whole period, from first backward slot to first backward slot.

        Seconds on the machine's monotonic clock: ranks of one machine can be compared. Periods are timed from the first
        call on, of this method or of :meth:`records`; zeros before there is one.
        """
        return self._engine.recorder.last_period()

    def explain(self) -> str:
        """Return how the plan was chosen: a line for each candidate, with predicted and measured milliseconds per step.

        The interval is the 96 % interval of a paired comparison with the chosen one. "" for a given plan, and before
        the choice.
        """
        return "\n".join(map(str, self._choice.trials)) if self._choice is not None else ""

    def memory(self) -> dict[str, Any]:
        """Return peak bytes by category since the start or :meth:`reset_memory`: ``predicted`` by the ledger during the
        run, and ``measured`` by the allocator (None where nothing is). ``retries``: how often the allocator had to free
        cached memory to serve a request, which stops the device (None on CPU).
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

    # -- the end

    def close(self, *, whole: bool = True) -> None:
        """End the run, on every rank: each rank then has the whole plain model, for any loop or another plan.

        The current iteration is given up. The optimizer gets the whole state of a plain loop. Without ``whole``, the
        optimizer's state is lost and parameters that are not whole on this rank raise when they are used. The same
        happens, with one warning, if the run was sharded from its start and the budget has no room for the whole model
        with the optimizer's state; and if gathering fails: after an error, when a rank does not take part within
        ``timeout_s``, or when updates of an iteration have begun. Waits for a checkpoint that is being written; if it
        fails, raises RunError after closing.
        """
        if self._heard is not None:
            self._heard.forget()
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
        if whole and self._options.emulate is None:
            plan = self.plan
            room = plan.budget - plan.reserve if self._was_in_pieces and plan.budget is not None else None
            why = unshard.beyond_budget(self._engine.storages, self._engine.updates.updates, room)
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

    def _end(self, why: str, *, failed: bool = False) -> None:
        self._stop_listening()
        if not self._engine.is_closed:
            if self._checkpoints is not None:
                self._checkpoints.leave()
            self._calls.end()
        self._engine.end(why, failed=failed)


@without_autograd()
def resume(session: Session, path: str | Path) -> ResumeInfo | None:
    """Resume from a checkpoint of :meth:`Session.checkpoint`, on any number of ranks and with any plan. Collective.

    ``path`` is the root passed to ``checkpoint``, or the folder of a step. From a root the newest usable checkpoint is
    read, with a warning for every newer one. Returns the step and the loop's extra; None where there is no checkpoint
    yet. With the same number of ranks and the same plan training continues bit for bit. Raises CheckpointError, by
    name, if no checkpoint is usable or if it belongs to another model or optimizer.
    """
    session._engine.drain("resume()", needs_ranks=True)
    resumed = session._checkpointing().resume(Path(path))
    if resumed is not None:
        session._resumed_after = resumed.step - (session._engine.sequencer.step - 1)
    return resumed


def _check_limit(call: str, option: str, value: float, limit: float | None, more: str = "") -> None:
    """Raise RunError unless the run clips at ``value``, which may be a tensor of one element."""
    if limit is None or not math.isclose(float(value), limit, rel_tol=1e-6):
        so_far, more = ("was started without clipping", more) if limit is None else (f"clips at {limit:g}", "")
        raise RunError(f"{call}({value:g}): this run {so_far}: write parallelize(…, {option}={value:g}){more}")
