"""The replay, by hand for two or three units, and against the longest path through what a plan demands."""

from __future__ import annotations

import itertools
import os
import pickle
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from mdcs.plan.ledger import Ledger, min_feasible_budget
from mdcs.plan.period import Op
from mdcs.plan.plan import Plan, PlanError
from mdcs.planner.pipeline import Scheduler, make_plan
from mdcs.planner.priority import Priority
from mdcs.planner.schedulers import Dear, Partitioning, Sequential, Wfbp
from mdcs.planner.strategies import RandomMix, Uniform
from mdcs.profile.link import Collectives, Contention, Kind
from mdcs.simulator import kernel
from mdcs.simulator.simulate import _drop_outdated, replay
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import step_times
from tests.mdcs.profiles import Job, chain, examples, jobs, link, of_job, planned, schedulers, seeds

AR, RS, AG_F, AG_B, *_ = Kind

# Forward takes 1 s and backward 2 s per unit. One rank of two sends 16 bytes of a (1 s) and 32 bytes of b (2 s).
PROFILE = chain(8, 16, link=link(1 / 16))


def spans(plan: Plan, lane: str) -> dict[str, tuple[float, float]]:
    """Name → (start, end) of the last period, rounded to microseconds."""
    return {i.name: (round(i.start, 6), round(i.end, 6)) for i in replay(plan).intervals if i.lane == lane}


# ---- by hand


def test_wfbp_hides_what_is_behind_the_next_backward_slot() -> None:
    plan = planned(PROFILE, "zero2", Wfbp())
    assert spans(plan, "compute") == {"B:b": (0, 2), "B:a": (2, 4), "F:a": (8, 9), "F:b": (9, 10)}
    # The gather of b is ahead of the messages of a: head of line.
    assert spans(plan, "message") == {"RS:b": (2, 4), "AG_F:b": (4, 6), "RS:a": (6, 7), "AG_F:a": (7, 8)}
    times = replay(plan).times
    assert (times.step_s, times.stalled_s, times.overlap_s, times.overlap_ratio) == (10, 4, 2, pytest.approx(1 / 3))


def test_priority_sends_what_is_needed_first() -> None:
    plan = planned(PROFILE, "zero2", Priority(10**6))
    assert spans(plan, "message") == {"RS:b": (2, 4), "RS:a": (4, 5), "AG_F:a": (5, 6), "AG_F:b": (6, 8)}
    assert spans(plan, "compute") == {"B:b": (0, 2), "B:a": (2, 4), "F:a": (6, 7), "F:b": (8, 9)}
    assert replay(plan).period_s == 9


def halves(**more: Any) -> Plan:
    """All-reduces of the second and the first half of b and of a, 2 s each. Half of b's backward slot brings the second half."""
    profile = chain(32, 64, link=link(1 / 64))
    units = profile.units[0], replace(profile.units[1], gradients=((32, 1.0), (32, 0.5)))
    return planned(replace(profile, units=units, **more), "dp", Partitioning(128 / MIB))


def on_the_link(plan: Plan) -> list[tuple[float, float]]:
    """When messages start and end, from the first on."""
    return [(round(i.start, 6), round(i.end, 6)) for i in replay(plan).intervals if i.lane == "message"]


def test_a_reduction_leaves_when_its_gradients_have_come() -> None:
    plan = halves()
    assert [m.parts for m in plan.messages] == [((1, 1),), ((1, 0),), ((0, 0),)]
    assert plan.schedule.ready == [0.5, 1.0, 1.0]
    assert on_the_link(plan) == [(1, 3), (3, 5), (5, 7)]
    assert spans(plan, "compute") == {"B:b": (0, 2), "B:a": (2, 4), "F:a": (7, 8), "F:b": (8, 9)}


