"""Schedulers: what each promises, by hand, against brute force, and for random jobs."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mdcs.plan.period import Op, Strategy, block_ready_fractions, choices
from mdcs.plan.plan import Plan, PlanError
from mdcs.plan.schedule import Message
from mdcs.planner.pipeline import SCHEDULERS, Scheduler
from mdcs.planner.priority import Priority, nearest_deadline_first
from mdcs.planner.schedulers import (
    Dear,
    Fusion,
    MgWfbp,
    Partitioning,
    RandomOrder,
    Sequential,
    StrategyAssignment,
    Wfbp,
    in_ready_order,
    optimal_merge,
)
from mdcs.planner.strategies import RandomMix
from mdcs.profile.link import Contention, Kind, Link
from mdcs.profile.schema import Optimizer, Profile, Unit
from mdcs.simulator.simulate import replay, undelayed
from mdcs.sizes import MIB
from tests.mdcs.profiles import Job, chain, examples, jobs, link, planned, schedulers, seeds, tied

AR, RS, AG_F, AG_B, *_ = Kind
dp, zero2, sdp, fsdp, *_ = Strategy


def listed(plan: Plan, kind: Kind | None = None) -> list[tuple[str, int]]:
    """(kind and units, issue slot) of all messages, or of one kind."""
    names = [u.name for u in plan.profile.units]
    return [
        (f"{m.kind} {'+'.join(names[u] for u, _ in m.parts)}", m.slot) for m in plan.messages if kind is None or m.kind is kind
    ]


def step_s(plan: Plan) -> float:
    return replay(plan).period_s


# ---- the mix


def test_a_unit_that_is_needed_again_at_once_is_not_freed() -> None:
    assert StrategyAssignment(Job(chain(8, 8, 8)), (fsdp,) * 3).strategies == (fsdp, fsdp, sdp)
    assert StrategyAssignment(Job(tied(8, 8, 8)), (fsdp,) * 3).strategies == (sdp, fsdp, fsdp)
    plain = chain(8, 8, 8)
    forward_only = Unit("a", (8,), False, (0, 0), None)
    without = replace(plain, units=(forward_only, *plain.units[1:]), slots=plain.slots[:-1])
    assert StrategyAssignment(Job(without), (fsdp,) * 3).strategies == (sdp, fsdp, sdp)


def test_a_mix_has_a_strategy_for_every_unit() -> None:
    with pytest.raises(PlanError, match="2 strategies for 3 units"):
        StrategyAssignment(Job(chain(8, 8, 8)), (dp, dp))


def test_operations_of_a_mix() -> None:
    mix = StrategyAssignment(Job(chain(8, 8, 8), micro_steps=2), (fsdp, zero2, dp))
    assert set(mix.ops) == {
        Op(RS, 0, 0), Op(AG_F, 0, 0), Op(AG_F, 0, 1), Op(AG_B, 0, 0), Op(AG_B, 0, 1),
        Op(RS, 1, 0), Op(AG_F, 1, 0), Op(AR, 2, 0),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("op", "crossing", "barrier"),
    [
        (Op(RS, 2, 0), (1, 5), (1, 3)),
        (Op(AG_F, 2, 0), (1, 5), (3, 5)),
        (Op(AG_B, 0, 0), (4, 8), (4, 8)),
        (Op(RS, 0, 0), (3, 3), (3, 3)),
    ],
)
def test_the_barrier_divides_windows_at_the_turn(op: Op, crossing: tuple[int, int], barrier: tuple[int, int]) -> None:
    profile = chain(8, 8, 8)  # B:c B:b B:a, turn, F:a F:b F:c
    assert StrategyAssignment(Job(profile), (sdp,) * 3).period.window(op) == crossing
    assert StrategyAssignment(Job(profile, cross_iteration=False), (sdp,) * 3).period.window(op) == barrier


def test_payloads_are_padded_and_of_the_type_that_is_sent() -> None:
    mix = StrategyAssignment(Job(chain(7, world=2, types=("bfloat16", "float32", ""))), (zero2,))
    assert (mix.payload(Op(AG_F, 0, 0)), mix.payload(Op(RS, 0, 0))) == (16, 32)


def test_units_are_cut_into_equal_blocks_without_a_small_tail() -> None:
    mix = StrategyAssignment(Job(chain(1000, 100, 7, world=2)), (dp, dp, dp))
    assert mix.unpartitioned_blocks() == ((1000,), (100,), (8,))
    assert mix.partition(1024) == ((256, 256, 256, 232), (100,), (8,))  # 1,024 bytes are 256 elements
    assert mix.partition(1) == ((32,) * 30 + (40,), (32, 32, 36), (8,))  # never below 16 elements per rank
    with pytest.raises(ValueError, match="block must be >= 1 byte, got 0"):
        mix.partition(0)


@examples(60)
@given(jobs(), st.integers(1, 20_000))
def test_blocks_cover_their_unit(job: Job, block: int) -> None:
    mix = StrategyAssignment(Job(job.profile), (dp,) * len(job.profile.units))
    world = job.profile.world
    for whole, cut in zip(mix.unpartitioned_blocks(), mix.partition(block), strict=True):
        assert (sum(cut),) == whole
        assert all(size > 0 and size % world == 0 for size in cut)
        if not job.profile.has_gradient_times:
            assert len(set(cut[:-1])) <= 1
            assert len(cut) == 1 or 0.5 * cut[0] <= cut[-1] <= 1.5 * cut[0]


def test_units_are_cut_where_a_parameter_ends_and_what_comes_first_is_sent_first() -> None:
    """Blocks of 16 multiples per rank; what is beyond the end of a parameter goes with the one before it, which comes later."""
    profile = chain(1000, world=2)
    profile = replace(profile, units=(replace(profile.units[0], gradients=((230, 1.0), (300, 0.5), (470, 0.25))),))
    mix = StrategyAssignment(Job(profile), (dp,))
    assert mix.partition(1024) == ((256, 288, 224, 232),)  # at 256, 512, 768 if all came at once; 530 is near 512
    assert block_ready_fractions(profile, 0, (256, 288, 224, 232)) == (1.0, 0.5, 0.25, 0.25)
    assert [m.parts for m in Partitioning(1 / 1024).schedule(mix).messages] == [((0, 2),), ((0, 3),), ((0, 1),), ((0, 0),)]


def test_drafts_are_ordered_by_slot_and_reductions_go_first_at_the_barrier() -> None:
    mix = StrategyAssignment(Job(chain(8, 8), cross_iteration=False), (zero2, zero2))
    drafts = [Message(AG_F, ((1, 0),), 2), Message(AG_F, ((0, 0),), 2), Message(RS, ((0, 0),), 2), Message(RS, ((1, 0),), 1)]
    plan = mix.plan("mine", mix.unpartitioned_blocks(), drafts)
    assert listed(plan) == [("RS b", 1), ("RS a", 2), ("AG_F b", 2), ("AG_F a", 2)]
    assert plan.scheduler == "mine"


# ---- one after the other, by hand: B:c B:b B:a F:a F:b F:c

THREE = chain(320, 320, 320)
MIXED = ["fsdp", "zero2", "dp"]


def test_sequential_sends_at_the_last_moment_and_waits() -> None:
    plan = planned(THREE, MIXED, Sequential())
    assert listed(plan) == [
        ("AR c", 1), ("RS b", 2), ("AG_B a", 2), ("RS a", 3), ("AG_F a", 3), ("AG_F b", 4),
    ]  # fmt: skip
    assert all(m.blocking for m in plan.messages)


def test_wfbp_sends_what_is_ready_and_prefetches_one_unit_ahead() -> None:
    plan = planned(THREE, MIXED, Wfbp())
    assert listed(plan) == [
        ("AR c", 1), ("AG_B a", 1), ("RS b", 2), ("AG_F b", 2), ("RS a", 3), ("AG_F a", 3),
    ]  # fmt: skip
    assert not any(m.blocking for m in plan.messages)
    barrier = planned(THREE, MIXED, Wfbp(), cross_iteration=False)
    assert listed(barrier, AG_F) == [("AG_F a", 3), ("AG_F b", 3)]
    assert listed(planned(THREE, "fsdp", Wfbp()), AG_F) == [("AG_F a", 3), ("AG_F b", 3), ("AG_F c", 4)]


def test_partitioning_is_wfbp_in_blocks() -> None:
    whole, cut = planned(THREE, MIXED, Wfbp()), planned(THREE, MIXED, Partitioning(256 / MIB))
    assert cut.blocks == ((64,) * 5,) * 3  # 1,280 bytes in 5 blocks
    assert listed(cut) == [m for m in listed(whole) for _ in range(5)]
    assert all(len(m.parts) == 1 for m in cut.messages)
    assert planned(THREE, MIXED, Partitioning()).blocks == planned(THREE, MIXED, Partitioning(THREE.block / MIB)).blocks


def test_fusion_fills_buckets() -> None:
    profile = chain(8, 8, 8, 8)  # 32 bytes each; B:d B:c B:b B:a F:a …
    assert listed(planned(profile, "dp", Fusion(64 / MIB))) == [("AR d+c", 2), ("AR b+a", 4)]
    assert listed(planned(profile, "dp", Fusion(65 / MIB))) == [("AR d+c+b", 3), ("AR a", 4)]
    assert listed(planned(profile, "dp", Fusion(1 / MIB))) == [("AR d", 1), ("AR c", 2), ("AR b", 3), ("AR a", 4)]
    assert listed(planned(profile, "zero2", Fusion(10**6))) == [("RS d+c+b+a", 4), ("AG_F a+b+c+d", 4)]
    with pytest.raises(ValueError, match="bucket_mib must be > 0, got 0"):
        Fusion(0 / MIB)


def test_a_fused_gather_is_sent_between_the_passes_it_serves() -> None:
    profile = chain(8, 8, 8, 8, 8)  # B:e B:d B:c B:b B:a F:a F:b F:c F:d F:e; e is sdp
    plan = planned(profile, "fsdp", Fusion(10**6))
    assert listed(plan, AG_B) == [("AG_B d+c+b+a", 0)]  # one slot ahead of B:d
    again = planned(profile, "sdp", Fusion(10**6), micro_steps=2)
    assert listed(again, AG_F) == [("AG_F a+b+c+d+e", 5), ("AG_F a+b+c+d+e", 15)]


def test_dear_gathers_in_the_pass_that_needs_it() -> None:
    plan = planned(THREE, "zero2", Dear())
    assert listed(plan) == [("RS c", 1), ("RS b", 2), ("RS a", 3), ("AG_F a", 3), ("AG_F b", 3), ("AG_F c", 3)]
    five = chain(8, 8, 8, 8, 8)  # slots 5 to 9 are forward, e is sdp
    plan = planned(five, "fsdp", Dear(ahead=2))
    assert listed(plan, AG_F) == [("AG_F a", 5), ("AG_F b", 5), ("AG_F c", 5), ("AG_F e", 5), ("AG_F d", 6)]
    assert listed(plan, AG_B) == [("AG_B c", 0), ("AG_B b", 1), ("AG_B a", 2), ("AG_B d", 9)]  # freed after F:d, slot 8
    assert listed(planned(five, "fsdp", Dear(ahead=0)), AG_B) == [
        ("AG_B d", 1), ("AG_B c", 2), ("AG_B b", 3), ("AG_B a", 4),
    ]  # fmt: skip
    assert listed(planned(five, "zero2", Dear(bucket_mib=64 / MIB)), RS) == [("RS e+d", 2), ("RS c+b", 4), ("RS a", 5)]
    with pytest.raises(ValueError, match="bucket_mib must be > 0, got -1"):
        Dear(bucket_mib=-1)


# ---- all of them


@examples(80)
@given(jobs(), seeds, schedulers)
def test_what_is_sent_does_not_depend_on_the_schedule(job: Job, seed: int, scheduler: Scheduler) -> None:
    mix = job.problem.mix(RandomMix(seed).choose(job.problem).strategies)
    plan = scheduler.schedule(mix)
    assert plan.strategies == mix.strategies
    assert plan.sent_bytes() == Sequential().schedule(mix).sent_bytes()
    elements: Counter[Op] = Counter()
    for m in plan.messages:
        for u, b in m.parts:
            elements[Op(m.kind, u, m.micro)] += plan.blocks[u][b]
    assert elements == {op: plan.profile.layouts[op.unit].elements for op in mix.ops}


@examples(60)
@given(jobs(), seeds, st.sampled_from([100, 600, 2000]))
def test_partitioning_really_cuts_and_nothing_else_does(job: Job, seed: int, block: int) -> None:
    mix = job.problem.mix(RandomMix(seed).choose(job.problem).strategies)
    widest = max(layout.param_width for layout in job.profile.layouts)
    largest = max(2 * block, 32 * job.profile.world * widest)  # rounding, and 16 elements per rank
    for scheduler in (Partitioning(block / MIB), Priority(block / MIB)):
        plan = scheduler.schedule(mix)
        widths = [job.profile.layouts[m.parts[0][0]].param_width for m in plan.messages]
        sizes = [plan.elements(m) * width for m, width in zip(plan.messages, widths, strict=True)]
        assert max(sizes, default=0) <= largest
    for whole in (Sequential(), Wfbp(), Fusion(block / MIB), MgWfbp(), Dear()):
        assert whole.schedule(mix).blocks == mix.unpartitioned_blocks()


@examples(80)
@given(jobs(), seeds)
def test_all_of_a_stream_can_be_fused_and_fusion_really_merges(job: Job, seed: int) -> None:
    mix = job.problem.mix(RandomMix(seed).choose(job.problem).strategies)
    windows: dict[tuple[Kind, int], list[tuple[int, int]]] = {}
    for op in mix.ops:
        windows.setdefault((op.kind, op.micro), []).append(mix.period.window(op))
    for stream in windows.values():
        assert max(first for first, _ in stream) <= min(last for _, last in stream)
    everything, single = Fusion(10**9).schedule(mix), Wfbp().schedule(mix)
    assert len(windows) <= len(everything.messages) <= len(single.messages)
    reductions = [m for m in everything.messages if not m.kind.is_gather]
    types = {(m.kind, job.profile.units[m.parts[0][0]].dtype_on_wire(is_gather=False)) for m in reductions}
    assert len(reductions) == len(types)  # they can always wait for the turn


def test_the_random_order_is_random_and_repeatable() -> None:
    plans = [planned(chain(900, 500, 300), "fsdp", RandomOrder(seed)).messages for seed in (*range(20), 0)]
    assert plans[0] == plans[-1]
    assert len(set(plans)) == 20
    assert any(len(m.parts) > 1 for plan in plans for m in plan)
    assert len({m.slot for plan in plans for m in plan if m.kind is AG_F and m.parts[0][0] == 2}) > 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomOrder(max_blocks=0), "max_blocks must be >= 1, got 0"),
        (lambda: RandomOrder(fuse=1.5), "fuse must be <= 1, got 1.5"),
        (lambda: Partitioning(-1), "block_mib must be > 0, got -1"),
        (lambda: Priority(-1), "block_mib must be > 0, got -1"),
        (lambda: Dear(ahead=-1), "ahead must be >= 0, got -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_schedulers_are_named_in_their_plans() -> None:
    """But memory_aware, which asks a solver: see test_joint."""
    made = {name: make() for name, make in SCHEDULERS.items() if name != "memory_aware"}
    assert {name: planned(THREE, "fsdp", each).scheduler for name, each in made.items()} == {name: name for name in made}


# ---- mg_wfbp against brute force


def partitions(stream: list[Op]) -> Iterator[list[list[Op]]]:
    """All ways to cut a stream into groups of neighbours."""
    for cuts in itertools.product([False, True], repeat=len(stream) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(stream)]
        yield [stream[a:b] for a, b in itertools.pairwise(edges)]


def seconds(mix: StrategyAssignment, group: list[Op]) -> float:
    """How long a fused message takes."""
    kind, profile = group[0].kind, mix.profile
    size = sum(profile.wire(kind, mix.payload(op)) for op in group)
    return profile.link.alpha_of(kind) + profile.link.beta_of(kind) * size


def clock(mix: StrategyAssignment, slot: int) -> float:
    """When compute alone reaches a slot (unrolled)."""
    length = mix.period.length
    return sum(mix.profile.slots[mix.period.slots[q % length].place].seconds for q in range(slot))


def end_of_reductions(mix: StrategyAssignment, groups: list[list[Op]]) -> float:
    """When the last message ends, if each starts when all of its gradients are ready."""
    time = -float("inf")
    for group in groups:
        ready = max(clock(mix, mix.period.window(op)[0]) for op in group)
        time = max(time, ready) + seconds(mix, group)
    return time


def start_of_gathers(mix: StrategyAssignment, groups: list[list[Op]]) -> float:
    """When the first message must start at the latest for all to be in time."""
    time = float("inf")
    for group in reversed(groups):
        needed = min(clock(mix, mix.period.window(op)[1]) for op in group)
        time = min(time, needed) - seconds(mix, group)
    return time


@examples(100)
@given(jobs(), st.sampled_from(["zero2", "dp", "fsdp"]))
def test_mg_wfbp_merges_optimally(job: Job, strategy: str) -> None:
    mix = job.problem.mix([Strategy(strategy)] * len(job.profile.units))
    streams: dict[tuple[Kind, int], list[Op]] = {}
    for op in in_ready_order(mix):
        streams.setdefault((op.kind, op.micro), []).append(op)
    assume(streams)
    for (kind, _), stream in streams.items():
        if kind.is_gather:
            stream.sort(key=lambda op: mix.period.window(op)[1])
        chosen = optimal_merge(mix, stream)
        assert [op for group in chosen for op in group] == stream
        allowed = list(partitions(stream))
        assert chosen in allowed
        if kind.is_gather:
            best = max(start_of_gathers(mix, groups) for groups in allowed)
            assert start_of_gathers(mix, chosen) == pytest.approx(best, abs=1e-12)
        else:
            best = min(end_of_reductions(mix, groups) for groups in allowed)
            assert end_of_reductions(mix, chosen) == pytest.approx(best, abs=1e-12)


def test_mg_wfbp_merges_more_the_longer_the_latency() -> None:
    counts = []
    for alpha in (0.0, 0.5, 3.0, 100.0):
        profile = chain(*[8] * 8, link=link(1 / 16, alpha=alpha))  # 1 s of bytes (2 s all-reduced), 2 s per slot
        counts.append(len(planned(profile, "dp", MgWfbp()).messages))
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (8, 1)


def test_mg_wfbp_of_nothing_is_nothing() -> None:
    assert optimal_merge(StrategyAssignment(Job(chain(8)), (dp,)), []) == []


# ---- priority against the nearest deadline


def fluid_job(rng: random.Random, count: int) -> Profile:
    """A chain without latency and update time, whose units are whole numbers of the smallest blocks."""
    sizes = [32 * rng.randint(1, 12) for _ in range(count)]
    profile = chain(*sizes, link=link(rng.choice([0.5, 1.0, 2.0]) * 1e-5, depth=rng.choice([1, 2])))
    slots = tuple(replace(s, seconds=rng.uniform(0.2e-3, 3e-3)) for s in profile.slots)
    return replace(profile, slots=slots)


def block_s(profile: Profile) -> float:
    """Time of one block of 16 elements per rank."""
    return 16 * 4 * max(profile.link.beta)


def all_orders(plan: Plan) -> Iterator[Plan]:
    """The plan's messages in every order that keeps reduce-scatters ahead of their gathers, as early as can be."""
    for order in itertools.permutations(plan.messages):
        slot, messages, reduced = 0, [], set()
        for m in order:
            first, last = plan.period.window(Op(m.kind, m.parts[0][0], 0))
            slot = max(slot, first)
            if slot > last or (m.kind is AG_F and not reduced.issuperset(m.parts)):
                break
            messages.append(Message(m.kind, m.parts, slot))
            reduced |= set(m.parts) if m.kind is RS else set()
        else:
            yield replace(plan, messages=tuple(messages))


