"""The schedule in the slot model (:mod:`mdcs.planner.ilp.slot_model` has the formulas): columns for what is sent in
each stage, and rows for windows, order and link time.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mdcs.plan.period import Op, Strategy, choices, ready_fraction_in_slot
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.ilp.solver import IntegerProgram, Terms
from mdcs.profile.link import REDUCTION
from mdcs.profile.recompute import NONE

_LEAN = 3e-4  # cost of holding all buffers for as long as possible, as a fraction of the seconds of compute

Need = tuple[Terms, int]
"""Terms and a constant whose sum is at most the bytes of activations and workspace."""


class RecomputeColumns:
    """One binary column per unit and option of recomputation. None unless the problem decides what is recomputed.

    Of the units' choices (:func:`mdcs.plan.job.recomputing`) the bytes of a slot are linear, except that a slot's peak
    is the largest of several terms: then there are several rows. For w[u,c], Σ_c w[u,c] <= 1::

        live'    = live - Σ freed·w                                    options whose uses span the slot
        live' + (peak - live)·(1 - Σ w of options that recompute in the slot) + Σ growth·w of options of a forward use
              + Σ_c peak[u,c]·w[u,c]                                    for every unit u that recomputes in the slot

    No row asks for more bytes than the slots of the choices have. ``second``: cost of a second in the program.
    """

    def __init__(self, program: IntegerProgram, problem: PlanningProblem, second: float = 1.0) -> None:
        profile = self._profile = problem.job.profile if problem.recomputes else problem.profile
        options = profile.recompute if problem.recomputes else ()
        costs = [second * problem.job.micro_steps * option.seconds for option in options]
        self.columns = {o: program.column(cost, integer=True) for o, cost in zip(options, costs, strict=True)}
        by_unit: dict[int, Terms] = defaultdict(list)
        self._freed, self._grown, self._higher = (defaultdict[int, Terms](list) for _ in range(3))
        self._peaks: dict[int, dict[int, Terms]] = defaultdict(lambda: defaultdict(list))  # slot -> unit -> terms
        for option, x in self.columns.items():
            by_unit[option.unit].append((x, 1.0))
            peaks: dict[int, int] = {}
            for use in option.uses:
                backward = profile.forward_slots + use.backward
                for s in range(use.forward + 1, backward + 1):
                    self._freed[s].append((x, -float(use.freed)))
                self._grown[backward].append((x, use.seconds))
                self._higher[use.forward].append((x, float(use.forward_peak)))
                peaks[backward] = max(peaks.get(backward, 0), use.peak)
            for s, peak in peaks.items():
                self._peaks[s][option.unit].append((x, float(peak)))
        for terms in by_unit.values():
            program.at_most(terms, 1.0)

    def grown(self, place: int) -> Terms:
        """Return the seconds by which a slot of the profile grows."""
        return self._grown.get(place, [])

    def freed(self, place: int) -> float:
        """Return the most bytes that choices can free in a slot of the profile."""
        return -sum(c for _, c in self._freed.get(place, ()))

    def live(self, place: int) -> Need:
        """Return the bytes when a slot of the profile begins."""
        return self._freed.get(place, []), self._profile.slots[place].live

    def peaks(self, place: int) -> list[Need]:
        """Return terms of which the largest is the peak of a slot of the profile."""
        freed, slot = self._freed.get(place, []), self._profile.slots[place]
        recomputed = self._peaks.get(place, {})
        more = float(slot.peak - slot.live)
        without = [*freed, *self._higher.get(place, []), *((x, -more) for own in recomputed.values() for x, _ in own)]
        needs = [([*without, *own], slot.peak) for own in recomputed.values()] or [(without, slot.peak)]
        return needs if all(c >= 0 for _, c in self._higher.get(place, [])) else [*needs, self.live(place)]

    def choices(self, values: Sequence[float]) -> tuple[str, ...]:
        """Return the choice of every unit in a solution. Empty: no unit has a choice."""
        chosen = {option.unit: option.choice for option, x in self.columns.items() if values[x] > 0.5}
        return tuple(chosen.get(u, NONE) for u in range(len(self._profile.units))) if self.columns else ()

    def set(self, values: list[float], choices: Sequence[str]) -> None:
        """Set the columns of these choices."""
        for option, x in self.columns.items():
            values[x] = float(bool(choices) and choices[option.unit] == option.choice)


@dataclass(frozen=True)
class TransferColumns:
    """Columns of one operation: the fraction sent by the end of each stage of its window. ``seconds``: of all of it.

    - ``stages``: 3·bin (unrolled) when compute waits at the first slot of the bin, + 1 while compute runs, + 2 when
      compute waits at a later slot of the bin.
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


