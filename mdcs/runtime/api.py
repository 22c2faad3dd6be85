"""``parallelize``: a model, its optimizer and a plan in; what a training loop needs out."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.measure.memory import current_meter
from mdcs.measure.timeline import Interval
from mdcs.model.hooks import Hooks
from mdcs.model.optimizers import parameter_groups
from mdcs.model.units import ModelUnit
from mdcs.plan.ledger import Ledger, check
from mdcs.plan.messages import Plan
from mdcs.profile.algorithms import Collectives
from mdcs.runtime import refusals as checks
from mdcs.runtime import state
from mdcs.runtime.account import Account
from mdcs.runtime.communicator import Communicator, backend_of
from mdcs.runtime.dispatcher import Dispatcher, RunError
from mdcs.runtime.emulation import EmulatedCommunicator, Emulation
from mdcs.runtime.executor import executor_for
from mdcs.runtime.pacing import Pacer
from mdcs.runtime.record import Recorder, StepRecord
from mdcs.runtime.scaling import LossScale
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.updates import Updates
from mdcs.runtime.walker import SlotWalker
from mdcs.runtime.wire import Wire


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    units: list[ModelUnit],
    *,
    group: dist.ProcessGroup | None = None,
    clip_norm: float | None = None,
    loss_scale: LossScale | None = None,
    timeout_s: float = 300.0,
    emulate: Emulation | None = None,
) -> Parallel:
    """Train ``model`` as ``plan`` says, in the loop that you have.

    Call it on every rank after ``init_process_group``, with the same plan (its hash is checked) and the ``units`` the
    plan was made for. Parameters are broadcast from rank 0. ``optimizer`` (SGD, Adam or AdamW) keeps its options
    and learning-rate schedules; its updates run on shards, inside ``backward`` and the next forward. On gloo the
    messages have a process group of their own, so the loop may use ``group`` for its collectives; on NCCL it may
    only after :meth:`Parallel.drain`. Then::

        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            parallel.step()          # after plan.micro_steps backward passes

    ``clip_norm`` clips the global gradient norm; it is a barrier, so the plan must have cross_iteration off.
    ``loss_scale`` is for float16, and a barrier, too: call ``parallel.scaled(loss).backward()`` then.
    Where the plan's profile has masters, they start as the model's parameters, and stay in ``sharded_state_dict()``.
    ``timeout_s`` bounds every wait. With ``emulate`` this one process is a rank of the plan's world, on its emulated link
    (:mod:`mdcs.runtime.emulation`). Raises PlanError (ranks with another plan are named), ValueError for a plan
    that does not fit the model, and RunError, naming rank, step and message, when something fails later.
    """
    return Parallel(model, optimizer, plan, units, group, clip_norm, timeout_s, emulate, loss_scale)


class Parallel:
    """A model in training. ``plan`` is what runs; :meth:`close` (or leaving a ``with`` block) ends it."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, units: list[ModelUnit],
        group: dist.ProcessGroup | None, clip_norm: float | None, timeout_s: float, emulate: Emulation | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.plan, self.units, self._emulate = model, optimizer, plan, units, emulate
        self._processes = processes = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        if emulate is not None:
            self.rank = emulate.rank
        groups = parameter_groups(optimizer)
        ordered: list[list[tuple[str, nn.Parameter]]] = []
        problem: ValueError | None = None
        try:
            checks.fits_processes(plan, processes, backend_of(group), emulate)
            checks.fits_job(plan, clip_norm, loss_scale, optimizer)
            check(plan)
            ordered = checks.match(plan, units, groups)
        except ValueError as e:
            problem = e
        # Every rank learns of every rank's problem: one that raised alone would leave the others waiting.
        self._own_groups: list[dist.ProcessGroup] = []
        control = None
        if processes > 1:
            if dist.get_backend(group) == "gloo":
                group = control = self._new_group(group, timeout_s)
            if clip_norm is not None or loss_scale is not None or dist.get_backend(group) != "gloo":
                control = self._new_group(group, timeout_s)  # its reductions must not mix with the plan's messages
        try:
            checks.same_plan(plan, problem, self.rank, processes, control)
        except ValueError:
            self._destroy_groups()
            raise
        device = units[0].parameters[0][1].device
        self._meter, self._executor = current_meter(device), executor_for(device)
        if processes > 1:
            _broadcast(model, group)
        ledger = Ledger(plan, self.rank)
        self._storages = [
            UnitStorage(plan, u, parameters, self.rank, self._meter) for u, parameters in enumerate(ordered)
        ]
        group_of = [list(dict.fromkeys(groups[p] for _, p in ps if p in groups)) or [0] for ps in ordered]
        self._updates = Updates(plan, self._storages, optimizer, group_of, self.rank, self._meter)
        lock = threading.Condition()
        if plan.budget is not None:
            self._executor.limit(plan.budget)
        cap = None if plan.budget is None else plan.budget - plan.reserve
        self._group = group

        def connect(collectives: Collectives) -> Communicator | EmulatedCommunicator:
            return Communicator(collectives, group) if emulate is None else EmulatedCommunicator(collectives, emulate)

        self._account = Account(lock, cap, ledger.at_rest)
        self._wire = Wire(plan, self._storages, connect, self._meter)
        self._recorder = Recorder(plan, self._executor)
        self._dispatcher = Dispatcher(
            plan, ledger, self._storages, self._wire, self._updates, self._account, self._executor, self._recorder,
            control=control, pacer=_pacer(plan, self.rank, group, processes), clip_norm=clip_norm,
            loss_scale=loss_scale, timeout_s=timeout_s,
        )  # fmt: skip
        self._loss_scale = loss_scale
        # Also when the program ends, or lets go of this, without close(): a thread that waits in C++ then would abort it.
        self._stop_threads = weakref.finalize(self, self._dispatcher.stop)
        self._walker = SlotWalker(
            plan, ledger, self._storages, self._dispatcher, self._updates, self._account, self._executor,
            self._recorder, self._meter,
        )  # fmt: skip
        in_flat_order = [dataclasses.replace(u, parameters=tuple(ps)) for u, ps in zip(units, ordered, strict=True)]
        self._hooks = Hooks(in_flat_order, self._walker)
        self._guards = [m.register_forward_pre_hook(self._guard) for u in units for m in u.modules]
        self._evaluating = self._closed = False
        self._kept: set[int] = set()  # what the plan has gathered already when an evaluation begins
        self._recorder.step(0, self._executor.stamp())
        self.reset_memory()  # profiling, and the copy of the weights into flat buffers, are not training

    def __enter__(self) -> Parallel:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None and self._walker.at_turn:
                self.drain()
        finally:
            self.close()

    def _new_group(self, group: dist.ProcessGroup | None, timeout_s: float) -> dist.ProcessGroup:
        """A gloo group of the same ranks whose collectives give up after ``timeout_s``."""
        timeout = timedelta(seconds=timeout_s)
        if dist.get_world_size(group) == dist.get_world_size():
            new = dist.new_group(timeout=timeout, backend="gloo")
            self._own_groups.append(new)
        else:
            # Other ranks do not take part. Such a group is named after its ranks: once destroyed, the next one would
            # find its addresses in the store and connect to nobody. So it is left.
            ranks = dist.get_process_group_ranks(group)
            new = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
        return new

    def _destroy_groups(self) -> None:
        while self._own_groups:
            dist.destroy_process_group(self._own_groups.pop())

    @contextlib.contextmanager
    def _during(self, what: str) -> Iterator[None]:
        """Name rank and step in errors of collectives that are no messages of the plan."""
        try:
            yield
        except RunError:
            raise
        except RuntimeError as e:
            raise RunError(f"rank {self.rank}, step {self._walker.step}: {what}: {e}") from e

    # -- training -----------------------------------------------------------------------------------------------

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to call ``backward`` on; itself where there is no ``loss_scale``."""
        return loss if self._loss_scale is None else loss * self._loss_scale.value

    def step(self) -> None:
        """End an iteration. Updates need not be done: they are before their unit is used again."""
        self._dispatcher.check()
        if not self._walker.at_turn or self._walker.rounds < self._walker.step:
            raise RunError(
                f"rank {self.rank}, step {self._walker.step}: step() needs {self.plan.micro_steps} forward and "
                f"backward passes before it"
            )
        self._recorder.step(self._walker.step, self._executor.stamp())
        self._walker.step += 1
        self._dispatcher.step = self._walker.step
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what torch's schedules look for

    def drain(self) -> None:
        """Finish all that is in flight and every update: before evaluation, state dicts and exit."""
        self._dispatcher.check()
        if not self._walker.at_turn:
            raise RunError(f"rank {self.rank}, step {self._walker.step}: drain() inside an iteration")
        self._dispatcher.finish_iteration(self._walker.rounds * self._dispatcher.n)
        if self._processes > 1:
            # As DDP with broadcast_buffers: rank 0's buffers (BatchNorm's statistics) are the model's.
            for name, buffer in self.model.named_buffers():
                with self._during(f"broadcast of buffer {name}"):
                    dist.broadcast(buffer, group_src=0, group=self._group)

    @contextlib.contextmanager
    def evaluate(self) -> Iterator[None]:
        """Forward passes without gradients: every unit is gathered for its forward, and freed after it."""
        self.drain()
        gathered: Counter[int] = Counter()
        handles: list[Any] = []

        def before(unit: int) -> Any:
            def hook(module: nn.Module, args: Any) -> None:
                if torch.is_grad_enabled():
                    raise RunError(f"rank {self.rank}: evaluate() is for forward passes under torch.no_grad()")
                gathered[unit] += 1
                if gathered[unit] == 1:
                    self._gather(unit)

            return hook

        def after(unit: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                gathered[unit] -= 1
                if gathered[unit] == 0:
                    self._ungather(unit)

            return hook

        self._evaluating = True
        self._keep_gathered()
        for u, unit in enumerate(self.units):
            for module in unit.modules:
                handles.append(module.register_forward_pre_hook(before(u), prepend=True))
                handles.append(module.register_forward_hook(after(u)))
        try:
            yield
        finally:
            self._evaluating = False
            for handle in handles:
                handle.remove()
            for unit_index, uses in gathered.items():
                if uses > 0:  # its forward raised
                    self._ungather(unit_index)

    def _guard(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() and not self._evaluating and not self._hooks.in_backward:
            raise RunError(f"rank {self.rank}: run forward passes without gradients inside parallel.evaluate()")

    def _keep_gathered(self) -> None:
        """What the plan has gathered by now stays so through an evaluation: the next forward counts on it."""
        self._kept = {u for u, s in enumerate(self._storages) if s.strategy.sharded and s.is_full}

    def _gather(self, unit: int) -> None:
        storage = self._storages[unit]
        if storage.strategy.value == "dp":
            return
        here = self._executor.mark()
        with self._executor.communicating(), torch.no_grad():
            self._executor.after(here)  # compute may still read what the unit before it left
            if not storage.is_full:
                with self._account.lock:
                    storage.allocate_full()
                    self._account.book("full_parameters", storage.full_bytes)
            with self._during(f"gather of {storage.name}"):
                self._executor.finish(self._wire.gather_now(unit))

    def _ungather(self, unit: int) -> None:
        storage = self._storages[unit]
        if storage.strategy.sharded and unit not in self._kept:
            with self._account.lock:
                storage.free_full()
                self._account.book("full_parameters", -storage.full_bytes)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's state dict, on every rank, for the plain model; :meth:`drain` included."""
        self._needs_ranks("state_dict()")
        self.drain()
        self._keep_gathered()
        return state.full_state(self.model, self._storages, self._gather, self._ungather)

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's part; :func:`mdcs.merge_shards` of all ranks' gives the plain model's state dict."""
        self._needs_ranks("sharded_state_dict()")
        self.drain()
        return state.sharded_state(self.model, self._storages)

    def _needs_ranks(self, what: str) -> None:
        if self._emulate is not None:
            raise RunError(f"rank {self.rank}: {what} of an emulated world would be made up: no rank has sent anything")

    def load_state_dict(self, full: dict[str, Tensor]) -> None:
        """Load a plain model's state dict (the same on every rank). Raises KeyError or ValueError by name."""
        self.drain()
        state.load_full(self.model, self._storages, full)

    # -- what happened ------------------------------------------------------------------------------------------

    def records(self, *, flush: bool = False) -> list[StepRecord]:
        """Finished iterations not given before; the last one only with ``flush``, after :meth:`drain`."""
        return self._recorder.finished(self._walker.step - (1 if flush else 2))

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm of the last clipped iteration."""
        return self._recorder.norm

    def last_period(self) -> tuple[float, float, list[Interval]]:
        """(begin, end, intervals) of the last whole period, from first backward slot to first backward slot.

        Seconds on the machine's monotonic clock: ranks of one machine can be compared.
        """
        return self._recorder.last_period()

    def memory(self) -> dict[str, Any]:
        """Peak bytes by category since the start or :meth:`reset_memory`: the ledger's as it ran, and the allocator's.

        The latter is None where nothing is measured. ``retries`` is how often the process's allocator had to give
        cached memory back to get some (None on CPU): each stops the device.
        """
        with self._account.lock:
            predicted = dict(self._account.peak)
        return {"predicted": predicted, "measured": self._meter.peaks(), "retries": self._executor.retries()}

    def memory_by_slot(self) -> list[Any]:
        """:class:`mdcs.measure.timeline.SlotMemory` of every slot of a period, as last seen."""
        return [m for _, m in sorted(self._walker.memory.items())]

    def reset_memory(self) -> None:
        with self._account.lock:
            self._account.reset()
            self._meter.reset()

    def close(self) -> None:
        """Stop the threads and take the hooks off. Does not drain; leaving a ``with`` block without an error does.

        The model is then only good for what is whole on every rank: a forward of anything else raises RunError.
        """
        if self._closed:
            return
        self._closed = True
        self._stop_threads()
        if self.plan.budget is not None:
            self._executor.limit(None)
        self._hooks.remove()
        for handle in self._guards:
            handle.remove()
        if self.plan.world > 1 or any(not s.is_full for s in self._storages):
            for u, unit in enumerate(self.units):
                if self.plan.strategies[u].value != "dp":
                    self._guards += [m.register_forward_pre_hook(_refuse_closed) for m in unit.modules]
        self._destroy_groups()

    def undo(self, weights: Mapping[nn.Parameter, Tensor]) -> None:
        """Close, and give the model back the tensors it had before ``parallelize``: nothing of the training is left."""
        self.close()
        for handle in self._guards:
            handle.remove()
        for p, tensor in weights.items():
            p.data, p.grad = tensor, None


def _refuse_closed(module: nn.Module, args: Any) -> None:
    raise RunError(
        "parallel is closed and this model is in pieces: load parallel.state_dict(), taken before, into a plain model"
    )


def _broadcast(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Rank 0's parameters and buffers to all, as DDP does when it is built."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            whole = tensor.data.contiguous()  # the tensor itself unless its layout is another one
            dist.broadcast(whole, group_src=0, group=group)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)


def _pacer(plan: Plan, rank: int, group: dist.ProcessGroup | None, processes: int) -> Pacer | None:
    if not plan.profile.link.emulated or plan.world == 1:
        return None
    if processes == 1:
        return Pacer(None, 0, 1, plan.profile.link)
    name: list[Any] = [None]
    try:
        if rank == 0:
            folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
            with tempfile.NamedTemporaryFile(prefix="mdcs-link-", dir=folder, delete=False) as f:
                name[0] = f.name
            Pacer.create(Path(f.name), plan.world)
        dist.broadcast_object_list(name, group_src=0, group=group)
        pacer = Pacer(Path(name[0]), rank, plan.world, plan.profile.link)
        dist.barrier(group=group)
    finally:  # once all have mapped it, or one never will
        if rank == 0 and name[0] is not None:
            Path(name[0]).unlink()
    return pacer