def test_nothing_leaves_ahead_of_what_has_to_wait() -> None:
    """As the half that comes last does if it is first in the order; what a plan puts off, or waits for, stays where it is."""
    plan = halves()
    second, first, last = plan.messages
    assert replace(plan, messages=(first, second, last)).schedule.ready == [1.0, 1.0, 1.0]
    assert replace(plan, messages=(replace(second, slot=2), replace(first, slot=2), last)).schedule.ready == [1.0, 1.0, 1.0]
    assert replace(plan, messages=(replace(second, blocking=True), first, last)).schedule.ready == [1.0, 1.0, 1.0]


def test_what_does_not_fit_beside_a_slot_leaves_after_it() -> None:
    peaks = tuple(replace(s, peak=1000 * (i == 2)) for i, s in enumerate(chain(32, 64).slots))
    plan = halves(slots=peaks, collectives=Collectives("ring"))
    tight = replace(plan, budget=min_feasible_budget(plan))
    roomy = replace(plan, budget=min_feasible_budget(plan) + Ledger(plan).messages[0].transient)
    assert [on_the_link(each)[0] for each in (plan, tight, roomy)] == [(1, 3), (2, 4), (1, 3)]


def test_computing_beside_a_message_is_slower() -> None:
    plan = planned(replace(PROFILE, interference=0.5), "zero2", Wfbp())
    # B:a does 4/3 s of its 2 s of work during RS:b, 2 s long, and the rest during the gather.
    assert spans(plan, "compute")["B:a"] == (2, 5)
    assert spans(plan, "message")["RS:b"] == (2, 4)
    short = planned(replace(PROFILE, interference=0.5, link=link(1 / 64)), "zero2", Wfbp())
    # RS:b and AG_F:b take 0.5 s each: 1 s slowed down, 2/3 s of the work, and 4/3 s alone.
    assert spans(short, "compute")["B:a"] == (2, round(2 + 1 + 4 / 3, 6))


def test_computing_loses_time_to_messages_beside_it() -> None:
    plan = planned(replace(PROFILE, contention=Contention(compute_per_message=0.25, compute_per_byte=1 / 128)), "zero2", Wfbp())
    # Each message of 32 bytes takes 0.25 s for itself and 0.25 s for its bytes from B:a, 2 s long alone: RS:b all of it,
    # AG_F:b, which takes 2 s, a quarter of each second from 4 s on.
    assert spans(plan, "message")["RS:b"] == (2, 4)
    assert spans(plan, "compute")["B:a"] == (2, round(4 + 0.5 / (1 - 0.25), 6))
    # What is on the link while compute waits for it costs compute nothing.
    waited = replace(plan, messages=(replace(plan.messages[0], blocking=True), *plan.messages[1:]))
    assert spans(waited, "compute")["B:a"] == (4, 6.5)


def test_computing_loses_a_share_of_updating() -> None:
    profile = replace(
        PROFILE, optimizer=replace(PROFILE.optimizer, seconds_per_run=1.0), link=link(1 / 32),
        contention=Contention(compute_per_work=0.5),
    )  # fmt: skip
    plan = planned(profile, "zero2", Wfbp())
    # RS:b takes 1 s on the link and 1 s to update: done at the end of B:a, which loses half.
    assert spans(plan, "compute")["B:a"] == (2, 4.5)


def test_a_message_beside_computing_has_a_least_time() -> None:
    plan = planned(replace(PROFILE, contention=Contention(message_seconds=1.0, seconds_per_byte=1 / 16)), "zero2", Wfbp())
    # 1 s and its 32 bytes make 3 s instead of 2; what is left when B:a ends, a third, is served at the link's own rate.
    assert spans(plan, "message")["RS:b"] == (2, round(4 + 2 / 3, 6))


@pytest.mark.parametrize(("skew", "waits"), [(0.5, 0.5), (5.0, 4.0)])
def test_a_message_that_finds_the_link_idle_waits_for_the_last_rank(skew: float, waits: float) -> None:
    plan = planned(PROFILE, "zero2", Wfbp())
    skewed = of_job(plan, profile=replace(PROFILE, contention=Contention(skew_seconds=skew)))
    before, after = spans(plan, "message"), spans(skewed, "message")
    # The link is idle during F:a, F:b and B:b, 4 s. RS:b ends this; the others follow without a pause.
    assert before["RS:b"] == (2, 4)
    assert after == {name: (begin + waits * (name != "RS:b"), end + waits) for name, (begin, end) in before.items()}


