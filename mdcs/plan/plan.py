"""The plan: a strategy per unit and the ordered messages of one period.

Immutable, stored as JSON, identified by a hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mdcs.plan.job import Job
from mdcs.plan.period import Period
from mdcs.plan.schedule import Message, MessageSeconds, MessageTable, Schedule, fold_seconds, message_table
from mdcs.plan.strategy import Strategy
from mdcs.plan.times import Prediction
from mdcs.plan.validity import PlanError, arranged, validate
from mdcs.profile.layout import owned_part
from mdcs.profile.link import Kind
from mdcs.profile.schema import Profile, with_tuples

SCHEMA = 2
"""Schema of plan.json."""

_NOT_EXECUTED = ("prediction", "strategy", "scheduler", "outcome", "bound_s")


@dataclass(frozen=True)
class Plan:
    """A strategy per unit, and the messages of one period.

    - ``job``: the profile, its settings, and what is recomputed.
    - ``strategies``: one strategy per unit.
    - ``blocks``: for each unit the sizes of its blocks (elements). Each is a multiple of ``world``.
    - ``messages``: messages in wire order.
    - ``budget``: bytes that the plan was made for, of which the job's reserve stays free. None: unlimited.
    - ``limit``: bytes that admission enforces, reserve included, where a share leaves less than the budget. None: the
      budget.
    - ``strategy``, ``scheduler``: names of the planners.
    - ``outcome``: status of the solver. Empty if no solver was used.
    - ``bound_s``: proven lower bound (seconds) on the step time of any plan within the budget. None: nothing was
      proven.
    - ``prediction``: result of the replay.

    Raises PlanError for a plan that cannot run (:func:`mdcs.plan.validity.validate`).
    """

    job: Job
    strategies: tuple[Strategy, ...]
    blocks: tuple[tuple[int, ...], ...]
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
        validate(self.job, self.strategies, self.blocks, self.messages, self.budget)
        assert self.schedule is not None  # raises for an order that cannot run

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # without cached properties

    @property
    def profile(self) -> Profile:
        """The profile that the plan was made for, with the slots of its recomputation."""
        return self.job.planned_profile

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
        """Whether messages may cross from one iteration to the next.

        False: a barrier lies between backward and the updates.
        """
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
        """For each unit none, full or selective recomputation of its activations. Empty: none for all units."""
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
        """Return (start, elements, segment) of each *run* of a block: a piece that ``rank`` updates as one tensor.

        Boundaries of segments cut a rank's part of a block. Starts are in the unit's flat buffer.
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
    def table(self) -> MessageTable:
        """The values of the messages that do not depend on their order."""
        return message_table(self.period, self.blocks, self.messages)

    @cached_property
    def schedule(self) -> Schedule:
        """The plan's messages as arrays: which message and slot waits for which."""
        return arranged(self.job, self.table, self.messages)

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
        fold_seconds(by_number, self.profile.contention.compute_per_work, range(n), self.schedule, out)
        return out

    @cached_property
    def hash(self) -> str:
        """Identity of the part of the plan that is executed. Predictions and names are not included."""
        return _hash(self._flat())

    @cached_property
    def execution_hash(self) -> str:
        """Identity of what is executed, whatever the budget: with equal predictions, plans of one differ only by noise.
        """
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
        data |= data.pop("job") | {"profile": self.job.profile.to_dict()}
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
        """Return the plan of :meth:`to_json`.

        Raises PlanError if the text is no plan of this schema, or if its executed part does not match the hash.
        """
        try:
            d: dict[str, Any] = json.loads(text)
            if d["schema"] != SCHEMA:
                raise PlanError(f"plan schema {d['schema']} is not the supported {SCHEMA}")
            plan = cls(
                job=Job(
                    Profile.from_dict(d["profile"]), d["micro_steps"], d["cross_iteration"], d["reserve"],
                    tuple(d.get("recompute", ())),
                ),  # fmt: skip
                strategies=tuple(Strategy(s) for s in d["strategies"]),
                blocks=with_tuples(d["blocks"]),
                messages=tuple(Message(**m | {"kind": Kind(m["kind"])}) for m in with_tuples(d["messages"])),
                prediction=None if d["prediction"] is None else Prediction.from_dict(d["prediction"]),
                limit=d.get("limit"),
                strategy=d["strategy"],
                **{k: d[k] for k in ("budget", "scheduler", "outcome", "bound_s")},
            )
        except PlanError:
            raise
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise PlanError(f"not a plan: {e!r}") from e
        if d.get("hash") != _hash(d):
            raise PlanError(f"plan says hash {d.get('hash')} but its content has {_hash(d)}")
        return plan


def _hash(plan: dict[str, Any]) -> str:
    executed = {key: value for key, value in plan.items() if key not in ("hash", *_NOT_EXECUTED)}
    return hashlib.sha256(json.dumps(executed, sort_keys=True).encode()).hexdigest()[:16]
