"""Replay of a plan in virtual time: what the runtime would do, slot by slot and message by message.

Compute is serial, the link is FIFO with ``depth`` messages in flight (:mod:`mdcs.link`), what follows a message
(summing, unpacking, updating) is serial on the dispatcher. A message starts when its turn has come, its data is
ready and compute has arrived at its issue slot; messages and slots are admitted only when their bytes fit, and
admission never changes the order. Because compute is the only thing that issues messages, and it waits only for
messages issued before, every time follows from earlier ones: one pass, no event queue.

Periods are replayed from the prologue (iteration 1 starts at the first forward slot) until they repeat.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from mdcs.ledger import Ledger, SlotLimits, most_in_flight
from mdcs.link import Kind
from mdcs.measure.timeline import Interval, StepTimes, step_times
from mdcs.plan import CATEGORIES, Plan, PlanError, Prediction

_MAX_PERIODS = 12
_REPEATS = 1e-9  # relative change of the period at which the replay has converged


@dataclass
class Replay:
    """Times in seconds from the start of the last replayed period (its first backward slot)."""

    period_s: float
    times: StepTimes
    intervals: list[Interval] = field(default_factory=list)
    peak: dict[str, int] = field(default_factory=dict)  # by category, each at its own peak, and "total"
    curve: list[dict[str, int]] = field(default_factory=list)  # per slot, by category, and "total"

    def prediction(self) -> Prediction:
        t = self.times
        return Prediction(
            step_s=self.period_s,
            compute_s=t.compute_s,
            communication_s=t.communication_s,
            overlap_s=t.overlap_s,
            exposed_s=t.exposed_s,
            overlap_ratio=t.overlap_ratio,
            peak_bytes=self.peak["total"],
            memory=self.peak,
        )


class _Costs:
    """What the replay needs of a plan, looked up once."""

    def __init__(self, plan: Plan) -> None:
        link, profile, opt = plan.profile.link, plan.profile, plan.profile.optimizer
        self.alpha = [link.alpha_of(m.kind) for m in plan.messages]
        self.transfer = [link.beta_of(m.kind) * plan.wire(m) for m in plan.messages]
        self.copy: list[float] = []
        self.update: list[float] = []
        self.after = plan.waits_for
        reductions = [i for i, m in enumerate(plan.messages) if not m.kind.is_gather]
        barrier_update = 0.0
        for i, m in enumerate(plan.messages):
            summed = m.kind is Kind.RS and profile.reduce_scatter == "all_to_all"
            packed = len(m.parts) > 1
            self.copy.append(profile.copy_seconds_per_byte * plan.payload(m) * (int(summed) + 2 * int(packed)))
            seconds = 0.0
            if not m.kind.is_gather:
                share = 1 if m.kind is Kind.AR else plan.world
                seconds = plan.elements(m) / share * opt.seconds_per_element + len(m.parts) * opt.seconds_per_run
                if not plan.cross_iteration:
                    barrier_update += seconds
                    seconds = barrier_update if i == reductions[-1] else 0.0
            self.update.append(seconds)


def replay(plan: Plan, *, detail: bool = True, ledger: Ledger | None = None) -> Replay:
    """Replay until the period repeats. ``detail`` adds intervals and the memory curve of the last period.

    Raises PlanError, naming the slot, when admission under the plan's budget deadlocks.
    """
    ledger = ledger or Ledger(plan)
    limits, costs, period = SlotLimits(plan), _Costs(plan), plan.period
    n, length, turn, depth = len(plan.messages), period.length, period.turn, plan.profile.link.depth
    seconds = [plan.profile.slots[s.place].seconds for s in period.slots]
    slowdown = 1 + plan.profile.interference
    cap = None if plan.budget is None else plan.budget - plan.reserve

    start: dict[int, float] = {}
    finish: dict[int, float] = {}
    processed: dict[int, float] = {}
    last_start = last_finish = last_processed = 0.0
    freed: list[tuple[float, int]] = []  # (time, bytes) of releases by messages
    held = ledger.rest_bytes
    gradients: dict[int, int] = {}
    slot_starts: list[float] = []
    slot_ends: list[float] = []
    slot_arrivals: list[float] = []
    busy_from = 0  # first message that may still be in flight, for interference
    issued = unprocessed = 0
    turns: list[float] = []
    now = 0.0
    transient = [e.transient for e in ledger.messages]

    def admit(t: float, more: int, q: int, upcoming: int | None = None) -> float:
        """When ``more`` bytes fit beside what is held and what messages in flight may take."""
        nonlocal held, unprocessed
        while True:
            while freed and freed[0][0] <= t:
                held -= heapq.heappop(freed)[1]
            if cap is None:
                return t
            while unprocessed < issued and processed[unprocessed] <= t:
                unprocessed += 1
            pending = [transient[g % n] for g in range(unprocessed, issued)]
            if upcoming is not None:
                pending.append(transient[upcoming % n])
            need = held + more + most_in_flight(pending, depth)
            if need <= cap:
                return t
            events = [freed[0][0]] if freed else []
            if unprocessed < issued:
                events.append(processed[unprocessed])
            if not events:
                raise PlanError(f"deadlock at slot {q} ({period.name(q)}): needs {need} of {cap} bytes")
            t = min(events)

    for p in range(_MAX_PERIODS):
        base = p * n
        for q in range(turn if p == 0 else 0, length):
            arrival = now
            slot_arrivals.append(arrival)
            slot = ledger.slots[q]
            for g in range(issued, base + limits.issued[q]):
                i = g % n
                e = ledger.messages[i]
                if p == 0 and not plan.in_prologue(plan.messages[i]):
                    start[g] = finish[g] = processed[g] = last_processed
                    issued = g + 1
                    continue
                now = admit(now, e.held + slot.live, q, g)
                held += e.held
                issued = g + 1
                begin = max(now, last_start)
                if g >= depth:
                    begin = max(begin, processed[g - depth])
                if costs.after[i] >= 0 and p:
                    begin = max(begin, processed[base + costs.after[i]])
                last_start = start[g] = begin
                last_finish = finish[g] = max(begin + costs.alpha[i], last_finish) + costs.transfer[i]
                summed = max(last_finish, last_processed) + costs.copy[i]
                last_processed = processed[g] = summed + costs.update[i]
                done_with = e.gradients_after_link + e.gradients_after_update
                late = e.shards_of_others + sum(gradients.pop(u, 0) for u, _ in done_with)
                if late:
                    heapq.heappush(freed, (last_processed, late))
                if plan.messages[i].blocking:
                    now = last_processed
            done = base + limits.done[q] - 1
            if done >= 0:
                now = max(now, processed[done])
            now = admit(now, sum(b for _, b in slot.gradients) + slot.peak, q)
            for u, b in slot.gradients:
                gradients[u] = b
                held += b
            slot_starts.append(now)
            work = seconds[q]
            if slowdown > 1:
                while busy_from < issued and finish[busy_from] <= now:
                    busy_from += 1
                g = busy_from
                while g < issued and work > 0:
                    gap = max(0.0, start[g] - now)
                    if gap >= work:
                        break
                    work, now = work - gap, now + gap
                    inside = max(0.0, finish[g] - now)
                    if work * slowdown <= inside:
                        now, work = now + work * slowdown, 0.0
                    else:
                        now, work = now + inside, work - inside / slowdown
                    g += 1
            now += work
            slot_ends.append(now)
            held -= sum(b for _, b in slot.released)
            if q == turn - 1:
                turns.append(now)
        if len(turns) >= 3 and p >= 3:
            one, two = turns[-1] - turns[-2], turns[-2] - turns[-3]
            if abs(one - two) <= _REPEATS * max(one, 1e-30):
                break

    first = len(slot_starts) - length  # index of the last period's first slot
    began, ended = slot_arrivals[first], now
    last_base = p * n
    intervals = []
    for k in range(length):
        s = period.slots[k]
        name = plan.profile.units[s.unit].name
        intervals.append(
            Interval("compute", period.name(k), s.phase, name, slot_starts[first + k] - began,
                     slot_ends[first + k] - began)
        )  # fmt: skip
    for g in range(max(0, last_base - n), issued):
        if finish[g] <= began or start[g] >= ended:
            continue
        m = plan.messages[g % n]
        names = "+".join(dict.fromkeys(plan.profile.units[u].name for u, _ in m.parts))
        a, b = max(start[g], began) - began, min(finish[g], ended) - began
        intervals.append(Interval("message", f"{m.kind}:{names}", str(m.kind), names, a, b, plan.wire(m)))
        up = costs.update[g % n]
        if up and processed[g] - up < ended:
            a, b = max(processed[g] - up, began) - began, min(processed[g], ended) - began
            intervals.append(Interval("update", f"update:{names}", "update", names, a, b))
    result = Replay(ended - began, step_times(intervals, 0.0, ended - began), intervals)
    if detail:
        _memory(plan, ledger, costs, result, p, start, finish, processed, slot_arrivals, slot_starts, slot_ends)
    return result


def _memory(
    plan: Plan, ledger: Ledger, costs: _Costs, result: Replay, last: int, start: dict[int, float],
    finish: dict[int, float], processed: dict[int, float], arrivals: list[float], starts: list[float],
    ends: list[float],
) -> None:  # fmt: skip
    """Fill peak and curve: every allocation and release of the replay, in time order, over the last period."""
    n, period = len(plan.messages), plan.period
    events: list[tuple[float, int, str, int]] = []  # time, frees first, category, bytes

    def add(time: float, category: str, size: int) -> None:
        if size:
            events.append((time, 0 if size < 0 else 1, category, size))

    gradients: dict[int, int] = {}
    index = 0
    by_slot: dict[int, list[int]] = {}
    for g in sorted(start):
        by_slot.setdefault((g // n) * period.length + plan.messages[g % n].slot, []).append(g)
    for p in range(last + 1):
        for q in range(period.turn if p == 0 else 0, period.length):
            for g in by_slot.get(p * period.length + q, ()):
                e = ledger.messages[g % n]
                if p == 0 and not plan.in_prologue(plan.messages[g % n]):
                    continue
                update = costs.update[g % n]
                summed = processed[g] - update
                for _, b in e.full:
                    add(start[g], "full_parameters", b)
                add(start[g], "staging", e.staging)
                add(summed, "staging", -e.staging)
                add(start[g], "gradient_shards", e.shards)
                add(processed[g], "gradient_shards", -e.shards_freed)
                add(summed, "update_scratch", e.scratch)
                add(processed[g], "update_scratch", -e.scratch)
                for u, _ in e.gradients_after_link:
                    add(summed, "gradients", -gradients.pop(u, 0))
                for u, _ in e.gradients_after_update:
                    add(processed[g], "gradients", -gradients.pop(u, 0))
            slot = ledger.slots[q]
            for u, b in slot.gradients:
                gradients[u] = b
                add(starts[index], "gradients", b)
            for _, b in slot.released:
                add(ends[index], "full_parameters", -b)
            index += 1
    events.sort(key=lambda e: (e[0], e[1]))

    live = dict.fromkeys(CATEGORIES, 0) | ledger.at_rest
    known = sum(live.values())
    first = len(starts) - period.length
    peak: dict[str, int] = dict.fromkeys((*CATEGORIES, "total"), 0)
    curve = []
    k = 0

    def apply_until(time: float, inclusive: bool) -> None:
        nonlocal k, known
        while k < len(events) and (events[k][0] < time or (inclusive and events[k][0] == time)):
            _, _, category, size = events[k]
            live[category] += size
            known += size
            k += 1
            if window is not None:
                window[category] = max(window[category], live[category])
                window["total"] = max(window["total"], known + rest)

    window: dict[str, int] | None = None
    rest = 0
    for i in range(first, len(starts)):
        slot = ledger.slots[(i - first) % period.length]
        apply_until(arrivals[i], inclusive=True)
        rest = slot.live
        window = dict(live, activations=rest, total=known + rest)
        apply_until(starts[i], inclusive=True)
        rest = slot.peak
        window["activations"] = max(window["activations"], rest)
        window["total"] = max(window["total"], known + rest)
        apply_until(ends[i], inclusive=False)
        curve.append(window)
        for key in peak:
            peak[key] = max(peak[key], window[key])
        window = None
    result.peak, result.curve = peak, curve
