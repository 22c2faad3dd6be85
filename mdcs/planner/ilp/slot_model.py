"""The slot model: strategies and schedule of one period as one time-indexed integer program.

The circle of slots (:class:`mdcs.plan.period.Period`) has two stages per slot q. In ``A(q)`` compute has arrived and
waits. In ``R(q)`` compute runs. Operations are sent in fractions: c[op, stage] is the fraction of an operation that is
sent by the end of a stage in its window::

    minimize    Σ_A link seconds + (1 - 1/(1 + interference)) Σ_R link seconds        step time added by communication
    subject to  Σ_k z[u,k] = 1                                     every unit has one strategy (binary z)
                c monotone, c[op, last] = Σ z of the strategies that need op
                Σ_op seconds[op] (c[op,R(q)] - c[op,before]) <= (1 + interference) · compute seconds of q
                c[AG_F,u,·] <= c[RS,u,·]                           blocks are gathered after their update
                done[u,q] <= Σ c[AR or RS,u,A(q)]                  binary: the gradient is freed before slot q
                c[AG,u,R(q)] <= started[u,q] (+ z[u,zero2])        binary, monotone: the buffer is held from slot q on
                Σ bytes at rest + full parameters + gradients not done <= budget - activations of q, for every slot q

If the plan decides what is recomputed, a binary w[u,c] per unit and option adds its seconds to the objective and to the
compute seconds of its backward slots, and changes the activations of slots
(:class:`~mdcs.planner.ilp.slot_schedule.RecomputeColumns`).

A running slot slows down to 1/(1 + interference) of its speed while a message is in flight. Communication that does not
overlap with compute is sent at arrivals and is exposed. A reduction whose gradients become ready while a slot runs
(:mod:`mdcs.plan.period`) may be sent in that slot: the fraction that becomes ready before its end, in the
time left after the first gradient. A message costs β·bytes. With ``depth`` 1 it also costs α, spread over a block. The
model leaves out staging, update time and gradient shards in flight. The replay of the plan includes them.

Everything that the simulator can do satisfies these rows. The optimum is therefore a lower bound of any plan's step
time within the budget. The same holds for a *coarser* model, whose stages are bins of neighbouring slots: windows and
lifetimes are rounded in favour of the solution. And it holds for a model in which only some slots, the *tight* ones,
have the columns ``done`` and ``started``: in most jobs one slot limits the mix. Such a model has a few binaries per
unit instead of some per unit and slot.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mdcs.plan.lifetimes import Row, unit_rows
from mdcs.plan.period import Op, Strategy
from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.ilp.slot_schedule import SlotSchedule, TransferColumns, negative
from mdcs.planner.ilp.solver import Terms
from mdcs.planner.schedulers import StrategyAssignment
from mdcs.profile.link import Kind
from mdcs.simulator.simulate import replay


@dataclass(frozen=True)
class SlotDecision:
    """A solution: a strategy per unit, and the slots (unrolled) that bound its operations.

    - ``earliest``: first slot at which an operation is issued. ``latest``: slot at which it must be done.
    - ``recompute``: a choice per unit. Empty: none, or the problem does not decide it.
    """

    strategies: tuple[Strategy, ...]
    earliest: dict[Op, int] = field(default_factory=dict)
    latest: dict[Op, int] = field(default_factory=dict)
    recompute: tuple[str, ...] = ()

    def windows(self, mix: StrategyAssignment) -> dict[Op, tuple[int, int]]:
        """Return the windows of the mix, narrowed by the decision."""
        windows = ((op, *mix.period.window(op)) for op in mix.ops)
        return {op: (max(a, self.earliest.get(op, a)), min(b, self.latest.get(op, b))) for op, a, b in windows}


class SlotModel(SlotSchedule):
    """The integer program of one job under ``problem.budget``: the schedule
    (:class:`~mdcs.planner.ilp.slot_schedule.SlotSchedule`), and a memory row for every slot.

    - ``tight``: slots whose rows have the memory of the schedule, and that are bins of their own. In the others buffers
      live only while compute uses them: a relaxation, with far fewer binaries. None: all slots.
    """

    def __init__(
        self, problem: PlanningProblem, *, fixed: Sequence[Strategy] | None = None, width: int = 1,
        tight: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(problem, fixed=fixed, width=width, apart=tight or ())
        self.tight = frozenset(range(self.period.length) if tight is None else tight)
        self.started: dict[Op, dict[int, int]] = {}  # operation -> unrolled slot -> column
        self.done: list[dict[int, int]] = [{} for _ in self.assign]
        self._keys: dict[int, tuple[int, ...]] = {}  # binary column -> columns whose sum it bounds
        if problem.admissible is not None:
            self._memory(problem.admissible)

    # ---- memory: sums over the table of lifetimes

    def _memory(self, cap: int) -> None:
        """Add the memory row of every slot, scaled by the bytes left for units because of the solver's tolerances. A
        row of the table is held in some slots whatever the schedule is; in others, from the start of a gather until the
        slot that needs it, and until a reduction has landed, the schedule decides.
        """
        length = self.period.length
        held: list[Terms] = [[] for _ in range(length)]
        base = [0.0] * length
        for u, z in enumerate(self.assign):
            rows = {k: unit_rows(self.period, u, k) for k in z}
            sizes = [dict.fromkeys(z, 0) for _ in range(length)]
            for k, own in rows.items():
                for row in own:
                    for q in self._surely_held(row):
                        sizes[q % length][k] += row.bytes
            for q, by_strategy in enumerate(sizes):
                least = min(by_strategy.values())  # held with any strategy
                base[q] += least
                held[q] += [(z[k], float(size - least)) for k, size in by_strategy.items() if size > least]
            self._hold_gathered(u, rows, held)
            self._hold_until_reduced(u, rows, held, base)
        for q in range(length):
            place = self.period.slots[q].place
            for terms, needed in self.recompute.peaks(place):
                left = cap - needed - base[q]
                scale = max(1.0, left + self.recompute.freed(place))
                self.program.at_most([(x, c / scale) for x, c in (*held[q], *terms)], left / scale)

    def _surely_held(self, row: Row) -> range:
        """Return the slots (unrolled) in which a buffer is held whatever the schedule is."""
        if row.allocated is None or row.freed is None:
            return range(self.period.length)
        start, end = row.allocated.of, row.freed.of
        if isinstance(end, int):
            return range(self.period.window(start)[1] if isinstance(start, Op) else int(start), end + 1)
        if isinstance(start, int) and isinstance(end, Op):
            first = self.period.window(end)[0]
            return range(start, first if start < first else first + self.period.length)
        return range(0)

    def _hold_gathered(self, u: int, rows: Mapping[Strategy, Sequence[Row]], held: list[Terms]) -> None:
        """Add the bytes of gathers before the slot that needs them: a column decides whether the buffer is held."""
        for op, sending in self.sendings.items():
            users = [k for k in rows if op.unit == u and op.kind.is_gather and op in self.ops[k]]
            sizes = {k: sum(row.bytes for row in rows[k] if row.allocated and row.allocated.of == op) for k in users}
            size = min((b for b in sizes.values() if b), default=0)
            if not size:
                continue
            first, last = self.period.window(op)
            free = [(self.assign[u][k], -1.0) for k in users if not sizes[k]]
            columns, before = self.started.setdefault(op, {}), None
            for q in self._tight_in(first, last):
                if sent := self._held_from(sending, q):
                    x = columns[q] = self._shared(sent, before)
                    if x != before:
                        self.program.at_most([*sent, (x, -1.0), *free], 0.0)
                    held[q % self.period.length].append((x, float(size)))
                    before = x

    def _hold_until_reduced(
        self, u: int, rows: Mapping[Strategy, Sequence[Row]], held: list[Terms], base: list[float]
    ) -> None:
        """Add the bytes that a reduction frees: a column decides whether it is done."""
        until = {k: [row for row in own if row.freed and isinstance(row.freed.of, Op)] for k, own in rows.items()}
        size = min(sum(row.bytes for row in own) for own in until.values())
        if not size:
            return
        reductions, columns, before = self._reductions(u), self.done[u], None
        first, last = self.period.window(reductions[0].op)
        updated = [k for k, own in until.items() if any(r.freed and r.freed.moment == "done" for r in own)]
        late = [(self.assign[u][k], 1.0) for k in updated]  # freed by the update
        for q in self._tight_in(first, last):
            base[q] += size
            sent = self._freed_by(reductions, q)
            if not sent:
                continue
            x = columns[q] = self._shared(sent, before)
            if x != before:
                self.program.at_most([(x, 1.0), *negative(sent)], 0.0)
                if q < self.period.update_slot:
                    self.program.at_most([(x, 1.0), *late], 1.0)
            held[q].append((x, -float(size)))
            before = x

    def _tight_in(self, first: int, last: int) -> Iterator[int]:
        """Yield the tight slots from ``first`` to before ``last`` (unrolled)."""
        return (q for q in range(first, last) if q % self.period.length in self.tight)

    def _shared(self, sent: Terms, before: int | None) -> int:
        """Return a binary column for a slot, never below that of the tight slot ``before``: that one for its terms."""
        key = tuple(x for x, _ in sent)
        if before is not None and self._keys[before] == key:
            return before
        x = self.program.column(integer=True)
        self._keys[x] = key
        if before is not None:
            self.program.at_most([(before, 1.0), (x, -1.0)], 0.0)
        return x

    def _reductions(self, u: int) -> list[TransferColumns]:
        """Return the possible reductions of a unit. Only the one of its strategy is sent."""
        possible = (Op(kind, u, 0) for kind in (Kind.RS, Kind.AR, Kind.RS_N))
        return [self.sendings[op] for op in possible if op in self.sendings]

    def _held_from(self, gather: TransferColumns, q: int) -> Terms:
        """Return the terms of a gather that surely hold its buffer in slot q. Terms of a bin count only in its last
        slot: the model does not know in which slot of the bin they are sent.
        """
        b = self._bin(q)
        last_of_bin = q % self.period.length == self._slots(b)[-1]
        return gather.by(3 * b + 2 if last_of_bin else 3 * b - 1)

    def _freed_by(self, reductions: Sequence[TransferColumns], q: int) -> Terms:
        """Return the terms of the reductions that may be done when slot q begins: at the first slot of a bin those of
        its arrival stage, at later ones those of all stages.
        """
        b = self._bin(q)
        first_of_bin = q % self.period.length == self._slots(b)[0]
        return [t for s in reductions for t in s.by(3 * b if first_of_bin else 3 * b + 2)]

    # ---- solutions

    def values_of(self, plan: Plan) -> list[float] | None:
        """Return the column values of a plan's replay. None if the model cannot express the plan."""
        if any(s not in z for s, z in zip(plan.strategies, self.assign, strict=True)):
            return None
        values = [0.0] * len(self.program.costs)
        for u, strategy in enumerate(plan.strategies):
            values[self.assign[u][strategy]] = 1.0
        self.recompute.set(values, plan.recompute)
        sent: dict[Op, dict[int, float]] = {}
        for op, stage, fraction in self._served(plan):
            at = sent.setdefault(op, {})
            q, running = divmod(stage, 2)
            b = self._bin(q)
            stage = 3 * b + (1 if running else 0 if q % self.period.length == self._slots(b)[0] else 2)
            at[stage] = at.get(stage, 0.0) + fraction
        for op, at in sent.items():
            sending = self.sendings[op]
            known, total = sum(at.values()), 0.0
            for stage, x in zip(sending.stages, sending.columns, strict=True):
                total += at.get(stage, 0.0) / known
                values[x] = min(1.0, total)
            values[sending.columns[-1]] = 1.0  # includes the part sent while compute waits for another message
        for op, columns in self.started.items():
            sharded = plan.strategies[op.unit].sharded
            for q, x in columns.items():
                sent_by = self._held_from(self.sendings[op], q)
                values[x] = float(sharded and sum(c * values[y] for y, c in sent_by) > 1e-9)
        for u, columns in enumerate(self.done):
            reduced = self._reductions(u)
            for q, x in columns.items():
                sent_by = self._freed_by(reduced, q)
                waits = q < self.period.update_slot and plan.strategies[u] is Strategy.dp
                values[x] = float(not waits and sum(c * values[y] for y, c in sent_by) > 1 - 1e-9)
        return values if not self.program.broken(values) else None

    def _served(self, plan: Plan) -> Iterator[tuple[Op, int, float]]:
        """Yield (operation, stage, fraction of it) of bytes on the replay's link. Stage: 2·slot, + 1 while it runs."""
        steady = replay(plan).steady()
        edges = [t for arrival, begin, _ in steady.slots for t in (arrival, begin)]
        stages = [edges[i] + turn * steady.period_s for turn in range(3) for i in range(len(edges))] + [math.inf]
        for m, slot, (start, end) in zip(plan.messages, plan.schedule.slot, steady.bytes, strict=True):
            shift = 2 * (slot - m.slot)
            i = max(0, bisect.bisect_right(stages, start) - 1)
            while True:
                low, high = max(start, stages[i]), min(end, stages[i + 1])
                part = 1.0 if end <= start else max(0.0, high - low) / (end - start)
                for u, b in m.parts:
                    if part:
                        op = Op(m.kind, u, m.micro)
                        size = plan.blocks[u][b] * plan.width(m)
                        yield op, i + shift, part * size / self.mixes[Strategy.dp].payload(op)
                if end <= stages[i + 1]:
                    break
                i += 1

    def decide(
        self, values: Sequence[float], strategies: tuple[Strategy, ...] | None = None, sent: float = 0.5,
        recompute: tuple[str, ...] | None = None,
    ) -> SlotDecision:  # fmt: skip
        """Return the decision of a solution: strategies, and the slots in which memory allows each operation.

        - ``strategies``, ``recompute``: taken from the solution unless given.
        - ``sent``: in fractional solutions a buffer is held from the slot by which this part of its gather is sent.
        """
        mix = self.problem.mix(strategies or tuple(max(z, key=lambda k: values[z[k]]) for z in self.assign))
        opens, closes = {}, {}
        for op in mix.ops:
            first, last = mix.period.window(op)
            if op in self.started and mix.strategies[op.unit].sharded:
                whole = sum(values[x] for k, x in self.assign[op.unit].items() if k.sharded and op in self.ops[k])
                free = [q for q, x in self.started[op].items() if values[x] <= sent * max(whole, 1e-3)]
                opens[op] = min(last, max(free) + 1) if free else first
            if not op.kind.is_gather and self.problem.budget is not None:
                closes[op] = min((q for q, x in self.done[op.unit].items() if values[x] > 1 - sent), default=last)
        recompute = self.recompute.choices(values) if recompute is None else recompute
        return SlotDecision(mix.strategies, opens, closes, recompute)