def test_messages_are_as_fast_as_the_link_while_compute_waits_for_them() -> None:
    plan = planned(replace(PROFILE, contention=Contention(message_seconds=4.0)), "zero2", Wfbp())
    # RS:b takes 4 s instead of 2, of which B:a covers 2; from then on compute waits: its second half in 1 s, AG_F:b 2 s,
    # RS:a and AG_F:a 1 s each.
    assert spans(plan, "compute") == {"B:b": (0, 2), "B:a": (2, 4), "F:a": (9, 10), "F:b": (10, 11)}
    assert spans(plan, "message") == {"RS:b": (2, 5), "AG_F:b": (5, 7), "RS:a": (7, 8), "AG_F:a": (8, 9)}
    # With a skew of 1 s only RS:b finds the link idle. B:a covers a quarter of its 4 s; the rest is served in 1.5 s.
    skewed = of_job(plan, profile=replace(PROFILE, contention=Contention(message_seconds=4.0, skew_seconds=1.0)))
    assert spans(skewed, "message") == {"RS:b": (2, 5.5), "AG_F:b": (5.5, 7.5), "RS:a": (7.5, 8.5), "AG_F:a": (8.5, 9.5)}


def test_what_waits_for_a_message_that_is_waited_for_starts_when_that_ends() -> None:
    profile = replace(PROFILE, link=replace(PROFILE.link, depth=2), contention=Contention(message_seconds=8.0))
    plan = planned(profile, "zero2", Dear(1.0))
    # Both of the two messages could be in flight at once, but what is gathered is first reduced, which takes 3 s, not 8.
    assert spans(plan, "message") == {"RS:b+a": (4, 7), "AG_F:a+b": (7, 10)}
    assert replay(plan).period_s == 12


def test_prefetched_for_backward_across_the_end_of_the_period() -> None:
    profile = chain(8, 16, 16, link=link(1 / 16))  # B:c B:b B:a F:a F:b F:c, a and b fsdp
    plan = planned(profile, ["fsdp", "fsdp", "dp"], Wfbp())
    gathers = [m for m in plan.messages if m.kind is AG_B]
    assert [(m.parts, m.slot) for m in gathers] == [(((1, 0),), 0), (((0, 0),), 1)]
    early = replace(gathers[0], slot=5)  # b again, as soon as F:b is over
    moved = replace(plan, messages=(*(m for m in plan.messages if m is not gathers[0]), early))
    assert spans(plan, "message")["AG_B:b"] == (0, 2)
    begin, end = spans(moved, "compute")["F:c"]
    assert spans(moved, "message")["AG_B:b"] == (begin, min(end, begin + 2))  # cut off at the end of the period
    assert replay(moved).times.communication_s == pytest.approx(replay(plan).times.communication_s)


# ---- admission


def test_a_slot_waits_for_its_bytes() -> None:
    plan = planned(PROFILE, "zero2", Wfbp())
    assert spans(plan, "compute")["B:a"] == (2, 4)
    # B:a needs a's gradient (32 bytes): with b's (64) and what RS:b receives (32), sums (32) that is too much.
    tight = replace(plan, budget=min_feasible_budget(plan))
    assert min_feasible_budget(plan) == 96 + 64 + 32 + 32
    assert spans(tight, "compute")["B:a"] == (4, 6)
    roomy = replace(plan, budget=min_feasible_budget(plan) + 32)
    assert spans(roomy, "compute")["B:a"] == (2, 4)


