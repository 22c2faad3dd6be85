"""The replay as loops over numbers: every time of compute and of the link follows from earlier ones, in one pass.

:mod:`mdcs.simulator.simulate` says what is computed. Python runs these functions as they are for one replay. A search that
replays thousands has numba turn the same functions into machine code (:mod:`mdcs.simulator.machine_code`). For this the
module uses numbers, sequences of numbers and loops, and nothing else; functions take each sequence by itself, which numba
handles faster than tuples of them.

Messages are counted in wire order and slots in executed order, both from the prologue on: message ``g`` of a replay is message
``g % n`` of the plan. Times are seconds since the prologue began, sizes are bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

MAX_PERIODS = 12
LONG_AGO = -1e300
_REPEATS = 1e-9  # of a period: two periods that differ by less are the same
SETTLED, UNSETTLED, DEADLOCK = 0, 1, 2
"""How a replay ended: the period repeats, it still changed after ``MAX_PERIODS``, or bytes never fitted."""

Numbers = Any
"""A list of numbers; an array of them when the functions are compiled."""


class Circle(NamedTuple):
    """The slots of a period, and what holds for all of them."""

    seconds: Numbers
    live: Numbers  # bytes of activations and workspace when the slot begins
    peak: Numbers  # the most of them during the slot
    allocated: Numbers  # bytes of gradients that begin with the slot
    freed: Numbers  # bytes of full parameters that end with the slot
    turn: int
    depth: int  # messages in flight
    slowdown: float  # computing beside a message takes so many times as long
    contended: bool
    dispatch_s: float
    per_wait: float
    turn_s: float
    rest: int  # bytes held between steps
    cap: int  # bytes that admission allows; -1: no limit


class Messages(NamedTuple):
    """The messages of one period in wire order, one number each."""

    slot: Numbers
    blocking: Numbers
    in_prologue: Numbers
    waits_for: Numbers  # the message ahead that must be done first, or -1
    early: Numbers  # the part of the slot before its own after which it may leave; 1: at its own
    alpha: Numbers
    gap: Numbers
    transfer: Numbers
    copy: Numbers
    update: Numbers
    idle: Numbers  # transfer while nothing computes
    lost: Numbers  # seconds that computing loses when the message is done beside it
    held: Numbers  # bytes that stay when the message is done
    freed: Numbers  # bytes of slots and earlier messages that it frees when it is done
    transient: Numbers  # bytes that live only while it is in flight


class Track(NamedTuple):
    """What a replay writes down, with room for ``MAX_PERIODS`` periods."""

    start: Numbers  # of messages on the link
    finish: Numbers
    done: Numbers  # when they are unpacked and updated
    arrival: Numbers  # of compute at slots, and at last at the end
    begin: Numbers
    flight: Numbers  # what was in flight at the last turn and at this one, relative to it; 3 n each
    count: Numbers  # see below


# Indices into Track.count: messages sent, the first that may be in flight, those that have cost compute their ``lost``, those
# whose bytes are freed; bytes held, and the most in flight; times written of compute; the slot of a deadlock and the bytes that
# it needs.
SENT, BUSY, PAID, RETIRED, HELD, MOST, ARRIVALS, STUCK, NEEDED = range(9)


def slowed(start: Numbers, finish: Numbers, count: Numbers, slowdown: float, now: float, work: float) -> float:
    """Return when ``work`` seconds of computing from now on are over: ``slowdown`` times as many beside a message."""
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


def delayed(done: Numbers, lost: Numbers, count: Numbers, begin: float, end: float) -> float:
    """Return when a slot ends that would end at ``end`` but for what messages cost it that are done by then."""
    n, g = len(lost), count[PAID]
    while g < count[SENT] and done[g] <= end:
        if done[g] > begin:  # else compute was waiting
            end += lost[g % n]
        g += 1
    count[PAID] = g
    return end


def hurry(c: Circle, m: Messages, t: Track, now: float, awaited: int) -> None:
    """Retime what is in flight: compute waits from now on for the message ``awaited``, so messages up to it are not slowed.

    All messages known of have been issued by now. What has not started waits for others that are done sooner.
    """
    n, sent = len(m.slot), t.count[SENT]
    first = sent
    while first > 0 and t.finish[first - 1] > now:
        first -= 1
    last_start = t.start[first - 1] if first else LONG_AGO
    last_finish = t.finish[first - 1] if first else LONG_AGO
    last_done = t.done[first - 1] if first else 0.0
    for g in range(first, sent):
        i = g % n
        began, transfer = t.start[g], m.transfer[i]
        if g <= awaited and transfer > 0:
            served = max(0.0, now - (t.finish[g] - transfer))
            transfer = served + (1 - served / transfer) * m.idle[i]
        if began > now:
            began = max(now, last_start)
            if g >= c.depth:
                began = max(began, t.done[g - c.depth])
            if m.waits_for[i] >= 0:
                began = max(began, t.done[g - i + m.waits_for[i]])
        last_start, last_finish = began, max(began + m.alpha[i], last_finish + m.gap[i]) + transfer
        last_done = max(last_finish, last_done) + m.copy[i] + m.update[i]
        t.start[g], t.finish[g], t.done[g] = last_start, last_finish, last_done


def retire(done: Numbers, freed: Numbers, count: Numbers, now: float) -> None:
    """Free what messages that are done by now free."""
    n, g = len(freed), count[RETIRED]
    while g < count[SENT] and done[g] <= now:
        if g >= n:  # the prologue only gathers, which frees nothing
            count[HELD] -= freed[g % n]
        g += 1
    count[RETIRED] = g


def most_in_flight(transient: Numbers, count: Numbers, depth: int, upcoming: int) -> int:
    """Return the most bytes that ``depth`` neighbours among the messages not yet done hold at once, ``upcoming`` of one more."""
    n, first, sent = len(transient), count[RETIRED], count[SENT]
    most = total = 0
    for g in range(first, sent + 1):
        total += transient[g % n] if g < sent else upcoming
        if g - first >= depth:
            total -= transient[(g - depth) % n]
        if total > most:
            most = total
    return most


def admit(
    done: Numbers, freed: Numbers, transient: Numbers, count: Numbers, cap: int, depth: int, now: float, size: int, upcoming: int
) -> float:
    """Return when ``size`` bytes fit beside all that is held and in flight; -1, and ``count[NEEDED]``, if they never do."""
    while True:
        retire(done, freed, count, now)
        if count[HELD] + size + count[MOST] <= cap:
            return now
        need = count[HELD] + size + most_in_flight(transient, count, depth, upcoming)
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
    """Compare what is in flight at this turn with the last turn's ``before`` messages: return their number, or -1 less it if
    the two differ. ``base`` is the first message of the period.
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


