"""The table of lifetimes: each buffer of a plan, its bytes, and the events that allocate and free it.

This is the only place that says when bytes come and go; everything else folds the table: the ledger, the worst case by
slot, the replayed memory, admission, candidates of the search, rows of the integer programs, the ranking of the greedy
planner. A new kind of buffer is one more :class:`Row`. Sizes by strategy are in docs/concepts.md.

Events are symbolic: rows depend on a unit and its strategy, or on one message, but not on the order of messages. An
operation may be sent in several messages: the first allocates a buffer, the last frees it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple

from mdcs.plan.period import Op, Period, Strategy
from mdcs.profile.link import Kind
from mdcs.profile.schema import Profile

CATEGORIES = (
    "parameters",  # at rest: whole (dp, zero2) or a shard (sdp, fsdp)
    "full_parameters",  # gathered for use (sdp, fsdp)
    "optimizer",
    "gradients",  # full
    "gradient_shards",
    "staging",  # buffers of messages in flight whose collective is not zero-copy
    "update_scratch",
    "activations",  # and workspace, batch, module buffers: everything that is not a registered buffer
)
"""Categories of bytes in every measurement and prediction."""

Moment = Literal["begin", "end", "start", "landed", "update", "done"]
"""Begin and end of a slot. Start of a message, end of its collective, begin and end of its update (with a barrier the
last reduction of the period makes the updates of all).
"""


class Event(NamedTuple):
    """A moment of a slot (an index, unrolled), or of a message: an operation's, or the one that the row belongs to."""

    moment: Moment
    of: int | Op | Literal["this"]


class Row(NamedTuple):
    """One buffer, of a unit, or of a message (-1). Bytes at rest have no events: they are always held."""

    category: str
    bytes: int
    allocated: Event | None
    freed: Event | None
    unit: int = -1