def test_a_message_waits_for_its_bytes() -> None:
    profile = chain(16, 8, 8, link=link(1 / 16, depth=2), live=10)
    plan = planned(profile, ["dp", "sdp", "dp"])  # B:c B:b B:a F:a F:b F:c
    reductions = [replace(m, blocking=False) for m in plan.messages if not m.kind.is_gather]
    gather = [replace(m, slot=3, blocking=False) for m in plan.messages if m.kind.is_gather]
    ahead = replace(plan, messages=(*reductions, *gather))
    assert [str(m.kind) for m in ahead.messages] == ["AR", "RS", "AR", "AG_F"]
    # AR:a needs most: a's gradient (64 bytes) and what it receives (32). At F:a it is still in flight, so b's
    # parameters (32) fit only after it.
    assert Ledger(ahead).rest_bytes == 64 + 16 + 32
    assert min_feasible_budget(ahead) == 112 + 64 + 32 + 10
    free, tight = spans(ahead, "message"), spans(replace(ahead, budget=min_feasible_budget(ahead)), "message")
    assert free["AG_F:b"][0] == free["AR:a"][0]
    assert tight["AG_F:b"][0] == tight["AR:a"][1]


def test_admission_without_enough_bytes_names_the_slot() -> None:
    with pytest.raises(PlanError, match=r"deadlock at slot 1 \(B:a\): needs 224 of 223 bytes"):
        replay(replace(planned(PROFILE, "zero2"), budget=223))
    with pytest.raises(PlanError, match=r"deadlock at slot 1 \(B:a\): needs 224 of 223 bytes"):
        replay(replace(of_job(planned(PROFILE, "zero2"), reserve=45), budget=268))


def test_a_prediction_is_made_of_a_replay_with_memory() -> None:
    plan = planned(PROFILE, "zero2")
    prediction = replay(plan).prediction()
    assert (prediction.step_s, prediction.overlap_ratio) == (12, 0)
    assert prediction.peak_bytes == prediction.memory["total"] == min_feasible_budget(plan)


def test_a_plan_is_replayed_again_as_it_was_at_first() -> None:
    plan = replace(planned(PROFILE, "zero2", Wfbp()), budget=min_feasible_budget(planned(PROFILE, "zero2", Wfbp())))
    first, second, copy = replay(plan), replay(plan), replay(pickle.loads(pickle.dumps(plan)))
    assert first.period_s == second.period_s == copy.period_s
    assert first.intervals == second.intervals == copy.intervals
    assert first.curve == second.curve == copy.curve
    assert set(vars(plan)) > {f.name for f in fields(plan)} == set(plan.__getstate__())


# ---- against the longest path


