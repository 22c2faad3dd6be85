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
                c[AG,u,R(q)] <= started[u,q] (+ z[u,zero1])        binary, monotone: the buffer is held from slot q on
                Σ bytes at rest + full parameters + gradients not done <= budget - activations of q, for every slot q

A running slot slows down to 1/(1 + interference) of its speed while a message is in flight. Communication that does not
overlap with compute is sent at arrivals and is exposed. A reduction whose gradients become ready while a slot runs
(:mod:`mdcs.plan.early`) may be sent in that slot: the fraction that becomes ready before its end, in the time left
after the first gradient. A message costs β·bytes. With ``depth`` 1 it also costs α, spread over a block. The model
leaves out staging, update time and gradient shards in flight. The replay of the plan includes them.

Everything that the simulator can do satisfies these rows. The optimum is therefore a lower bound of any plan's step
time within the budget. The same holds for a *coarser* model, whose stages are bins of neighbouring slots: windows and
lifetimes are rounded in favour of the solution.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mdcs.plan.early import share_within
from mdcs.plan.ledger import Ledger
from mdcs.plan.messages import Plan
from mdcs.plan.mix import Mix, sequential
from mdcs.plan.period import Op
from mdcs.plan.strategy import Strategy, choices
from mdcs.planner.ilp.solver import Problem, Terms
from mdcs.planner.judge import Judge
from mdcs.profile.link import REDUCTION, Kind
from mdcs.simulator.simulate import steady_state


@dataclass(frozen=True)
class Sending:
    """Columns of one operation: the fraction sent by the end of each stage.

    - ``op``: the operation.
    - ``seconds``: link time of the whole operation.
    - ``stages``: the stages of its window. A stage is 3·bin (unrolled) when compute waits at the first slot of the bin,
      3·bin + 1 while compute runs, 3·bin + 2 when compute waits at a later slot of the bin.
    - ``columns``: one column per stage.
    """

    op: Op
    seconds: float
    stages: tuple[int, ...]
    columns: tuple[int, ...]

    def by(self, stage: int) -> Terms:
        """Return the terms of the fraction sent by the end of a stage."""
        i = bisect.bisect_right(self.stages, stage)
        return [] if i == 0 else [(self.columns[i - 1], 1.0)]

    def during(self, index: int, factor: float = 1.0) -> Terms:
        """Return the terms of ``factor`` times the fraction sent in the stage with this index."""
        terms = [(self.columns[index], factor)]
        return terms if index == 0 else [*terms, (self.columns[index - 1], -factor)]


@dataclass(frozen=True)
class Decision:
    """A solution: a strategy per unit, and the slots (unrolled) that bound its operations.

    - ``opens``: first slot at which an operation is issued.
    - ``closes``: slot at which it must be done.
    """

    strategies: tuple[Strategy, ...]
    opens: dict[Op, int] = field(default_factory=dict)
    closes: dict[Op, int] = field(default_factory=dict)

    def windows(self, mix: Mix) -> dict[Op, tuple[int, int]]:
        """Return the windows of the mix, narrowed by the decision."""
        windows = {op: mix.window(op) for op in mix.ops}
        return {op: (max(a, self.opens.get(op, a)), min(b, self.closes.get(op, b))) for op, (a, b) in windows.items()}


