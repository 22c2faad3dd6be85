"""The table of lifetimes: each buffer of a plan, its bytes, and the events that allocate and free it.

This module is the only place that says when bytes come and go. Everything else folds the table: the bytes of a message
or slot (:mod:`mdcs.plan.ledger`), the worst case by slot (:mod:`mdcs.plan.admission`), the replayed memory, admission,
candidates of the search, rows of the integer programs, the ranking of the greedy planner. A new kind of buffer is one
more :class:`Row` in :func:`unit_rows` or :func:`message_rows`. Sizes by strategy are in docs/glossary.md.

Events are symbolic, so rows depend on a unit and its strategy, or on one message, but not on the order of messages. An
operation may be sent in several messages: the first allocates a buffer, the last frees it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple

from mdcs.plan.period import Op, Period
from mdcs.plan.strategy import Strategy
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
"""Begin and end of a slot. Start of a message, end of its collective, begin and end of its update.

In barrier mode the last reduction of the period makes the updates of all reductions.
"""

THIS: Literal["this"] = "this"
"""The message that the row belongs to."""


class Event(NamedTuple):
    """A moment of a slot (an index, unrolled), or of a message (an operation, or ``THIS``)."""

    moment: Moment
    of: int | Op | Literal["this"]


class Row(NamedTuple):
    """One buffer.

    - ``allocated``, ``freed``: the events. None for bytes at rest, which are always held.
    - ``unit``: the unit that the buffer belongs to. -1: the buffer belongs to a message.
    """

    category: str
    bytes: int
    allocated: Event | None
    freed: Event | None
    unit: int = -1


def state_bytes(profile: Profile, unit: int, parts: int) -> int:
    """Return the optimizer state of a trainable unit, on the rank of ``parts`` that has the most."""
    layout = profile.layouts[unit]
    if layout.is_whole:
        return max(sum([p.state for p in own]) for own in layout.owned(parts))
    tensors = profile.optimizers[profile.units[unit].optimizer].state_tensors
    return int(layout.elements // parts * (layout.updated_width * tensors))


@lru_cache(maxsize=1 << 14)
def unit_rows(period: Period, unit: int, strategy: Strategy) -> tuple[Row, ...]:
    """Return the buffers of one unit, without those of its messages.

    The fixed bytes of optimizer state per run (:attr:`~mdcs.profile.schema.Optimizer.state_fixed`) are left out:
    blocks decide how many runs there are.
    """
    profile = period.profile
    of, layout, parts = profile.units[unit], profile.layouts[unit], strategy.parts(profile)
    size = layout.elements // (parts if strategy.sharded else 1)
    # 0: the master shard is all
    parameters = 0 if strategy.sharded and layout.master_width else size * layout.param_width
    optimizer = layout.elements // parts * layout.master_width + (
        state_bytes(profile, unit, parts) if of.trainable else 0
    )
    rows = [Row("parameters", parameters, None, None, unit), Row("optimizer", optimizer, None, None, unit)]
    for kind in strategy.kinds(of.trainable, of.backward is not None):
        for op in [Op(kind, unit, m) for m in range(period.micro_steps)] if kind.is_gather and strategy.sharded else ():
            freed = Event("end", period.release(op, strategy))
            rows.append(Row("full_parameters", layout.param_bytes, Event("start", op), freed, unit))
        if not kind.is_gather and (span := period.backward(unit, 0)):
            # A reduce-scatter frees the gradient once it is summed. An all-reduced gradient stays for the update.
            freed = Event("landed" if kind.plain is Kind.RS else "done", Op(kind, unit, 0))
            rows.append(Row("gradients", layout.grad_bytes, Event("begin", span[0] % period.length), freed, unit))
    return tuple(rows)


def message_rows(profile: Profile, kind: Kind, payload: int, parts: int, scratch: int) -> tuple[Row, ...]:
    """Return the buffers of one message.

    - ``payload``: bytes of its blocks. ``parts``: their number.
    - ``scratch``: temporary bytes of its update. Updates run one after another, so in barrier mode the largest scratch
      of all reductions counts.
    """
    shard = payload // profile.group(kind) if kind.plain is Kind.RS else 0
    return _message_rows(kind, staging_bytes(profile, kind, payload, parts), shard, scratch)


@lru_cache(maxsize=1 << 14)
def _message_rows(kind: Kind, staging: int, shard: int, scratch: int) -> tuple[Row, ...]:
    rows = [Row("staging", staging, Event("start", THIS), Event("landed", THIS))]
    if kind.plain is Kind.RS:
        rows.append(Row("gradient_shards", shard, Event("start", THIS), Event("done", THIS)))
    if not kind.is_gather:
        rows.append(Row("update_scratch", scratch, Event("update", THIS), Event("done", THIS)))
    return tuple([row for row in rows if row.bytes])


def staging_bytes(profile: Profile, kind: Kind, payload: int, parts: int) -> int:
    """Return the bytes of the buffers of a message whose collective is not zero-copy.

    A fused message is packed into one buffer. The algorithm may need a further buffer (:mod:`mdcs.profile.link`).
    """
    packed = payload if profile.world > 1 and parts > 1 else 0
    return packed + profile.buffer(kind, payload)


def bytes_between(rows: Iterable[Row], allocated: Moment, freed: Moment) -> int:
    """Return the bytes of the rows with these moments."""
    return sum(
        [
            r.bytes
            for r in rows
            if r.allocated and r.allocated.moment == allocated and r.freed and r.freed.moment == freed
        ]
    )


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

    def gathered(of: Event) -> bool:
        return isinstance(of.of, Op) and of.of.kind.plain is Kind.AG_F and of.of.micro == last

    def held(strategy: Strategy) -> int:
        """Bytes at rest, and gathered for the last forward pass and still there when it ends."""
        rows = unit_rows(period, unit, strategy)
        moving = [(row.allocated, row.freed, row.bytes) for row in rows if row.allocated and row.freed]
        kept = [size for a, f, size in moving if gathered(a) and isinstance(f.of, int) and f.of > used]
        return sum(at_rest(rows).values()) + sum(kept)

    return held(strategy) - held(Strategy.fsdp)
