"""The engine of a run: its parts, and what they do together when the training loop is between two passes."""

from __future__ import annotations

import contextlib
import functools
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from mdcs.emulation import EmulatedCommunicator, pacer_for
from mdcs.model.guard import attributes_over_parameters, still_held
from mdcs.model.hooks import Hooks, Listener, ReentrantPasses
from mdcs.model.optimizers import Optimizers
from mdcs.model.recompute import Recomputation
from mdcs.model.units import ModelUnit, alias_refused
from mdcs.plan.plan import Plan
from mdcs.profile.link import Collectives
from mdcs.profile.recompute import NONE, SELECTIVE
from mdcs.runtime import loop_access, optimizer_state, validation
from mdcs.runtime.communicator import ProcessGroups, backend_of, why_ranks_cannot_continue
from mdcs.runtime.context import RunContext
from mdcs.runtime.departures import Departures, Lending, SidePasses
from mdcs.runtime.errors import ErrorContext, FailureChannel, RunError, forgotten_in_child
from mdcs.runtime.executor import run_on_comm_stream
from mdcs.runtime.gradient_scaling import UpdateScale
from mdcs.runtime.initialization import Buffers, leave_units, shard_units
from mdcs.runtime.loop_access import ParameterAccess, forbid_optimizer_calls
from mdcs.runtime.messages import Connected, Messages
from mdcs.runtime.optimizer_state import OptimizerState
from mdcs.runtime.sharded_optimizer import ShardedOptimizer
from mdcs.runtime.slot_sequencer import SlotSequencer
from mdcs.runtime.slots import ActivationExcess, BatchSizes
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.stream_transport import StreamTransport
from mdcs.runtime.thread_transport import ThreadTransport
from mdcs.runtime.unshard import Evaluation, Unsharder
from mdcs.runtime.validation import RunOptions, ValidationResult
from mdcs.runtime.wire import Wire, queue_for
from mdcs.torch_compat import mark_stepped, without_autograd


@dataclass(frozen=True)
class Trained:
    """A model, its optimizers and its units, to be trained by a run."""

    model: nn.Module
    optimizers: Optimizers
    units: list[ModelUnit]


