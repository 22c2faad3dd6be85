"""``parallelize``: takes a model, its optimizer and a plan; returns the interface of the training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import uuid
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.measure.memory import current_meter
from mdcs.measure.timeline import Interval
from mdcs.model.aliases import attributes_over_parameters, still_held
from mdcs.model.hooks import Hooks, ModuleHook
from mdcs.model.inputs import BatchSizes
from mdcs.model.optimizers import parameter_groups
from mdcs.model.units import ModelUnit, alias_refused
from mdcs.plan.ledger import Ledger
from mdcs.plan.messages import Plan
from mdcs.plan.worst_case import check
from mdcs.profile.algorithms import Collectives
from mdcs.runtime import misuse, optimizer_state, state
from mdcs.runtime import refusals as checks
from mdcs.runtime.account import Account
from mdcs.runtime.buffers import Buffers, broadcast, check_buffers, layout
from mdcs.runtime.communicator import Communicator, NodeCommunicator, backend_of
from mdcs.runtime.dispatcher import Dispatcher
from mdcs.runtime.emulation import EmulatedCommunicator, Emulation
from mdcs.runtime.errors import Place, RunError
from mdcs.runtime.evaluation import Evaluation
from mdcs.runtime.excess import Excess
from mdcs.runtime.executor import between, executor_for, with_index
from mdcs.runtime.gathering import Gathering
from mdcs.runtime.groups import Groups
from mdcs.runtime.last_words import LastWords
from mdcs.runtime.optimizer_state import OptimizerState
from mdcs.runtime.pacing import pacer_for
from mdcs.runtime.record import Recorder, StepRecord
from mdcs.runtime.scaling import LossScale
from mdcs.runtime.start import Initialisation, Initialise, take_over
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.stream_dispatcher import StreamDispatcher, bytes_apart
from mdcs.runtime.updates import Updates
from mdcs.runtime.walker import SlotWalker
from mdcs.runtime.wire import Connected, Wire
from mdcs.torch_compat import mark_stepped

if TYPE_CHECKING:
    from mdcs.runtime.checkpointing import Checkpoints, Resumed, Saving

_CPU = torch.device("cpu")


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    units: list[ModelUnit],
    *,
    group: dist.ProcessGroup | None = None,
    clip_norm: float | None = None,
    loss_scale: LossScale | None = None,
    broadcast_buffers: bool | None = None,
    timeout_s: float = 300.0,
    emulate: Emulation | None = None,
    init: Initialise | None = None,
    device: torch.device | str = "cpu",
) -> Parallel:
    """Train ``model`` as ``plan`` says, in your own loop.

    Call it on every rank after ``init_process_group``, with the same plan (its hash is checked) and the ``units`` that
    the plan was made for. Parameters are broadcast from rank 0. ``optimizer`` (SGD, Adam or AdamW) keeps its options
    and learning-rate schedules; its updates run on shards, inside ``backward`` and the next forward. Messages have a
    process group of their own, so the loop may use ``group`` for its collectives. Then::

        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            parallel.step()          # after plan.micro_steps backward passes

    - ``clip_norm``: clips the global gradient norm. Clipping is a barrier: the plan must have cross_iteration off.
    - ``loss_scale``: dynamic loss scale for float16, also a barrier. Call ``parallel.scaled(loss).backward()`` then.
    - ``broadcast_buffers``: True broadcasts rank 0's buffers after every step, as DDP does; False leaves each rank its
      own. None broadcasts them when training pauses, and refuses a model whose forward changes buffers other than
      BatchNorm's.
    - ``timeout_s``: bounds every wait (seconds).
    - ``emulate``: this one process is a rank of the plan's world, on its emulated link (:mod:`mdcs.runtime.emulation`).
    - ``init``: initialises a module's own parameters and buffers if they are on the meta device; None: the module's
      ``reset_parameters()``.
    - ``device``: where parameters and buffers from the meta device are made, unit by unit.

    Masters, where the plan's profile has them, start as the model's parameters. docs/loops.md says what a loop may do
    with model and optimizer during the run. Raises PlanError (it names ranks with another plan), ValueError for a plan
    that does not fit the model and for a parameter that would not be trained, and RunError, naming rank, step and
    message, for later failures.
    """
    return Parallel(
        model, optimizer, plan, units, group, clip_norm, timeout_s, emulate, loss_scale, broadcast_buffers, init,
        with_index(device),
    )  # fmt: skip


def resume(parallel: Parallel, path: str | Path) -> Resumed | None:
    """Resume from a checkpoint of :meth:`Parallel.checkpoint`, on any number of ranks and with any plan. Collective.

    ``path`` is the root passed to ``checkpoint``, or the folder of a step. From a root the newest usable checkpoint is
    read, with a warning for every newer one. Returns the step and the loop's extra; None where there is no checkpoint
    yet. With the same number of ranks and the same plan training continues bit for bit. Raises CheckpointError, by
    name, if no checkpoint is usable or if it belongs to another model or optimizer.
    """
    return parallel._resume(Path(path))


class Parallel:
    """A model in training. ``plan`` is the running plan; :meth:`close` (or leaving a ``with`` block) ends the run."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, units: list[ModelUnit],
        group: dist.ProcessGroup | None, clip_norm: float | None, timeout_s: float, emulate: Emulation | None = None,
        loss_scale: LossScale | None = None, broadcast_buffers: bool | None = None, init: Initialise | None = None,
        made_on: torch.device = _CPU,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.plan, self.units, self._emulate = model, optimizer, plan, units, emulate
        processes = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        if emulate is not None:
            self.rank = emulate.rank
        self._place = Place(self.rank)
        device = units[0].parameters[0][1].device
        if device.type == "meta":
            device = made_on
        ordered: list[list[tuple[str, nn.Parameter]]] = []
        group_of: list[list[int]] = []
        started: optimizer_state.Together = {}
        problem: ValueError | None = None
        try:
            checks.fits_processes(plan, processes, backend_of(group, device), emulate)
            checks.covers(model, units, optimizer)
            checks.keeps_order(model, backend_of(group, device))
            check_buffers(model)
            checks.fits_job(plan, clip_norm, loss_scale, optimizer)
            check(plan)
            groups = parameter_groups(optimizer)
            ordered, group_of = checks.match(plan, units, groups)
            initialisation = Initialisation(model, units, init, device)
            started = optimizer_state.together(ordered, groups, optimizer.state)
        except ValueError as e:
            problem = e
        # Every rank learns of every rank's problem: one that raised alone would leave the others waiting.
        self._groups = Groups(
            group, device, timeout_s, needs_control=clip_norm is not None or loss_scale is not None,
            per_node=plan.profile.per_node if any(k.in_node for k in plan.strategies) else 0,
        )
        try:
            named = [*model.named_parameters(), *model.named_buffers()]
            checks.same_plan(plan, problem, layout(named), started, self.rank, processes, self._groups.talk)
        except ValueError:
            self._groups.destroy()
            raise
        run = self._groups.exchange(uuid.uuid4().hex)[0] if processes > 1 else None
        self._last_words = LastWords(self._place, run, processes)
        self._place.explain = self._last_words.after
        self._group = group = self._groups.messages
        self._meter, self._executor = current_meter(device), executor_for(device)
        ledger = Ledger(plan, self.rank)
        self._aliases = attributes_over_parameters(model)
        self._ended: str | None = None  # why parameters are not whole after the end of the run
        self._started = False
        own = weakref.ref(self)  # weak: the closed parameters of a model must not keep this object alive

        def refuse(name: str, what: str) -> RunError | None:
            parallel = own()
            return RunError(misuse.left_in_pieces(name, "it is gone")) if parallel is None else parallel._refuse(name, what)

        try:
            self._storages = take_over(
                model, initialisation, lambda u: UnitStorage(plan, u, ordered[u], self.rank, self._meter, refuse, device),
                group if processes > 1 else None, self._place,
            )  # fmt: skip
        except BaseException:
            self._last_words.end()
            self._groups.destroy(failed=True)
            raise
        self._started = True
        self._buffers = Buffers(model, broadcast_buffers)
        self._updates = Updates(plan, self._storages, optimizer, group_of, self.rank, self._meter)
        lock = threading.RLock()
        if plan.budget is not None:
            self._executor.limit(plan.budget + (bytes_apart(ledger) if self._executor.runs_ahead else 0))
        cap = None if plan.budget is None else plan.budget - plan.reserve

        def connect(collectives: Collectives, in_node: bool) -> Connected:
            if emulate is not None:
                return EmulatedCommunicator(collectives, emulate)
            if in_node:
                return NodeCommunicator(
                    Communicator(collectives, self._groups.node), Communicator(collectives, self._groups.across)
                )
            return Communicator(collectives, group)

        self._account = Account(lock, cap, ledger.at_rest)
        self._wire = Wire(plan, self._storages, connect, self._meter)
        self._recorder = Recorder(plan, self._executor)
        made = StreamDispatcher if self._executor.runs_ahead else Dispatcher
        self._dispatcher = made(
            plan, ledger, self._storages, self._wire, self._updates, self._account, self._executor, self._recorder,
            control=self._groups.control, pacer=pacer_for(plan, self.rank, group, processes), clip_norm=clip_norm,
            loss_scale=loss_scale, timeout_s=timeout_s, last_words=self._last_words,
        )  # fmt: skip
        self._loss_scale = loss_scale
        # Runs without close(), too: a thread that still waits in C++ would abort the process when it exits.
        self._stop_threads = weakref.finalize(self, _stop, self._dispatcher, self._last_words)
        batch = BatchSizes(units[plan.period.slots[plan.period.turn].unit].modules)
        self._excess = Excess(plan, ledger.slots, self.rank, batch)
        self._walker = SlotWalker(
            plan, ledger, self._storages, self._dispatcher, self._updates, self._account, self._executor,
            self._recorder, self._meter, self._excess,
        )  # fmt: skip
        self._gathering = Gathering(self._storages, self._wire, self._account, self._executor, self._place)
        self._state = OptimizerState(self._updates, self._storages, self._gathering, self._groups.exchange)
        self._state.load(optimizer.state)
        optimizer.state.clear()  # the state is on shards from now on
        self._checkpoints: Checkpoints | None = None
        self._resumed_after = 0
        self._evaluation = Evaluation(
            units, self._storages, ledger, self._gathering, self._groups, self._place
        )
        in_flat_order = [dataclasses.replace(u, parameters=tuple(ps)) for u, ps in zip(units, ordered, strict=True)]
        self._hooks = Hooks(in_flat_order, self._walker)
        before_all = [m for u in units if u.trainable for m in u.modules]  # their forwards include the slots of frozen units
        self._handles = [m.register_forward_pre_hook(ModuleHook(self._forward), prepend=True) for m in before_all]
        self._handles += [*batch.handles, *misuse.refuse_calls(optimizer, self.rank)]
        for storage in self._storages:
            if not storage.is_plain:
                storage.guard.close()
        self._closed = False
        self._recorder.step(0, self._executor.stamp())
        self.reset_memory()  # profiling, and the copy of the weights into flat buffers, are not training

    def __enter__(self) -> Parallel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.close()
        else:  # the state of the other ranks is unknown
            self._last_words.say(error)
            self._end(f"rank {self.rank} left the run with {type(error).__name__}", failed=True)

    # -- training -----------------------------------------------------------------------------------------------

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss to call ``backward`` on; ``loss`` itself where there is no ``loss_scale``."""
        return loss if self._loss_scale is None else loss * self._loss_scale.value

    def step(self) -> None:
        """End an iteration. Updates may still be in flight: each is done before its unit is used again.

        After fewer than ``plan.micro_steps`` passes the gradients of these passes are used, on every rank. Raises
        RunError if there was no pass, and for changes by the loop that the updates did not see.
        """
        self._dispatcher.check()
        self._not_lent("step()")
        if self._walker.after_micro_step:
            self._walker.end_short()
        if not self._walker.at_turn or not self._walker.due:
            raise self._place.error(f"step() needs {self.plan.micro_steps} forward and backward passes before it")
        if self._walker.step == 1 and self._buffers.option is None:
            self._buffers.adopt(self._groups, self._place)
        problem = misuse.unseen_change(self.optimizer, self._updates, self._storages, self._buffers, self.plan.world)
        alias = still_held(self.model, self._aliases) if problem is None and self._walker.step == 1 else None
        if alias is not None:
            problem = str(alias_refused(alias))
        if problem is not None:
            raise self._place.error(problem)
        if not self._walker.watches_memory:
            self._excess.read(self._walker.step, self._meter)
        self._recorder.over_budget(self._walker.step, *self._excess.end_step(self._walker.step))
        self._recorder.step(self._walker.step, self._executor.stamp())
        self._walker.step += 1
        self._walker.due = False
        self._dispatcher.end_step()
        self._dispatcher.step = self._place.step = self._walker.step
        if self._buffers.option:
            # Where the host runs ahead, the broadcasts go in the messages' group, in stream order. On CPU threads have
            # messages in flight in that group, so the broadcasts need another one.
            group = self._group if self._executor.runs_ahead else self._groups.talk
            with between(self._executor):
                self._buffers.broadcast(self._groups, group, self._place)
        mark_stepped(self.optimizer)

    def drain(self) -> None:
        """Finish all messages in flight and every update: before evaluation, state dicts and exit.

        Parameters of dp units can then be read, and changed alike on all ranks, until the next forward pass.
        """
        self._drain("drain()")

    def _drain(self, call: str) -> None:
        """Drain for this ``call`` of the loop, which all ranks make now, in the same step."""
        self._dispatcher.check()
        self._not_lent(call)
        if not self._walker.at_turn:
            raise self._place.error(f"{call} inside an iteration")
        self._excess.skips = True
        with self._place.during(call):
            problem = misuse.disagreement(self._groups.tell(call, self._walker.step))
        if problem is not None:
            raise self._place.error(f"{call}: {problem}")
        self._finish(self._walker.periods)
        for storage in self._storages:
            if storage.strategy.value == "dp" and storage.is_plain:
                storage.guard.open()

    @torch.inference_mode(False)
    def _finish(self, period: int) -> None:
        """Finish all issued messages and the updates of a period."""
        self._dispatcher.finish_iteration(period * self._dispatcher.n)
        if self._buffers.option is not False:
            with between(self._executor):
                self._buffers.broadcast(self._groups, self._group, self._place)

    @torch.inference_mode(False)
    def abandon(self) -> None:
        """Give up the current iteration on every rank, as if its batches did not exist: the response to an exception.

        The ranks may be at different places of a forward pass. Raises RunError if updates of the iteration have begun;
        without ``plan.cross_iteration`` none begins before backward has ended.
        """
        self._dispatcher.check()
        self._not_lent("abandon()")
        self._walker.leave_forward()
        with self._place.during("abandon()"):
            answers = self._groups.tell("abandon()", self._walker.step, self._walker.committed, self._walker.is_torn)
        problem = misuse.disagreement(answers)
        if problem is not None:
            raise self._place.error(f"the iteration cannot be given up: {problem}: start again from a checkpoint")
        self._give_up(max(progress for _, progress, _ in answers))

    def _give_up(self, progress: int) -> None:
        self._walker.walk(progress)
        self._finish(self._walker.periods - self._walker.due)
        self._walker.restart()

    def evaluate(self) -> AbstractContextManager[None]:
        """Run forward passes without gradients (``torch.no_grad()``), any number per rank; :meth:`drain` included.

        Units that are sharded at rest are gathered once if the budget has room for all of them, else for every forward.
        In the second case a rank waits at the end for the ranks that have more batches.
        """
        return self._lend("evaluate()", self._evaluate)

    @contextlib.contextmanager
    def _evaluate(self) -> Iterator[None]:
        with torch.no_grad(), self._evaluation.run():
            yield
        self._buffers.know()

    @contextlib.contextmanager
    def _lend(self, call: str, run: Any, **options: Any) -> Iterator[None]:
        self._drain(call)
        self._walker.lent = call
        try:
            with run(**options):
                yield
        finally:
            self._walker.lent = None

    def _forward(self, module: nn.Module, args: Any) -> None:
        if not (torch.is_grad_enabled() or self._walker.lent or self._hooks.in_backward):
            raise RunError(f"rank {self.rank}: run forward passes without gradients inside parallel.evaluate()")

    # -- state --------------------------------------------------------------------------------------------------

    def full_parameters(
        self, *, rank0_only: bool = False, cpu: bool = False, writeback: bool = False
    ) -> AbstractContextManager[None]:
        """Hold whole parameters in the model, on every rank or on rank 0, on its device or on the ``cpu``; drains
        first.

        With ``writeback`` rank 0's changes reach every rank; without it, and if the block raises, changes are lost.
        Unless on the ``cpu``, the device holds the whole model besides the shards. Parameters that a rank keeps whole
        anyway are copied. Collective.
        """
        self._needs_ranks("full_parameters()")
        return self._lend(
            f"full_parameters({'writeback=True' if writeback else ''})", state.full_parameters,
            storages=self._storages, gathering=self._gathering,
            keep=not rank0_only or self.rank == 0, cpu=cpu, writeback=self._write_back if writeback else None,
        )  # fmt: skip

    @torch.no_grad()
    @torch.inference_mode(False)
    def _write_back(self, storage: UnitStorage) -> None:
        if self._groups.world > 1:
            with self._place.during(f"broadcast of {storage.name}"):
                for flat in storage.fulls:
                    broadcast(flat, self._group)
        storage.adopt()

    @torch.inference_mode(False)
    def state_dict(self, *, rank0_only: bool = False, cpu: bool = False) -> dict[str, Tensor]:
        """Return the whole model's state dict for the plain model, on every rank or on rank 0 (else empty); drains
        first.

        Units are gathered one by one. With ``cpu``, and where the budget has no room for the result, the result is on
        the CPU and the device holds no more than one whole unit. Collective.
        """
        self._needs_ranks("state_dict()")
        self._drain("state_dict()")
        sizes = [storage.full_bytes for storage in self._storages]
        cpu = cpu or not self._gathering.fits(sum(sizes) + max(sizes))
        return state.full_state(
            self.model, self._storages, self._gathering, keep=not rank0_only or self.rank == 0, cpu=cpu
        )

    def _needs_ranks(self, what: str) -> None:
        if self._emulate is not None:
            raise RunError(f"rank {self.rank}: {what} of an emulated world would be made up: no rank has sent anything")

    @torch.inference_mode(False)
    def load_state_dict(self, full: dict[str, Tensor]) -> None:
        """Load a plain model's state dict (the same on every rank). Raises KeyError or ValueError by name."""
        self._drain("load_state_dict()")
        state.load_full(self.model, self._storages, full)

    @torch.no_grad()
    @torch.inference_mode(False)
    def optimizer_state_dict(self, *, rank0_only: bool = False, cpu: bool = False) -> dict[str, Any]:
        """Return the ``optimizer.state_dict()`` of a plain loop, on every rank or on rank 0 (else empty); drains first.

        Units are gathered one by one, and kept on the CPU with ``cpu``. State of masters has their precision.
        Collective.
        """
        self._needs_ranks("optimizer_state_dict()")
        self._drain("optimizer_state_dict()")
        keep = not rank0_only or self.rank == 0
        found = self._state.whole(keep=keep, cpu=cpu)
        return optimizer_state.packed(self.optimizer, found) if keep else {}

    @torch.no_grad()
    @torch.inference_mode(False)
    def load_optimizer_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a plain loop's ``optimizer.state_dict()``, or :meth:`optimizer_state_dict` (the same on every rank).

        Options, such as the learning rate, are loaded too. Raises ValueError for the state of another optimizer, and
        where parameters that the plan updates together have different histories.
        """
        self._drain("load_optimizer_state_dict()")
        found = optimizer_state.unpacked(self.optimizer, saved)
        named = [list(zip(s.names, s.parameters, strict=True)) for s in self._storages]
        optimizer_state.together(named, parameter_groups(self.optimizer), found)
        optimizer_state.take_options(self.optimizer, saved)
        self._state.load(found)

    @property
    def steps(self) -> int:
        """Iterations done, including those before a resumed checkpoint."""
        return self._resumed_after + self._walker.step - 1

    @torch.no_grad()
    @torch.inference_mode(False)
    def checkpoint(self, root: str | Path, *, extra: Any = None, keep: int | None = None, wait: bool = True) -> Saving:
        """Write ``root/step-N`` for :func:`mdcs.resume` into a folder that all ranks see. Collective; drains first.

        - ``extra``: numbers, texts, containers and tensors that ``resume`` returns (a schedule's state, the place in
          the data).
        - ``keep``: delete all but the last ``keep`` checkpoints once this one is complete; None keeps all.
        - ``wait``: False copies this rank's part to the host and writes it while training goes on, one checkpoint at a
          time. If the budget has no room for the copy on a CPU, the part is written before this returns.

        Raises RunError on every rank, naming the rank that could not write; without ``wait`` in the next call or in
        :meth:`close` at the latest. Earlier checkpoints stay as they are.
        """
        self._needs_ranks("checkpoint()")
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}")
        self._drain("checkpoint()")
        spare = None
        if self.plan.budget is not None and self._storages[0].device.type == "cpu":
            peak = self.plan.prediction.peak_bytes if self.plan.prediction else self.plan.budget
            spare = self.plan.budget - self.plan.reserve - peak
        return self._checkpointing().save(Path(root), self.steps, extra, keep=keep, spare=spare, wait=wait)

    def _checkpointing(self) -> Checkpoints:
        if self._checkpoints is None:
            from mdcs.runtime.checkpointing import Checkpoints  # late: importing DCP takes most of a second

            self._checkpoints = Checkpoints(
                self.model, self.optimizer, self._storages, self._state, self._buffers, self._loss_scale, self._groups,
                self._meter, self._place,
            )  # fmt: skip
        return self._checkpoints

    @torch.no_grad()
    @torch.inference_mode(False)
    def _resume(self, path: Path) -> Resumed | None:
        self._needs_ranks("resume()")
        self._drain("resume()")
        resumed = self._checkpointing().resume(path)
        if resumed is not None:
            self._resumed_after = resumed.step - (self._walker.step - 1)
        return resumed

    # -- what happened ------------------------------------------------------------------------------------------

    def records(self, *, flush: bool = False) -> list[StepRecord]:
        """Return the finished iterations not returned before; the last one only with ``flush``, after :meth:`drain`."""
        return self._recorder.finished(self._walker.step - (1 if flush else 2), flush)

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm of the last clipped iteration; on CUDA the host waits for it."""
        if self._recorder.norm is None:
            return None
        with self._executor.communicating():
            return float(self._recorder.norm)

    def watch_gradients(self, *units: str) -> None:
        """Keep the gradients that these units (by name) are updated with, from now on; no names: keep none. Costs their
        bytes.

        Raises ValueError for a unit that is frozen or not in the plan.
        """
        named = {s.name: u for u, s in enumerate(self._storages) if s.trainable}
        for name in units:
            if name not in named:
                raise ValueError(f"the plan has no trainable unit {name}: {', '.join(named)}")
        self._updates.kept = {named[name]: {} for name in units}

    @torch.inference_mode(False)
    def gradients(self, unit: str) -> dict[str, Tensor]:
        """Return by parameter the gradient of a watched unit's last update: averaged over ranks, clipped, unscaled,
        whole.

        Collective; drains first. Raises ValueError for a unit that is not watched, or was not updated since.
        """
        self._needs_ranks("gradients()")
        self._drain("gradients()")
        for u, blocks in self._updates.kept.items():
            storage = self._storages[u]
            if storage.name == unit and len(blocks) == len(storage.blocks):
                return self._gathering.by_parameter(u, blocks)
        raise ValueError(f"unit {unit} has no gradient: watch_gradients({unit!r}) comes before the backward that makes it")

    def last_period(self) -> tuple[float, float, list[Interval]]:
        """Return (begin, end, intervals) of the last whole period, from first backward slot to first backward slot.

        Seconds on the machine's monotonic clock: ranks of one machine can be compared.
        """
        return self._recorder.last_period()

    def memory(self) -> dict[str, Any]:
        """Return peak bytes by category since the start or :meth:`reset_memory`.

        - ``predicted``: the ledger's, kept during the run.
        - ``measured``: the allocator's; None where nothing is measured.
        - ``retries``: how often the allocator had to free cached memory to serve a request (None on CPU). Each stops
          the device.
        """
        with self._account.lock:
            predicted = dict(self._account.peak)
        return {"predicted": predicted, "measured": self._meter.peaks(), "retries": self._executor.retries()}

    def memory_by_slot(self) -> list[Any]:
        """Return the last :class:`mdcs.measure.timeline.SlotMemory` of every slot of a period."""
        return [m for _, m in sorted(self._walker.memory.items())]

    def watch_memory(self) -> None:
        """Measure every slot from now on, for :meth:`memory_by_slot`. Off by default on CUDA: a reading takes time."""
        self._walker.watches_memory = True

    def reset_memory(self) -> None:
        """Restart the peaks of :meth:`memory`."""
        with self._account.lock:
            self._account.reset()
            self._meter.reset()

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self, *, whole: bool = True) -> None:
        """End the run, on every rank: each rank then has the whole plain model, for any loop or another plan.

        The current iteration is given up. The optimizer gets the whole state of a plain loop. Without ``whole``, the
        optimizer's state is lost and parameters that are not whole on this rank raise when they are used. The same
        happens if gathering fails: after an error, when a rank does not take part within ``timeout_s``, or when updates
        of an iteration have begun. Waits for a checkpoint that is being written; if it fails, raises RunError after
        closing.
        """
        if self._closed:
            return
        self._not_lent("close()")
        unwritten: RunError | None = None
        try:
            if self._checkpoints is not None:
                self._checkpoints.finish()
        except RunError as e:  # close all the same: the model is not affected
            unwritten = e
        why = "it was closed without gathering them" if not whole else "they are made up: no rank has sent anything"
        failed = False
        if whole and self._emulate is None:
            why = self._gather_all()
            failed = bool(why)
            if why:
                warnings.warn(f"rank {self.rank}: closed without the optimizer's state: {why}", stacklevel=2)
        self._end(why, failed=failed)
        if unwritten is not None:
            raise unwritten

    @torch.no_grad()
    @torch.inference_mode(False)
    def _gather_all(self) -> str:
        """Make all units whole, in plain parameters. Return why this failed, or ""."""
        walker = self._walker
        if self._dispatcher.error is not None:
            return str(self._dispatcher.error)
        if self._groups.world > 1 and not dist.is_initialized():
            return "the process group was destroyed before close()"
        try:
            walker.leave_forward()
            answers = self._groups.tell("close()", walker.step, walker.committed, walker.is_torn)
            problem = misuse.disagreement(answers)
            if problem is not None:
                return problem
            progress = max(progress for _, progress, _ in answers)
            if not walker.at_turn or walker.due:
                self._give_up(progress)
            else:
                walker.walk(progress)
                self._finish(walker.periods)
            if self.plan.budget is not None:
                self._executor.limit(None)
            self._gathering.begin()
            state = optimizer_state.for_parameters(self._state.whole(keep=True, cpu=False, release=True))
            for u, storage in enumerate(self._storages):
                self._gathering.gather(u)
                storage.let_go()
            self.optimizer.state.update(state)
        except RuntimeError as e:
            return str(e)
        return ""

    def _end(self, why: str, *, failed: bool = False) -> None:
        """Stop the threads and remove the hooks, without the other ranks. ``why``: the reason for parameters that are
        not whole.
        """
        if self._closed:
            return
        self._closed = True
        self._ended = why
        self._stop_threads.detach()
        self._dispatcher.stop()
        self._last_words.end()
        if self.plan.budget is not None:
            self._executor.limit(None)
        self._hooks.remove()
        for handle in self._handles:
            handle.remove()
        if self._checkpoints is not None:
            self._checkpoints.leave()
        self._groups.destroy(failed=failed)

    def tell(self, error: BaseException) -> None:
        """Send the other ranks an error that ends this rank's part, as leaving a ``with`` block does."""
        self._last_words.say(error)

    def undo(self, weights: Mapping[nn.Parameter, Tensor]) -> None:
        """Close, and restore the tensors that the model had before ``parallelize``: the training leaves no trace."""
        self._end("")
        for storage in self._storages:
            storage.guard.open()
        for p, tensor in weights.items():
            p.data, p.grad = tensor, None

    # -- errors -------------------------------------------------------------------------------------------------

    def _not_lent(self, what: str) -> None:
        if self._closed:
            raise RunError(f"rank {self.rank}: {what} after close()")
        if self._walker.lent:
            raise self._place.error(f"{what} inside {self._walker.lent}")

    def _refuse(self, name: str, what: str) -> RunError | None:
        """Return the error for a use of a closed parameter, or None to allow the use."""
        if self._ended is not None:
            return RunError(f"rank {self.rank}: {misuse.left_in_pieces(name, self._ended)}")
        if not self._started:
            return self._place.error(f"the initialisation of a module used {name} ({what}), which is of another unit")
        problem = misuse.use(name, what, self._walker.has_gradients)
        return None if problem is None else self._place.error(problem)


def _stop(dispatcher: Dispatcher, last_words: LastWords) -> None:
    """Stop a run that ends without close()."""
    last_words.say_uncaught()
    dispatcher.stop()
    last_words.end()