@pytest.mark.parametrize("seed", range(12))
def test_priority_is_as_fast_as_the_best_of_all_orders(seed: int) -> None:
    """Nearest deadline first in blocks is optimal for one link; blocks are sent whole, hence one of them of slack."""
    profile = fluid_job(random.Random(seed), 3)
    best = min(map(step_s, all_orders(planned(profile, "zero2", Wfbp()))))
    assert step_s(planned(profile, "zero2", Priority(128 / MIB))) <= best + block_s(profile) + 1e-12


@pytest.mark.parametrize("cross_iteration", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_priority_is_never_slower_than_another_scheduler(seed: int, cross_iteration: bool) -> None:
    rng = random.Random(seed)
    profile = fluid_job(rng, rng.randint(2, 6))
    strategies = [str(rng.choice(choices(profile))) for _ in profile.units]
    for mixed in (strategies, "zero2", "fsdp", "dp"):
        blocks = 128 / MIB
        others = (Wfbp(), Partitioning(blocks), Dear(), Fusion(600 / MIB), RandomOrder(seed), Sequential())
        plans = {s.name: step_s(planned(profile, mixed, s, cross_iteration=cross_iteration)) for s in (Priority(blocks), *others)}
        assert plans["priority"] <= min(plans.values()) + block_s(profile) + 1e-12, (mixed, plans)


@pytest.mark.parametrize(("gap_s", "is_cut"), [(0.0, True), (0.1, False)])
def test_priority_cuts_finer_than_the_link_asks_for_where_that_is_faster(gap_s: float, is_cut: bool) -> None:
    profile = chain(*[1 << 20] * 4, link=link(2e-8))
    slots = tuple(replace(s, seconds=0.05) for s in profile.slots)
    profile = replace(profile, slots=slots, link=replace(profile.link, block=2**30, gap=(gap_s,) * len(profile.link.gap)))
    plan, whole = planned(profile, "zero2", Priority()), planned(profile, "zero2", Priority(2**30 / MIB))
    assert (len(plan.messages) > len(whole.messages), step_s(plan) < 0.99 * step_s(whole)) == (is_cut, is_cut)


@pytest.mark.parametrize(("depth", "slow", "first"), [(1, "alpha", 3), (1, "gap", 4), (2, "alpha", 4), (2, "gap", 3)])
def test_priority_counts_latencies_of_messages_that_are_alone_and_gaps_of_others(depth: int, slow: str, first: int) -> None:
    """In the 2 s before b's gradients come, blocks of c go out: all four, or one each 0.7 s until b's are more urgent."""
    profile = chain(128, 128, 128, link=link(depth=depth, **{slow: 0.7}))
    mix = StrategyAssignment(Job(profile), (dp,) * 3)
    windows, times = {op: mix.period.window(op) for op in mix.ops}, undelayed(mix.period)
    messages = nearest_deadline_first(mix, mix.partition(128), windows, times, waits=False)
    assert [m.slot for m in messages if m.parts[0][0] == 2].count(1) == first


def test_priority_waits_for_updates() -> None:
    # The update of b takes as long as everything else: a's messages are not held up by b's gather.
    profile = chain(32, 96, link=link(1 / 64), optimizer=Optimizer(seconds_per_element=1 / 8))
    kinds = [name for name, _ in listed(planned(profile, "zero2", Priority(10**6)))]
    assert kinds.index("RS a") < kinds.index("AG_F b")


def step_s_blind(profile: Profile) -> float:
    """Seconds of a step of zero2 with its messages in the order that is best where messages cost compute nothing."""
    mix = StrategyAssignment(Job(profile), (zero2,) * len(profile.units))
    windows = {op: mix.period.window(op) for op in mix.ops}
    messages = nearest_deadline_first(mix, mix.partition(128), windows, undelayed(mix.period))
    return step_s(mix.plan("blind", mix.partition(128), messages))


@pytest.mark.parametrize("seed", range(12))
def test_priority_knows_what_messages_cost_compute(seed: int) -> None:
    """It is no slower than in the order that is best where they cost nothing, and sometimes faster."""
    profile = fluid_job(random.Random(seed), 4)
    slow = replace(profile, contention=Contention(compute_per_byte=profile.link.beta_of(RS)))
    assert step_s(planned(slow, "zero2", Priority(128 / MIB))) <= step_s_blind(slow)


def test_idle_time_that_messages_make_is_used() -> None:
    """Where backward is slowed down by what it sends, gathers for the next forward fit beside it."""
    profile = chain(*[128] * 6, link=link(2.0 / 256, depth=2), forward_s=1.0, backward_s=2.0)
    slow = replace(profile, contention=Contention(compute_per_byte=0.5 / 256))
    assert step_s(planned(slow, "zero2", Priority(128 / MIB))) < 0.9 * step_s_blind(slow)


@pytest.mark.parametrize(("gap_s", "blocks"), [(0.0, 2), (0.5, 1)])
def test_priority_sends_the_largest_block_that_is_as_fast(gap_s: float, blocks: int) -> None:
    """The link's block makes five of a unit; a whole unit, whose update is one, too, takes 1 % more without gaps."""
    profile = replace(THREE, link=Link((0.0,) * 4, (0.02,) * 4, 1, 256, gap=(gap_s,) * 4))
    assert {len(unit) for unit in planned(profile, "dp", Priority()).blocks} == {blocks}


@pytest.mark.parametrize("seed", range(60))
def test_nearest_deadline_first_keeps_narrower_windows(seed: int) -> None:
    """Gathers that wait for their update and for their window, reductions that are due early."""
    rng = random.Random(seed)
    count = rng.randint(2, 6)
    profile = chain(
        *(rng.randint(8, 400) for _ in range(count)), link=link(seconds_per_byte=rng.choice([1e-4, 1e-3, 1e-2])),
        optimizer=Optimizer("adam", 2, 4, 2, seconds_per_element=rng.choice([0.0, 1e-3, 0.1]), seconds_per_run=0.05),
    )  # fmt: skip
    profile = replace(profile, interference=rng.choice([0.0, 0.5]))
    mix = StrategyAssignment(
        Job(profile, rng.choice([1, 2]), rng.random() < 0.7), tuple(rng.choice(choices(profile)) for _ in range(count))
    )
    windows = {}
    for op in mix.ops:
        first, last = mix.period.window(op)
        windows[op] = (rng.randint(first, last), last) if op.kind.is_gather else (first, rng.randint(first, last))
    blocks = mix.partition(200)
    times = replay(Partitioning(200 / MIB).schedule(mix)).steady()
    messages = nearest_deadline_first(mix, blocks, windows, times)
    mix.plan("narrow", blocks, messages)  # every block once, in an order that can be sent
    for message in messages:
        first, last = windows[Op(message.kind, message.parts[0][0], message.micro)]
        assert first <= message.slot <= last