class Engine:
    """The parts of a run. Hooks tell the sequencer of slots; it issues messages to the queue and waits for them.

    ``group``: the ranks; None: all. ``before``: the run of another plan, which :meth:`retire` has stopped: it gives its
    units, process groups and failure channel, and ends. None: units are plain and whole.
    """

    storages: list[UnitStorage]
    updates: ShardedOptimizer

    def __init__(
        self, trained: Trained, plan: Plan, options: RunOptions, group: dist.ProcessGroup | None = None,
        before: Engine | None = None,
    ) -> None:  # fmt: skip
        model, optimizers, units = trained.model, trained.optimizers, trained.units
        self.model, self.optimizers, self.plan, self.options = model, optimizers, plan, options
        rank, world = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
        self.rank = rank if options.emulate is None else options.emulate.rank
        device = units[0].parameters[0][1].device
        self.device = device = options.device if device.type == "meta" else device

        # Validation: plan, job and model fit, on every rank. From here on ranks communicate.
        found = validation.validate(
            model, optimizers, plan, units, options, processes=world, backend=backend_of(group, device), device=device,
            updates=None if before is None else before.updates.updates,
        )  # fmt: skip
        self._handles: list[Any] = []  # what a run that ends, or cannot begin, removes from model and optimizers
        if before is None:
            self.groups = ProcessGroups(group, device, options.timeout_s, needs_control=options.needs_norm)
            self.place = ErrorContext(self.rank)
        else:
            self.groups, self.place = before.groups, before.place
        try:
            if any(k.in_node for k in plan.strategies):
                self.groups.connect_nodes(plan.profile.per_node)
            validation.agree_on_validation(found, model, plan, self.place, self.groups)
            validation.warn_untrained(found.untrained if rank == 0 else ())
            self._assemble(found, before)
        except BaseException as error:
            self._disassemble(error, before)
            raise

    def _assemble(self, found: ValidationResult, before: Engine | None) -> None:
        model, optimizers, plan, options = self.model, self.optimizers, self.plan, self.options
        self.units = units = found.units
        groups, place, world = self.groups, self.place, self.groups.world
        self.context = context = RunContext(plan, place, self.device, options.timeout_s)
        self.meter, self.executor = context.meter, context.executor
        self.account, self.recorder = context.account, context.recorder
        self.aliases = attributes_over_parameters(model) if before is None else []

        # Failure: the other ranks hear why this one leaves.
        if before is None:
            run = groups.all_gather_object(uuid.uuid4().hex)[0] if world > 1 else None
            self.failures = FailureChannel(place, run, world)
            self.lending = Lending(self.failures)
        else:
            self.failures, self.lending = before.failures, before.lending

        # Units: flat parameters, shards and gradients. Closed parameters refuse to be used.
        self.access = ParameterAccess(place)
        assert found.initialisation is not None and found.updates is not None

        def make(u: int) -> UnitStorage:
            refuse = functools.partial(self.access.refuse, u)
            old = None if before is None else before.storages[u]
            return UnitStorage(context, u, [*units[u].parameters], refuse, old)

        if before is None:
            self.storages = shard_units(model, found.initialisation, make, groups.message_group, place)
        else:
            self.storages = [make(u) for u in range(len(units))]
        self.updates = ShardedOptimizer(context, self.storages, found.updates, options.clip_value)
        self.buffers = Buffers(model, options.broadcast_buffers)

        # Wire: messages in the plan's order, several in flight.
        on_streams, clip_norm, loss_scale = self.executor.runs_ahead, options.clip_norm, options.loss_scale
        self.update_scale = UpdateScale(self.storages, groups.norm_group, clip_norm, loss_scale, on_streams)
        messages = Messages(context, self.storages, self.updates, self.update_scale, self._connect)
        queue = queue_for(plan, context.ledger, self.executor.execution, on_streams)
        pacer = pacer_for(plan, self.rank, groups.message_group, world)
        transport = StreamTransport if on_streams else ThreadTransport
        self.wire: Wire = transport(context, queue, messages, pacer, self.failures)
        # Stops without end(), too: a thread that still waits in C++ would abort the process when it exits.
        self._stop_threads = weakref.finalize(self, self.wire.stop_unclosed)
        forgotten_in_child.add(self)

        # Walker: hooks of modules and gradients tell it which slot compute is in.
        batch = BatchSizes(units[plan.period.slots[plan.period.turn].unit].modules)
        self._handles.append(batch)
        self.excess = ActivationExcess(plan, context.ledger.slots, place, batch, raises=options.over_budget == "raise")
        self.lending.serve(context, self.storages)
        self.unsharder = Unsharder(context, self.wire)
        self.evaluation = Evaluation(context, self.unsharder, groups)
        departures = Departures(context, self.wire, self.lending)
        reentrant = ReentrantPasses([p for storage in self.storages if storage.trainable for p in storage.parameters])
        side = SidePasses(context, self.wire, departures, self.evaluation, groups)
        self.sequencer = SlotSequencer(context, self.wire, side, self.excess, reentrant)
        self._hooks = Hooks(units, self.sequencer, model, reentrant)
        self._handles.append(self._hooks)
        self.access.follow(self.sequencer, self._hooks)
        chosen = {u: choice == SELECTIVE for u, choice in enumerate(plan.recompute) if choice != NONE}
        self._handles.append(Recomputation(units, chosen, self._hooks.recomputing))
        self._handles += [h for each in optimizers.members for h in forbid_optimizer_calls(each, self.rank)]
        self._handles += [loop_access.refuse_state_dict(model, self.storages, place)]

        # State: units and the optimizer's state, whole, outside of the plan's messages.
        self.optimizer_state = OptimizerState(self.updates, self.storages, self.unsharder, groups.all_gather_object)
        if before is None:
            self.optimizer_state.load(optimizers.state)
            for optimizer in optimizers.members:
                optimizer.state.clear()  # it is on shards from now on
        else:
            self.optimizer_state.take_over(before.optimizer_state)
            before.end("a new plan has them", is_over=False)
        if plan.budget is not None:
            self.executor.limit(plan.budget + self.wire.pool_bytes)
        for storage in self.storages:
            if not storage.is_open_between_steps:
                storage.guard.close()
        self.is_closed = False
        self.recorder.step(place.step - 1, self.executor.record_timestamp())
        self.reset_memory()  # profiling, and the copy of the weights into flat buffers, are not training

    def _disassemble(self, error: BaseException, before: Engine | None) -> None:
        """Undo a start that failed: units that are whole on this rank are plain again, others say why they are not."""
        if "failures" in vars(self):
            self.failures.publish(error)
            self.failures.end()
        if "wire" in vars(self):
            self.wire.stop()
        for handle in self._handles:
            handle.remove()
        if "storages" in vars(self) and before is None:
            self.access.ended = f"its start failed: {error}"
            leave_units(self.storages)
        self.groups.destroy(failed=True)

    def _connect(self, collectives: Collectives, in_node: bool) -> Connected:
        if self.options.emulate is not None:
            return EmulatedCommunicator(collectives, self.options.emulate)
        return self.groups.communicator(collectives, in_node, synchronous=self.executor.runs_ahead)

    def reset_memory(self) -> None:
        """Restart the peaks of memory."""
        with self.account.lock:
            self.account.reset()
            self.meter.reset()

    # -- between iterations -------------------------------------------------------------------------------------

    def check(self, call: str, *, needs_ranks: bool = False) -> None:
        """Raise the error of a thread, and refuse this ``call`` of the loop where it cannot be. Side passes end."""
        if needs_ranks and self.options.emulate is not None:
            raise RunError(f"rank {self.rank}: {call} needs all ranks; this run emulates them")
        self.wire.check()
        self.refuse_if_exported(call)
        if self.sequencer.side.is_open:
            self.sequencer.side.end()

    def refuse_if_exported(self, call: str) -> None:
        """Raise RunError for a ``call`` after the end, and where the loop has the parameters for something else."""
        if self.is_closed:
            raise RunError(f"rank {self.rank}: {call} after close(): call mdcs.parallelize() again")
        if self.sequencer.exported_to:
            raise self.place.error(f"{call} inside {self.sequencer.exported_to}: leave that with block first")

    def end_step(self) -> None:
        """End an iteration. Raises RunError if it is not complete, and for changes that the updates did not see."""
        sequencer, place = self.sequencer, self.place
        self.check("step()")
        sequencer.end_short()
        if not sequencer.at_turn or not sequencer.step_pending:
            problem = loop_access.find_changed_training(self.storages)
            n = self.plan.micro_steps
            passes = "a forward and a backward pass" if n == 1 else f"{n} forward and backward passes"
            needs = f"step() needs {passes} before it; parallel.abandon() ends a batch that has none"
            raise place.error(problem or needs)
        if sequencer.step == 1 and self.buffers.option is None:
            self.buffers.broadcast_created(self.groups, place)
        problem = loop_access.find_unseen_change(self.updates, self.storages, self.buffers, self.plan.world)
        if problem is None and sequencer.step == 1 and (alias := still_held(self.model, self.aliases)) is not None:
            problem = str(alias_refused(alias))
        if (problem := problem or loop_access.find_removed_parameter(self.model, self.storages)) is not None:
            raise place.error(problem)
        if not sequencer.watches_memory:
            self.excess.read(sequencer.step, self.meter)
        slots, size = self.excess.end_step(sequencer.step)
        counts, seconds = sequencer.departures.pop_counts()
        self.recorder.note(
            sequencer.step, slots_over_budget=slots, over_budget=size, departures=counts, departed_s=seconds
        )
        self.recorder.step(sequencer.step, self.executor.record_timestamp())
        sequencer.end_step()
        self._hooks.updates += 1
        self.wire.end_step()
        if self.buffers.option:
            # Where the host runs ahead, the broadcasts go in the messages' group, in stream order. On CPU threads have
            # messages in flight in that group, so the broadcasts need another one.
            group = self.groups.message_group if self.executor.runs_ahead else self.groups.host_group
            with run_on_comm_stream(self.executor):
                self.buffers.broadcast(self.groups, group, place)
        for optimizer in self.optimizers.members:
            mark_stepped(optimizer)

    def drain(self, call: str, *, needs_ranks: bool = False) -> None:
        """Finish all messages and updates for this ``call`` of the loop, which all ranks make in the same step."""
        self.check(call, needs_ranks=needs_ranks)
        if not self.sequencer.at_turn or self.sequencer.step_pending:
            raise self.place.error(f"{call} inside an iteration: call it after step()")
        self.excess.skips = True
        with self.place.during(call):
            problem = why_ranks_cannot_continue(self.groups.agree_on_call(call, self.sequencer.step))
        if problem is not None:
            raise self.place.error(f"{call}: {problem}")
        self._finish(self.sequencer.periods)
        for storage in self.storages:
            if storage.strategy.value == "dp" and storage.is_open_between_steps:
                storage.guard.open()

    @contextlib.contextmanager
    def export_params(
        self, call: str, use: Callable[[], AbstractContextManager[None]], *, needs_ranks: bool = False,
        weights: str | None = None,
    ) -> Iterator[None]:  # fmt: skip
        """Drain, then let ``use`` have the parameters or the state ``weights`` instead of training, in the block."""
        self.drain(call, needs_ranks=needs_ranks)
        self.sequencer.exported_to = call
        try:
            with self.recorder.pause(), self.optimizer_state.in_parameters(weights), use():
                yield
        finally:
            self.sequencer.exported_to = None
            if weights is not None:  # after an error, too: training may go on
                self.groups.agree_on_call(call)
                self.optimizer_state.gather_again()

    @without_autograd()
    def _finish(self, period: int) -> None:
        self.wire.finish_iteration(period)
        self.updates.move_on()
        if self.buffers.option is not False:
            with run_on_comm_stream(self.executor):
                self.buffers.broadcast(self.groups, self.groups.message_group, self.place)

    @without_autograd()
    def abandon(self) -> None:
        """Give up the current iteration on every rank. Raises RunError if its updates have begun."""
        self.check("abandon()")
        with self.place.during("abandon()"):
            problem = self._give_up("abandon()")
        if problem is not None:
            raise self.place.error(f"the iteration cannot be given up: {problem}: start again from a checkpoint")

    def _give_up(self, call: str) -> str | None:
        """Go back to the turn, with nothing in flight; return why this cannot be. Collective."""
        sequencer = self.sequencer
        if sequencer.side.is_open:
            sequencer.side.end()
        sequencer.leave_forward()
        answers = self.groups.agree_on_call(call, sequencer.step, sequencer.agreed_progress, sequencer.updates_begun)
        if (problem := why_ranks_cannot_continue(answers)) is not None:
            return problem
        sequencer.advance_to(max(progress for _, progress, _ in answers))
        sequencer.decide(False)
        self._finish(sequencer.periods - sequencer.step_pending)
        sequencer.restart()
        return None

    # -- the end ------------------------------------------------------------------------------------------------

    @without_autograd()
    def make_plain(self) -> str:
        """Make all units whole, in plain parameters, and the optimizer's state. Return why this failed, or ""."""
        if self.wire.error is not None:
            return str(self.wire.error)
        if self.groups.world > 1 and not dist.is_initialized():
            return "the process group was destroyed before close()"
        try:
            if (problem := self._give_up("close()")) is not None:
                return problem
            if self.plan.budget is not None:
                self.executor.limit(None)
            whole = self.optimizer_state.full(keep=True, cpu=False, release=True)
            state = optimizer_state.for_parameters(whole, self.optimizer_state.layout_of)
            for storage in self.unsharder.one_by_one():
                storage.detach_plain_params()
            for storage in self.storages:
                storage.guard.open()
            self.optimizers.set_state(state)
        except RuntimeError as e:
            return str(e)
        return ""

    def end(self, why: str, *, failed: bool = False, is_over: bool = True) -> None:
        """Stop the threads and remove the hooks, without the other ranks. ``why``: why parameters are not whole.
        ``is_over``: no other plan goes on with the process groups.
        """
        if self.is_closed:
            return
        self.is_closed, self.access.ended = True, why
        self._stop_threads.detach()
        self.wire.stop()
        self._leave_model()
        if is_over:
            self.failures.end()
            self.groups.destroy(failed=failed)

    def forget(self) -> None:
        """Leave the run to the process that this one was forked from."""
        self.is_closed, self.access.ended = True, "this process was forked from the one that has them"
        self._stop_threads.detach()
        self.failures.forget()
        self._hooks.remove()

    def retire(self, call: str) -> None:
        """Stop between two steps, for this ``call``: the engine of another plan may take over. Collective."""
        if (problem := self._give_up(call)) is not None:
            raise RunError(f"rank {self.rank}: {call}: {problem}")
        self._leave_model()
        for storage in self.storages:
            storage.guard.open()

    def _leave_model(self) -> None:
        if self.plan.budget is not None:
            self.executor.limit(None)
        for handle in self._handles:
            handle.remove()

    def observe(self, listener: Listener | None) -> None:
        """Let ``listener`` hear the hooks, and tell the sequencer; None: the sequencer hears them itself."""
        self._hooks.listener = self.sequencer if listener is None else listener
