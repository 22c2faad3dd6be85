"""The engine of a run: its parts, and what they do together when the training loop is between two passes."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import nn

from mdcs.measure.memory import current_meter
from mdcs.model.aliases import attributes_over_parameters, still_held
from mdcs.model.hooks import Hooks, ModuleHook
from mdcs.model.inputs import BatchSizes
from mdcs.model.units import ModelUnit, alias_refused
from mdcs.plan.ledger import Ledger
from mdcs.plan.messages import Plan
from mdcs.profile.algorithms import Collectives
from mdcs.runtime import optimizer_state, validation
from mdcs.runtime.account import Account
from mdcs.runtime.buffers import Buffers
from mdcs.runtime.communicator import Communicator, NodeCommunicator, backend_of
from mdcs.runtime.departures import Departures
from mdcs.runtime.draining import finish_iteration
from mdcs.runtime.emulation import EmulatedCommunicator, pacer_for
from mdcs.runtime.errors import Place, RunError
from mdcs.runtime.excess import Excess
from mdcs.runtime.executor import between, executor_for
from mdcs.runtime.gathering import Gathering
from mdcs.runtime.groups import Groups
from mdcs.runtime.last_words import LastWords
from mdcs.runtime.lending import Lending
from mdcs.runtime.message_runner import MessageRunner
from mdcs.runtime.optimizer_state import OptimizerState
from mdcs.runtime.queue import MessageQueue, messages_of
from mdcs.runtime.record import Recorder
from mdcs.runtime.scaling import UpdateScale
from mdcs.runtime.start import take_over
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.stream_transport import StreamTransport, bytes_apart
from mdcs.runtime.thread_transport import ThreadTransport
from mdcs.runtime.updates import Updates
from mdcs.runtime.validation import Access, RunOptions
from mdcs.runtime.walker import SlotWalker
from mdcs.runtime.wire import Connected, Wire
from mdcs.torch_compat import mark_stepped


class Engine:
    """The parts of a run. Hooks tell the sequencer of slots; it issues messages to the queue and waits for them."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, units: list[ModelUnit],
        group: dist.ProcessGroup | None, options: RunOptions,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.plan, self.options = model, optimizer, plan, options
        world = dist.get_world_size(group) if dist.is_initialized() else 1
        rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.rank = rank if options.emulate is None else options.emulate.rank
        self.place = place = Place(self.rank)
        device = units[0].parameters[0][1].device
        device = options.device if device.type == "meta" else device

        # Validation: plan, job and model fit, on every rank. From here on ranks communicate.
        found = validation.fit(
            model, optimizer, plan, units, options, processes=world, backend=backend_of(group, device), device=device
        )
        self.groups = groups = Groups(
            group, device, options.timeout_s, needs_control=options.needs_norm,
            per_node=plan.profile.per_node if any(k.in_node for k in plan.strategies) else 0,
        )
        try:
            validation.agree(found, model, plan, place, groups)
        except ValueError:
            groups.destroy()
            raise
        if rank == 0:
            validation.warn_untrained(found.untrained)
        self.aliases = attributes_over_parameters(model)

        # Failure: the other ranks hear why this one leaves.
        run = groups.exchange(uuid.uuid4().hex)[0] if world > 1 else None
        self.last_words = LastWords(place, run, world)
        place.explain = self.last_words.after

        # Units: flat parameters, shards and gradients. Closed parameters refuse to be used.
        self.meter, self.executor = current_meter(device), executor_for(device)
        self.access = Access(place)
        assert found.initialisation is not None
        try:
            self.storages = take_over(
                model, found.initialisation,
                lambda u: UnitStorage(plan, u, found.ordered[u], self.rank, self.meter, self.access.refuse, device),
                groups.messages, place,
            )  # fmt: skip
        except BaseException:
            self.last_words.end()
            groups.destroy(failed=True)
            raise

        # Collectives, the optimizer on shards, and the bytes that both may hold.
        self.ledger = ledger = Ledger(plan, self.rank)
        self.account = Account(threading.RLock(), ledger.at_rest)
        self.wire = Wire(plan, self.storages, self._connect, self.meter)
        self.updates = Updates(
            plan, self.storages, optimizer, found.layout, found.group_of, self.rank, self.meter, options.clip_value
        )
        self.buffers = Buffers(model, options.broadcast_buffers)

        # Queue and transport: messages in the plan's order, several in flight.
        self.recorder = Recorder(plan, self.executor)
        self.update_scale = UpdateScale(self.storages, groups.control, options.clip_norm, options.loss_scale)
        self.runner = runner = MessageRunner(
            plan, ledger, self.storages, self.wire, self.updates, self.account, self.executor, self.recorder,
            self.update_scale, place, self.last_words,
        )  # fmt: skip
        execution, cap = self.executor.execution, None if plan.budget is None else plan.budget - plan.reserve
        self.queue = MessageQueue(
            messages_of(plan, ledger), execution.in_flight(plan.profile.link.depth), cap=cap, at_rest=ledger.rest_bytes,
            has_own_updates=execution.has_own_updates,
        )  # fmt: skip
        pacer = pacer_for(plan, self.rank, groups.messages, world)
        runs_ahead = self.executor.runs_ahead
        self.transport = (StreamTransport if runs_ahead else ThreadTransport)(self.queue, runner, pacer, options.timeout_s)
        if plan.budget is not None:
            self.executor.limit(plan.budget + (bytes_apart(ledger, self.queue.depth) if runs_ahead else 0))
        # Stops without end(), too: a thread that still waits in C++ would abort the process when it exits.
        self._stop_threads = weakref.finalize(self, _stop, self.transport, self.last_words)

        # Sequencer: hooks of modules and gradients tell it which slot compute is in.
        batch = BatchSizes(units[plan.period.slots[plan.period.turn].unit].modules)
        self.excess = Excess(plan, ledger.slots, self.rank, batch)
        lending = Lending(self.storages, self.last_words, self.executor, options.timeout_s)
        self.last_words.duties.append(lending.answer)
        self.walker = SlotWalker(
            plan, ledger, self.storages, self.transport, self.updates, self.account, self.executor, self.recorder,
            self.meter, self.excess, Departures(plan, self.storages, self.transport, self.account, lending),
        )  # fmt: skip
        self.access.follow(self.walker)
        in_flat_order = [dataclasses.replace(u, parameters=tuple(ps)) for u, ps in zip(units, found.ordered, strict=True)]
        self._hooks = Hooks(in_flat_order, self.walker)
        before_all = [m for u in units if u.trainable for m in u.modules]  # their forwards include the slots of frozen units
        self._handles = [m.register_forward_pre_hook(ModuleHook(self._forward), prepend=True) for m in before_all]
        self._handles += [*batch.handles, *validation.refuse_calls(optimizer, self.rank)]
        self._handles.append(validation.refuse_state_dict(model, self.storages, place))

        # State: units and the optimizer's state, whole, outside of the plan's messages.
        self.gathering = Gathering(self.storages, self.wire, self.account, self.queue, self.executor, place)
        self.optimizer_state = OptimizerState(self.updates, self.storages, self.gathering, groups.exchange)
        self.optimizer_state.load(optimizer.state)
        optimizer.state.clear()  # the state is on shards from now on

        for storage in self.storages:
            if not storage.is_plain:
                storage.guard.close()
        self.is_closed = False
        self.recorder.step(0, self.executor.stamp())
        self.reset_memory()  # profiling, and the copy of the weights into flat buffers, are not training

    def _connect(self, collectives: Collectives, in_node: bool) -> Connected:
        if self.options.emulate is not None:
            return EmulatedCommunicator(collectives, self.options.emulate)

        def of(group: dist.ProcessGroup | None) -> Communicator:
            return Communicator(collectives, group, synchronous=self.executor.runs_ahead)

        groups = self.groups
        return NodeCommunicator(of(groups.node), of(groups.across)) if in_node else of(groups.messages)

    def _forward(self, module: nn.Module, args: object) -> None:
        if not (torch.is_grad_enabled() or self.walker.lent or self._hooks.in_backward):
            raise RunError(f"rank {self.rank}: run forward passes without gradients inside parallel.evaluate()")

    def reset_memory(self) -> None:
        """Restart the peaks of memory."""
        with self.account.lock:
            self.account.reset()
            self.meter.reset()

    # -- between iterations -------------------------------------------------------------------------------------

    def check(self, call: str, *, needs_ranks: bool = False) -> None:
        """Raise the error of a thread, and refuse this ``call`` of the loop where it cannot be."""
        if needs_ranks and self.options.emulate is not None:
            raise RunError(f"rank {self.rank}: {call} of an emulated world would be made up: no rank has sent anything")
        self.transport.check()
        self.refuse_if_lent(call)

    def refuse_if_lent(self, call: str) -> None:
        """Raise RunError for a ``call`` after the end, and where the loop has the parameters for something else."""
        if self.is_closed:
            raise RunError(f"rank {self.rank}: {call} after close()")
        if self.walker.lent:
            raise self.place.error(f"{call} inside {self.walker.lent}")

    def end_step(self) -> None:
        """End an iteration. Raises RunError if it is not complete, and for changes that the updates did not see."""
        walker, place = self.walker, self.place
        self.check("step()")
        if walker.after_micro_step:
            walker.end_short()
        if not walker.at_turn or not walker.due:
            raise place.error(f"step() needs {self.plan.micro_steps} forward and backward passes before it")
        if walker.step == 1 and self.buffers.option is None:
            self.buffers.adopt(self.groups, place)
        problem = validation.unseen_change(self.optimizer, self.updates, self.storages, self.buffers, self.plan.world)
        alias = still_held(self.model, self.aliases) if problem is None and walker.step == 1 else None
        if alias is not None:
            problem = str(alias_refused(alias))
        problem = problem or validation.taken_away(self.model, self.storages)
        if problem is not None:
            raise place.error(problem)
        if not walker.watches_memory:
            self.excess.read(walker.step, self.meter)
        self.recorder.over_budget(walker.step, *self.excess.end_step(walker.step))
        self.recorder.departures(walker.step, *walker.departures.take())
        self.recorder.step(walker.step, self.executor.stamp())
        walker.step += 1
        walker.due = False
        self.transport.end_step()
        place.step = walker.step
        if self.buffers.option:
            # Where the host runs ahead, the broadcasts go in the messages' group, in stream order. On CPU threads have
            # messages in flight in that group, so the broadcasts need another one.
            group = self.groups.messages if self.executor.runs_ahead else self.groups.talk
            with between(self.executor):
                self.buffers.broadcast(self.groups, group, place)
        mark_stepped(self.optimizer)

    def wait_for_norm(self) -> bool:
        """Wait until the gradients of this iteration are reduced; return False if the plan does so after this call only.

        Raises RunError before backward has ended.
        """
        walker = self.walker
        self.check("clip_grad_norm_()")
        if walker.after_micro_step:
            walker.end_short()
        if not walker.at_turn or not walker.due:
            raise self.place.error("clip_grad_norm_() comes between backward and step()")
        index = walker.periods * self.queue.n + self.runner.last_reduction
        if index >= self.queue.issued:  # beside the next forward pass, of units that are not trained
            return False
        with self.account.lock:
            self.transport.wait_for(index + 1, "the gradients' norm")
        return True

    def drain(self, call: str, *, needs_ranks: bool = False) -> None:
        """Finish all messages and updates, for this ``call`` of the loop, which all ranks make now, in the same step."""
        self.check(call, needs_ranks=needs_ranks)
        if not self.walker.at_turn:
            raise self.place.error(f"{call} inside an iteration")
        self.excess.skips = True
        with self.place.during(call):
            problem = validation.disagreement(self.groups.tell(call, self.walker.step))
        if problem is not None:
            raise self.place.error(f"{call}: {problem}")
        self._finish(self.walker.periods)
        for storage in self.storages:
            if storage.strategy.value == "dp" and storage.is_plain:
                storage.guard.open()

    @contextlib.contextmanager
    def lend(self, call: str, use: Callable[[], AbstractContextManager[None]], *, needs_ranks: bool = False) -> Iterator[None]:
        """Drain, then let ``use`` have the parameters, instead of training, inside the block."""
        self.drain(call, needs_ranks=needs_ranks)
        self.walker.lent = call
        try:
            with use():
                yield
        finally:
            self.walker.lent = None

    @torch.inference_mode(False)
    def _finish(self, period: int) -> None:
        """Finish all issued messages and the updates of a period."""
        finish_iteration(self.transport, period * self.queue.n)
        if self.buffers.option is not False:
            with between(self.executor):
                self.buffers.broadcast(self.groups, self.groups.messages, self.place)

    @torch.inference_mode(False)
    def abandon(self) -> None:
        """Give up the current iteration on every rank. Raises RunError if its updates have begun."""
        self.check("abandon()")
        with self.place.during("abandon()"):
            problem = self._give_up("abandon()")
        if problem is not None:
            raise self.place.error(f"the iteration cannot be given up: {problem}: start again from a checkpoint")

    def _give_up(self, call: str) -> str | None:
        """Go back to the turn, with nothing in flight; return why this cannot be. Collective."""
        walker = self.walker
        walker.leave_forward()
        answers = self.groups.tell(call, walker.step, walker.committed, walker.is_torn)
        problem = validation.disagreement(answers)
        if problem is not None:
            return problem
        walker.walk(max(progress for _, progress, _ in answers))
        self._finish(walker.periods - walker.due)
        walker.restart()
        return None

    # -- the end ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @torch.inference_mode(False)
    def make_plain(self) -> str:
        """Make all units whole, in plain parameters, and the optimizer's state. Return why this failed, or ""."""
        if self.transport.error is not None:
            return str(self.transport.error)
        if self.groups.world > 1 and not dist.is_initialized():
            return "the process group was destroyed before close()"
        try:
            problem = self._give_up("close()")
            if problem is not None:
                return problem
            if self.plan.budget is not None:
                self.executor.limit(None)
            whole = self.optimizer_state.whole(keep=True, cpu=False, release=True)
            state = optimizer_state.for_parameters(whole, self.optimizer_state.layout)
            for storage in self.gathering.one_by_one():
                storage.let_go()
            for storage in self.storages:
                storage.guard.open()
            self.optimizer.state.update(state)
        except RuntimeError as e:
            return str(e)
        return ""

    def end(self, why: str, *, failed: bool = False) -> None:
        """Stop the threads and remove the hooks, without the other ranks. ``why``: the reason for parameters that are
        not whole.
        """
        if self.is_closed:
            return
        self.is_closed = True
        self.access.ended = why
        self._stop_threads.detach()
        self.transport.stop()
        self.last_words.end()
        if self.plan.budget is not None:
            self.executor.limit(None)
        self._hooks.remove()
        for handle in self._handles:
            handle.remove()
        self.groups.destroy(failed=failed)


def _stop(transport: ThreadTransport | StreamTransport, last_words: LastWords) -> None:
    """Stop a run that ends without close()."""
    last_words.say_uncaught()
    transport.stop()
    last_words.end()
