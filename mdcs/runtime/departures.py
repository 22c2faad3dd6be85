"""Departures: what a step does otherwise than the plan foresees, and the units that are whole for it.

Messages go in the plan's order whatever compute does, so that ranks may take different branches. A unit that is used
where the plan has freed it is made whole again, alone, from the shards of the other ranks, and from then on stays whole
from its planned gather to its last use. A collective would need all ranks at the same place; so the rank asks through
the store of the process group, and the presence thread of each other rank answers, whatever its training thread does. A
shard cannot change meanwhile: the unit's next update needs a reduction that the asking rank has not taken part in. Slow
(a quarter of a second, and the store's bandwidth), and needed once per unit.

In side passes (:class:`mdcs.model.hooks.Listener`), which bring no gradients that are the step's, the plan waits. All
ranks come to the same place of it, finish the messages that they have issued, and make the units whole by collectives.
Then each rank runs what it likes, until the plan goes on. What a side pass adds to ``.grad`` stays there, as with DDP's
``no_sync()``: the next gradient of the step comes on top of it.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist

from mdcs.plan.period import PeriodSlot
from mdcs.profile.link import Kind
from mdcs.runtime.communicator import SIDE_PASS, ProcessGroups
from mdcs.runtime.context import RunContext
from mdcs.runtime.errors import FailureChannel
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.unshard import Evaluation
from mdcs.runtime.wire import Wire
from mdcs.sizes import MIB
from mdcs.torch_compat import without_autograd

_CHUNK = 4 * MIB  # bytes of a value: stores refuse long ones
_POLL_S = 0.01

MORE = (
    "Call step() after each batch; to accumulate gradients, put all but the last forward and backward of a step under "
    "`with parallel.no_sync():`, or plan for more of them (micro_steps=)"
)
TOO_LATE = (
    f"{SIDE_PASS}: came between the last backward pass of the step and step(): evaluate before that backward pass or "
    f"after step(). {MORE}"
)


class Departures:
    """Units that leave the plan in one pass, and the departures of a step in words.

    - ``held_until_last_use``: units that were once used after the plan had freed them, which from then on it does not.
    - ``skipped_forward``, ``skipped_backward``: units of which such a slot was passed over in this pass.
    - ``open_calls``: by unit, calls of its modules that have not returned.
    - ``counts``, ``seconds``: departures of this step, in words.
    """

    def __init__(self, context: RunContext, wire: Wire, lending: Lending) -> None:
        self._plan, self._wire, self._storages = context.plan, wire, wire.storages
        self._lending = lending
        self.held_until_last_use: set[int] = set()
        self.skipped_forward: set[int] = set()
        self.skipped_backward: set[int] = set()
        self.open_calls = [0] * len(self._storages)
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0

    def count(self, unit: int, what: str) -> None:
        """Count a departure: ``what`` names the unit as ``{}``."""
        name = self._storages[unit].name
        if not name.endswith("]"):  # the rest of the module is a unit that departs as well
            self.counts[what.format(name)] += 1

    def count_skipped(self) -> None:
        """Count what did not come in the pass that ends."""
        for unit in self.skipped_forward:
            self.count(unit, "ran {} less often" if self._storages[unit].come else "left out {}")
        for unit in self.skipped_backward - self.skipped_forward:
            if self._storages[unit].trainable and not self._storages[unit].come:
                self.count(unit, "ran {} without a gradient")

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the seconds of the body."""
        begin = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begin

    def pop_counts(self) -> tuple[dict[str, int], float]:
        """Return the departures since the last call, and the seconds that they took."""
        counts = dict(self.counts), self.seconds
        self.counts, self.seconds = Counter(), 0.0
        return counts

    # -- units that stay whole ------------------------------------------------------------------------------------

    def must_hold(self, unit: int, phase: str) -> bool:
        """Return whether a unit stays whole at the end of a slot after which the plan frees it."""
        if phase == "B":  # a trainable unit never does: its update may begin
            return unit in self.held_until_last_use and not self._storages[unit].trainable
        # A unit that was passed over may still come, in another order. Without a budget there is room to wait for it.
        has_room = self._wire.queue.admission.cap is None
        passed_over = has_room and unit in self.skipped_forward
        return unit in self.held_until_last_use or self.open_calls[unit] > 0 or passed_over

    def make_whole(self, unit: int, slot: PeriodSlot | None, periods: int) -> None:
        """Make a freed unit whole, and keep it so from the next pass on. ``slot``: where compute is, in that period;
        None behind the unit's last planned use.
        """
        storage, queue = self._storages[unit], self._wire.queue
        self.held_until_last_use.add(unit)
        if slot is not None and (gathered := self._gathered(unit, slot, periods)) is not None:
            self._wait(gathered)
        else:
            if not queue.admission.fits(storage.full_bytes):
                # Wait only for messages that this rank has issued: a rank that has not come to their slots waits for
                # none that this rank still has to issue.
                self._wait(queue.issued)
            with self._wire.lock:
                # A part of the unit's messages may be in flight: then the plan has allocated it, and they write what
                # the shards have.
                if not storage.is_full:
                    storage.take_outside()
            self._lending.borrow(unit)
        storage.guard.open()

    def _wait(self, count: int) -> None:
        with self._wire.lock:
            self._wire.wait_for(count, "a unit that is used again")

    def _gathered(self, unit: int, slot: PeriodSlot, periods: int) -> int | None:
        """Return the number of messages through the last that gathers the unit for backward; None if not all issued."""
        queue, last = self._wire.queue, slot.micro == self._plan.micro_steps - 1
        # The last micro-step's backward is in the next period, which has begun once compute is in it.
        begun = periods - (last and slot.phase == "B")
        numbers = [
            (begun + (last and m.slot < self._plan.period.turn)) * queue.n + i + 1
            for i, m in enumerate(self._plan.messages)
            if m.kind.plain is Kind.AG_B and m.micro == slot.micro and any(u == unit for u, _ in m.parts)
        ]
        return max(numbers) if numbers and max(numbers) <= queue.issued else None

    def end_pass(self) -> None:
        """Free what is held outside of the plan."""
        for storage in self._storages:
            storage.free_outside()
        self.restart()

    def restart(self) -> None:
        """Forget the pass; its memory is freed."""
        self.skipped_forward.clear()
        self.skipped_backward.clear()
        self.open_calls = [0] * len(self._storages)


