"""The plan: a strategy per unit and the ordered messages of one period. Immutable, stored as JSON, with a hash.

Every block is sent once, in its window, and nothing is gathered before its update. Whether the bytes fit a budget is
for :func:`mdcs.plan.ledger.check`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from mdcs.plan import schedule
from mdcs.plan.cost import Prediction
from mdcs.plan.job import Job
from mdcs.plan.period import Period, Strategy
from mdcs.plan.schedule import Message, MessageSeconds, MessageTable, Schedule
from mdcs.profile.layout import owned_part
from mdcs.profile.link import Kind
from mdcs.profile.schema import Profile, read


class PlanError(ValueError):
    """A plan that cannot run. The message names the unit, the message or the slot."""


Blocks = tuple[tuple[int, ...], ...]
"""For each unit, the elements of each block."""


def require_nodes(profile: Profile, strategies: Iterable[Strategy]) -> None:
    """Raise PlanError for a strategy within nodes if the profile has no nodes."""
    within = next((k for k in strategies if k.in_node), None)
    if within is not None and not profile.per_node:
        raise PlanError(
            f"{within} shards within a node: it needs several hosts with several ranks each, and a profile of them"
        )


@lru_cache(maxsize=256)  # a planner compares many plans of one mix
def _expected(period: Period, strategies: tuple[Strategy, ...], blocks: Blocks) -> set[tuple[Kind, int, int, int]]:
    """Return (kind, unit, micro-step, block) of every block that is required. Raises PlanError for invalid sizes."""
    world, out = period.profile.world, set[tuple[Kind, int, int, int]]()
    for u, (unit, strategy, sizes) in enumerate(zip(period.profile.units, strategies, blocks, strict=True)):
        layout = period.profile.layouts[u]
        total = layout.elements
        if sizes != (total,) and (sum(sizes) != total or any(b <= 0 or b % world for b in sizes)):
            raise PlanError(
                f"unit {unit.name}: blocks {sizes} must be multiples of the world, {world}, and sum to {total}"
            )
        if layout.is_whole and len(sizes) > 1:
            raise PlanError(f"unit {unit.name}: blocks {sizes} cut parameters that are updated as wholes")
        out.update([(*op, b) for op in period.ops(u, strategy) for b in range(len(sizes))])
    return out


SCHEMA = 2
"""Schema of plan.json."""

_NOT_EXECUTED = ("prediction", "strategy", "scheduler", "outcome", "bound_s")


@dataclass(frozen=True)
class Plan:
    """A strategy per unit, and the messages of one period.

    - ``job``: the profile, its settings, and what is recomputed.
    - ``blocks``: sizes of the blocks (elements) of each unit. Each is a multiple of ``world``.
    - ``messages``: messages in wire order.
    - ``budget``: bytes that the plan was made for, of which the job's reserve stays free. None: unlimited.
    - ``limit``: bytes that admission enforces, reserve included, where a share leaves less. None: the budget.
    - ``strategy``, ``scheduler``: names of the planners. ``outcome``: status of the solver, if one was used.
    - ``bound_s``: proven lower bound (seconds) of the step of any plan within the budget. None: nothing was proven.
    - ``prediction``: result of the replay.

    Raises PlanError for a plan that cannot run, such as one that does not send every block exactly once.
    """

    job: Job
    strategies: tuple[Strategy, ...]
    blocks: Blocks
    messages: tuple[Message, ...]
    budget: int | None = None
    limit: int | None = None
    strategy: str = "?"
    scheduler: str = "?"
    outcome: str = dataclasses.field(default="", hash=False, compare=False)
    bound_s: float | None = dataclasses.field(default=None, hash=False, compare=False)
    prediction: Prediction | None = dataclasses.field(default=None, hash=False, compare=False)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        units = self.job.profile.units
        require_nodes(self.job.profile, self.strategies)
        if self.budget is not None and self.budget <= self.reserve:
            raise PlanError(f"budget {self.budget} bytes is not above the reserve of {self.reserve}")
        if not len(self.strategies) == len(self.blocks) == len(units):
            raise PlanError(f"{len(units)} units but {len(self.strategies)} strategies, {len(self.blocks)} block lists")
        empty = next((i for i, m in enumerate(self.messages) if not m.parts), None)
        if empty is not None:
            raise PlanError(f"message {empty} is empty")
        expected = _expected(self.period, self.strategies, self.blocks)
        carried = [(m.kind, u, m.micro, b) for m in self.messages for u, b in m.parts]
        if len(carried) != len(expected) or set(carried) != expected:
            for i, m in enumerate(self.messages):
                for u, b in m.parts:
                    if (m.kind, u, m.micro, b) not in expected:
                        raise PlanError(f"{self._where(i)}: the strategies have no block {b} of unit {u} to send")
            for (kind, u, _, b), times in Counter(carried).items():
                if times != 1:
                    raise PlanError(f"block {b} of {units[u].name} is sent {times} times as {kind}")
            kind, u, micro, b = min(expected.difference(carried))
            raise PlanError(f"block {b} of {units[u].name} is never sent as {kind} (micro-step {micro})")
        for i, m in enumerate(self.messages):
            if len(m.parts) > 1 and len({units[u].dtype_on_wire(m.kind.is_gather) for u, _ in m.parts}) > 1:
                raise PlanError(f"{self._where(i)}: carries elements of several types")
        assert self.schedule is not None  # raises for an order that cannot run

    def _where(self, i: int) -> str:
        """Return the message in words. Its units may not exist."""
        message, units = self.messages[i], self.job.profile.units
        names = (units[u].name if 0 <= u < len(units) else f"unit {u}" for u, _ in message.parts)
        return f"message {i} ({message.kind} of {', '.join(names)})"

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # without cached properties

    @property
    def profile(self) -> Profile:
        """The profile that the plan was made for, with the slots of its recomputation."""
        return self.job.period.profile

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.job.profile.world

    @property
    def micro_steps(self) -> int:
        """Forward and backward passes of one iteration."""
        return self.job.micro_steps

    @property
    def cross_iteration(self) -> bool:
        """Return whether messages may cross from one iteration to the next. If not, updates follow all of backward."""
        return self.job.cross_iteration

    @property
    def reserve(self) -> int:
        """Bytes of the budget that stay free."""
        return self.job.reserve

    @property
    def admissible(self) -> int | None:
        """Bytes that admission allows: the limit without the reserve. None: no limit."""
        limit = self.budget if self.limit is None else self.limit
        return None if limit is None else limit - self.reserve

    @property
    def recompute(self) -> tuple[str, ...]:
        """Recomputation of each unit: none, full or selective. Empty: none for all units."""
        return self.job.recompute

    @property
    def period(self) -> Period:
        """The circle of slots of one iteration."""
        return self.job.period

    @cached_property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """Start of each block in its unit's flat buffer (elements)."""
        return tuple(tuple(itertools.accumulate(sizes[:-1], initial=0)) for sizes in self.blocks)

    def runs(self, unit: int, block: int, rank: int) -> list[tuple[int, int, int]]:
        """Return (start, elements, segment) of each *run* of a block: a piece that ``rank`` updates as one tensor, for
        boundaries of segments cut its part of a block. Starts are in the unit's flat buffer.
        """
        parts = self.strategies[unit].parts(self.profile)
        part = owned_part(self.offsets[unit][block], self.blocks[unit][block], parts, rank)
        return self.profile.layouts[unit].pieces(self.profile.units[unit].segments, part)

    def elements(self, message: Message) -> int:
        """Return the elements of all blocks of the message, padding included."""
        return sum([self.blocks[u][b] for u, b in message.parts])

    def payload(self, message: Message) -> int:
        """Return the bytes of the full (unsharded) payload."""
        return self.elements(message) * self.width(message)

    def width(self, message: Message) -> int:
        """Return the bytes of an element of the message. All its elements have one type."""
        return self.profile.layouts[message.parts[0][0]].width(message.kind.is_gather)

    def wire(self, message: Message) -> int:
        """Return the bytes that one rank sends."""
        return self.profile.wire(message.kind, self.payload(message))

    @cached_property
    def labels(self) -> list[tuple[str, str, int]]:
        """(kind, names of its units, wire bytes) of each message."""
        names = [unit.name for unit in self.profile.units]
        units = ["+".join(dict.fromkeys(names[u] for u, _ in m.parts)) for m in self.messages]
        return [(str(m.kind), joined, self.wire(m)) for m, joined in zip(self.messages, units, strict=True)]

    @cached_property
    def table(self) -> MessageTable:
        """The values of the messages that do not depend on their order."""
        return schedule.message_table(self.period, self.blocks, self.messages)

    @cached_property
    def schedule(self) -> Schedule:
        """The plan's messages as arrays: which message and slot waits for which."""
        period, table, slots = self.period, self.table, [m.slot for m in self.messages]
        made = schedule.empty_schedule(len(slots), period)
        broken = schedule.arrange(table, period.turn, range(len(slots)), slots, made)
        if broken == 0:
            return made
        i, reason = divmod(broken, schedule.REASONS)
        raise PlanError(
            f"{self._where(i)}: "
            + {
                schedule.NO_SLOT: f"no slot {slots[i]} in a period of {period.length}",
                schedule.BACKWARDS: f"issue slot {slots[i]} comes before {slots[i - 1]} of the message ahead of it",
                schedule.OUTSIDE: f"issue slot {slots[i]} is outside its window {table.first[i]}..{table.last[i]}",
                schedule.STALE: "gathers parameters before their update",
            }[reason]
            + ("" if self.cross_iteration else "; cross_iteration is off")
        )

    @cached_property
    def held_update(self) -> int | None:
        """The message behind which all updates wait for the loop's ``step()``, which may leave them out: with a barrier
        the last reduction. None where there is none, and where backward still needs a message behind it.
        """
        last = max(self.schedule.updated_by, default=-1)
        if self.cross_iteration or last < 0:
            return None
        behind = self.messages[last + 1 :]
        return None if any(m.kind.plain is Kind.AG_B and m.slot < self.period.turn for m in behind) else last

    @cached_property
    def seconds(self) -> MessageSeconds:
        """Seconds of the messages."""
        cost, n = self.job.cost, len(self.messages)
        costs = [
            cost.message(m.kind, tuple([(u, self.blocks[u][b]) for u, b in m.parts]), m.blocking) for m in self.messages
        ]
        by_number = MessageSeconds(*([each[i] for each in costs] for i in range(len(MessageSeconds._fields))))
        out = MessageSeconds(*([0.0] * n for _ in MessageSeconds._fields))
        schedule.fold_seconds(by_number, self.profile.contention.compute_per_work, range(n), self.schedule, out)
        return out

    @cached_property
    def hash(self) -> str:
        """Identity of the part of the plan that is executed. Predictions and names are not included."""
        return _hash(self._flat())

    @cached_property
    def execution_hash(self) -> str:
        """Identity of what is executed, whatever the budget: with equal predictions, plans differ only by noise."""
        return _hash({k: v for k, v in self._flat().items() if k not in ("budget", "limit")} | {"budget": None})

    def sent_bytes(self) -> dict[str, int]:
        """Return the wire bytes that one rank sends in one iteration, by kind."""
        out: dict[str, int] = {}
        for m in self.messages:
            out[str(m.kind)] = out.get(str(m.kind), 0) + self.wire(m)
        return out

    def _flat(self) -> dict[str, Any]:
        """Return all fields as plain containers, with the fields of the job at the same level."""
        data = dataclasses.asdict(self)
        data |= data.pop("job")
        if not self.recompute:  # plans from before have none
            del data["recompute"]
        if self.limit is None:
            del data["limit"]
        return data

    def to_json(self) -> str:
        """Return the text of plan.json, with the plan's hash."""
        return json.dumps(self._flat() | {"hash": self.hash})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan of :meth:`to_json`. Raises PlanError for another text or schema, and for another hash."""
        try:
            d: dict[str, Any] = json.loads(text)
            if d["schema"] != SCHEMA:
                raise PlanError(f"plan schema {d['schema']} is not the supported {SCHEMA}")
            job, fields = ({f.name: d[f.name] for f in dataclasses.fields(of) if f.name in d} for of in (Job, cls))
            plan: Plan = read(cls, fields | {"job": job})
        except PlanError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise PlanError(f"not a plan: {e!r}") from e
        if d.get("hash") != _hash(d):
            raise PlanError(f"plan says hash {d.get('hash')} but its content has {_hash(d)}")
        return plan


def _hash(plan: dict[str, Any]) -> str:
    executed = {key: value for key, value in plan.items() if key not in ("hash", *_NOT_EXECUTED)}
    return hashlib.sha256(json.dumps(executed, sort_keys=True).encode()).hexdigest()[:16]