@lru_cache(maxsize=1 << 14)
def unit_rows(period: Period, unit: int, strategy: Strategy) -> tuple[Row, ...]:
    """Return the buffers of one unit, without those of its messages, and without the fixed bytes of optimizer state per
    run (:attr:`~mdcs.profile.schema.Optimizer.state_fixed`): blocks decide how many runs there are.
    """
    profile = period.profile
    of, layout, parts = profile.units[unit], profile.layouts[unit], strategy.parts(profile)
    size = layout.elements // (parts if strategy.sharded else 1)
    # 0: the master shard is all
    parameters = 0 if strategy.sharded and layout.master_width else size * layout.param_width
    optimizer = layout.elements // parts * layout.master_width
    if of.trainable and layout.is_whole:  # state of the rank that has the most
        optimizer += max(sum([p.state for p in own]) for own in layout.owned(parts))
    elif of.trainable:
        tensors = profile.optimizers[of.optimizer].state_tensors
        optimizer += int(layout.elements // parts * (layout.updated_width * tensors))
    rows = [Row("parameters", parameters, None, None, unit), Row("optimizer", optimizer, None, None, unit)]
    for op in period.ops(unit, strategy):
        if op.kind.is_gather and strategy.sharded:
            freed = Event("end", period.release(op, strategy))
            rows.append(Row("full_parameters", layout.param_bytes, Event("start", op), freed, unit))
        if not op.kind.is_gather and (span := period.backward(unit, 0)):
            # A reduce-scatter frees the gradient once it is summed. An all-reduced gradient stays for the update.
            freed = Event("landed" if op.kind.plain is Kind.RS else "done", op)
            rows.append(Row("gradients", layout.grad_bytes, Event("begin", span[0] % period.length), freed, unit))
    return tuple(rows)


def message_rows(profile: Profile, kind: Kind, payload: int, parts: int, scratch: int) -> tuple[Row, ...]:
    """Return the buffers of one message of ``payload`` bytes in so many ``parts``. ``scratch``: temporary bytes of its
    updates, the largest of all: updates run one after another.
    """
    staging = staging_bytes(profile, kind, payload, parts)
    rows = [Row("staging", staging, Event("start", "this"), Event("landed", "this"))]
    if kind.plain is Kind.RS:
        shard = payload // profile.group(kind)
        rows.append(Row("gradient_shards", shard, Event("start", "this"), Event("done", "this")))
    if not kind.is_gather:
        rows.append(Row("update_scratch", scratch, Event("update", "this"), Event("done", "this")))
    return tuple([row for row in rows if row.bytes])


def staging_bytes(profile: Profile, kind: Kind, payload: int, parts: int) -> int:
    """Return the bytes that a message is packed into, and those of the algorithm (:mod:`mdcs.profile.link`)."""
    packed = payload if profile.world > 1 and parts > 1 else 0
    return packed + profile.buffer(kind, payload)


def bytes_between(rows: Iterable[Row], allocated: Moment, freed: Moment) -> int:
    """Return the bytes of the rows with these moments."""
    moments = [(r.allocated.moment, r.freed.moment, r.bytes) for r in rows if r.allocated and r.freed]
    return sum([size for begin, end, size in moments if (begin, end) == (allocated, freed)])


def at_rest(rows: tuple[Row, ...]) -> dict[str, int]:
    """Return the bytes that are always held, by category."""
    out: dict[str, int] = {}
    for row in rows:
        if row.allocated is None:
            out[row.category] = out.get(row.category, 0) + row.bytes
    return out


def extra_bytes_vs_fsdp(period: Period, unit: int, strategy: Strategy) -> int:
    """Return the bytes that a unit holds at the end of forward in excess of fsdp. The peak is usually there."""
    last = period.micro_steps - 1
    used = period.forward(unit, last)[1]

    def is_held(row: Row) -> bool:
        """Return whether it is at rest, or gathered for the last forward pass and still there when that ends."""
        if row.allocated is None or row.freed is None:
            return row.allocated is None
        op, end = row.allocated.of, row.freed.of
        is_gathered = isinstance(op, Op) and op.kind.plain is Kind.AG_F and op.micro == last
        return is_gathered and isinstance(end, int) and end > used

    held, of_fsdp = (
        sum([row.bytes for row in unit_rows(period, unit, k) if is_held(row)]) for k in (strategy, Strategy.fsdp)
    )
    return held - of_fsdp


# ---- admission: which bytes may be taken now, beside all that is promised and in flight. Pure numbers, without threads


class Admission:
    """Bytes promised to messages and slots, under a limit. Not thread-safe.

    The runtime's queue asks it; the replay's loops ask the same questions of arrays (:mod:`mdcs.simulator.kernel`). A
    message that is issued reserves what stays after it, and may need bytes of its own while it is in flight; when it is
    done, it frees buffers of slots and earlier messages (:class:`mdcs.plan.schedule.Folded`). Only ``depth`` messages
    need their own bytes at a time. Waiting for messages makes room in the end, as the worst case by slot says.

    - ``cap``: bytes that may be reserved; None: no limit. ``soft_cap``: above it messages are waited for nevertheless.
    - ``at_rest``: bytes held between iterations. ``depth``: messages in flight.
    - ``reserved``: bytes promised, to messages and to slots. ``excess``: activation bytes beyond the profiled ones.
    """

    def __init__(self, cap: int | None, at_rest: int, depth: int, soft_cap: int | None = None) -> None:
        self.depth, self.at_rest, self.cap, self.excess = depth, at_rest, cap, 0
        self._limit = soft_cap if cap is None else cap
        self.restart()

    def restart(self) -> None:
        """Begin with nothing in flight."""
        self.reserved = self.at_rest
        self._freeing = 0  # bytes that the messages in flight free when they are done
        self._in_flight = InFlightBytes(self.depth)

    def fits(self, size: int) -> bool:
        """Return whether ``size`` bytes fit under the cap beside what is reserved, not counting messages in flight."""
        return self.cap is None or self.reserved + size <= self.cap

    def admits(self, size: int, transient: int = 0) -> bool:
        """Return whether ``size`` bytes, and ``transient`` bytes of a message, fit beside all that is reserved and in
        flight. The excess is counted as far as waiting can make room for it: if the bytes would not fit beside it with
        nothing in flight, waiting is in vain.
        """
        if self._limit is None:
            return True
        room = self._limit - self.reserved - size - self._in_flight.most(transient)
        if room < 0 or not self.excess or room >= self.excess:
            return room >= 0
        return self.reserved + size + transient - self._freeing + self.excess > self._limit

    def has_room(self, size: int, transient: int) -> bool:
        """Return whether a message fits as in :meth:`admits`, beside all of the excess."""
        needed = self.reserved + size + self.excess
        return self._limit is None or needed + self._in_flight.most(transient) <= self._limit

    def reserve(self, size: int) -> None:
        """Promise bytes to compute; a negative size takes a promise back."""
        self.reserved += size

    def issue(self, held: int, transient: int, freed: int) -> None:
        """Promise the bytes of the next message."""
        self.reserved += held
        self._freeing += freed
        self._in_flight.add(transient)

    def update(self) -> None:
        """Take back what the oldest message needed for itself."""
        self._in_flight.remove()

    def finish(self, freed: int) -> None:
        """Take back what a message has freed of other buffers."""
        self.reserved -= freed
        self._freeing -= freed


class InFlightBytes:
    """The most bytes that ``depth`` consecutive messages among those in flight can hold, kept message by message."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._waiting: deque[int] = deque()
        self._done = 0  # messages done since the start
        self._sums: deque[tuple[int, int]] = deque()  # windows of depth messages, bytes falling: (last message, bytes)

    def add(self, size: int) -> None:
        """Append a message that takes ``size`` bytes while in flight."""
        total = self._with_last(size)
        self._waiting.append(size)
        if len(self._waiting) >= self._depth:
            while self._sums and self._sums[-1][1] <= total:
                self._sums.pop()
            self._sums.append((self._done + len(self._waiting), total))

    def remove(self) -> None:
        """Remove the oldest message: it is done."""
        self._waiting.popleft()
        self._done += 1
        while self._sums and self._sums[0][0] < self._done + self._depth:
            self._sums.popleft()

    def most(self, upcoming: int = 0) -> int:
        """Return the most bytes, counting one more message of ``upcoming`` bytes at the end."""
        most = self._sums[0][1] if self._sums else sum(self._waiting)
        return max(most, self._with_last(upcoming))

    def _with_last(self, size: int) -> int:
        """Return ``size`` plus the bytes of the messages that can be in flight ahead of it."""
        ahead = min(len(self._waiting), self._depth - 1)
        return size + sum([self._waiting[-k] for k in range(1, ahead + 1)])


def max_in_flight_bytes(transient: Iterable[int], depth: int) -> int:
    """Return the most bytes that ``depth`` consecutive messages can hold in flight."""
    messages = InFlightBytes(depth)
    for size in transient:
        messages.add(size)
    return messages.most()