class SlotModel:
    """The integer program of one job under ``judge.budget``.

    - ``fixed``: strategies of the units. Only the schedule is then open.
    - ``width``: slots per bin. More than one makes a coarser model, a relaxation.
    - ``reach``: number of slots by which a reduction may be late or a gather early. Fewer than the period make a
      smaller model, whose bound proves nothing.
    - ``loose``: leave out the memory of the schedule, so that buffers live only while compute uses them. A relaxation,
      too.
    """

    def __init__(
        self,
        judge: Judge,
        *,
        fixed: Sequence[Strategy] | None = None,
        width: int = 1,
        reach: int | None = None,
        loose: bool = False,
    ) -> None:
        self.judge, self.fixed, self.reach, self.loose = judge, fixed, reach, loose
        self.profile = judge.profile
        self.problem = Problem()
        units = range(len(self.profile.units))
        self.mixes = {k: judge.mix([k] * len(self.profile.units)) for k in choices(judge.profile)}
        self.ops = {k: frozenset(mix.ops) for k, mix in self.mixes.items()}
        self.period = judge.job.period
        passes = [i for i, s in enumerate(self.period.slots) if i == 0 or s.phase != self.period.slots[i - 1].phase]
        ends = [*passes[1:], self.period.length]
        self.bins = [q for first, end in zip(passes, ends, strict=True) for q in range(first, end, width)]
        self.coarse = len(self.bins) < self.period.length
        self.slow = 1 + self.profile.interference
        self.choices = [self._choices(u) for u in units]
        self.z = [{k: self.problem.column(integer=True) for k in allowed} for allowed in self.choices]
        self.sendings: dict[Op, Sending] = {}
        self.started: dict[Op, dict[int, int]] = {}  # operation -> unrolled slot -> column
        self.done: list[dict[int, int]] = [{} for _ in units]
        self._keys: dict[int, tuple[int, ...]] = {}  # binary column -> columns whose sum it bounds
        for u in units:
            self.problem.equal([(x, 1.0) for x in self.z[u].values()], 1.0)
            self._send(u)
        self._precedence()
        self._link()
        if judge.budget is not None:
            self._memory(judge.budget - judge.job.reserve)

    # ---- columns

    def _choices(self, unit: int) -> list[Strategy]:
        if self.fixed is not None:
            return [self.judge.mix(self.fixed).strategies[unit]]
        if not self.profile.units[unit].trainable:
            pointless: Strategy | None = Strategy.zero1
        else:
            pointless = Strategy.dp if self._dominated(unit) else None
        return [k for k, mix in self.mixes.items() if k is not pointless and mix.strategies[unit] is k]

    def _dominated(self, unit: int) -> bool:
        """Whether zero1 is no slower on the link than dp and holds no more bytes.

        Not if gradients become ready early: an early all-reduce (dp) is then complete, but an early reduce-scatter
        (zero1) is only half of the communication.
        """
        if self._first_part(unit) < 1:
            return False
        time = {k: sum(self._seconds(Op(kind, unit, 0)) for kind in k.kinds(True, True)) for k in (Strategy.dp, Strategy.zero1)}
        return self.profile.optimizer.state_tensors > 0 and time[Strategy.zero1] <= time[Strategy.dp] * (1 + 1e-9)

    def _seconds(self, op: Op) -> float:
        link, size = self.profile.link, self.mixes[Strategy.dp].payload(op)
        wire = self.profile.wire(op.kind, size)
        return link.beta_of(op.kind) * wire + self._latency(op)

    def _latency(self, op: Op) -> float:
        """Return the latency (seconds) of an operation: α per block with one message in flight.

        0 with several messages in flight, because the latency overlaps with the bytes of others.
        """
        link, size = self.profile.link, self.mixes[Strategy.dp].payload(op)
        return link.alpha_of(op.kind) * max(1.0, size / link.block) if link.depth == 1 else 0.0

    def _first_part(self, unit: int) -> float:
        """Return the fraction of the unit's last backward slot after which its first gradient is ready."""
        return min((part for _, part in self.profile.units[unit].gradients), default=1.0)

    def _opens(self, op: Op) -> int:
        """Return the first slot (unrolled) that may run while the operation is sent."""
        first = self._window(op)[0]
        return first if op.kind.is_gather or self._first_part(op.unit) == 1 else first - 1

    def _bin(self, slot: int) -> int:
        """Return the bin (unrolled) of an unrolled slot."""
        turns, q = divmod(slot, self.period.length)
        return turns * len(self.bins) + bisect.bisect_right(self.bins, q) - 1

    def _slots(self, b: int) -> range:
        """Return the slots of a bin."""
        b %= len(self.bins)
        return range(self.bins[b], self.bins[b + 1] if b + 1 < len(self.bins) else self.period.length)

    def _send(self, u: int) -> None:
        """Add the columns of every operation that some strategy of the unit needs."""
        needed: dict[Op, list[Strategy]] = {}
        for k in self.choices[u]:
            for op in self.mixes[k].ops:
                if op.unit == u:
                    needed.setdefault(op, []).append(k)
        for op, strategies in needed.items():
            first, last = self._window(op)
            # Compute waits for a gather only at the slot that needs it: waiting later holds the buffer for less time.
            bins = range(self._bin(self._opens(op)), self._bin(last) + 1)
            stages = [s for b in bins for s in (3 * b, 3 * b + 1, 3 * b + 2) if self._usable(op, s, first, last)]
            seconds = self._seconds(op)
            columns = [self.problem.column() for _ in stages]
            sending = Sending(op, seconds, tuple(stages), tuple(columns))
            self.sendings[op] = sending
            for i, stage in enumerate(stages):
                price = 1 - 1 / self.slow if stage % 3 == 1 else 1.0
                for x, c in sending.during(i, price * seconds):
                    self.problem.costs[x] += c
                if i:
                    self.problem.at_most([(columns[i - 1], 1.0), (columns[i], -1.0)], 0.0)
            whole = [(self.z[u][k], -1.0) for k in strategies]
            self.problem.equal([(columns[-1], 1.0), *whole], 0.0)
            if self._opens(op) < first and not self.coarse:
                self._send_early(sending, strategies)

    def _send_early(self, sending: Sending, strategies: Sequence[Strategy]) -> None:
        """Limit the fraction of a reduction that is sent in the slot in which its gradients become ready."""
        unit, [early, *_] = sending.op.unit, sending.columns
        share = share_within(self.profile, unit)
        self.problem.at_most([(early, 1.0), *((self.z[unit][k], -share) for k in strategies)], 0.0)
        slot = self.period.slots[self._opens(sending.op) % self.period.length]
        left = (1 - self._first_part(unit)) * self.profile.slots[slot.place].seconds
        self.problem.at_most([(early, sending.seconds)], self.slow * left)

    def _usable(self, op: Op, stage: int, first: int, last: int) -> bool:
        b, what = divmod(stage, 3)
        slots = self._slots(b)
        start = slots[0] + (b // len(self.bins)) * self.period.length
        end = start + len(slots)
        if what == 1:  # some slot of the bin runs inside the window
            return self._opens(op) < end and last > start
        if what == 2:  # compute arrives at a later slot of the bin that lies in the window
            return max(first, start + 1) <= min(last, end - 1)
        return first <= start and (not op.kind.is_gather or self.coarse or b == self._bin(last))

    # ---- rows

    def _precedence(self) -> None:
        for op, gather in self.sendings.items():
            reduction = self.sendings.get(Op(REDUCTION[op.kind], op.unit, 0)) if op.kind in REDUCTION else None
            if op.micro or reduction is None:
                continue
            for stage in gather.stages[:-1]:
                # Within a bin, running and waiting stages have no order, so the row allows both.
                self.problem.at_most([*gather.by(stage), *_negative(reduction.by(stage + 1 if stage % 3 == 1 else stage))], 0.0)

    def _link(self) -> None:
        seconds = [self.profile.slots[s.place].seconds for s in self.period.slots]
        rows: dict[int, Terms] = {}
        partial: dict[tuple[int, bool, int], Terms] = {}  # (bin, whether a suffix of it, boundary slot) -> terms
        for op, sending in self.sendings.items():
            first, last = self._opens(op), self._window(op)[1]
            for i, stage in enumerate(sending.stages):
                if stage % 3 != 1:
                    continue
                b = stage // 3 % len(self.bins)
                terms = sending.during(i, sending.seconds)
                rows.setdefault(b, []).extend(terms)
                slots = self._slots(b)
                if len(slots) == 1:
                    continue
                offset = (stage // 3 // len(self.bins)) * self.period.length
                for q in slots[1:]:
                    if first >= q + offset:  # sent in q or later
                        partial.setdefault((b, True, q), []).extend(terms)
                    if last <= q + offset:  # sent before q
                        partial.setdefault((b, False, q), []).extend(terms)
        for b, terms in rows.items():
            self.problem.at_most(terms, self.slow * sum(seconds[q] for q in self._slots(b)))
        for (b, suffix, q), terms in partial.items():
            covered = [s for s in self._slots(b) if (s >= q if suffix else s < q)]
            self.problem.at_most(terms, self.slow * sum(seconds[s] for s in covered))

    def _window(self, op: Op) -> tuple[int, int]:
        first, last = self.mixes[Strategy.dp].window(op)
        if self.reach is None:
            return first, last
        return (first, min(last, first + self.reach)) if not op.kind.is_gather else (max(first, last - self.reach), last)

    def _memory(self, cap: int) -> None:
        """Add the memory row of every slot, scaled by the bytes left for units because of the solver's tolerances."""
        length = self.period.length
        held: list[Terms] = [[] for _ in range(length)]
        base = [0.0] * length
        for u, unit in enumerate(self.profile.units):
            full = self.mixes[Strategy.dp].payload(Op(Kind.AG_F, u, 0))
            gradient = self.mixes[Strategy.dp].payload(Op(Kind.RS, u, 0))
            for k, x in self.z[u].items():
                rest = _rest(self.judge, u, k)
                for q in range(length):
                    held[q].append((x, rest))
            self._hold_full(u, full, held)
            if unit.trainable:
                self._hold_gradient(u, gradient, held, base)
        for q in range(length):
            left = cap - self.profile.slots[self.period.slots[q].place].peak - base[q]
            scale = max(1.0, left)
            self.problem.at_most([(x, c / scale) for x, c in held[q]], left / scale)

    def _hold_full(self, u: int, full: int, held: list[Terms]) -> None:
        """Add the bytes of gathered parameters.

        Until the slot that needs them, a column of their own decides whether the buffer is held. After that, the
        strategy decides.
        """
        length = self.period.length
        for k in self.choices[u]:
            if not k.sharded:
                continue
            for op in self.sendings:
                if op.unit == u and op.kind.is_gather and op in self.ops[k]:
                    for q in range(self._window(op)[1], self.period.release(op, k) + 1):
                        held[q % length].append((self.z[u][k], full))
        for op, sending in self.sendings.items():
            if self.loose or op.unit != u or not op.kind.is_gather or not any(k.sharded for k in self.choices[u]):
                continue
            first, last = self._window(op)
            free = [(self.z[u][k], -1.0) for k in self.choices[u] if op in self.ops[k] and not k.sharded]
            columns = self.started[op] = {}
            for q in range(first, last):
                sent = self._held_from(sending, q)
                if not sent:
                    continue
                columns[q] = self._shared(sent, columns, q)
                if columns[q] != columns.get(q - 1):
                    self.problem.at_most([*sent, (columns[q], -1.0), *free], 0.0)
                held[q % length].append((columns[q], full))

    def _shared(self, sent: Terms, columns: dict[int, int], q: int) -> int:
        """Return a binary column for slot q. It is never below the column of slot q - 1.

        If the terms of both slots are the same, it is the same column.
        """
        key = tuple(x for x, _ in sent)
        if q - 1 in columns and self._keys[columns[q - 1]] == key:
            return columns[q - 1]
        x = self.problem.column(integer=True)
        self._keys[x] = key
        if q - 1 in columns:
            self.problem.at_most([(columns[q - 1], 1.0), (x, -1.0)], 0.0)
        return x

    def _hold_gradient(self, u: int, size: int, held: list[Terms], base: list[float]) -> None:
        """Add the bytes of the full gradient, from the first backward slot of the period until it is reduced."""
        length = self.period.length
        reductions = self._reductions(u)
        span = self.period.backward(u, 0)
        assert span is not None
        first, last = self._window(reductions[0].op)
        start = span[0] % length
        for q in range(start, first if start < first else first + length):
            base[q % length] += size
        if self.loose:
            return
        columns = self.done[u]
        for q in range(first, last):
            sent = self._freed_by(reductions, q)
            barrier_dp = [(self.z[u][k], 1.0) for k in self.choices[u] if k is Strategy.dp and not self.judge.job.cross_iteration]
            base[q] += size
            if not sent:
                continue
            x = columns[q] = self._shared(sent, columns, q)
            if x != columns.get(q - 1):
                self.problem.at_most([(x, 1.0), *_negative(sent)], 0.0)
                if barrier_dp:
                    self.problem.at_most([(x, 1.0), *barrier_dp], 1.0)
            held[q].append((x, -float(size)))

    def _reductions(self, u: int) -> list[Sending]:
        """Return the possible reductions of a unit. Only the one of its strategy is sent."""
        possible = (Op(kind, u, 0) for kind in (Kind.RS, Kind.AR, Kind.RS_N))
        return [self.sendings[op] for op in possible if op in self.sendings]

    def _held_from(self, gather: Sending, q: int) -> Terms:
        """Return the terms of a gather that surely hold its buffer in slot q.

        Terms of a bin count only in its last slot, because the model does not know in which slot of the bin they are
        sent.
        """
        b = self._bin(q)
        last_of_bin = q % self.period.length == self._slots(b)[-1]
        return gather.by(3 * b + 2 if last_of_bin else 3 * b - 1)

    def _freed_by(self, reductions: Sequence[Sending], q: int) -> Terms:
        """Return the terms of the reductions that may be done when slot q begins.

        At the first slot of a bin, only its arrival stage counts. At later slots, all stages of the bin count.
        """
        b = self._bin(q)
        first_of_bin = q % self.period.length == self._slots(b)[0]
        return [t for s in reductions for t in s.by(3 * b if first_of_bin else 3 * b + 2)]

    # ---- solutions

    def values_of(self, plan: Plan) -> list[float] | None:
        """Return the column values of a plan's replay. None if the model cannot express the plan."""
        if any(s not in z for s, z in zip(plan.strategies, self.z, strict=True)):
            return None
        values = [0.0] * len(self.problem.costs)
        for u, strategy in enumerate(plan.strategies):
            values[self.z[u][strategy]] = 1.0
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
            barrier = not self.judge.job.cross_iteration and plan.strategies[u] is Strategy.dp
            for q, x in columns.items():
                sent_by = self._freed_by(reduced, q)
                values[x] = float(not barrier and sum(c * values[y] for y, c in sent_by) > 1 - 1e-9)
        return values if not self.problem.broken(values) else None

    def _served(self, plan: Plan) -> Iterator[tuple[Op, int, float]]:
        """Yield (operation, stage, fraction of the operation) for the bytes on the link in the replay.

        The stage is 2·slot, plus 1 while compute runs.
        """
        steady = steady_state(plan)
        edges = [t for arrival, begin, _ in steady.slots for t in (arrival, begin)]
        stages = [edges[i] + turn * steady.period_s for turn in range(3) for i in range(len(edges))] + [math.inf]
        for m, (start, end) in zip(plan.messages, steady.bytes, strict=True):
            shift = 2 * (plan.unrolled(m) - m.slot)
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

    @property
    def compute_s(self) -> float:
        """Seconds of compute in a period."""
        return sum(self.profile.slots[s.place].seconds for s in self.period.slots)

    def step_bound(self, bound: float) -> float:
        """Return the step time (seconds) that follows from a bound of the problem's cost.

        The problem charges a latency per block, but a plan may send larger messages. The latencies are therefore
        subtracted.
        """
        latency = 0.0
        for u, z in enumerate(self.z):
            latency += max(sum(self._latency(op) for op in self.ops[k] if op.unit == u) for k in z)
        return self.compute_s + max(0.0, bound - latency)

    def traffic(self) -> Problem:
        """Return the same rows with another objective: the seconds for which the link is busy."""
        costs = [0.0] * len(self.problem.costs)
        for sending in self.sendings.values():
            costs[sending.columns[-1]] = sending.seconds - self._latency(sending.op)
        return dataclasses.replace(self.problem, costs=costs)

    def decide(self, values: Sequence[float], strategies: tuple[Strategy, ...] | None = None, sent: float = 0.5) -> Decision:
        """Return the decision of a solution: strategies, and the slots in which memory allows each operation.

        - ``strategies``: taken from the solution unless given.
        - ``sent``: threshold for fractional solutions. A buffer is held from the slot by which this fraction of its
          gather is sent.
        """
        mix = self.judge.mix(strategies or tuple(max(z, key=lambda k: values[z[k]]) for z in self.z))
        opens, closes = {}, {}
        for op in mix.ops:
            first, last = mix.window(op)
            if op in self.started and mix.strategies[op.unit].sharded:
                whole = sum(values[x] for k, x in self.z[op.unit].items() if k.sharded and op in self.ops[k])
                held = [q for q, x in self.started[op].items() if values[x] > sent * max(whole, 1e-3)]
                opens[op] = min(held, default=last)
            if not op.kind.is_gather and self.judge.budget is not None:
                last = self._window(op)[1]
                closes[op] = min((q for q, x in self.done[op.unit].items() if values[x] > 1 - sent), default=last)
        return Decision(mix.strategies, opens, closes)


def _negative(terms: Terms) -> Terms:
    return [(x, -c) for x, c in terms]


def _rest(judge: Judge, unit: int, strategy: Strategy) -> int:
    """Return the bytes at rest of one unit alone, by the ledger."""
    profile = judge.profile
    slots = tuple(dataclasses.replace(s, unit=0) for s in profile.slots)
    alone = dataclasses.replace(profile, units=(profile.units[unit],), slots=slots)
    return Ledger(sequential(Mix(dataclasses.replace(judge.job, profile=alone), (strategy,)))).rest_bytes
