"""Candidates of a search, as numbers. A search by replays compares thousands of candidates per second.

A candidate has a strategy and blocks per unit, and the numbers of its messages in wire order. The values of a message
alone (bytes, seconds, window) are computed once for all candidates. Step and bytes of a candidate equal those of its
plan (:meth:`Candidates.plan`), by the same replay.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mdcs.plan.job import Job, recomputing
from mdcs.plan.ledger import AssignmentBytes, own_bytes, sizes_of_units
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Blocks, Plan
from mdcs.plan.schedule import (
    BY_MESSAGE,
    Folded,
    Message,
    MessageSeconds,
    MessageTable,
    Schedule,
    SizeTable,
    empty_schedule,
    message_values,
)  # fmt: skip
from mdcs.profile.link import Kind
from mdcs.profile.recompute import NONE
from mdcs.simulator import kernel
from mdcs.simulator.kernel import PeriodArrays, ReplayArrays
from mdcs.simulator.simulate import compiled_loops, empty_replay, for_loops, numbers, period_arrays

# Penalty of bytes, as a fraction of the step: _TIGHT · mean over slots of (bytes / budget) ** _POWER.
_TIGHT, _POWER = 0.05, 4


class Candidate(NamedTuple):
    """A plan in numbers: its messages in wire order, the slot of each, the mix, and recomputation (empty: none)."""

    messages: list[int]
    slots: list[int]
    strategies: tuple[Strategy, ...]
    blocks: Blocks
    recompute: tuple[str, ...] = ()


class Score(NamedTuple):
    """Result of a candidate's replay, in seconds.

    - ``energy``: the value that annealing minimizes: the step plus a penalty for bytes. Bytes that are held without
      need block later moves, most of all where the budget is tight.
    - ``waits``, ``needed``: [slots] how long compute waits in the last period, and for how many messages (unrolled).
    """

    step_s: float
    energy: float
    waits: Any
    needed: Any


class _Tables(NamedTuple):
    """Values of all messages of a search, and arrays that each candidate fills anew."""

    table: MessageTable
    by_number: MessageSeconds
    sizes: SizeTable
    schedule: Schedule
    seconds: MessageSeconds
    folded: Folded
    track: ReplayArrays


_SIZES = SizeTable._fields[:3]
_BY_NUMBER = (*BY_MESSAGE, *MessageSeconds._fields, *_SIZES)
_BY_MESSAGE = Schedule._fields[: Schedule._fields.index("issued")]


class Candidates:
    """The candidates for one job, with any recomputation, within some admissible bytes, and all their messages."""

    def __init__(self, job: Job, admissible: int | None) -> None:
        self._loops = compiled_loops()
        job = dataclasses.replace(job, recompute=()) if job.recompute else job
        self.job, self.length, self.admissible = job, job.period.length, admissible
        self.options: dict[int, list[str]] = {}  # unit -> its choices of recomputation
        for option in job.profile.recompute:
            self.options.setdefault(option.unit, [NONE]).append(option.choice)
        self._jobs = lru_cache(maxsize=64)(job.with_recompute)
        self.all: list[Message] = []  # by number; their slots are not used
        self._numbers: dict[tuple[Kind, tuple[tuple[int, int], ...], int, bool, Blocks], int] = {}
        self._columns: dict[str, list[Any]] = {name: [] for name in (*_BY_NUMBER, "unit", "block", "buffer")}
        self._columns["begin"] = [0]
        self._block_numbers: dict[tuple[int, tuple[int, ...], int], int] = {}
        self._bytes = lru_cache(maxsize=256)(lambda strategies, blocks: AssignmentBytes(job.period, strategies, blocks))
        self._circle = lru_cache(maxsize=1000)(
            lambda *mix: for_loops(period_arrays(job, admissible, self._bytes(*mix)))
        )
        self._tables: _Tables | None = None  # of all messages known so far
        self._sizes = lru_cache(maxsize=256)(self._sizes_of)
        self._recomputing = lru_cache(maxsize=256)(self._table_of)
        self._activations = lru_cache(maxsize=1000)(self._slots_of)
        self._arrival, self._running = numbers([0] * self.length), numbers([0] * self.length)

    def of(self, plan: Plan) -> Candidate:
        """Return the candidate of a plan of this job."""
        found = [self.number(m, plan.strategies, plan.blocks) for m in plan.messages]
        return Candidate(found, [m.slot for m in plan.messages], plan.strategies, plan.blocks, plan.recompute)

    def plan(self, candidate: Candidate, like: Plan | None = None) -> Plan:
        """Return the plan of a candidate, with budget and names of ``like``. Raises PlanError if it cannot run."""
        _, slots, strategies, blocks, recompute = candidate
        sent = zip(candidate.messages, slots, strict=True)
        messages = tuple(dataclasses.replace(self.all[i], slot=slot) for i, slot in sent)
        if like is None:
            return Plan(self._jobs(recompute) if recompute else self.job, strategies, blocks, messages)
        job = like.job if recompute == like.recompute else self._jobs(recompute)
        return dataclasses.replace(like, job=job, strategies=strategies, blocks=blocks, messages=messages)

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
        kind, parts, profile, period = message.kind, message.parts, self.job.profile, self.job.period
        row, buffers, elements = message_values(period, message, blocks)
        payload = elements * profile.layouts[parts[0][0]].width(kind.is_gather)
        scratch = 0 if kind.is_gather else max(mix.scratch[part] for part in parts)
        sizes = own_bytes(period, kind, payload, len(parts), scratch)[1:]
        seconds = self.job.cost.message(kind, tuple([(u, blocks[u][b]) for u, b in parts]), message.blocking)
        for name, value in zip(_BY_NUMBER, (*row, *seconds, *sizes), strict=True):
            self._columns[name].append(value)
        known = self._block_numbers
        for (u, b), (buffer, is_updated) in zip(parts, buffers, strict=True):
            self._columns["unit"].append(u)
            self._columns["block"].append(known.setdefault((u, blocks[u], b), len(known)) if is_updated else -1)
            self._columns["buffer"].append(buffer)
        self._columns["begin"].append(len(self._columns["unit"]))
        self._tables = None

    def window(self, number: int) -> tuple[int, int]:
        """Return the first and the last slot (unrolled) at which a message can be issued."""
        return self._columns["first"][number], self._columns["last"][number]

    def slot_near(self, candidate: Candidate, place: int, far: int) -> int:
        """Return the slot at distance ``far`` from that of the message at ``place``, within the message's window."""
        (first, last), slot = self.window(candidate.messages[place]), candidate.slots[place]
        unrolled = slot if slot >= first else slot + self.length
        return min(last, max(first, unrolled + far)) % self.length

    def score(self, candidate: Candidate, limit: float) -> Score | None:
        """Return the score of a candidate; None if it cannot run, does not fit, or has an energy above ``limit`` s."""
        c: PeriodArrays = self._circle(candidate.strategies, candidate.blocks)
        if candidate.recompute:
            slot_s, live, peak, _ = self._activations(candidate.recompute)
            c = c._replace(seconds=slot_s, live=live, peak=peak)
        known = self._known()
        has_early = candidate.recompute and self.job.profile.has_gradient_times
        table = self._recomputing(candidate.recompute) if has_early else known.table
        order, slots, n = numbers(candidate.messages), numbers(candidate.slots), len(candidate.messages)
        s = known.schedule._replace(**{name: getattr(known.schedule, name)[:n] for name in _BY_MESSAGE})
        if self._loops.arrange(table, c.turn, order, slots, s) != 0:
            return None
        seconds, sizes = MessageSeconds(*(x[:n] for x in known.seconds)), Folded(*(x[:n] for x in known.folded))
        self._loops.fold_seconds(known.by_number, self.job.profile.contention.compute_per_work, order, s, seconds)
        tight = 0.0
        if c.cap >= 0:
            self._loops.fold_bytes(table, self._sizes(candidate.strategies), order, s, sizes)
            self._loops.fill_demands(
                c.turn, c.rest, c.live, c.peak, c.allocated, c.freed, s, sizes, self._arrival, self._running
            )  # fmt: skip
            held = np.maximum(self._arrival, self._running) / c.cap
            if held.max() > 1:
                return None
            tight = _TIGHT * float((held**_POWER).mean())
        if self._loops.run(c, s, seconds, sizes, known.track) == kernel.DEADLOCK:
            return None
        end = known.track.count[kernel.ARRIVALS] - 1
        arrival, begin = known.track.arrival, known.track.begin
        step_s = float(arrival[end] - arrival[end - self.length])
        energy = step_s * (1 + tight)
        if energy > limit:
            return None
        last = slice(end - self.length, end)
        return Score(step_s, energy, np.array(begin[last]) - np.array(arrival[last]), np.array(s.required))

    def _slots_of(self, recompute: tuple[str, ...]) -> tuple[Any, Any, Any, Any]:
        """Return seconds, ``live`` and ``peak`` of slots with a recomputation, and the seconds that it adds."""
        profile = recomputing(self.job.profile, recompute)
        slots = [profile.slots[slot.place] for slot in self.job.period.slots]
        seconds = numbers([slot.seconds for slot in slots], seconds=True)
        live, peak = numbers([slot.live for slot in slots]), numbers([slot.peak for slot in slots])
        return seconds, live, peak, np.array(seconds) - np.array(self.job.period.seconds)

    def _known(self) -> _Tables:
        """Return the values of all messages known so far, and room for a candidate's."""
        if self._tables is None:
            columns, many, period = self._columns, len(self.all), self.job.period
            by_table = {name: columns[name] for name in MessageTable._fields if name in columns}
            self._tables = _Tables(
                for_loops(MessageTable(**by_table, blocks=len(self._block_numbers), update_slot=period.update_slot)),
                for_loops(MessageSeconds(*(columns[name] for name in MessageSeconds._fields))),
                for_loops(SizeTable(*(columns.get(name, []) for name in SizeTable._fields))),
                for_loops(empty_schedule(many, period)),
                for_loops(MessageSeconds(*([0.0] * many for _ in MessageSeconds._fields))),
                for_loops(Folded(*([0] * many for _ in Folded._fields))),
                for_loops(empty_replay(many, self.length)),
            )  # fmt: skip
            self._sizes.cache_clear()
            self._recomputing.cache_clear()
        return self._tables

    def _sizes_of(self, strategies: tuple[Strategy, ...]) -> SizeTable:
        buffers, gradients = sizes_of_units(self.job.period, strategies)
        return self._known().sizes._replace(buffer_bytes=numbers(buffers), gradient_bytes=numbers(gradients))

    def _table_of(self, recompute: tuple[str, ...]) -> MessageTable:
        """Return the table of messages: within a slot that recomputes first, gradients come later."""
        before = (np.array(self._columns["first"]) - 1) % self.length
        seconds, _, _, grown = (np.array(each)[before] for each in self._activations(recompute))
        early = np.array(self._columns["early"])
        later = np.minimum(1.0, (grown + early * (seconds - grown)) / np.maximum(seconds, 1e-12))
        return self._known().table._replace(early=numbers(list(np.where(grown > 0, later, early)), seconds=True))
