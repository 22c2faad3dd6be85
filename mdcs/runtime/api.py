"""``parallelize``: a model, its optimizer and a plan in; what a training loop needs out."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.hooks import Hooks
from mdcs.ledger import Ledger, check
from mdcs.measure.memory import current_meter
from mdcs.measure.profiler import in_group_order, parameter_groups
from mdcs.measure.timeline import Interval
from mdcs.plan import Plan, PlanError
from mdcs.runtime import state
from mdcs.runtime.account import Account
from mdcs.runtime.dispatcher import Dispatcher, RunError
from mdcs.runtime.executor import executor_for
from mdcs.runtime.pacing import Pacer
from mdcs.runtime.record import Recorder, StepRecord
from mdcs.runtime.scheduler import SlotWalker
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.updates import Updates
from mdcs.runtime.wire import Wire
from mdcs.units import ModelUnit


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    units: list[ModelUnit],
    *,
    group: dist.ProcessGroup | None = None,
    clip_norm: float | None = None,
    timeout_s: float = 300.0,
) -> Parallel:
    """Train ``model`` as ``plan`` says, in the loop that you have.

    Call it on every rank after ``init_process_group``, with the same plan (its hash is checked) and the ``units`` the
    plan was made for. Parameters are broadcast from rank 0. ``optimizer`` (SGD, Adam or AdamW) keeps its options
    and learning-rate schedules; its updates run on shards, inside ``backward`` and the next forward. Then::

        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            parallel.step()          # after plan.micro_steps backward passes

    ``clip_norm`` clips the global gradient norm; it is a barrier, so the plan must have cross_iteration off.
    ``timeout_s`` bounds every wait. Raises PlanError (ranks with another plan are named), ValueError for a plan
    that does not fit the model, and RunError, naming rank, step and message, when something fails later.
    """
    return Parallel(model, optimizer, plan, units, group, clip_norm, timeout_s)


class Parallel:
    """A model in training. ``plan`` is what runs; :meth:`close` (or leaving a ``with`` block) ends it."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, units: list[ModelUnit],
        group: dist.ProcessGroup | None, clip_norm: float | None, timeout_s: float,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.plan, self.units = model, optimizer, plan, units
        world = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        if world != plan.world:
            raise PlanError(f"the plan is for {plan.world} ranks, the process group has {world}")
        control = dist.new_group(backend="gloo") if world > 1 and dist.get_backend(group) != "gloo" else group
        _same_plan(plan, self.rank, world, control)
        check(plan)
        if clip_norm is not None and plan.cross_iteration:
            raise PlanError("clipping the global norm needs all gradients first: plan with cross_iteration=False")
        if clip_norm is not None and clip_norm <= 0:
            raise ValueError(f"clip_norm must be > 0, got {clip_norm}")
        if world > 1 and (clip_norm is not None) and control is group:
            control = dist.new_group(backend="gloo")  # its reductions must not mix with the plan's messages
        groups = parameter_groups(optimizer)
        ordered = _match(plan, units, groups)
        device = units[0].parameters[0][1].device
        self._meter, self._executor = current_meter(device), executor_for(device)
        if world > 1:
            _broadcast(model, group)
        ledger = Ledger(plan, self.rank)
        self._storages = [
            UnitStorage(plan, u, parameters, self.rank, self._meter) for u, parameters in enumerate(ordered)
        ]
        group_of = [list(dict.fromkeys(groups[p] for _, p in ps if p in groups)) or [0] for ps in ordered]
        self._updates = Updates(plan, self._storages, optimizer, group_of, self.rank, self._meter)
        lock = threading.Condition()
        cap = None if plan.budget is None else plan.budget - plan.reserve
        self._group = group
        self._account = Account(lock, cap, ledger.at_rest)
        self._wire = Wire(plan, self._storages, group, self._meter)
        self._recorder = Recorder(plan, self._executor)
        self._dispatcher = Dispatcher(
            plan, ledger, self._storages, self._wire, self._updates, self._account, self._executor, self._recorder,
            control=control, pacer=_pacer(plan, self.rank, group), clip_norm=clip_norm, timeout_s=timeout_s,
        )  # fmt: skip
        self._walker = SlotWalker(
            plan, ledger, self._storages, self._dispatcher, self._updates, self._account, self._executor,
            self._recorder, self._meter,
        )  # fmt: skip
        self._hooks = Hooks(units, self._walker)
        self._guards = [m.register_forward_pre_hook(self._guard) for u in units for m in u.modules]
        self._evaluating = False
        self._recorder.step(0, self._executor.stamp())

    def __enter__(self) -> Parallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- training -----------------------------------------------------------------------------------------------

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
        if not self._walker.at_turn:
            raise RunError(f"rank {self.rank}, step {self._walker.step}: drain() inside an iteration")
        self._dispatcher.finish_iteration(self._walker.rounds * self._dispatcher.n)
        if self.plan.world > 1:
            # As DDP with broadcast_buffers: rank 0's buffers (BatchNorm's statistics) are the model's.
            for buffer in self.model.buffers():
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
        self._kept = {u for u, s in enumerate(self._storages) if s.strategy.sharded and s.is_full}
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

    def _guard(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() and not self._evaluating and not self._hooks._in_backward:
            raise RunError(f"rank {self.rank}: run forward passes without gradients inside parallel.evaluate()")

    def _gather(self, unit: int) -> None:
        storage = self._storages[unit]
        if storage.strategy.value == "dp":
            return
        with self._executor.communicating(), torch.no_grad():
            if not storage.is_full:
                with self._account.lock:
                    storage.allocate_full()
            self._executor.finish(self._wire.gather_now(unit))

    def _ungather(self, unit: int) -> None:
        storage = self._storages[unit]
        if storage.strategy.sharded and unit not in self._kept:
            storage.free_full()

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's state dict, on every rank, for the plain model; :meth:`drain` included."""
        self.drain()
        self._kept = {u for u, s in enumerate(self._storages) if s.strategy.sharded and s.is_full}
        return state.full_state(self.model, self._storages, self._gather, self._ungather)

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's part; :func:`mdcs.merge_shards` of all ranks' gives the plain model's state dict."""
        self.drain()
        return state.sharded_state(self.model, self._storages)

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
        """Peak bytes since :meth:`reset_memory` by category: the ledger's as it ran, and the allocator's (or None)."""
        with self._account.lock:
            predicted = dict(self._account.peak)
        return {"predicted": predicted, "measured": self._meter.peaks()}

    def memory_by_slot(self) -> list[Any]:
        """:class:`mdcs.measure.timeline.SlotMemory` of every slot of a period, as last seen."""
        return [m for _, m in sorted(self._walker.memory.items())]

    def reset_memory(self) -> None:
        with self._account.lock:
            self._account.reset()
            self._meter.reset()

    def close(self) -> None:
        """Stop the threads and take the hooks off. Does not drain."""
        self._dispatcher.stop()
        self._hooks.remove()
        for handle in self._guards:
            handle.remove()


def _same_plan(plan: Plan, rank: int, world: int, control: dist.ProcessGroup | None) -> None:
    if world == 1:
        return
    hashes: list[Any] = [None] * world
    dist.all_gather_object(hashes, plan.hash, group=control)
    common = Counter(hashes).most_common(1)[0][0]
    other = [r for r, h in enumerate(hashes) if h != common]
    if len(set(hashes)) == len(hashes) > 1:
        common, other = hashes[0], [r for r in range(world) if hashes[r] != hashes[0]]
    if other:
        raise PlanError(
            f"rank {rank}, before step 1: rank{'s' if len(other) > 1 else ''} {', '.join(map(str, other))} "
            f"ha{'ve' if len(other) > 1 else 's'} another plan ({', '.join(str(hashes[r]) for r in other)}) "
            f"than the others ({common})"
        )


def _match(
    plan: Plan, units: list[ModelUnit], groups: dict[nn.Parameter, int]
) -> list[list[tuple[str, nn.Parameter]]]:
    """The parameters of every unit in flat order. Raises ValueError where plan and model differ."""
    if len(units) != len(plan.profile.units):
        raise ValueError(f"the plan has {len(plan.profile.units)} units, the model {len(units)}")
    out = []
    for unit, planned in zip(units, plan.profile.units, strict=True):
        ordered, segments = in_group_order(unit, groups)
        if (unit.name, segments, unit.trainable) != (planned.name, planned.segments, planned.trainable):
            raise ValueError(
                f"unit {unit.name} has {segments} elements{'' if unit.trainable else ', frozen'}; the plan was made "
                f"for {planned.name} with {planned.segments}{'' if planned.trainable else ', frozen'}"
            )
        if ordered[0][1].element_size() != plan.profile.param_bytes:
            width = plan.profile.param_bytes
            raise ValueError(f"unit {unit.name} is {ordered[0][1].dtype}; the plan is for {width} bytes per element")
        out.append(ordered)
    return out


def _broadcast(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Rank 0's parameters and buffers to all, as DDP does when it is built."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, group_src=0, group=group)


def _pacer(plan: Plan, rank: int, group: dist.ProcessGroup | None) -> Pacer | None:
    if not plan.profile.link.emulated or plan.world == 1:
        return None
    name: list[Any] = [None]
    if rank == 0:
        folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
        with tempfile.NamedTemporaryFile(prefix="mdcs-link-", dir=folder, delete=False) as f:
            name[0] = f.name
        Pacer.create(Path(f.name), plan.world)
    dist.broadcast_object_list(name, group_src=0, group=group)
    pacer = Pacer(Path(name[0]), rank, plan.world, plan.profile.link)
    dist.barrier(group=group)
    if rank == 0:
        Path(name[0]).unlink()
    return pacer
