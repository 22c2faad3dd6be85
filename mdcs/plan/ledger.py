"""The memory ledger: integer bytes per rank that each slot and message of a plan holds.

It resolves the events of the table of lifetimes (:mod:`mdcs.plan.lifetimes`) for one plan and sums the rows by slot and
message. Runtime, simulator and planners read these sums: admission, prediction and measurement count the same bytes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from mdcs.plan.lifetimes import Moment, Row, at_rest, bytes_between, message_rows, unit_rows
from mdcs.plan.period import Op, Period, Strategy
from mdcs.plan.plan import Blocks, Plan, PlanError
from mdcs.plan.schedule import Folded, Numbers, Schedule, SizeTable, buffer_of, fold_bytes
from mdcs.profile.layout import cuts, owned_part
from mdcs.profile.link import Kind

Effects = tuple[tuple[str, int], ...]
"""(category, bytes) pairs: positive bytes are allocated, negative bytes are freed."""

Rows = tuple[Row, ...]


def _bytes(category: str, *of: str) -> cached_property[int]:
    """Return a property: the bytes of a category in these fields."""
    return cached_property(
        lambda self: sum(r.bytes for field in of for r in getattr(self, field) if r.category == category)
    )


def _pairs(category: str, of: str, freed: Moment | None = None) -> cached_property[tuple[tuple[int, int], ...]]:
    """Return a property: (unit, bytes) of a category in a field, of the rows that are freed at this moment if given."""
    return cached_property(
        lambda self: tuple(
            (r.unit, r.bytes) for r in getattr(self, of)
            if r.category == category and (freed is None or (r.freed and r.freed.moment == freed))
        )
    )  # fmt: skip


@dataclass(frozen=True)
class MessageBytes:
    """Bytes that one message allocates and frees; the numbers are those of :class:`~mdcs.plan.schedule.Folded`.

    - ``own``: buffers that it allocates and frees. ``kept``: that it allocates, and a slot or later message frees.
    - ``ended``: buffers of slots and earlier messages that it frees.
    """

    own: Rows
    kept: Rows
    ended: Rows
    held: int
    freed: int
    transient: int

    @cached_property
    def effects(self) -> tuple[Effects, Effects, Effects]:
        """Return its effects at its start, when it has landed (its update begins), and when its update is done."""
        changes: dict[str, list[tuple[str, int]]] = {moment: [] for moment in ("start", "landed", "update", "done")}
        for row in (*self.own, *self.kept):
            assert row.allocated is not None
            changes[row.allocated.moment].append((row.category, row.bytes))
        for row in (*self.own, *self.ended):
            assert row.freed is not None
            changes[row.freed.moment].append((row.category, -row.bytes))
        # Staging and reduced gradients are freed before the update: its scratch takes their place.
        return tuple(changes["start"]), tuple(changes["landed"] + changes["update"]), tuple(changes["done"])

    @cached_property
    def freed_by_update(self) -> int:
        """Bytes that were held before its update and are free after it."""
        return -sum([size for _, size in self.effects[-1]]) - bytes_between(self.own, "update", "done")

    @cached_property
    def own_bytes(self) -> int:
        """The most bytes of its own buffers. Gradients that it frees make no room for them."""
        own = OwnBytes.of(self.own)
        return own.until_updated + max(own.until_landed, own.updating)

    # Buffers that the runtime makes: bytes, or (unit, bytes) pairs.
    full = _pairs("full_parameters", "kept")  # of the units that it is the first to gather
    staging = _bytes("staging", "own")
    shards = _bytes("gradient_shards", "own", "kept")  # that it makes
    shards_held = _bytes("gradient_shards", "kept")  # that stay until the barrier
    shards_freed = _bytes("gradient_shards", "own", "ended")  # after its update; with a barrier of all reductions
    scratch = _bytes("update_scratch", "own")
    gradients_after_link = _pairs("gradients", "ended", freed="landed")  # freed when a reduce-scatter ends
    gradients_after_update = _pairs("gradients", "ended", freed="done")  # freed after the update (all-reduce)


@dataclass(frozen=True)
class SlotBytes:
    """Bytes that one slot allocates and frees; the numbers are those of :class:`mdcs.profile.schema.Slot`.

    - ``begun``: buffers allocated when the slot begins. ``ended``: buffers freed when it ends.
    - ``at_begin``, ``at_end``: the effects of these two events. ``allocated``, ``freed``: their bytes.
    """

    begun: Rows
    ended: Rows
    live: int
    peak: int

    allocated = cached_property[int](lambda self: sum(row.bytes for row in self.begun))
    freed = cached_property[int](lambda self: sum(row.bytes for row in self.ended))
    at_begin = cached_property[Effects](lambda self: tuple((row.category, row.bytes) for row in self.begun))
    at_end = cached_property[Effects](lambda self: tuple((row.category, -row.bytes) for row in self.ended))

    # Buffers that the runtime makes: (unit, bytes) pairs.
    gradients = _pairs("gradients", "begun")
    released = _pairs("full_parameters", "ended")


# Cached, because the plans that a planner compares share most of their messages.
_message_bytes = lru_cache(maxsize=1 << 14)(MessageBytes)


@lru_cache(maxsize=256)
def _slots(period: Period, strategies: tuple[Strategy, ...]) -> list[SlotBytes]:
    """Return the bytes of each slot. They depend only on the strategies."""
    begun: dict[int, list[Row]] = {}
    ended: dict[int, list[Row]] = {}
    for u, strategy in enumerate(strategies):
        for row in unit_rows(period, u, strategy):
            for event, by_slot in ((row.allocated, begun), (row.freed, ended)):
                if event is not None and isinstance(event.of, int):
                    by_slot.setdefault(event.of % period.length, []).append(row)
    slots = [period.profile.slots[s.place] for s in period.slots]
    return [SlotBytes(tuple(begun.get(q, ())), tuple(ended.get(q, ())), s.live, s.peak) for q, s in enumerate(slots)]


@lru_cache(maxsize=1 << 13)
def _unit_bytes(
    period: Period, u: int, strategy: Strategy, blocks: tuple[int, ...], rank: int | None
) -> tuple[dict[str, int], dict[tuple[int, int], int], dict[int, int]]:
    """Return ``at_rest`` and ``scratch`` of one unit, and rank -> bytes of state beyond those of all ranks."""
    profile, unit, layout = period.profile, period.profile.units[u], period.profile.layouts[u]
    parts, resting = strategy.parts(profile), at_rest(unit_rows(period, u, strategy))
    if not unit.trainable:
        return resting, {}, {}
    # A copy of the gradient in the optimizer's precision.
    copies = layout.updated_width if layout.updated_width != layout.grad_width else 0
    if layout.is_whole:
        most = max(p.scratch for p in layout.whole) + layout.elements // parts * copies
        return resting, {(u, 0): most}, {}
    opt, found = profile.optimizers[unit.optimizer], cuts(layout.ends(unit.segments), blocks, parts)
    resting["optimizer"] += (len(blocks) + found.everywhere) * opt.state_fixed
    more = Counter[int]()
    for part, count in found.on_rank:
        more.update(dict.fromkeys(range(part, profile.world, parts), count * opt.state_fixed))
    scratch = {}
    for b, largest in enumerate(found.largest):
        if rank is not None:
            own = owned_part(sum(blocks[:b]), blocks[b], parts, rank)
            largest = max(n for _, n, _ in layout.pieces(unit.segments, own))
        scratch[u, b] = opt.scratch(largest, layout.updated_width) + blocks[b] // parts * copies
    return resting, scratch, more


class AssignmentBytes:
    """Bytes that depend only on strategies and blocks (elements), not on the order of messages.

    - ``at_rest``: bytes by category between steps. ``slots``: bytes of each slot.
    - ``scratch``: temporary bytes of the update of each (unit, block).

    Segment boundaries cut the shards of ranks differently, which changes state and scratch. The result is that of
    ``rank``; None (for planning): the most that any rank needs.
    """

    def __init__(
        self, period: Period, strategies: tuple[Strategy, ...], blocks: Blocks, rank: int | None = None
    ) -> None:
        self.at_rest = {"parameters": 0, "optimizer": 0}
        self.scratch: dict[tuple[int, int], int] = {}
        more = Counter[int]()  # rank -> bytes
        for u, strategy in enumerate(strategies):
            resting, scratch, own = _unit_bytes(period, u, strategy, blocks[u], rank)
            for category, size in resting.items():
                self.at_rest[category] = self.at_rest.get(category, 0) + size
            self.scratch.update(scratch)
            more.update(own)
        self.at_rest["optimizer"] += max(more.values(), default=0) if rank is None else more[rank]
        self.rest_bytes = sum(self.at_rest.values())
        self.slots = _slots(period, strategies)


class Ledger(AssignmentBytes):
    """Bytes of all slots and messages of a plan, and its bytes at rest by category.

    - ``folded``: the bytes of messages in wire order. ``payloads``: bytes of their blocks.
    - ``buffer_bytes``: by buffer (:func:`mdcs.plan.schedule.buffer_of`).
    """

    def __init__(self, plan: Plan, rank: int | None = None) -> None:
        super().__init__(plan.period, plan.strategies, plan.blocks, rank)
        self.plan, n = plan, len(plan.messages)
        self.payloads = [plan.payload(m) for m in plan.messages]
        scratch = [0 if m.kind.is_gather else max([self.scratch[part] for part in m.parts]) for m in plan.messages]
        own = self._own(scratch)
        columns = {name: [getattr(each, name) for each in own] for name in OwnBytes._fields[1:]}
        self.buffer_bytes, gradients = sizes_of_units(plan.period, plan.strategies)
        sizes = SizeTable(**columns, buffer_bytes=self.buffer_bytes, gradient_bytes=gradients)
        self.folded = Folded([0] * n, [0] * n, [0] * n)
        fold_bytes(plan.table, sizes, range(n), plan.schedule, self.folded)

    def _own(self, scratch: list[int]) -> list[OwnBytes]:
        return [
            own_bytes(self.plan.period, m.kind, payload, len(m.parts), size)
            for m, payload, size in zip(self.plan.messages, self.payloads, scratch, strict=True)
        ]

    @cached_property
    def messages(self) -> list[MessageBytes]:
        """The bytes of each message, with its buffers."""
        plan, s = self.plan, self.plan.schedule
        begun: dict[int, list[Row]] = {}
        ended: dict[int, list[Row]] = {}
        for u, strategy in enumerate(plan.strategies):
            for row in unit_rows(plan.period, u, strategy):
                if row.allocated is not None and isinstance(row.allocated.of, Op):
                    begun.setdefault(s.opened_by[buffer_of(plan.period, row.allocated.of)], []).append(row)
                if row.freed is not None and isinstance(row.freed.of, Op):
                    closed_by = s.closed_by[u]
                    by = closed_by if row.freed.moment == "landed" else s.updated_by[closed_by]
                    ended.setdefault(by, []).append(row)
        scratch = [0] * len(plan.messages)  # updates run one after another
        for m, update in zip(plan.messages, s.updated_by, strict=True):
            if update >= 0:
                scratch[update] = max(scratch[update], *(self.scratch[part] for part in m.parts))
        own = [each.rows for each in self._own(scratch)]
        for i, update in enumerate(s.updated_by):
            if update not in (-1, i):  # its shards stay until a later message's update
                stay = [row for row in own[i] if row.freed is not None and row.freed.moment == "done"]
                begun.setdefault(i, []).extend(stay)
                ended.setdefault(update, []).extend(stay)
                own[i] = tuple([row for row in own[i] if row not in stay])
        rows = [(rows, tuple(begun.get(i, ())), tuple(ended.get(i, ()))) for i, rows in enumerate(own)]
        return [_message_bytes(*each, *sizes) for each, *sizes in zip(rows, *self.folded, strict=True)]


class OwnBytes(NamedTuple):
    """The buffers of a message, and their bytes as in :class:`~mdcs.plan.schedule.SizeTable`."""

    rows: Rows
    until_landed: int
    until_updated: int
    updating: int

    @classmethod
    def of(cls, rows: Rows) -> OwnBytes:
        """Return the bytes of these rows."""
        moments: tuple[tuple[Moment, Moment], ...] = ("start", "landed"), ("start", "done"), ("update", "done")
        return cls(rows, *(bytes_between(rows, *each) for each in moments))


@lru_cache(maxsize=1 << 14)  # the plans that a planner compares share most of their messages
def own_bytes(period: Period, kind: Kind, payload: int, parts: int, scratch: int) -> OwnBytes:
    """Return the buffers of a message (:func:`mdcs.plan.lifetimes.message_rows`)."""
    return OwnBytes.of(message_rows(period.profile, kind, payload, parts, scratch))


@lru_cache(maxsize=256)
def sizes_of_units(period: Period, strategies: tuple[Strategy, ...]) -> tuple[list[int], list[int]]:
    """Return the bytes of the buffers that units are gathered into, and of their gradients, for a SizeTable."""
    buffers, gradients = [0] * (2 * len(strategies) * period.micro_steps), [0] * len(strategies)
    for u, strategy in enumerate(strategies):
        for row in unit_rows(period, u, strategy):
            if row.allocated is not None and isinstance(row.allocated.of, Op):
                buffers[buffer_of(period, row.allocated.of)] += row.bytes
            if row.freed is not None and isinstance(row.freed.of, Op):
                gradients[u] += row.bytes
    return buffers, gradients


def worst_case_bytes_by_slot(plan: Plan, ledger: Ledger | None = None) -> list[int]:
    """Return the bytes needed at each slot: the larger of prologue and steady period, with all earlier messages done.
    Compute can always wait for messages that are issued. So admission cannot deadlock if these bytes fit.
    """
    ledger = ledger or Ledger(plan)
    slots, length = ledger.slots, plan.period.length
    arrival, running = [0] * length, [0] * length
    fill_demands(
        plan.period.turn, ledger.rest_bytes, [s.live for s in slots], [s.peak for s in slots],
        [s.allocated for s in slots], [s.freed for s in slots], plan.schedule, ledger.folded, arrival, running,
    )  # fmt: skip
    return list(map(max, arrival, running))


def fill_demands(
    turn: int, rest: int, live: Numbers, peak: Numbers, allocated: Numbers, released: Numbers, s: Schedule,
    sizes: Folded, arrival: Numbers, running: Numbers,
) -> None:  # fmt: skip
    """Fill the bytes that each slot needs when compute arrives, while it waits for messages, and while it is running. A
    loop over numbers, which :mod:`mdcs.simulator.simulate` compiles for searches.

    - ``turn``: first forward slot, where the prologue starts. ``rest``: bytes at rest.
    - by slot: ``live``, ``peak``, ``allocated``, ``released``, as in :class:`SlotBytes`.
    """
    length, now = len(arrival), rest
    for q in range(length):
        arrival[q] = running[q] = 0
    for period in range(3):  # prologue, first and steady period
        for q in range(turn if period == 0 else 0, length):
            most = 0
            for i in range(0 if q == 0 or (period == 0 and q == turn) else s.issued[q - 1], s.issued[q]):
                if period > 0 or s.in_prologue[i]:
                    most = max(most, now + sizes.held[i] + sizes.transient[i] + live[q])
                    now += sizes.held[i] - sizes.freed[i]
            now += allocated[q]
            if period != 1:
                arrival[q], running[q] = max(arrival[q], most), max(running[q], now + peak[q])
            now -= released[q]


def min_feasible_budget(plan: Plan) -> int:
    """Return the smallest budget (bytes, reserve included) under which the plan runs with any timing."""
    return max(worst_case_bytes_by_slot(plan)) + plan.reserve


def check(plan: Plan) -> None:
    """Raise PlanError, naming the cycle, if admission under the plan's budget could deadlock."""
    allowed = plan.admissible
    if allowed is None:
        return
    for q, need in enumerate(worst_case_bytes_by_slot(plan)):
        if need > allowed:
            blocking = [
                f"{m.kind} of {', '.join(plan.profile.units[u].name for u, _ in m.parts)}"
                for m, needed_by in zip(plan.messages, plan.schedule.needed_by, strict=True)
                if m.slot <= q < needed_by
            ]
            raise PlanError(
                f"cycle: slot {q} ({plan.period.name(q)}) needs {need + plan.reserve} of "
                f"{allowed + plan.reserve} bytes, and what holds them is freed only after it"
                + (f" (gathered ahead: {'; '.join(blocking[:4])})" if blocking else "")
            )