class SlotSchedule:
    """Strategies and schedule of one job, without memory.

    - ``fixed``: strategies of the units; only the schedule is then open.
    - ``width``: slots per bin. More than one makes a coarser model, a relaxation. ``apart``: slots that are bins.
    """

    def __init__(
        self, problem: PlanningProblem, *, fixed: Sequence[Strategy] | None = None, width: int = 1,
        apart: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.problem, self.fixed = problem, fixed
        self.program = IntegerProgram()
        self.recompute = RecomputeColumns(self.program, problem)
        if self.recompute.columns:  # rows are for the slots without recomputation, and the columns change them
            self.problem = problem = problem.decided(())
        self.profile, self.period = problem.profile, problem.job.period
        units = range(len(self.profile.units))
        self.mixes = {k: problem.mix([k] * len(units)) for k in choices(self.profile)}
        self.ops = {k: frozenset(mix.ops) for k, mix in self.mixes.items()}
        passes = [i for i, s in enumerate(self.period.slots) if i == 0 or s.phase != self.period.slots[i - 1].phase]
        ends = [*passes[1:], self.period.length]
        edges = {q for first, end in zip(passes, ends, strict=True) for q in range(first, end, width)}
        self.bins = sorted(edges | {edge for q in apart for edge in (q, q + 1) if edge < self.period.length})
        self.slowdown = 1 + self.profile.interference
        self.choices = [self._choices(u) for u in units]
        self.assign = [{k: self.program.column(integer=True) for k in allowed} for allowed in self.choices]
        self.sendings: dict[Op, TransferColumns] = {}
        for u in units:
            self.program.equal([(x, 1.0) for x in self.assign[u].values()], 1.0)
            self._send(u)
        self._precedence()
        self._link()

    def _choices(self, unit: int) -> list[Strategy]:
        if self.fixed is not None:
            return [self.problem.mix(self.fixed).strategies[unit]]
        is_frozen = not self.profile.units[unit].trainable
        pointless = Strategy.zero2 if is_frozen else Strategy.dp if self._dominated(unit) else None
        useful = choices(self.profile, self.problem.budget is not None)
        return [k for k in useful if k is not pointless and self.mixes[k].strategies[unit] is k]

    def _dominated(self, unit: int) -> bool:
        """Return whether zero2 is no slower on the link than dp and holds no more bytes.

        Not if gradients become ready early: an early all-reduce is then complete, an early reduce-scatter only half of
        the communication. Nor if the gather must wait for a barrier.
        """
        opens, gather_opens = (self.period.window(Op(kind, unit, 0))[0] for kind in Strategy.zero2.kinds(True, True))
        if self._first_part(unit) < 1 or gather_opens > opens:
            return False
        dp, zero2 = (
            sum(self._seconds(Op(kind, unit, 0)) for kind in k.kinds(True, True)) for k in (Strategy.dp, Strategy.zero2)
        )
        return self.profile.optimizer.state_tensors > 0 and zero2 <= dp * (1 + 1e-9)

    def _seconds(self, op: Op) -> float:
        wire = self.profile.wire(op.kind, self.mixes[Strategy.dp].payload(op))
        return self.profile.link.beta_of(op.kind) * wire + self._latency(op)

    def _latency(self, op: Op) -> float:
        """Return the latency (seconds) of an operation: α per block; 0 where messages in flight hide each other's."""
        link, size = self.profile.link, self.mixes[Strategy.dp].payload(op)
        return link.alpha_of(op.kind) * max(1.0, size / link.block) if link.depth == 1 else 0.0

    def _first_part(self, unit: int) -> float:
        """Return the fraction of the unit's last backward slot after which its first gradient is ready."""
        return min((part for _, part in self.profile.units[unit].gradients), default=1.0)

    def _opens(self, op: Op) -> int:
        """Return the first slot (unrolled) that may run while the operation is sent."""
        first = self.period.window(op)[0]
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
            first, last = self.period.window(op)
            # Compute waits for a gather only at the slot that needs it: waiting later holds the buffer for less time.
            bins = range(self._bin(self._opens(op)), self._bin(last) + 1)
            stages = [s for b in bins for s in (3 * b, 3 * b + 1, 3 * b + 2) if self._usable(op, s, first, last)]
            seconds = self._seconds(op)
            columns = [self.program.column() for _ in stages]
            sending = self.sendings[op] = TransferColumns(op, seconds, tuple(stages), tuple(columns))
            for i, stage in enumerate(stages):
                price = 1 - 1 / self.slowdown if stage % 3 == 1 else 1.0
                for x, c in sending.during(i, price * seconds):
                    self.program.costs[x] += c
                if i:
                    self.program.at_most([(columns[i - 1], 1.0), (columns[i], -1.0)], 0.0)
            whole = [(self.assign[u][k], -1.0) for k in strategies]
            self.program.equal([(columns[-1], 1.0), *whole], 0.0)
            if self._opens(op) < first and len(self._slots(self._bin(self._opens(op)))) == 1:
                self._send_early(sending, strategies)

    def _send_early(self, sending: TransferColumns, strategies: Sequence[Strategy]) -> None:
        """Limit the fraction of a reduction that is sent in the slot in which its gradients become ready."""
        unit, [early, *_] = sending.op.unit, sending.columns
        share = ready_fraction_in_slot(self.profile, unit)
        self.program.at_most([(early, 1.0), *((self.assign[unit][k], -share) for k in strategies)], 0.0)
        left = (1 - self._first_part(unit)) * self.period.seconds[self._opens(sending.op) % self.period.length]
        self.program.at_most([(early, sending.seconds)], self.slowdown * left)

    def _usable(self, op: Op, stage: int, first: int, last: int) -> bool:
        b, what = divmod(stage, 3)
        slots = self._slots(b)
        start = slots[0] + (b // len(self.bins)) * self.period.length
        end = start + len(slots)
        if what == 1:  # some slot of the bin runs inside the window
            return self._opens(op) < end and last > start
        if what == 2:  # compute arrives at a later slot of the bin that lies in the window
            return start < last < end if op.kind.is_gather else max(first, start + 1) <= min(last, end - 1)
        return first <= start and (not op.kind.is_gather or start == last)

    def _precedence(self) -> None:
        for op, gather in self.sendings.items():
            reduction = self.sendings.get(Op(REDUCTION[op.kind], op.unit, 0)) if op.kind in REDUCTION else None
            if op.micro or reduction is None:
                continue
            for stage in gather.stages[:-1]:
                # Within a bin, running and waiting stages have no order, so the row allows both.
                reduced = reduction.by(stage + 1 if stage % 3 == 1 else stage)
                self.program.at_most([*gather.by(stage), *negative(reduced)], 0.0)

    def _link(self) -> None:
        rows: dict[int, Terms] = {}
        partial: dict[tuple[int, bool, int], Terms] = {}  # (bin, whether a suffix of it, boundary slot) -> terms
        for op, sending in self.sendings.items():
            first, last = self._opens(op), self.period.window(op)[1]
            for i, stage in enumerate(sending.stages):
                if stage % 3 != 1:
                    continue
                b = stage // 3 % len(self.bins)
                terms = sending.during(i, sending.seconds)
                rows.setdefault(b, []).extend(terms)
                offset = (stage // 3 // len(self.bins)) * self.period.length
                for q in self._slots(b)[1:]:
                    if first >= q + offset:  # sent in q or later
                        partial.setdefault((b, True, q), []).extend(terms)
                    if last <= q + offset:  # sent before q
                        partial.setdefault((b, False, q), []).extend(terms)
        for b, terms in rows.items():
            self._fit_link(terms, self._slots(b))
        for (b, suffix, q), terms in partial.items():
            self._fit_link(terms, [s for s in self._slots(b) if (s >= q if suffix else s < q)])

    def _fit_link(self, terms: Terms, slots: Sequence[int]) -> None:
        """Limit what is sent while these slots run to their seconds."""
        grown = [(x, -self.slowdown * c) for q in slots for x, c in self.recompute.grown(self.period.slots[q].place)]
        self.program.at_most([*terms, *grown], self.slowdown * sum(self.period.seconds[q] for q in slots))

    @property
    def compute_s(self) -> float:
        """Seconds of compute in a period, without what the columns of recomputation add."""
        return sum(self.period.seconds)

    def step_bound(self, bound: float) -> float:
        """Return the step time (seconds) that follows from a bound of the problem's cost, without the latencies that it
        charges per block: a plan may send larger messages.
        """
        latency = 0.0
        for u, z in enumerate(self.assign):
            latency += max(sum(self._latency(op) for op in self.ops[k] if op.unit == u) for k in z)
        return self.compute_s + max(0.0, bound - latency)

    def prefer_lean(self) -> None:
        """Add a small cost to bytes that are held for long: of solutions as fast, the one that holds fewest is left,
        with late gathers and early reductions. The cost is no bound any more.
        """
        held: dict[int, float] = {}  # column -> bytes times slots
        for op, sending in self.sendings.items():
            size = self.mixes[Strategy.dp].payload(op)
            for x, (stage, later) in zip(sending.columns, itertools.pairwise(sending.stages), strict=False):
                slots = sum(len(self._slots(b)) for b in range(stage // 3, later // 3))
                held[x] = float(size * slots if op.kind.is_gather else -size * slots)
        price = _LEAN * self.compute_s / max(1.0, sum(map(abs, held.values())))
        for x, weight in held.items():
            self.program.costs[x] += price * weight

    def traffic(self) -> IntegerProgram:
        """Return the same rows with another objective: the seconds for which the link is busy."""
        costs = [0.0] * len(self.program.costs)
        for sending in self.sendings.values():
            costs[sending.columns[-1]] = sending.seconds - self._latency(sending.op)
        return dataclasses.replace(self.program, costs=costs)


def negative(terms: Terms) -> Terms:
    """Return the terms with the opposite sign."""
    return [(x, -c) for x, c in terms]
