"""The memory ledger, computed by hand: bytes by category and slot, for every strategy and way to send messages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from mdcs.plan.ledger import Ledger, min_feasible_budget, worst_case_bytes_by_slot
from mdcs.plan.lifetimes import CATEGORIES, staging_bytes
from mdcs.plan.plan import Plan
from mdcs.plan.schedule import Message
from mdcs.planner.pipeline import Scheduler
from mdcs.planner.schedulers import Fusion, Partitioning
from mdcs.planner.strategies import RandomMix
from mdcs.profile.link import Collectives, Kind
from mdcs.profile.schema import Profile, Slot
from mdcs.simulator.simulate import replay
from mdcs.sizes import MIB
from tests.mdcs.profiles import ADAM, FREE, Job, chain, examples, jobs, planned, schedulers, seeds, tied

AR, RS, AG_F, AG_B, *_ = Kind

# a has 8 elements (32 bytes), b has 4 (16 bytes); (live, peak) of the activations in the order of the model.
PLAIN = chain(8, 4, world=2, optimizer=ADAM)
ACTIVATIONS = ((10, 30), (30, 40), (40, 50), (30, 45))  # F:a F:b B:b B:a
PROFILE = replace(
    PLAIN, slots=tuple(replace(s, live=low, peak=high) for s, (low, high) in zip(PLAIN.slots, ACTIVATIONS, strict=True))
)


def by_slot(plan: Plan, *categories: str) -> list[tuple[int, ...]]:
    """Bytes in every slot of the replayed period, the messages that compute waits for before it included."""
    return [tuple(window[c] for c in categories) for window in replay(plan).curve]


# ---- by strategy, sequential: period B:b B:a F:a F:b

#         full  gradients  shards  staging  scratch  activations  total
DP = [
    (0, 16, 0, 0, 0, 50, 152 + 16 + 50),
    (0, 32, 0, 8, 32, 45, 152 + 16 + 32 + 30),  # b: all-reduced beside a part, Adam on 16 bytes; then B:a
    (0, 32, 0, 16, 64, 30, 152 + 32 + 64 + 10),
    (0, 0, 0, 0, 0, 40, 152 + 40),
]
ZERO1 = [
    (0, 16, 0, 0, 0, 50, 104 + 16 + 50),
    (0, 32, 8, 8, 16, 45, 104 + 32 + 45),  # b: a part received in 8 bytes, summed into 8, then Adam on 8
    (0, 32, 16, 16, 32, 30, 104 + 32 + 16 + 16 + 10),
    (0, 0, 0, 0, 0, 40, 104 + 40),
]
SDP = [
    (48, 16, 0, 0, 0, 50, 80 + 48 + 16 + 50),  # both still full from forward
    (32, 32, 8, 8, 16, 45, 80 + 32 + 32 + 45),
    (32, 32, 16, 16, 32, 30, 80 + 32 + 16 + 16 + 10),  # a is reduced before it is gathered
    (48, 0, 0, 0, 0, 40, 80 + 48 + 40),
]
FSDP = [  # b, the last, has nothing to gain from a second gather: as sdp
    (16, 16, 0, 0, 0, 50, 80 + 16 + 16 + 50),
    (32, 32, 8, 8, 16, 45, 80 + 32 + 32 + 45),  # b is reduced before a is gathered again
    (32, 32, 16, 16, 32, 30, 80 + 32 + 16 + 16 + 10),
    (16, 0, 0, 0, 0, 40, 80 + 16 + 40),  # a is freed after F:a
]


@pytest.mark.parametrize(
    ("strategy", "at_rest", "table"),
    [
        ("dp", {"parameters": 48, "optimizer": 2 * 48 + 2 * 4}, DP),
        ("zero2", {"parameters": 48, "optimizer": 48 + 2 * 4}, ZERO1),
        ("sdp", {"parameters": 24, "optimizer": 48 + 2 * 4}, SDP),
        ("fsdp", {"parameters": 24, "optimizer": 48 + 2 * 4}, FSDP),
    ],
)
def test_bytes_by_category_and_slot(strategy: str, at_rest: dict[str, int], table: list[tuple[int, ...]]) -> None:
    plan = planned(PROFILE, strategy)
    assert Ledger(plan).at_rest == at_rest
    moving = [c for c in CATEGORIES if c not in at_rest]
    assert moving == ["full_parameters", "gradients", "gradient_shards", "staging", "update_scratch", "activations"]
    assert by_slot(plan, *moving, "total") == table
    assert min_feasible_budget(plan) == max(row[-1] for row in table)
    assert replay(plan).peak["total"] == min_feasible_budget(plan)


@pytest.mark.parametrize(
    ("strategy", "parameters", "optimizer"),
    [
        ("dp", 36 + 24, 2 * 60 + 2 * 4),  # 8 and 4 elements are padded to 9 and 6
        ("zero2", 36 + 24, 2 * 20 + 2 * 4),
        ("sdp", 12 + 8, 2 * 20 + 2 * 4),
        ("fsdp", 12 + 8, 2 * 20 + 2 * 4),
    ],
)
def test_three_ranks_pad(strategy: str, parameters: int, optimizer: int) -> None:
    plan = planned(replace(PROFILE, world=3), strategy)
    assert Ledger(plan).at_rest == {"parameters": parameters, "optimizer": optimizer}
    assert max(by_slot(plan, "gradients")) == (36,)


def in_types(dtype: str, grad: str, master: str) -> Profile:
    units = [replace(unit, dtype=dtype, grad_dtype=grad, master_dtype=master) for unit in PROFILE.units]
    return replace(PROFILE, units=tuple(units))


def test_half_precision_parameters_with_whole_gradients() -> None:
    plan = planned(in_types("bfloat16", "float32", ""), "sdp")
    assert max(by_slot(plan, "full_parameters")) == (24,)
    assert max(by_slot(plan, "gradients")) == (32,)
    assert max(by_slot(plan, "gradient_shards", "staging")) == (16, 16)


@pytest.mark.parametrize(
    ("strategy", "parameters", "optimizer", "scratch"),
    [("dp", 24, 3 * 48 + 8, 32), ("zero2", 24, 3 * 24 + 8, 16), ("sdp", 0, 3 * 24 + 8, 16), ("fsdp", 0, 3 * 24 + 8, 16)],
)
def test_masters(strategy: str, parameters: int, optimizer: int, scratch: int) -> None:
    """2 bytes in compute and on the wire, 4 in the optimizer: masters are with its state, a cast gradient is scratch."""
    plan = planned(in_types("bfloat16", "", "float32"), strategy)
    assert Ledger(plan).at_rest == {"parameters": parameters, "optimizer": optimizer}
    assert max(by_slot(plan, "update_scratch")) == (scratch + ADAM.scratch_tensors * scratch,)
    a, b = plan.profile.units
    frozen = replace(plan.profile, units=(replace(a, trainable=False, master_dtype=""), b))
    assert Ledger(planned(frozen, strategy)).at_rest["parameters"] == (8 if parameters == 0 else 24)


@pytest.mark.parametrize(("strategy", "parameters"), [("dp", 48), ("zero2", 48), ("sdp", 24)])
def test_a_frozen_unit_has_no_gradient_no_state_and_no_update(strategy: str, parameters: int) -> None:
    frozen_a = replace(PROFILE, units=(replace(PROFILE.units[0], trainable=False), PROFILE.units[1]))
    plan = planned(frozen_a, strategy)
    ledger = Ledger(plan)
    b = 2 * 16 if strategy == "dp" else 2 * 8
    assert ledger.at_rest == {"parameters": parameters, "optimizer": b + 4}
    assert by_slot(plan, "gradients") == [(16,), (16,), (0,), (0,)]  # b's, reduced when compute arrives at B:a
    assert {u for m in plan.messages if not m.kind.is_gather for u, _ in m.parts} == {1}


def test_a_tied_unit_holds_its_gradient_from_its_first_backward_use() -> None:
    plan = planned(tied(8, 4), "zero2")  # B:a B:b B:a F:a F:b F:a
    assert by_slot(plan, "gradients") == [(32,), (48,), (48,), (32,), (0,), (0,)]


def test_a_tied_unit_is_full_until_its_last_use() -> None:
    assert by_slot(planned(tied(8, 4), "sdp"), "full_parameters") == [(48,), (48,), (32,), (32,), (48,), (48,)]
    # As fsdp, a would be gathered again at once; b is freed after F:b.
    assert by_slot(planned(tied(8, 4), "fsdp"), "full_parameters") == [(32,), (48,), (32,), (32,), (48,), (32,)]


def test_accumulated_gradients_stay_through_the_period() -> None:
    plan = planned(PROFILE, "zero2", micro_steps=2)  # B/1:b B/1:a F/0:a F/0:b B/0:b B/0:a F/1:a F/1:b
    assert by_slot(plan, "gradients") == [(48,), (48,), (32,), (0,), (16,), (48,), (48,), (48,)]
    assert sum(m.kind is RS for m in plan.messages) == 2  # both once per period


def test_sharded_parameters_are_gathered_in_every_micro_step() -> None:
    plan = planned(PROFILE, "sdp", micro_steps=2)
    assert by_slot(plan, "full_parameters") == [(48,), (32,), (32,), (48,), (48,), (32,), (32,), (48,)]


def test_at_the_barrier_shards_wait_for_the_last_reduction() -> None:
    plan = planned(PROFILE, "zero2", cross_iteration=False)
    assert by_slot(plan, "gradients", "gradient_shards", "update_scratch", "total") == [
        (16, 0, 0, 104 + 16 + 50),
        (32, 8, 0, 104 + 8 + 32 + 45),  # b is reduced but not updated
        (32, 24, 32, 104 + 8 + 32 + 16 + 16 + 10),  # then both are, with the larger scratch
        (0, 0, 0, 104 + 40),
    ]
    b, a = (e for e in Ledger(plan).messages if e.shards)
    assert (b.shards_held, b.transient, b.freed) == (8, 8, 16)
    assert (a.shards_held, a.transient, a.freed) == (0, 16 + 16, 8 + 32)


def test_at_the_barrier_dp_gradients_wait_for_the_last_reduction() -> None:
    plan = planned(PROFILE, "dp", cross_iteration=False)
    assert by_slot(plan, "gradients") == [(16,), (48,), (48,), (0,)]
    b, a = Ledger(plan).messages
    assert (b.gradients_after_update, a.gradients_after_update) == ((), ((0, 32), (1, 16)))


def test_at_the_barrier_a_reduce_scatter_can_end_what_an_all_reduce_began() -> None:
    plan = planned(PROFILE, ["zero2", "dp"], cross_iteration=False)
    assert by_slot(plan, "gradients", "gradient_shards") == [(16, 0), (48, 0), (48, 16), (0, 0)]
    b, a = (e for e, m in zip(Ledger(plan).messages, plan.messages, strict=True) if not m.kind.is_gather)
    assert (a.gradients_after_link, a.gradients_after_update) == (((0, 32),), ((1, 16),))
    assert b.freed == 0


# ---- messages

A, B = (0, 0), (1, 0)


@pytest.mark.parametrize(
    ("kind", "parts", "algorithm", "world", "staging"),
    [
        (AR, (A,), "native", 2, 0),  # in place
        (AR, (A,), "ring", 2, 16),  # a part is received beside the gradient
        (AR, (A, B), "native", 2, 48),  # packed
        (AR, (A, B), "ring", 2, 48 + 24),
        (AR, (A, B), "native", 1, 0),
        (RS, (A,), "native", 2, 0),  # an all-reduce in place
        (RS, (A,), "ring", 2, 16),
        (RS, (A, B), "native", 2, 48),
        (RS, (A, B), "ring", 3, 60 + 20),  # 9 and 6 elements
        (RS, (A, B), "ring", 1, 0),  # nothing is sent
        (AG_F, (A,), "native", 2, 32),  # gloo's own copy
        (AG_F, (A,), "ring", 2, 0),
        (AG_F, (A, B), "native", 2, 96),
        (AG_F, (A, B), "ring", 2, 48),
    ],
)
def test_staging(kind: Kind, parts: tuple[tuple[int, int], ...], algorithm: str, world: int, staging: int) -> None:
    collectives = Collectives(algorithm)
    plan = planned(replace(PROFILE, collectives=collectives, world=world), "zero2")
    assert staging_bytes(plan.profile, kind, plan.payload(Message(kind, parts, 2)), len(parts)) == staging


def test_a_fused_message_frees_what_it_reduces_only_when_it_ends() -> None:
    plan = planned(PROFILE, "zero2", Fusion(10**6))
    reduction = Ledger(plan).messages[0]
    assert plan.messages[0].parts == ((1, 0), (0, 0))
    assert (reduction.shards, reduction.staging, reduction.gradients_after_link) == (24, 72, ((0, 32), (1, 16)))
    # Beside the gradients: shards and staging on the link, then shards and Adam on the larger shard.
    assert (reduction.transient, reduction.scratch, reduction.freed) == (24 + 72, 32, 48)


def test_blocks_of_a_unit_share_its_buffer_and_its_gradient() -> None:
    plan = planned(chain(64, 64, 64, world=2, optimizer=ADAM), "fsdp", Partitioning(128 / MIB))  # 2 blocks of 128 bytes
    assert plan.blocks == ((32, 32),) * 3
    ledger = Ledger(plan)
    for kind in (AG_F, AG_B, RS):
        effects = [e for e, m in zip(ledger.messages, plan.messages, strict=True) if m.kind is kind and m.parts[0][0] == 0]
        assert [e.full for e in effects] == [((0, 256),) if kind.is_gather else (), ()]
        assert [e.gradients_after_link for e in effects] == [(), ((0, 256),) if kind is RS else ()]
    assert ledger.at_rest["optimizer"] == 2 * 3 * 128 + 6 * 4  # each block has a step counter


def test_the_first_gather_is_the_first_in_time_when_blocks_cross_the_end_of_the_period() -> None:
    plan = planned(chain(64, 64, 64, world=2), "fsdp", Partitioning(128 / MIB))  # B:c B:b B:a F:a F:b F:c
    gathers = [m for m in plan.messages if m.kind is AG_B and m.parts[0][0] == 0]
    head, tail = replace(gathers[0], slot=0), replace(gathers[1], slot=5)
    rest = [m for m in plan.messages if m not in gathers]
    crossing = replace(plan, messages=tuple(sorted([head, *rest, tail], key=lambda m: m.slot)))
    slots = dict(zip(crossing.messages, crossing.schedule.slot, strict=True))
    assert (slots[tail], slots[head]) == (5, 6)
    effects = dict(zip(crossing.messages, Ledger(crossing).messages, strict=True))
    assert (effects[tail].full, effects[head].full) == (((0, 256),), ())


# ---- ranks


def test_planning_assumes_the_rank_that_needs_most() -> None:
    # Rank 0 updates two runs of 4 elements, rank 1 one of 8: more state here, more scratch there.
    unit = replace(PROFILE.units[0], segments=(4, 12))
    plan = planned(replace(PROFILE, units=(unit, PROFILE.units[1])), "zero2")
    first, second, worst = Ledger(plan, rank=0), Ledger(plan, rank=1), Ledger(plan)

    def state_and_scratch(ledger: Ledger) -> tuple[int, int]:
        return ledger.at_rest["optimizer"], max(e.scratch for e in ledger.messages)

    assert state_and_scratch(first) == (2 * (32 + 8) + 3 * 4, 2 * 4 * 4)
    assert state_and_scratch(second) == (2 * (32 + 8) + 2 * 4, 2 * 8 * 4)
    assert state_and_scratch(worst) == (2 * (32 + 8) + 3 * 4, 2 * 8 * 4)


@examples(100)
@given(jobs(), seeds, schedulers)
def test_no_rank_needs_more_than_planning_assumes_and_all_of_it_is_freed(job: Job, seed: int, scheduler: Scheduler) -> None:
    plan = job.plan(RandomMix(seed), scheduler)
    worst = Ledger(plan)
    ranks = [Ledger(plan, rank) for rank in range(plan.world)]
    assert worst.rest_bytes == max(r.rest_bytes for r in ranks)
    for i, effect in enumerate(worst.messages):
        assert effect.scratch == max(r.messages[i].scratch for r in ranks)
    assert min_feasible_budget(plan) >= max(max(worst_case_bytes_by_slot(plan, r)) for r in ranks) + plan.reserve
    assert sum(s.allocated - s.freed for s in worst.slots) + sum(e.held - e.freed for e in worst.messages) == 0
    assert sum(e.shards - e.shards_freed for e in worst.messages) == 0


def test_slots_keep_what_they_measured() -> None:
    profile = Profile(PLAIN.units, (*PLAIN.slots[:3], Slot(0, "B", 1.0, 7, 5)), 2, FREE)
    assert [(s.live, s.peak) for s in Ledger(planned(profile, "dp")).slots][1] == (7, 5)