def longest_path(plan: Plan, periods: int) -> list[float]:
    """When each period begins without budget and interference, from what must precede what.

    Written from the rules, message by message; the simulator walks the period once with running maxima instead.
    """
    period, link_ = plan.period, plan.profile.link
    length, turn, opt = period.length, period.turn, plan.profile.optimizer
    in_prologue, slots = plan.schedule.in_prologue, plan.schedule.slot
    sent = [(p, i) for p in range(periods) for i in range(len(plan.messages)) if p or in_prologue[i]]  # in FIFO order
    place = {which: g for g, which in enumerate(sent)}
    last_reduction = max((i for i, m in enumerate(plan.messages) if not m.kind.is_gather), default=-1)

    def needed_by(p: int, q: int) -> Iterator[tuple[int, int]]:
        for p_sent in (p - 1, p):
            for i, m in enumerate(plan.messages):
                for u, _ in m.parts:
                    last = period.needed_by(Op(m.kind, u, m.micro))
                    used = m.kind.is_gather or m.kind is AR
                    at = (p_sent - (slots[i] >= length)) * length + last
                    if used and at == p * length + q and (p_sent, i) in place:
                        yield p_sent, last_reduction if m.kind is AR and not plan.cross_iteration else i

    def first_slot(p: int) -> int:
        return turn if p == 0 else 0

    @cache
    def arrival(p: int, q: int) -> float:
        if q > first_slot(p):
            return end(p, q - 1)
        return end(p - 1, length - 1) if p else 0.0

    def comes(i: int, q: int) -> float | None:
        """How much of the slot before q is over when a reduction that becomes ready in it is ready; None: it does not."""
        m, parts = plan.messages[i], []
        if m.kind.is_gather or m.blocking:
            return None
        for u, b in m.parts:
            ready = period.window(Op(m.kind, u, m.micro))[0]
            if ready == q and plan.profile.units[u].gradients:
                begin, at = sum(plan.blocks[u][:b]), 0
                ends = plan.profile.layouts[u].ends([n for n, _ in plan.profile.units[u].gradients])
                for (_, part), end in zip(plan.profile.units[u].gradients, ends, strict=True):
                    if at < begin + plan.blocks[u][b] and end > begin:
                        parts.append(part)
                    at = end
            elif ready == q:
                parts.append(1.0)
        return max(parts) if parts else None

    @cache
    def waited(p: int, i: int) -> float:
        """When compute issues a message: after the blocking ones of its slot, or in the slot before, with all ahead of it."""
        m = plan.messages[i]
        q = max(m.slot, first_slot(p))
        if p and m.slot == q:
            early = [comes(j, q) for j in range(i + 1) if plan.messages[j].slot == q]
            if all(part is not None and part < 1 for part in early):
                part = max(part for part in early if part is not None)
                return begin(p, q - 1) + part * plan.profile.slots[period.slots[q - 1].place].seconds
        ahead = [j for j in range(i) if (p, j) in place and max(plan.messages[j].slot, first_slot(p)) == q]
        return max([arrival(p, q), *(done(p, j) for j in ahead if plan.messages[j].blocking)])

    @cache
    def begin(p: int, q: int) -> float:
        blocking = [
            done(p, i) for i, m in enumerate(plan.messages) if m.blocking and (p, i) in place and max(m.slot, first_slot(p)) == q
        ]
        return max([arrival(p, q), *blocking, *(done(*which) for which in needed_by(p, q))])

    @cache
    def end(p: int, q: int) -> float:
        return begin(p, q) + plan.profile.slots[period.slots[q].place].seconds

    @cache
    def start(p: int, i: int) -> float:
        m, g = plan.messages[i], place[p, i]
        times = [waited(p, i)]
        if g:
            times.append(start(*sent[g - 1]))
        if g >= link_.depth:
            times.append(done(*sent[g - link_.depth]))
        if p and m.kind.plain is AG_F and m.micro == 0:
            reductions = [j for j, r in enumerate(plan.messages) if not r.kind.is_gather and set(r.parts) & set(m.parts)]
            times += [done(p, j) for j in reductions]
            if reductions and not plan.cross_iteration:
                times.append(done(p, last_reduction))
        return max(times)

    @cache
    def off_the_link(p: int, i: int) -> float:
        m, g = plan.messages[i], place[p, i]
        before = off_the_link(*sent[g - 1]) if g else float("-inf")
        return max(start(p, i) + link_.alpha_of(m.kind), before + link_.gap_of(m.kind)) + link_.beta_of(m.kind) * plan.wire(m)

    def update(i: int) -> float:
        m = plan.messages[i]
        share = plan.profile.group(m.kind) if m.kind.plain is RS else 1
        return plan.elements(m) / share * opt.seconds_per_element + len(m.parts) * opt.seconds_per_run

    @cache
    def done(p: int, i: int) -> float:
        m, g = plan.messages[i], place[p, i]
        before = done(*sent[g - 1]) if g else 0.0
        copies = 2 * (len(m.parts) > 1)
        time = max(off_the_link(p, i), before) + copies * plan.profile.copy_seconds_per_byte * plan.payload(m)
        if m.kind.is_gather:
            return time
        if plan.cross_iteration:
            return time + update(i)
        everything = [j for j, r in enumerate(plan.messages) if not r.kind.is_gather]
        return time + (sum(map(update, everything)) if i == last_reduction else 0.0)

    for p in range(periods):
        for q in range(first_slot(p), length):
            end(p, q)
    return [arrival(p, 0) for p in range(1, periods)]