class Lending:
    """Both sides: :meth:`borrow` in the training thread, :meth:`answer` in the presence thread of ``words``."""

    def __init__(self, words: FailureChannel) -> None:
        self._words, self._rank = words, words.place.rank
        self._borrowed = self._answered = 0
        words.duties.append(weakref.WeakMethod(self.answer))

    def serve(self, context: RunContext, storages: list[UnitStorage]) -> None:
        """Lend these units from now on: those of the plan that runs."""
        self._context, self._storages = context, storages

    def borrow(self, unit: int) -> None:
        """Fill a unit's full parameters with the parts of all ranks. Raises RunError if one has left, or is late."""
        storage, store, place = self._storages[unit], self._words.store, self._context.place
        storage.copy_shard_into_flat()
        first = self._rank - self._rank % storage.parts  # of the ranks that have the unit together
        others = [r for r in range(first, first + storage.parts) if r != self._rank]
        if store is None or not others:
            return
        self._borrowed += 1
        for peer in others:
            number = store.add(f"asks/{peer}", 1)
            store.set(f"ask/{peer}/{number}", f"{self._rank} {unit} {self._borrowed}")
        deadline = time.monotonic() + self._context.timeout_s
        for peer in others:
            keys = _keys(self._rank, self._borrowed, peer, storage.full_bytes // storage.parts)
            while not store.check(keys):
                reason = self._words.peer_failure()
                if reason or time.monotonic() >= deadline:
                    raise place.error(
                        f"{reason}. This rank waited for its part of {storage.name}" if reason else
                        f"{storage.name} is used once more than in the measured step, and rank {peer} did not send "
                        f"its part in {self._context.timeout_s:g} s: look at the log of rank {peer}"
                    )  # fmt: skip
                time.sleep(_POLL_S)
            values = torch.frombuffer(bytearray().join(map(store.get, keys)), dtype=storage.flat_param.dtype)
            slices = storage.owned_slices(peer)
            with torch.no_grad():
                for part, piece in zip(slices, values.split([s.stop - s.start for s in slices]), strict=True):
                    storage.flat_param[part].copy_(piece)
            for key in keys:
                store.delete_key(key)

    def answer(self, store: dist.Store) -> None:
        """Send the parts that other ranks have asked for. ``store``: the presence thread's connection."""
        while store.check([key := f"ask/{self._rank}/{self._answered + 1}"]):
            self._answered += 1
            asking, unit, number = map(int, store.get(key).split())
            storage = self._storages[unit]
            # behind the gather that followed the last update
            with torch.no_grad(), self._context.executor.on_comm_stream():
                # Copies: memory that numpy has seen cannot be freed by resizing.
                shards = ((storage.owned_shard(b), storage.flat_param.dtype) for b in range(len(storage.blocks)))
                parts = [shard.to("cpu", dtype, copy=True) for shard, dtype in shards]
            data = b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)
            for key, at in zip(_keys(asking, number, self._rank, len(data)), itertools.count(0, _CHUNK)):
                store.set(key, data[at : at + _CHUNK])  # type: ignore[arg-type]  # bytes are as good as text


