"""The plan: a strategy per unit and the ordered messages of one period. Immutable, JSON, hashed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import weakref
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from mdcs.plan.times import Prediction
from mdcs.profile.contents import Profile
from mdcs.profile.link import Kind

SCHEMA = 1

CATEGORIES = (
    "parameters",  # at rest: whole (dp, zero1) or a shard (sdp, fsdp)
    "full_parameters",  # gathered for use (sdp, fsdp)
    "optimizer",
    "gradients",  # full
    "gradient_shards",
    "staging",  # buffers of messages in flight whose collective is not zero-copy
    "update_scratch",
    "activations",  # and workspace, batch, buffers: all that is no registered buffer
)


class PlanError(ValueError):
    """A plan that cannot be run: the message names the unit, the message or the slot."""


class Strategy(str, Enum):
    """How one unit is sharded (see README for what each costs)."""

    dp = "dp"  # replicated, all-reduce, full update
    zero1 = "zero1"  # parameters resident, reduce-scatter, shard update, all-gather
    sdp = "sdp"  # sharded at rest, gathered before forward, kept until its backward ends
    fsdp = "fsdp"  # gathered before forward, freed, gathered again before backward

    __hash__ = str.__hash__

    def __init__(self, value: str) -> None:
        self.sharded = value in ("sdp", "fsdp")  # whether the parameters at rest are a shard
        self._updating = {"dp": (Kind.AR,), "zero1": (Kind.RS, Kind.AG_F)}.get(value, (Kind.RS,))

    def __str__(self) -> str:
        return self.value

    def kinds(self, trainable: bool, has_backward: bool) -> tuple[Kind, ...]:
        """The collectives that a unit of this strategy needs in one period."""
        update = self._updating if trainable else ()
        if not self.sharded:
            return update
        again = (Kind.AG_B,) if self is Strategy.fsdp and has_backward else ()
        return (*update, Kind.AG_F, *again)


class Op(NamedTuple):
    """One kind of communication of one unit, in one micro-step of a period."""

    kind: Kind
    unit: int
    micro: int


class PeriodSlot(NamedTuple):
    unit: int
    phase: str
    micro: int
    place: int  # its index in Profile.slots


@dataclass(frozen=True)
class Message:
    """One collective on the wire: ``kind`` and its ``parts`` as (unit, block) pairs.

    Several units make a fused message, a block of a unit a partitioned one. It may start once compute has
    arrived at ``slot`` (an index into the period); with ``blocking`` compute waits there until it is done,
    before anything else is issued.
    ``micro`` is the micro-step whose slots the message serves.
    """

    kind: Kind
    parts: tuple[tuple[int, int], ...]
    slot: int
    blocking: bool = False
    micro: int = 0


class _Windows(dict[tuple[Kind, int, int], tuple[int, int]]):
    """The window of every operation that was asked for (a plain tuple is found like the :class:`Op` it equals)."""

    def __init__(self, period: Period) -> None:
        self._period = weakref.proxy(period)

    def __missing__(self, op: tuple[Kind, int, int]) -> tuple[int, int]:
        found = self[op] = self._period.find_window(Op(*op))
        return found


class Period:
    """The circle of slots of one iteration in steady state.

    It starts at the first backward slot of the last micro-step; ``turn`` is the index of the first forward
    slot. Indices of windows and releases are *unrolled*: they may pass ``length``, into the next period.
    """

    def __init__(self, profile: Profile, micro_steps: int) -> None:
        nf, nb = profile.forward_slots, profile.backward_slots
        self.profile, self.micro_steps = profile, micro_steps
        self.turn, self.length = nb, micro_steps * (nf + nb)

        def slot(index: int, micro: int) -> PeriodSlot:
            s = profile.slots[index]
            return PeriodSlot(s.unit, s.phase, micro, index)

        last = micro_steps - 1
        slots = [slot(nf + i, last) for i in range(nb)]
        for m in range(micro_steps):
            slots += [slot(i, m) for i in range(nf)]
            if m < last:
                slots += [slot(nf + i, m) for i in range(nb)]
        self.slots: tuple[PeriodSlot, ...] = tuple(slots)
        self.seconds = tuple(profile.slots[s.place].seconds for s in slots)
        self.windows = _Windows(self)

    @classmethod
    def of(cls, profile: Profile, micro_steps: int) -> Period:
        """The one period of all plans that are made of a profile."""
        # A period keeps its profile alive, so an id in this dictionary belongs to no other profile.
        key = id(profile), micro_steps
        period = _periods.get(key)
        if period is None:
            period = _periods[key] = cls(profile, micro_steps)
        return period

    def forward(self, unit: int, micro: int) -> tuple[int, int]:
        """First and last forward slot of the unit in a micro-step."""
        start = self.forward_start(micro)
        first, last = self.profile.units[unit].forward
        return start + first, start + last

    def backward(self, unit: int, micro: int) -> tuple[int, int] | None:
        """First and last backward slot; unrolled, so that it follows :meth:`forward` of the same micro-step."""
        span = self.profile.units[unit].backward
        if span is None:
            return None
        start = self.forward_start(micro) + self.profile.forward_slots
        return start + span[0], start + span[1]

    def forward_start(self, micro: int) -> int:
        return self.turn + micro * (self.profile.forward_slots + self.profile.backward_slots)

    def last_use(self, unit: int, micro: int) -> int:
        span = self.backward(unit, micro)
        return self.forward(unit, micro)[1] if span is None else span[1]

    def window(self, op: Op) -> tuple[int, int]:
        """First slot at which ``op`` can be issued and the slot that needs it (both unrolled)."""
        return self.windows[op]

    def find_window(self, op: Op) -> tuple[int, int]:
        kind, unit, micro = op
        if kind is Kind.AG_B:
            span = self.backward(unit, micro)
            assert span is not None, "a unit without backward has no AG_B"
            return self.forward(unit, micro)[1] + 1, span[0]
        before = self.last_use(unit, micro - 1 if micro else self.micro_steps - 1) + 1
        if micro == 0:  # the previous use was in the previous period
            before = max(before - self.length, 0)
        return before, self.forward(unit, micro)[0]

    def release(self, op: Op, strategy: Strategy) -> int:
        """The slot (unrolled) after which the buffer that a gather filled is freed."""
        freed_after_forward = strategy is Strategy.fsdp and op.kind is Kind.AG_F
        return self.forward(op.unit, op.micro)[1] if freed_after_forward else self.last_use(op.unit, op.micro)

    def name(self, slot: int) -> str:
        s = self.slots[slot % self.length]
        micro = f"/{s.micro}" if self.micro_steps > 1 else ""
        return f"{s.phase}{micro}:{self.profile.units[s.unit].name}"


_periods: weakref.WeakValueDictionary[tuple[int, int], Period] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Plan:
    """Strategy per unit, blocks per unit (elements, each a multiple of ``world``), messages in wire order.

    ``budget`` (bytes, None for unlimited) is what admission enforces, ``reserve`` bytes of it kept free.
    Without ``cross_iteration`` (or with clipping) all updates wait for all reductions of the iteration.
    ``outcome`` is what became of a solver's work, if one was asked, and ``bound_s`` the step time below which it has
    proven that no plan within the budget is.
    Raises PlanError when the messages do not carry every block of every unit exactly once per kind, when an
    issue slot lies outside its window, or when the order lets a gather overtake the reduction it depends on.
    """

    profile: Profile
    strategies: tuple[Strategy, ...]
    blocks: tuple[tuple[int, ...], ...]
    messages: tuple[Message, ...]
    micro_steps: int = 1
    cross_iteration: bool = True
    budget: int | None = None
    reserve: int = 0
    strategy: str = "?"
    scheduler: str = "?"
    outcome: str = dataclasses.field(default="", hash=False, compare=False)
    bound_s: float | None = dataclasses.field(default=None, hash=False, compare=False)
    prediction: Prediction | None = dataclasses.field(default=None, hash=False, compare=False)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        _validate(self)

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # not what was worked out from it

    @property
    def world(self) -> int:
        return self.profile.world

    @cached_property
    def period(self) -> Period:
        return Period.of(self.profile, self.micro_steps)

    @cached_property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """Where each block begins in its unit's flat buffer, in elements."""
        return tuple(tuple(sum(sizes[:i]) for i in range(len(sizes))) for sizes in self.blocks)

    def padded(self, unit: int) -> int:
        return sum(self.blocks[unit])

    def elements(self, message: Message) -> int:
        return sum([self.blocks[u][b] for u, b in message.parts])

    def payload(self, message: Message) -> int:
        """Bytes of the full (unsharded) payload."""
        width = self.profile.param_bytes if message.kind.is_gather else self.profile.grad_bytes
        return self.elements(message) * width

    def wire(self, message: Message) -> int:
        """Bytes that one rank sends."""
        return self.profile.wire(message.kind, self.payload(message))

    @cached_property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """For each message the first slot at which it can be issued, and the slot that needs it (both unrolled)."""
        of, out = self.period.windows, []
        for m in self.messages:
            spans = [of[m.kind, u, m.micro] for u, _ in m.parts]
            out.append(spans[0] if len(spans) == 1 else (max(first for first, _ in spans), min(last for _, last in spans)))
        return tuple(out)

    def need(self, message: Message) -> int | None:
        """The slot (unrolled) that cannot start before the message is done; None if it is no gather."""
        if message.kind is Kind.RS:
            return None  # its AG_F follows it
        return min(self.period.window(Op(message.kind, u, message.micro))[1] for u, _ in message.parts)

    def unrolled(self, message: Message) -> int:
        """The issue slot on the scale of the message's window (AG_B issued at the head of the next period)."""
        kind, micro, window = message.kind, message.micro, self.period.window
        first = max([window(Op(kind, u, micro))[0] for u, _ in message.parts])
        return message.slot if message.slot >= first else message.slot + self.period.length

    @cached_property
    def waits_for(self) -> tuple[int, ...]:
        """For each message the one ahead of it in the same period that must be done first (its update too), or -1.

        A gather after the update waits for the reduction of its blocks; in barrier mode for the last of all.
        """
        reduced: dict[tuple[int, int], int] = {}
        for i, m in enumerate(self.messages):
            if not m.kind.is_gather:
                for part in m.parts:
                    reduced[part] = i
        last = max(reduced.values(), default=-1)
        out = []
        for m in self.messages:
            own = -1
            if m.kind is Kind.AG_F and m.micro == 0:
                own = max([reduced.get(part, -1) for part in m.parts])
            out.append(own if own < 0 or self.cross_iteration else last)
        return tuple(out)

    def in_prologue(self, message: Message) -> bool:
        """Whether the message is sent before the first iteration, which starts at the first forward slot.

        What a plan gathers for forward in backward slots is gathered then; nothing is reduced yet.
        """
        return message.kind is Kind.AG_F or (message.kind is Kind.AG_B and message.slot >= self.period.turn)

    @property
    def hash(self) -> str:
        """Identity of what is executed: predictions and names do not count."""
        data = dataclasses.asdict(self)
        for key in ("prediction", "strategy", "scheduler", "outcome", "bound_s"):
            del data[key]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self) | {"hash": self.hash})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Raises PlanError if the text is no plan of this schema, or what is executed was changed in it."""
        try:
            d: dict[str, Any] = json.loads(text)
            if d["schema"] != SCHEMA:
                raise PlanError(f"plan schema {d['schema']} is not the supported {SCHEMA}")
            plan = cls(
                profile=Profile.from_dict(d["profile"]),
                strategies=tuple(Strategy(s) for s in d["strategies"]),
                blocks=tuple(tuple(b) for b in d["blocks"]),
                messages=tuple(
                    Message(Kind(m["kind"]), tuple((u, b) for u, b in m["parts"]), m["slot"], m["blocking"], m["micro"])
                    for m in d["messages"]
                ),
                prediction=None if d["prediction"] is None else Prediction.from_dict(d["prediction"]),
                **{
                    k: d[k]
                    for k in (
                        "micro_steps", "cross_iteration", "budget", "reserve", "strategy", "scheduler", "outcome", "bound_s",
                    )
                },
            )
        except PlanError:
            raise
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise PlanError(f"not a plan: {e!r}") from e
        if d.get("hash") != plan.hash:
            raise PlanError(f"plan says hash {d.get('hash')} but its content has {plan.hash}")
        return plan


def pad(numel: int, world: int) -> int:
    return -(-numel // world) * world


def _validate(plan: Plan) -> None:
    units = plan.profile.units
    if plan.micro_steps < 1:
        raise PlanError(f"micro_steps must be >= 1, got {plan.micro_steps}")
    if plan.reserve < 0 or (plan.budget is not None and plan.budget <= plan.reserve):
        raise PlanError(f"budget {plan.budget} bytes leaves nothing beside the reserve of {plan.reserve}")
    if not len(plan.strategies) == len(plan.blocks) == len(units):
        raise PlanError(f"{len(units)} units but {len(plan.strategies)} strategies, {len(plan.blocks)} block lists")
    empty = next((i for i, m in enumerate(plan.messages) if not m.parts), None)
    if empty is not None:
        raise PlanError(f"message {empty} is empty")
    _check_contents(plan)
    _check_order(plan)
    if not plan.cross_iteration:
        _check_barrier(plan)


Block = tuple[Kind, int, int, int]
"""Kind, unit, micro-step and block of what is sent in one piece."""


@lru_cache(maxsize=256)  # a planner compares many plans of one mix
def _expected(period: Period, strategies: tuple[Strategy, ...], blocks: tuple[tuple[int, ...], ...]) -> set[Block]:
    """Every block that the strategies ask for. Raises PlanError for blocks that cannot be."""
    world = period.profile.world
    out: set[Block] = set()
    for u, (unit, strategy, sizes) in enumerate(zip(period.profile.units, strategies, blocks, strict=True)):
        total = pad(unit.numel, world)
        if sizes != (total,) and (sum(sizes) != total or any(b <= 0 or b % world for b in sizes)):
            raise PlanError(f"unit {unit.name}: blocks {sizes} must be multiples of the world, {world}, and sum to {total}")
        for kind in strategy.kinds(unit.trainable, unit.backward is not None):
            micros = period.micro_steps if kind.is_gather and strategy.sharded else 1
            out.update([(kind, u, micro, b) for micro in range(micros) for b in range(len(sizes))])
    return out


def _check_contents(plan: Plan) -> None:
    """What the messages carry is what the strategies ask for, once."""
    units = plan.profile.units
    expected = _expected(plan.period, plan.strategies, plan.blocks)
    carried = [(m.kind, u, m.micro, b) for m in plan.messages for u, b in m.parts]
    if len(carried) == len(expected) and set(carried) == expected:
        return
    for i, m in enumerate(plan.messages):
        for u, b in m.parts:
            if (m.kind, u, m.micro, b) not in expected:
                raise PlanError(f"{_where(plan, i)}: the strategies have no block {b} of unit {u} to send")
    for (kind, u, _, b), times in Counter(carried).items():
        if times != 1:
            raise PlanError(f"block {b} of {units[u].name} is sent {times} times as {kind}")
    kind, u, micro, b = min(expected.difference(carried))
    raise PlanError(f"block {b} of {units[u].name} is never sent as {kind} (micro-step {micro})")


def _check_order(plan: Plan) -> None:
    """Messages are in the order of their issue slots, in their windows, and gather nothing before its reduction."""
    units, length = plan.profile.units, plan.period.length
    reduced: set[tuple[int, int]] = set()
    previous = 0
    for i, (message, (first, last)) in enumerate(zip(plan.messages, plan.windows, strict=True)):
        slot = message.slot
        if not previous <= slot < length:
            if not 0 <= slot < length:
                raise PlanError(f"{_where(plan, i)}: no slot {slot} in a period of {length}")
            raise PlanError(f"{_where(plan, i)}: issue slot {slot} comes before {previous} of the message ahead of it")
        previous = slot
        if not first <= (slot if slot >= first else slot + length) <= last:
            raise PlanError(f"{_where(plan, i)}: issue slot {slot} is outside its window {first}..{last}")
        if message.kind is Kind.RS:
            reduced.update(message.parts)
        elif message.kind is Kind.AG_F and message.micro == 0:
            for part in message.parts:
                if part not in reduced and units[part[0]].trainable:
                    raise PlanError(
                        f"{_where(plan, i)}: gathers block {part[1]} of {units[part[0]].name} before its reduce-scatter"
                    )


def _where(plan: Plan, i: int) -> str:
    """The message in words; its units need not exist."""
    message, units = plan.messages[i], plan.profile.units
    names = (units[u].name if 0 <= u < len(units) else f"unit {u}" for u, _ in message.parts)
    return f"message {i} ({message.kind} of {', '.join(names)})"


def _check_barrier(plan: Plan) -> None:
    reductions = [i for i, m in enumerate(plan.messages) if m.kind in (Kind.AR, Kind.RS)]
    late = [i for i in reductions if plan.messages[i].slot > plan.period.turn]
    if late:
        raise PlanError(f"message {late[0]} reduces after the turn, but cross_iteration is off")
    for i, m in enumerate(plan.messages[: reductions[-1] if reductions else 0]):
        updated = any(plan.profile.units[u].trainable for u, _ in m.parts)
        if m.kind is Kind.AG_F and m.micro == 0 and updated:
            raise PlanError(f"message {i} gathers before the barrier that message {reductions[-1]} ends")
