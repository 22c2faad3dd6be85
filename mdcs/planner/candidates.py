"""Candidates of a search, as numbers. A search by replays compares thousands of candidates per second.

A candidate has a strategy and blocks per unit, and the numbers of its messages in wire order. The values of a message
alone (bytes, seconds, window) are computed once and shared by all candidates. Step and bytes of a candidate equal those
of its plan (:meth:`Candidates.plan`), by the same replay.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mdcs.plan.gradient_readiness import ready_fraction
from mdcs.plan.job import Job
from mdcs.plan.ledger import AssignmentBytes
from mdcs.plan.lifetimes import bytes_between, message_rows, unit_rows
from mdcs.plan.message import Message, windows
from mdcs.plan.period import Op
from mdcs.plan.plan import Plan
from mdcs.plan.recompute import recomputing
from mdcs.plan.strategy import Strategy
from mdcs.plan.validity import Blocks
from mdcs.profile.link import Kind
from mdcs.profile.recompute import NONE
from mdcs.simulator import arrange, kernel
from mdcs.simulator.arrange import MessageTable
from mdcs.simulator.engine import empty_replay, period_arrays
from mdcs.simulator.kernel import MessageArrays, PeriodArrays
from mdcs.simulator.machine_code import compile_loops, for_loops, numbers

# Penalty of bytes, as a fraction of the step: _TIGHT · mean over slots of (bytes / budget) ** _POWER.
_TIGHT, _POWER = 0.05, 4


class Candidate(NamedTuple):
    """A plan in numbers.

    - ``messages``: numbers of the messages in wire order.
    - ``slots``: slot at which each is issued.
    - ``strategies``, ``blocks``: the mix.
    - ``recompute``: what each unit recomputes. Empty: nothing.
    """

    messages: list[int]
    slots: list[int]
    strategies: tuple[Strategy, ...]
    blocks: Blocks
    recompute: tuple[str, ...] = ()


class Activations(NamedTuple):
    """Times and bytes of the slots with a recomputation, [slots].

    - ``seconds``, ``live``, ``peak``: as in :class:`~mdcs.simulator.kernel.PeriodArrays`.
    - ``grown``: seconds at the beginning of the slot in which it recomputes.
    """

    seconds: Any
    live: Any
    peak: Any
    grown: Any


class Score(NamedTuple):
    """Result of a candidate's replay, in seconds.

    - ``step_s``: the step.
    - ``energy``: the value that annealing minimizes: the step plus a penalty for bytes. Bytes that are held without
      need block later moves, most of all where the budget is tight.
    - ``waits``: [slots] how long compute waits in the last period.
    - ``needed``: [slots] number of messages that must be done (unrolled).
    """

    step_s: float
    energy: float
    waits: Any
    needed: Any


class Candidates:
    """The candidates for one job, with any recomputation, and one budget. They have a cache of their messages."""

    def __init__(self, job: Job, budget: int | None) -> None:
        compile_loops()
        job = dataclasses.replace(job, recompute=()) if job.recompute else job
        self.job, self.budget, self.length = job, budget, job.period.length
        self.options: dict[int, list[str]] = {}  # unit -> its choices of recomputation
        for option in job.profile.recompute:
            self.options.setdefault(option.unit, [NONE]).append(option.choice)
        self._jobs = lru_cache(maxsize=64)(lambda recompute: dataclasses.replace(job, recompute=recompute))
        self.windows: list[tuple[int, int]] = []  # by message
        self.all: list[Message] = []  # by number; their slots are not used
        self._numbers: dict[tuple[Kind, tuple[tuple[int, int], ...], int, bool, Blocks], int] = {}
        self._columns: dict[str, Any] = {name: [] for name in arrange.BY_MESSAGE} | {"begin": [0]}
        self._block_numbers: dict[tuple[int, tuple[int, ...], int], int] = {}
        self._buffers: dict[Op, int] = {}
        self._bytes = lru_cache(maxsize=256)(lambda strategies, blocks: AssignmentBytes(job.period, strategies, blocks))
        self._circle = lru_cache(maxsize=1000)(lambda *mix: for_loops(period_arrays(job, budget, self._bytes(*mix))))
        self._shape: MessageTable | None = None  # of all messages known so far
        self._completed = lru_cache(maxsize=256)(self._complete)  # the same, for strategies and recomputation
        self._activations = lru_cache(maxsize=1000)(self._slots_of)
        units = job.profile.units
        self._by_unit = {
            "trained": numbers([int(unit.trainable) for unit in units]),
            "forward": numbers([job.period.forward(u, 0)[0] for u in range(len(units))]),
        }
        self._issued, self._needed, self._arrival, self._running = (numbers([0] * self.length) for _ in range(4))

    # ---- between plans and numbers

    def of(self, plan: Plan) -> Candidate:
        """Return the candidate of a plan of this job."""
        found = [self.number(m, plan.strategies, plan.blocks) for m in plan.messages]
        return Candidate(found, [m.slot for m in plan.messages], plan.strategies, plan.blocks, plan.recompute)

    def plan(self, candidate: Candidate, like: Plan) -> Plan:
        """Return the plan of a candidate, with the names of ``like``. Raises PlanError if the plan cannot run."""
        sent = zip(candidate.messages, candidate.slots, strict=True)
        return dataclasses.replace(
            like,
            job=like.job if candidate.recompute == like.recompute else self._jobs(candidate.recompute),
            strategies=candidate.strategies,
            blocks=candidate.blocks,
            messages=tuple(dataclasses.replace(self.all[i], slot=slot) for i, slot in sent),
        )

    def number(self, message: Message, strategies: tuple[Strategy, ...], blocks: Blocks) -> int:
        """Return the number of a message in this mix. Its slot does not matter."""
        key = message.kind, message.parts, message.micro, message.blocking, tuple([blocks[u] for u, _ in message.parts])
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.all)
            self.all.append(message)
            self._add(message, self._bytes(strategies, blocks), blocks)
        return found

    def _add(self, message: Message, mix: AssignmentBytes, blocks: Blocks) -> None:
        kind, parts, profile, cost = message.kind, message.parts, self.job.profile, self.job.cost
        [window] = windows(self.job.period, [message])
        elements = sum(blocks[u][b] for u, b in parts)
        width = profile.width(blocks, kind, parts[0])
        payload, wire = elements * width, profile.wire(kind, elements * width)
        scratch = 0 if kind.is_gather else max(mix.scratch[part] for part in parts)
        rows = message_rows(profile, kind, payload, len(parts), scratch)
        update = cost.updates_s(kind, blocks, parts)
        seconds = cost.message(kind, elements, len(parts), message.blocking, width, update)
        own = {
            "reduces": not kind.is_gather, "scatters": kind.plain is Kind.RS, "is_forward": kind.plain is Kind.AG_F,
            "is_backward": kind.plain is Kind.AG_B, "follows_update": kind.plain is Kind.AG_F and message.micro == 0,
            "blocking": message.blocking, "first": window[0], "last": window[1],
            "early": 1.0 if kind.is_gather else ready_fraction(self.job.period, blocks, message, window[0]),
            "lost": cost.lost_s(wire, 0.0), "lost_per_work": profile.contention.compute_per_work,
            "until_landed": bytes_between(rows, "start", "landed"), "until_updated": bytes_between(rows, "start", "done"),
            "updating": bytes_between(rows, "update", "done"),
            **{name: getattr(seconds, name) for name in ("alpha", "gap", "transfer", "copy", "update", "idle")},
        }  # fmt: skip
        for name, value in own.items():
            self._columns[name].append(value)
        for u, b in parts:
            self._columns["unit"].append(u)
            self._columns["block"].append(self._block_numbers.setdefault((u, blocks[u], b), len(self._block_numbers)))
            op = Op(kind, u, message.micro)
            self._columns["buffer"].append(self._buffers.setdefault(op, len(self._buffers)) if kind.is_gather else -1)
        self._columns["begin"].append(len(self._columns["unit"]))
        self.windows.append(window)
        self._shape = None

    # ---- scores

    def slot_near(self, candidate: Candidate, place: int, far: int) -> int:
        """Return the slot at distance ``far`` from that of the message at ``place``, within the message's window."""
        (first, last), slot = self.windows[candidate.messages[place]], candidate.slots[place]
        unrolled = slot if slot >= first else slot + self.length
        return min(last, max(first, unrolled + far)) % self.length

    def score(self, candidate: Candidate, limit: float) -> Score | None:
        """Return the score of a candidate.

        None if the candidate cannot run, does not fit the budget, or has an energy above ``limit`` seconds.
        """
        c: PeriodArrays = self._circle(candidate.strategies, candidate.blocks)
        if candidate.recompute:
            changed = self._activations(candidate.recompute)
            c = c._replace(seconds=changed.seconds, live=changed.live, peak=changed.peak)
        shape = self._shape_for(candidate.strategies, candidate.recompute)
        sent, slots = numbers(candidate.messages), numbers(candidate.slots)
        if not arrange.place(shape, c.turn, sent, slots, self._issued, self._needed):
            return None
        messages, track = MessageArrays(*(column[: len(sent)] for column in self._messages)), self._track
        arrange.arrange(shape, c.turn, self.length, sent, slots, messages)
        tight = 0.0
        if c.cap >= 0:
            arrange.fill_demands(
                c.turn, c.rest, c.live, c.peak, c.allocated, c.freed, messages.in_prologue, messages.held, messages.transient,
                messages.freed, self._issued, self._arrival, self._running,
            )  # fmt: skip
            held = np.maximum(self._arrival, self._running) / c.cap
            if held.max() > 1:
                return None
            tight = _TIGHT * float((held**_POWER).mean())
        if kernel.run(c, messages, track, self._issued, self._needed) == kernel.DEADLOCK:
            return None
        end = track.count[kernel.ARRIVALS] - 1
        step_s = float(track.arrival[end] - track.arrival[end - self.length])
        energy = step_s * (1 + tight)
        if energy > limit:
            return None
        last = slice(end - self.length, end)
        return Score(step_s, energy, np.array(track.begin[last]) - np.array(track.arrival[last]), np.array(self._needed))

    def _slots_of(self, recompute: tuple[str, ...]) -> Activations:
        profile, places = recomputing(self.job.profile, recompute), [slot.place for slot in self.job.period.slots]
        slots = [profile.slots[place] for place in places]
        seconds = numbers([slot.seconds for slot in slots], seconds=True)
        live, peak = numbers([slot.live for slot in slots]), numbers([slot.peak for slot in slots])
        return Activations(seconds, live, peak, np.array(seconds) - np.array(self.job.period.seconds))

    def _early(self, recompute: tuple[str, ...]) -> Any:
        """Return when messages may leave within a slot that recomputes first: all gradients come later in it."""
        changed, before = self._activations(recompute), (np.array(self._columns["first"]) - 1) % self.length
        grown, seconds, early = changed.grown[before], np.array(changed.seconds)[before], np.array(self._columns["early"])
        later = np.minimum(1.0, (grown + early * (seconds - grown)) / np.maximum(seconds, 1e-12))
        return numbers(list(np.where(grown > 0, later, early)), seconds=True)

    def _shape_for(self, strategies: tuple[Strategy, ...], recompute: tuple[str, ...]) -> MessageTable:
        """Return the values of all messages known so far, completed for the strategies and the recomputation of a mix."""
        if self._shape is None:
            self._shape = for_loops(
                MessageTable(
                    **self._columns, **self._by_unit, buffer_bytes=[], gradient_bytes=[], replicated=[],
                    blocks=len(self._block_numbers), barrier=not self.job.cross_iteration,
                )  # fmt: skip
            )
            self._messages = for_loops(MessageArrays(*([0] * len(self.all) for _ in MessageArrays._fields)))
            self._track = for_loops(empty_replay(len(self.all), self.length))
            self._completed.cache_clear()
        return self._completed(strategies, recompute if self.job.profile.has_gradient_times else ())

    def _complete(self, strategies: tuple[Strategy, ...], recompute: tuple[str, ...]) -> MessageTable:
        assert self._shape is not None
        if recompute:
            return self._completed(strategies, ())._replace(early=self._early(recompute))
        rows = [unit_rows(self.job.period, u, k) for u, k in enumerate(strategies)]
        full = [sum(r.bytes for r in rows[op.unit] if r.allocated and r.allocated.of == op) for op in self._buffers]
        gradients = [sum(r.bytes for r in own if r.freed and isinstance(r.freed.of, Op)) for own in rows]
        return self._shape._replace(
            buffer_bytes=numbers(full), gradient_bytes=numbers(gradients),
            replicated=numbers([int(k is Strategy.dp) for k in strategies]),
        )  # fmt: skip