def _keys(asking: int, number: int, peer: int, size: int) -> list[str]:
    return [f"part/{asking}/{number}/{peer}/{at}" for at in range(0, size, _CHUNK)]


class SidePasses:
    """The block of side passes between two passes of the plan.

    - ``in_block``: the loop is in ``no_sync()``. ``is_open``: the plan waits.
    - ``had_backward``: a backward pass of this step was a side pass.
    - ``counts``: all passes are side passes, as nobody knows yet how many a step has; ``ended`` is called after each.
    """

    def __init__(
        self, context: RunContext, wire: Wire, departures: Departures, evaluation: Evaluation, groups: ProcessGroups
    ) -> None:
        self.departures, self.evaluation, self._groups, self._place = departures, evaluation, groups, context.place
        self._wire, self._storages = wire, wire.storages
        self.in_block = self.is_open = self.had_backward = self.counts = False
        self.ended: Callable[[], None] | None = None
        self._block = ExitStack()
        self._makes_graphs = False  # a backward with create_graph: a later one uses the parameters again, in any order

    @property
    def accumulates(self) -> bool:
        """Return whether all passes are side passes now."""
        return self.in_block or self.counts

    def begin(self, progress: int, period: int | None) -> None:
        """Make units whole at this place of the step, all ranks together. ``period``: whose reductions are not issued
        yet; None inside of an iteration.
        """
        with self.departures.timed(), self._place.during(SIDE_PASS), without_autograd():
            answers = self._groups.agree_on_call(SIDE_PASS, self._place.step, progress)
            if len(set(answers)) > 1:
                raise self._place.error(f"{SIDE_PASS}: run it at the same place of the step on every rank")
            if period is not None:
                self._wire.finish_iteration(period)
            else:
                with self._wire.lock:
                    self._wire.wait_for(self._wire.queue.issued, "the messages in flight")
            self._open = [storage.guard.is_open for storage in self._storages]
            self._full = [storage.is_full for storage in self._storages]
            self._block.enter_context(self.evaluation.unsharded())
            self.is_open = True
        if not self.counts:
            self.departures.counts["ran a pass beside the plan"] = 1

    def use(self, unit: int, in_backward: bool) -> None:
        """Make sure that a unit is whole: in a forward until it returns, in a backward until the plan goes on."""
        self.evaluation.enter(unit)
        self._makes_graphs |= in_backward and torch.is_grad_enabled()

    def end(self) -> None:
        """Let the plan go on: free what it has not gathered. After a backward that made a graph units stay whole until
        the plan's next pass has ended.
        """
        self.is_open = False
        with self.departures.timed():
            whole = self.evaluation.keep() if self._makes_graphs else ()
            self._block.close()
            for storage, was_open in zip(self._storages, self._open, strict=True):
                storage.guard.open() if was_open else storage.guard.close()
            for unit in whole:
                if not self._full[unit]:
                    self._storages[unit].take_outside()
                    self._storages[unit].guard.open()
        self._makes_graphs = False
