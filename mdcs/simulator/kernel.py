"""The replay as loops over numbers (:mod:`mdcs.simulator.simulate` describes the model). Every time of compute and of
the link follows from earlier times, in one pass.

For one replay, Python runs these functions as they are; for a search with thousands of replays, numba compiles them. So
there are only loops, numbers and sequences of numbers here, each an argument of its own, which numba handles fastest.

Messages are counted in wire order and slots in executed order, both from the start of the prologue. Message ``g`` of a
replay is message ``g % n`` of the plan. Times are seconds since the prologue began, sizes are bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from mdcs.plan.schedule import Folded, MessageSeconds, Numbers, Schedule

MAX_PERIODS = 12
LONG_AGO = -1e300
_REPEATS = 1e-9  # fraction of a period: periods that differ by less count as equal
SETTLED, UNSETTLED, DEADLOCK = 0, 1, 2
"""How a replay ended: the period repeats; it still changed after ``MAX_PERIODS``; bytes never fitted."""


class PeriodArrays(NamedTuple):
    """The slots of a period (one number per slot), and constants of the replay."""

    seconds: Numbers
    live: Numbers  # bytes of activations and workspace when the slot begins
    peak: Numbers  # peak of these bytes during the slot
    allocated: Numbers  # bytes of gradients allocated when the slot begins
    freed: Numbers  # bytes of full parameters freed when the slot ends
    turn: int  # the first forward slot
    depth: int  # messages in flight, from start to done
    apart: bool  # whether updates run beside the link, which then carries one message at a time
    host_message_s: float  # the host's time for a message, and for a slot, where it enqueues ahead of the device
    host_slot_s: float
    slowdown: float  # factor on compute time while a message is in flight
    contended: bool  # whether the profile has contention
    dispatch_s: float  # delay between the end of a message and the compute that waits for it
    turn_s: float  # time of the training loop between backward and forward
    skew_s: float  # most that a message which finds the link idle waits for the last rank
    rest: int  # bytes held between steps
    cap: int  # bytes that admission allows; -1: no limit


class ReplayArrays(NamedTuple):
    """Output of a replay, with room for ``MAX_PERIODS`` periods. Times are seconds."""

    start: Numbers  # by message: start on the link
    finish: Numbers  # by message: end on the link
    landed: Numbers  # by message: end of unpacking
    done: Numbers  # by message: end of its update, and of all before
    arrival: Numbers  # by slot: when compute arrives; the last entry is the end of the replay
    begin: Numbers  # by slot: when compute begins to run it
    flight: Numbers  # times of messages in flight at the last turn and at this one, relative to the turn; 3 n each
    count: Numbers  # counters, see SENT and the others below


# Indices into Track.count.
# SENT: messages sent. BUSY: first message that may be in flight. PAST: messages done before the slot.
# RETIRED: messages whose bytes are freed. HELD: bytes held. MOST: upper bound of bytes in flight.
# ARRIVALS: entries of ``arrival``. STUCK: slot of a deadlock. NEEDED: bytes that the slot needs.
SENT, BUSY, PAST, RETIRED, HELD, MOST, ARRIVALS, STUCK, NEEDED = range(9)


def finish_time_under_interference(
    start: Numbers, finish: Numbers, count: Numbers, slowdown: float, now: float, work: float
) -> float:
    """Return when ``work`` seconds of compute that begin now end: ``slowdown`` times as long beside a message."""
    if slowdown == 1:
        return now + work
    sent, g = count[SENT], count[BUSY]
    while g < sent and finish[g] <= now:
        g += 1
    count[BUSY] = g
    while g < sent:
        alone = max(0.0, start[g] - now)
        if alone >= work:
            break
        now, work = now + alone, work - alone
        beside = max(0.0, finish[g] - now)
        if work * slowdown <= beside:
            return now + work * slowdown
        now, work = now + beside, work - beside / slowdown
        g += 1
    return now + work


def add_message_overhead(
    start: Numbers, finish: Numbers, done: Numbers, lost: Numbers, count: Numbers, begin: float, end: float
) -> float:
    """Return when a slot from ``begin`` to ``end`` ends, with what it loses to the messages beside it.

    A message takes what it takes evenly, from the begin of its bytes until it is done: the part during which compute
    waits is free, and a plan gains nothing from messages that end in a short wait.
    """
    n, sent, g = len(lost), count[SENT], count[PAST]
    while g < sent and done[g] <= begin:
        g += 1
    count[PAST] = g
    while g < sent:
        began = finish[g - 1] if g > 0 and finish[g - 1] > start[g] else start[g]
        since = began if began > begin else begin
        if since >= end:
            break
        if done[g] > since:
            taken = lost[g % n] / (done[g] - began)
            longer = taken * (done[g] - since)
            if taken < 1 and (end - since) * taken / (1 - taken) < longer:  # it goes on after the slot
                longer = (end - since) * taken / (1 - taken)
            end += longer
        g += 1
    return end


def end_slot(
    start: Numbers, finish: Numbers, done: Numbers, lost: Numbers, arrival: Numbers, count: Numbers, slowdown: float,
    contended: bool, released: int, begin: float, work: float,
) -> float:  # fmt: skip
    """Return and record the end of the slot that computes from ``begin`` for ``work`` s; free ``released`` bytes."""
    end = finish_time_under_interference(start, finish, count, slowdown, begin, work)
    if contended:
        end = add_message_overhead(start, finish, done, lost, count, begin, end)
    count[HELD] -= released
    arrival[count[ARRIVALS]] = end
    count[ARRIVALS] += 1
    return end


def retime_while_compute_blocked(
    c: PeriodArrays, s: Schedule, m: MessageSeconds, t: ReplayArrays, now: float, awaited: int
) -> None:
    """Retime the messages in flight while compute waits for message ``awaited`` from ``now`` on.

    Up to ``awaited`` they run while nothing computes: the part that is not yet served takes ``idle`` instead of
    ``transfer``. Later messages shift accordingly. All messages in ``t`` have been issued by now. A message that has
    not started waits only for messages that are done earlier.
    """
    n, sent = len(m.alpha), t.count[SENT]
    first = sent
    while first > 0 and t.finish[first - 1] > now:
        first -= 1
    last_start = t.start[first - 1] if first else LONG_AGO
    last_finish = t.finish[first - 1] if first else LONG_AGO
    last_landed = t.landed[first - 1] if first else 0.0
    last_done = t.done[first - 1] if first else 0.0
    for g in range(first, sent):
        i = g % n
        began, transfer = t.start[g], m.transfer[i]
        if g <= awaited and transfer > 0:
            served = max(0.0, now - (t.finish[g] - transfer))
            transfer = served + (1 - served / transfer) * m.idle[i]
        if began > now:
            began = max(now, last_start)
            if c.apart:
                began = max(began, last_landed)
            if g >= c.depth:
                began = max(began, t.done[g - c.depth])
            if s.waits_for[i] >= 0:
                began = max(began, t.done[g - i + s.waits_for[i]])
        skew = min(c.skew_s, max(0.0, began - last_finish))
        last_start, last_finish = began, max(began + skew + m.alpha[i], last_finish + m.gap[i]) + transfer
        last_landed = max(last_finish, last_landed if c.apart else last_done) + m.copy[i]
        last_done = max(last_landed, last_done) + m.update[i]
        t.start[g], t.finish[g], t.landed[g], t.done[g] = last_start, last_finish, last_landed, last_done


def retire_completed(done: Numbers, freed: Numbers, count: Numbers, now: float) -> None:
    """Free the bytes of messages that are done by now."""
    n, g = len(freed), count[RETIRED]
    while g < count[SENT] and done[g] <= now:
        if g >= n:  # messages of the prologue only gather, so they free nothing
            count[HELD] -= freed[g % n]
        g += 1
    count[RETIRED] = g


def max_in_flight_bytes(transient: Numbers, in_prologue: Numbers, count: Numbers, depth: int, upcoming: int) -> int:
    """Return the most bytes that ``depth`` consecutive messages can hold in flight: of those that are not yet done,
    without those that the prologue passes over, and one more of ``upcoming`` bytes.
    """
    n, oldest, sent = len(transient), count[RETIRED], count[SENT]
    most = total = many = 0
    for g in range(count[RETIRED], sent + 1):
        if g < n and g < sent and not in_prologue[g]:
            continue
        total += transient[g % n] if g < sent else upcoming
        many += 1
        if many > depth:
            while oldest < n and not in_prologue[oldest]:
                oldest += 1
            total -= transient[oldest % n]
            oldest += 1
            many -= 1
        if total > most:
            most = total
    return most


def admit(
    done: Numbers, freed: Numbers, transient: Numbers, in_prologue: Numbers, count: Numbers, cap: int, depth: int,
    now: float, size: int, upcoming: int,
) -> float:  # fmt: skip
    """Return when ``size`` bytes fit beside those held and in flight; -1: never, with the need in ``count[NEEDED]``."""
    while True:
        retire_completed(done, freed, count, now)
        if count[HELD] + size + count[MOST] <= cap:
            return now
        need = count[HELD] + size + max_in_flight_bytes(transient, in_prologue, count, depth, upcoming)
        if need <= cap:
            return now
        if count[RETIRED] == count[SENT]:
            count[NEEDED] = need
            return -1.0
        now = done[count[RETIRED]]


def repeats(
    start: Numbers, finish: Numbers, done: Numbers, flight: Numbers, sent: int, now: float, base: int, before: int,
    tolerance: float,
) -> int:  # fmt: skip
    """Compare the messages in flight at this turn with those at the last. Return their number k, or -1 - k if unequal.

    - ``base``: first message of the period. ``before``: number of messages in flight at the last turn.
    - ``tolerance``: largest difference (seconds) of equal times.
    """
    room, many = len(flight) // 2, 0
    for g in range(base, sent):
        if done[g] > now:
            at = room + 3 * many
            flight[at], flight[at + 1], flight[at + 2] = start[g] - now, finish[g] - now, done[g] - now
            many += 1
    same = many == before
    for at in range(3 * many):
        same = same and abs(flight[at] - flight[room + at]) <= tolerance
        flight[at] = flight[room + at]
    return many if same else -1 - many


def run(c: PeriodArrays, s: Schedule, m: MessageSeconds, sizes: Folded, t: ReplayArrays) -> int:
    """Replay until the period repeats; return how it ended. In ``t`` the last ``n`` messages and the last
    ``len(c.seconds)`` slots are the last period.
    """
    start, finish, landed, done, arrival = t.start, t.finish, t.landed, t.done, t.arrival
    begins, count, flight = t.begin, t.count, t.flight
    apart, host_message_s, host_slot_s = c.apart, c.host_message_s, c.host_slot_s
    seconds, live, peak, allocated, released = c.seconds, c.live, c.peak, c.allocated, c.freed
    issued, needed, blocking, in_prologue = s.issued, s.required, s.blocking, s.in_prologue
    waits_for, early = s.waits_for, s.ready
    alpha, gap, transfer, copy, update, lost = m.alpha, m.gap, m.transfer, m.copy, m.update, m.lost
    held, freed, transient = sizes.held, sizes.freed, sizes.transient
    n, turn, depth, cap, slowdown, contended = len(alpha), c.turn, c.depth, c.cap, c.slowdown, c.contended
    dispatch_s, turn_s, skew_s = c.dispatch_s, c.turn_s, c.skew_s
    for k in range(len(count)):
        count[k] = 0
    if cap >= 0 and n > 0:
        count[RETIRED], count[SENT] = n, 2 * n + depth
        # upper bound, for a quick test in admit()
        count[MOST] = max_in_flight_bytes(transient, in_prologue, count, depth, 0)
    count[HELD], count[RETIRED], count[SENT] = c.rest, 0, 0
    now = last_start = last_landed = last_done = begin = work = host = 0.0
    last_finish = LONG_AGO
    base = begun = 0
    before = at = -1  # messages in flight at the last turn; slot that compute runs
    for p in range(MAX_PERIODS):
        settled = False
        for q in range(turn if p == 0 else 0, len(seconds)):
            inside = at >= 0
            if not inside:
                arrival[count[ARRIVALS]] = now
                count[ARRIVALS] += 1
            for i in range(0 if q == 0 or (p == 0 and q == turn) else issued[q - 1], issued[q]):
                g = base + i
                if p == 0 and not in_prologue[i]:
                    start[g] = finish[g] = last_finish  # passed over: as the message before
                    landed[g], done[g] = last_landed, last_done
                    count[SENT] = g + 1
                    continue
                if inside:
                    if early[i] < 1:
                        now = finish_time_under_interference(start, finish, count, slowdown, begin, early[i] * work)
                        if cap >= 0:
                            retire_completed(done, freed, count, now)
                            beside = peak[at] + max_in_flight_bytes(transient, in_prologue, count, depth, transient[i])
                            inside = count[HELD] + held[i] + beside <= cap
                    else:
                        inside = False
                    if not inside:
                        now = end_slot(
                            start, finish, done, lost, arrival, count, slowdown, contended, released[at], begin, work
                        )
                if cap >= 0 and not inside:
                    now = admit(
                        done, freed, transient, in_prologue, count, cap, depth, now, held[i] + live[q], transient[i]
                    )
                    if now < 0:
                        count[STUCK] = q
                        return DEADLOCK
                count[HELD] += held[i]
                if now > last_start:  # max() is much slower when not compiled
                    last_start = now
                if g >= depth and done[g - depth] > last_start:
                    last_start = done[g - depth]
                if apart and last_landed > last_start:
                    last_start = last_landed
                host += host_message_s
                if host > last_start:
                    last_start = host
                if p > 0 and waits_for[i] >= 0 and done[base + waits_for[i]] > last_start:
                    last_start = done[base + waits_for[i]]
                ready, free = last_start + alpha[i], last_finish + gap[i]
                if skew_s > 0 and last_start > last_finish:
                    ready += min(skew_s, last_start - last_finish)
                last_finish = (ready if ready > free else free) + transfer[i]
                free = last_landed if apart else last_done
                last_landed = (last_finish if last_finish > free else free) + copy[i]
                last_done = (last_landed if last_landed > last_done else last_done) + update[i]
                start[g], finish[g], landed[g], done[g] = last_start, last_finish, last_landed, last_done
                count[SENT] = g + 1
                if blocking[i]:
                    now = last_done + dispatch_s
            if inside:
                now = end_slot(
                    start, finish, done, lost, arrival, count, slowdown, contended, released[at], begin, work
                )
            arrived = arrival[count[ARRIVALS] - 1]
            if q == turn and p > 0:
                tolerance = _REPEATS * arrived / (p + 1)
                before = repeats(start, finish, done, flight, count[SENT], arrived, base, before, tolerance)
                settled = before >= 0
                before = before if settled else -1 - before
                now += turn_s
                if now > host:  # a loop looks at the device once a step: at its loss, or in the model
                    host = now
            awaited = base + needed[q] - 1
            if awaited >= 0 and done[awaited] > now:
                if contended and p > 0:
                    retime_while_compute_blocked(c, s, m, t, now, awaited)
                    g = count[SENT] - 1
                    last_start, last_finish, last_landed, last_done = start[g], finish[g], landed[g], done[g]
                now = done[awaited] + dispatch_s
            if cap >= 0:
                now = admit(done, freed, transient, in_prologue, count, cap, depth, now, allocated[q] + peak[q], 0)
                if now < 0:
                    count[STUCK] = q
                    return DEADLOCK
            count[HELD] += allocated[q]
            host += host_slot_s
            if host > now:
                now = host
            begins[begun] = begin = now
            begun += 1
            at, work = q, seconds[q]
        if settled or p == MAX_PERIODS - 1:
            end_slot(start, finish, done, lost, arrival, count, slowdown, contended, released[at], begin, work)
            return SETTLED if settled else UNSETTLED
        base += n
    return UNSETTLED


LOOPS = (
    finish_time_under_interference, add_message_overhead, end_slot, retime_while_compute_blocked, retire_completed,
    max_in_flight_bytes, admit, repeats, run,
)  # fmt: skip
"""Functions that :func:`mdcs.simulator.simulate.compiled_loops` compiles."""