def run(c: Circle, m: Messages, t: Track, issued: Numbers, needed: Numbers) -> int:
    """Replay until the period repeats; return how it ended.

    ``issued`` has the number of messages that are issued by each slot, ``needed`` of those that must be done when it begins
    (unrolled: 0 or less is in the period before). The last ``n`` messages and the last ``len(c.seconds)`` slots in ``t`` are
    the last period.
    """
    start, finish, done, arrival, begins, count, flight = t.start, t.finish, t.done, t.arrival, t.begin, t.count, t.flight
    seconds, live, peak, allocated, released = c.seconds, c.live, c.peak, c.allocated, c.freed
    blocking, in_prologue, waits_for, early, lost = m.blocking, m.in_prologue, m.waits_for, m.early, m.lost
    alpha, gap, transfer, copy, update = m.alpha, m.gap, m.transfer, m.copy, m.update
    held, freed, transient = m.held, m.freed, m.transient
    n, turn, depth, cap, slowdown, contended = len(alpha), c.turn, c.depth, c.cap, c.slowdown, c.contended
    dispatch_s, per_wait, turn_s = c.dispatch_s, c.per_wait, c.turn_s
    for k in range(len(count)):
        count[k] = 0
    if cap >= 0 and n > 0:
        count[SENT] = n + depth
        count[MOST] = most_in_flight(transient, count, depth, 0)  # of any neighbours: beside these anything fits
    count[HELD], count[SENT] = c.rest, 0
    now = last_start = last_done = begin = work = 0.0
    last_finish = LONG_AGO
    base = begun = arrived = 0
    before = at = -1  # messages in flight at the last turn, the slot that compute is in
    for p in range(MAX_PERIODS):
        settled = False
        for q in range(turn if p == 0 else 0, len(seconds)):
            inside = at >= 0
            if not inside:
                arrival[arrived] = now
                arrived += 1
            for i in range(0 if q == 0 or (p == 0 and q == turn) else issued[q - 1], issued[q]):
                g = base + i
                if p == 0 and not in_prologue[i]:
                    start[g] = finish[g] = done[g] = last_done
                    count[SENT] = g + 1
                    continue
                if inside:
                    if early[i] < 1:
                        now = slowed(start, finish, count, slowdown, begin, early[i] * work)
                        if cap >= 0:
                            retire(done, freed, count, now)
                            beside = peak[at] + most_in_flight(transient, count, depth, transient[i])
                            inside = count[HELD] + held[i] + beside <= cap
                    else:
                        inside = False
                    if not inside:
                        now = slowed(start, finish, count, slowdown, begin, work)
                        if contended:
                            now = delayed(done, lost, count, begin, now)
                        count[HELD] -= released[at]
                        arrival[arrived] = now
                        arrived += 1
                if cap >= 0 and not inside:
                    now = admit(done, freed, transient, count, cap, depth, now, held[i] + live[q], transient[i])
                    if now < 0:
                        count[STUCK] = q
                        return DEADLOCK
                count[HELD] += held[i]
                if now > last_start:  # not max(): much slower, uncompiled
                    last_start = now
                if g >= depth and done[g - depth] > last_start:
                    last_start = done[g - depth]
                if p > 0 and waits_for[i] >= 0 and done[base + waits_for[i]] > last_start:
                    last_start = done[base + waits_for[i]]
                ready, free = last_start + alpha[i], last_finish + gap[i]
                last_finish = (ready if ready > free else free) + transfer[i]
                last_done = (last_finish if last_finish > last_done else last_done) + copy[i] + update[i]
                start[g], finish[g], done[g] = last_start, last_finish, last_done
                count[SENT] = g + 1
                if blocking[i]:
                    now = last_done + dispatch_s
            if inside:
                now = slowed(start, finish, count, slowdown, begin, work)
                if contended:
                    now = delayed(done, lost, count, begin, now)
                count[HELD] -= released[at]
                arrival[arrived] = now
                arrived += 1
            if q == turn and p > 0:
                tolerance = _REPEATS * arrival[arrived - 1] / (p + 1)
                before = repeats(start, finish, done, flight, count[SENT], arrival[arrived - 1], base, before, tolerance)
                settled = before >= 0
                before = before if settled else -1 - before
                now += turn_s
            awaited = base + needed[q] - 1
            if awaited >= 0 and done[awaited] > now:
                if contended and p > 0:
                    hurry(c, m, t, now, awaited)
                    g = count[SENT] - 1
                    last_start, last_finish, last_done = start[g], finish[g], done[g]
                now = done[awaited] + dispatch_s
            if cap >= 0:
                now = admit(done, freed, transient, count, cap, depth, now, allocated[q] + peak[q], 0)
                if now < 0:
                    count[STUCK] = q
                    return DEADLOCK
            count[HELD] += allocated[q]
            begins[begun] = begin = now
            begun += 1
            at, work = q, seconds[q] + per_wait * (now - arrival[arrived - 1])
        if settled or p == MAX_PERIODS - 1:
            now = slowed(start, finish, count, slowdown, begin, work)
            arrival[arrived] = delayed(done, lost, count, begin, now) if contended else now
            count[ARRIVALS] = arrived + 1
            return SETTLED if settled else UNSETTLED
        base += n
    return UNSETTLED


LOOPS = (slowed, delayed, hurry, retire, most_in_flight, admit, repeats, run)
"""What :func:`mdcs.simulator.machine_code.compile_loops` compiles."""
