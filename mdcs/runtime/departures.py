"""Departures: what a step does otherwise than the plan foresees, and the units that are whole for it.

Messages go in the plan's order whatever compute does, so that ranks may take different branches. A unit that is used
where the plan has freed it is made whole again, alone, from the shards of the other ranks, which need not come to the
same place (:mod:`mdcs.runtime.lending`). From then on it stays whole from its planned gather to its last use.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mdcs.plan.period import PeriodSlot
from mdcs.profile.link import Kind
from mdcs.runtime.context import RunContext
from mdcs.runtime.lending import Lending
from mdcs.runtime.wire import Wire


class Departures:
    """Units that leave the plan in one pass, and the departures of a step in words.

    - ``kept``: units that were once used after the plan had freed them: from now on they are whole until their last use.
    - ``passed``: units of which a forward slot was passed over in this pass.
    - ``unreached``: units of which a backward slot was passed over in this pass.
    - ``inside``: by unit, calls of its modules that have not returned.
    - ``seen``, ``seconds``: departures of this step.
    """

    def __init__(
        self, context: RunContext, wire: Wire, lending: Lending
    ) -> None:
        self._plan, self._wire, self._units, self._storages = context.plan, wire, wire.units, wire.units.storages
        self._lending = lending
        self.kept: set[int] = set()
        self.passed: set[int] = set()
        self.unreached: set[int] = set()
        self.inside = [0] * len(self._storages)
        self.seen: Counter[str] = Counter()
        self.seconds = 0.0

    def note(self, unit: int, what: str) -> None:
        """Count a departure: ``what`` names the unit as ``{}``."""
        name = self._storages[unit].name
        if not name.endswith("[frozen]"):  # the rest of the module is a unit that departs as well
            self.seen[what.format(name)] += 1

    def note_pass(self, has_gradient: Callable[[int], bool]) -> None:
        """Count what did not come in the pass that ends."""
        for unit in self.passed:
            self.note(unit, "ran {} less often" if has_gradient(unit) else "left out {}")
        for unit in self.unreached - self.passed:
            if self._storages[unit].trainable and not has_gradient(unit):
                self.note(unit, "ran {} without a gradient")

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the seconds of the body."""
        begin = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begin

    def take(self) -> tuple[dict[str, int], float]:
        """Return the departures since the last call, and the seconds that they took."""
        taken = dict(self.seen), self.seconds
        self.seen, self.seconds = Counter(), 0.0
        return taken

    # -- units that stay whole ------------------------------------------------------------------------------------

    def stays(self, unit: int, phase: str) -> bool:
        """Return whether a unit stays whole at the end of a slot after which the plan frees it.

        After backward a trainable unit never does: its update may begin.
        """
        if phase == "B":
            return unit in self.kept and not self._storages[unit].trainable
        # A unit that was passed over may still come, in another order. Without a budget there is room to wait for it.
        has_room = self._wire.queue.admission.cap is None
        return unit in self.kept or self.inside[unit] > 0 or has_room and unit in self.passed

    def make_whole(self, unit: int, slot: PeriodSlot | None, periods: int) -> None:
        """Make a freed unit whole, and keep it so from the next pass on.

        ``slot``: where compute is, in the period with this number; None behind the unit's last planned use.
        """
        storage, queue = self._storages[unit], self._wire.queue
        self.kept.add(unit)
        gathered = None if slot is None else self._gathered(unit, slot, periods)
        if gathered is not None:
            self._wait(gathered)
        else:
            if not queue.admission.fits(storage.full_bytes):
                # Wait only for messages that this rank has issued: a rank that has not come to their slots waits for none
                # that this rank still has to issue.
                self._wait(queue.issued)
            with self._wire.lock:
                # A part of the unit's messages may be in flight: then the plan has allocated it, and they write what the
                # shards have.
                if not storage.is_full:
                    self._units.take_outside(unit)
            self._lending.borrow(unit)
        storage.guard.open()

    def _wait(self, count: int) -> None:
        with self._wire.lock:
            self._wire.wait_for(count, "a unit that is used again")

    def _gathered(self, unit: int, slot: PeriodSlot, periods: int) -> int | None:
        """Return the number of messages with the last one that gathers the unit for backward; None if one of them is not
        issued, or there is none.
        """
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
        self._units.free_outside()
        self.restart()

    def restart(self) -> None:
        """Forget the pass; its memory is freed."""
        self.passed.clear()
        self.unreached.clear()
        self.inside = [0] * len(self._storages)