@examples(60)
@given(jobs(max_units=3), seeds, schedulers)
def test_the_period_is_that_of_the_longest_path(job: Job, seed: int, scheduler: Scheduler) -> None:
    job = replace(job, profile=replace(job.profile, interference=0.0))
    plan = job.plan(RandomMix(seed), scheduler)
    periods = longest_path(plan, 8)
    assert replay(plan).period_s == pytest.approx(periods[-1] - periods[-2], rel=1e-6, abs=1e-12)


# ---- properties


@examples(100)
@given(jobs(), seeds, schedulers)
def test_times_are_those_of_the_timeline_and_no_less_than_compute_or_the_link(job: Job, seed: int, scheduler: Scheduler) -> None:
    plan = job.plan(RandomMix(seed), scheduler)
    result, profile = replay(plan), job.profile
    assert result.times == step_times(result.intervals, 0.0, result.period_s)
    assert all(0 <= i.start <= i.end <= result.period_s for i in result.intervals)
    slots = [i for i in result.intervals if i.lane == "compute"]
    assert [i.name for i in slots] == [plan.period.name(q) for q in range(plan.period.length)]
    assert all(a.end <= b.start for a, b in itertools.pairwise(slots))
    compute = job.micro_steps * sum(s.seconds for s in profile.slots)
    transfer = sum(profile.link.beta_of(m.kind) * plan.wire(m) for m in plan.messages)
    assert result.period_s >= max(compute, transfer) - 1e-12
    assert result.times.compute_s >= compute - 1e-12
    if profile.interference == 0:
        assert result.times.compute_s == pytest.approx(compute, abs=1e-12)
    assert result.times.compute_s <= compute * (1 + profile.interference) + 1e-12
    assert result.times.communication_s >= transfer - 1e-12


@examples(100)
@given(jobs(), seeds)
def test_sequential_overlaps_nothing_and_reaches_the_peak_that_planning_assumes(job: Job, seed: int) -> None:
    plan = job.plan(RandomMix(seed), Sequential())
    found = replay(plan)
    assert found.times.overlap_s == found.times.overlap_ratio == 0
    assert found.times.stalled_s >= found.times.communication_s - 1e-12
    assert found.peak["total"] + plan.reserve == min_feasible_budget(plan)


def test_updates_behind_a_barrier_never_give_compute_time_back() -> None:
    """All come with the last message; the others lose what theirs cost."""
    profile = chain(8, 4, 4)
    optimizer = replace(profile.optimizer, seconds_per_run=0.5)
    profile = replace(profile, optimizer=optimizer, contention=Contention(compute_per_work=0.1))
    plan = planned(profile, "dp", Wfbp(), cross_iteration=False)
    assert plan.seconds.lost == pytest.approx([0, 0, 0.1 * 3 * 0.5])


def test_a_plan_says_when_its_periods_have_not_become_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction is of one of them, and the next would be another."""
    plan = planned(PROFILE, "zero2", Wfbp())
    assert replay(plan).settled and make_plan(PROFILE, Uniform("zero2"), Wfbp()).outcome == ""
    run = kernel.run
    monkeypatch.setattr(kernel, "run", lambda *inputs: max(run(*inputs), kernel.UNSETTLED))
    assert not replay(plan).settled
    assert re.fullmatch(r"periods differ after \d+: predicted is the last", make_plan(PROFILE, Uniform("zero2"), Wfbp()).outcome)


# ---- machine code


def test_numbas_caches_of_an_older_source_are_deleted_and_no_others(tmp_path: Path) -> None:
    source, caches = tmp_path / "kernel.py", tmp_path / "__pycache__"
    source.touch()
    _drop_outdated(source)
    assert list(tmp_path.iterdir()) == [source]
    caches.mkdir()
    names = ("kernel.run-1.py311.nbi", "kernel.walk-9.py311.nbi", "engine.run-1.py311.nbi", "kernel.cpython-311.pyc")
    for at, file in enumerate((caches / names[0], source, *(caches / name for name in names[1:]))):
        file.touch()
        os.utime(file, (at, 0 if file.name == names[2] else at))
    _drop_outdated(source)
    assert {file.name for file in caches.iterdir()} == set(names[1:])
