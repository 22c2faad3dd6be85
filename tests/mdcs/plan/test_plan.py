"""The period and its windows, what makes a plan invalid, and that a plan survives JSON but no change."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdcs.plan.cost import Prediction
from mdcs.plan.period import Op, Period, Strategy
from mdcs.plan.plan import Plan, PlanError
from mdcs.plan.schedule import Message
from mdcs.planner.pipeline import make_plan
from mdcs.planner.schedulers import RandomOrder, Sequential, Wfbp
from mdcs.planner.strategies import RandomMix, Uniform
from mdcs.profile.link import Kind
from mdcs.profile.schema import Profile, Unit
from tests.mdcs.profiles import Job, chain, examples, jobs, of_job, planned, seeds, tied

AR, RS, AG_F, AG_B, *_ = Kind


def names(period: Period) -> str:
    return " ".join(period.name(q) for q in range(period.length))


def window(profile: Profile, kind: Kind, unit: int, micro: int = 0, micro_steps: int = 1) -> tuple[int, int]:
    return Period(profile, micro_steps).window(Op(kind, unit, micro))


# ---- the period


def test_a_period_begins_with_the_first_backward_slot() -> None:
    period = Period(chain(8, 4), 1)
    assert names(period) == "B:b B:a F:a F:b"
    assert (period.turn, period.length) == (2, 4)
    assert period.in_words(0) == "the backward of b" and period.in_words(2) == "the forward of a"


def test_a_period_of_several_micro_steps_begins_with_the_last_backward_pass() -> None:
    period = Period(chain(8, 4), 2)
    assert names(period) == "B/1:b B/1:a F/0:a F/0:b B/0:b B/0:a F/1:a F/1:b"
    assert (period.turn, period.length) == (2, 8)
    assert period.in_words(0) == "the backward of b in micro-step 2"
    assert period.forward(1, 1) == (7, 7)
    assert period.backward(1, 1) == (8, 8)  # unrolled: slot 0 of the next period


@pytest.mark.parametrize(
    ("kind", "unit", "expected"),
    [
        (RS, 1, (1, 3)),  # ready after B:b, needed, with its gather, by F:b
        (AG_F, 1, (1, 3)),
        (RS, 0, (2, 2)),  # the first unit has no window: only the turn
        (AR, 0, (2, 2)),
        (AG_B, 0, (3, 5)),  # freed after F:a, needed again in B:a of the next period
        (AG_B, 1, (4, 4)),
    ],
)
def test_windows_of_a_chain(kind: Kind, unit: int, expected: tuple[int, int]) -> None:
    assert window(chain(8, 4), kind, unit) == expected


@pytest.mark.parametrize(
    ("kind", "unit", "micro", "expected"),
    [
        (RS, 1, 0, (1, 3)),  # reduced once, after the last micro-step
        (AG_F, 1, 0, (1, 3)),
        (AG_F, 1, 1, (5, 7)),  # freed in B/0:b, slot 4
        (AG_B, 0, 0, (3, 5)),
        (AG_B, 0, 1, (7, 9)),
    ],
)
def test_windows_of_two_micro_steps(kind: Kind, unit: int, micro: int, expected: tuple[int, int]) -> None:
    assert window(chain(8, 4), kind, unit, micro, micro_steps=2) == expected


def test_the_window_of_a_tied_unit_is_from_its_last_backward_to_its_first_forward_use() -> None:
    profile = tied(8, 4)
    assert names(Period(profile, 1)) == "B:a B:b B:a F:a F:b F:a"
    assert window(profile, RS, 0) == (3, 3)
    assert window(profile, AG_B, 0) == (6, 6)
    assert window(profile, RS, 1) == (2, 4)


def test_a_unit_without_backward_is_gathered_from_the_head_of_the_period_on() -> None:
    profile = chain(8, 4)
    plain = replace(profile, units=(Unit("a", (8,), False, (0, 0), None), profile.units[1]), slots=profile.slots[:-1])
    assert names(Period(plain, 1)) == "B:b F:a F:b"
    assert window(plain, AG_F, 0) == (0, 1)


@pytest.mark.parametrize(("strategy", "kind", "slot"), [("fsdp", AG_F, 2), ("fsdp", AG_B, 5), ("sdp", AG_F, 5)])
def test_full_parameters_are_released_when_their_strategy_says(strategy: str, kind: Kind, slot: int) -> None:
    assert Period(chain(8, 4), 1).release(Op(kind, 0, 0), Strategy(strategy)) == slot


@pytest.mark.parametrize(
    ("strategy", "trainable", "has_backward", "kinds"),
    [
        ("dp", True, True, (AR,)),
        ("zero2", True, True, (RS, AG_F)),
        ("sdp", True, True, (RS, AG_F)),
        ("fsdp", True, True, (RS, AG_F, AG_B)),
        ("dp", False, True, ()),
        ("zero2", False, True, ()),
        ("sdp", False, True, (AG_F,)),
        ("fsdp", False, True, (AG_F, AG_B)),
        ("fsdp", False, False, (AG_F,)),
    ],
)
def test_collectives_of_a_strategy(strategy: str, trainable: bool, has_backward: bool, kinds: tuple[Kind, ...]) -> None:
    assert Strategy(strategy).kinds(trainable, has_backward) == kinds


# ---- messages


ZERO1 = planned(chain(8, 4), "zero2")  # RS b, RS a, AG_F a, AG_F b, at slots 1, 2, 2, 3


def test_what_waits_for_what() -> None:
    assert [str(m.kind) + "ab"[m.parts[0][0]] for m in ZERO1.messages] == ["RSb", "RSa", "AG_Fa", "AG_Fb"]
    assert ZERO1.schedule.waits_for == [-1, -1, 1, 0]
    assert ZERO1.schedule.updated_by == [0, 1, -1, -1]
    barrier = planned(chain(8, 4), "zero2", cross_iteration=False)
    assert barrier.schedule.waits_for == [-1, -1, 1, 1]
    assert barrier.schedule.updated_by == [1, 1, -1, -1]  # the last reduction runs the updates of all


def test_gathers_of_later_micro_steps_wait_for_no_update() -> None:
    plan = planned(chain(8, 4), "sdp", micro_steps=2)
    by_kind = [(str(m.kind), m.micro, w >= 0) for m, w in zip(plan.messages, plan.schedule.waits_for, strict=True)]
    assert {k: w for k, micro, w in by_kind if micro == 1} == {"AG_F": False}
    assert {k: w for k, micro, w in by_kind if micro == 0} == {"RS": False, "AG_F": True}


def test_the_slot_that_needs_a_message_and_the_slot_it_is_issued_at_are_unrolled() -> None:
    plan = planned(chain(8, 4), "fsdp")
    for slot, unrolled in ((0, 4), (3, 3)):  # at the head of the next period, and before
        messages = sorted((replace(m, slot=slot) if m.kind is AG_B else m for m in plan.messages), key=lambda m: m.slot)
        moved = replace(plan, messages=tuple(messages))
        at = [m.kind for m in messages].index(AG_B)
        assert (moved.schedule.slot[at], moved.schedule.needed_by[at]) == (unrolled, 5)
    needs = [(m.kind, q) for m, q in zip(plan.messages, plan.schedule.needed_by, strict=True)]
    assert (RS, -1) in needs and (AG_F, 2) in needs
    assert planned(chain(8, 4), "dp").schedule.needed_by == [3, 2]  # all-reduces of b and a


def test_the_prologue_gathers_what_the_first_forward_pass_and_its_backward_need() -> None:
    plan = planned(chain(8, 4, 4), "fsdp", Wfbp())
    assert plan.period.turn == 3
    sent = [(str(m.kind), bool(each)) for m, each in zip(plan.messages, plan.schedule.in_prologue, strict=True)]
    assert {s for s in sent if s[0] == "RS"} == {("RS", False)}
    assert {s for s in sent if s[0] == "AG_F"} == {("AG_F", True)}
    backward = [(m.slot, bool(each)) for m, each in zip(plan.messages, plan.schedule.in_prologue, strict=True) if m.kind is AG_B]
    assert backward == [(slot, slot >= 3) for slot, _ in backward]  # before the turn: of a backward pass that never was


def test_bytes_of_a_message() -> None:
    profile = chain(8, 4, world=2, types=("bfloat16", "float32", ""))
    plan = planned(profile, "zero2")
    fused = Message(RS, ((0, 0), (1, 0)), slot=2)
    assert plan.elements(fused) == 12
    assert plan.payload(fused) == 48  # gradients are fp32
    assert plan.payload(replace(fused, kind=AG_F)) == 24  # parameters are bf16
    assert plan.wire(fused) == 24
    assert plan.offsets == ((0,), (0,))


def with_message(i: int, **change: Any) -> Callable[[], Plan]:
    messages = list(ZERO1.messages)
    messages[i] = replace(messages[i], **change)
    return lambda: replace(ZERO1, messages=tuple(messages))


def with_order(*order: int) -> Callable[[], Plan]:
    return lambda: replace(ZERO1, messages=tuple(ZERO1.messages[i] for i in order))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_order(0, 1, 2), r"block 0 of b is never sent as AG_F \(micro-step 0\)"),
        (with_order(0, 1, 2, 3, 3), "block 0 of b is sent 2 times as AG_F"),
        (with_order(0, 2, 1, 3), r"message 1 \(AG_F of a\)"),
        (with_order(1, 0, 2, 3), r"message 1 \(RS of b\): issue slot 1 comes before 2 of the message ahead of it"),
        (with_message(0, slot=0), r"message 0 \(RS of b\): issue slot 0 is outside its window 1..3"),
        (with_message(3, slot=4), r"message 3 \(AG_F of b\): no slot 4 in a period of 4"),
        (with_message(0, slot=-1), r"message 0 \(RS of b\): no slot -1 in a period of 4"),
        (with_message(0, parts=()), "message 0 is empty"),
        (with_message(0, parts=((1, 1),)), r"message 0 \(RS of b\): the strategies have no block 1 of unit 1 to send"),
        (with_message(0, parts=((5, 0),)), r"message 0 \(RS of unit 5\): the strategies have no block 0 of unit 5"),
        (with_message(0, parts=((-1, 0),)), r"message 0 \(RS of unit -1\): the strategies have no block 0 of unit -1"),
        (with_message(0, kind=AR), r"message 0 \(AR of b\): the strategies have no block 0 of unit 1 to send"),
        (with_message(0, micro=1), r"message 0 \(RS of b\): the strategies have no block"),
        (lambda: replace(ZERO1, blocks=((8,), (2,))), r"unit b: blocks \(2,\) must be multiples of the world, 2, and sum"),
        (lambda: replace(ZERO1, blocks=((5, 3), (4,))), r"unit a: blocks \(5, 3\) must be multiples of the world"),
        (lambda: replace(ZERO1, blocks=((8, 0), (4,))), r"unit a: blocks \(8, 0\) must be multiples of the world"),
        (lambda: replace(ZERO1, blocks=((8,),)), "2 units but 2 strategies, 1 block lists"),
        (lambda: replace(ZERO1, strategies=(Strategy.dp,)), "2 units but 1 strategies"),
        (lambda: replace(of_job(ZERO1, reserve=100), budget=100), "budget 100 bytes is not above the reserve of 100"),
    ],
)  # fmt: skip
def test_invalid_plans_are_refused_by_name(make: Callable[[], Plan], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


BARRIER = planned(chain(8, 4, 4), "zero2", cross_iteration=False)  # RS c, RS b, RS a, AG_F a, b, c


@pytest.mark.parametrize(
    ("order", "slots", "message"),
    [
        ((1, 2, 3, 4, 0, 5), (2, 3, 3, 4, 4, 5), r"message 2 \(AG_F of a\)"),  # the last reduction is message 4
        ((0, 5, 1, 2, 3, 4), (1, 2, 2, 3, 3, 4), r"message 1 \(AG_F of c\)"),
    ],
)
def test_a_barrier_lies_between_all_reductions_and_all_gathers(
    order: tuple[int, ...], slots: tuple[int, ...], message: str
) -> None:
    messages = tuple(replace(BARRIER.messages[i], slot=s) for i, s in zip(order, slots, strict=True))
    assert replace(of_job(BARRIER, cross_iteration=True), messages=messages).messages == messages
    with pytest.raises(PlanError, match=message):
        replace(BARRIER, messages=messages)


def test_frozen_units_may_be_gathered_before_the_barrier() -> None:
    plan = planned(chain(8, 4, 4, frozen=[2]), "sdp", cross_iteration=False)
    frozen = [m for m in plan.messages if m.parts[0][0] == 2]
    assert [m.kind for m in frozen] == [AG_F]
    rest = tuple(m for m in plan.messages if m not in frozen)
    replace(plan, messages=(replace(frozen[0], slot=1), *rest))


def test_a_fused_gather_is_issued_in_the_window_of_all_its_units() -> None:
    plan = planned(chain(8, 4, 4), "fsdp")  # period B:c B:b B:a F:a F:b F:c; c is sdp
    alone = [m for m in plan.messages if m.kind is not AG_B]
    fused = Message(AG_B, ((0, 0), (1, 0)), slot=5)  # windows 4..8 and 5..7
    ordered = sorted([*alone, fused], key=lambda m: m.slot)
    assert replace(plan, messages=tuple(ordered)).schedule.needed_by[ordered.index(fused)] == 7
    early = sorted([*alone, replace(fused, slot=4)], key=lambda m: m.slot)
    with pytest.raises(PlanError, match=r"AG_B of a, b\): issue slot 4 is outside its window 5..7"):
        replace(plan, messages=tuple(early))


# ---- JSON and the hash


@examples(40)
@given(jobs(), seeds)
def test_json_gives_the_same_plan_back(job: Job, seed: int) -> None:
    plan = job.plan(RandomMix(seed), RandomOrder(seed))
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash
    assert again.prediction == plan.prediction
    assert again.to_json() == plan.to_json()
    assert pickle.loads(pickle.dumps(plan)) == plan  # how ranks get it


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to all numbers, texts and flags of a JSON value."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    return [path] if children is None else [p for k, v in children for p in leaves(v, (*path, k))]


SAVED = json.loads(make_plan(chain(8, 4, about={"model": "toy"}), Uniform("zero2"), Sequential()).to_json())
EXECUTED = [p for p in leaves(SAVED) if p[0] not in ("prediction", "strategy", "scheduler", "outcome", "bound_s", "schema")]


@examples(60)
@given(st.sampled_from(EXECUTED), st.data())
def test_a_changed_plan_is_refused(path: tuple[Any, ...], data: st.DataObject) -> None:
    changed = json.loads(json.dumps(SAVED))
    where = changed
    for key in path[:-1]:
        where = where[key]
    old = where[path[-1]]
    if isinstance(old, bool):
        new: Any = not old
    elif isinstance(old, (int, float)):
        new = old + data.draw(st.integers(1, 3))
    else:
        new = f"{old or ''}x"
    where[path[-1]] = new
    with pytest.raises(PlanError):
        Plan.from_json(json.dumps(changed))


def test_names_and_predictions_are_no_part_of_the_identity() -> None:
    prediction = Prediction.of(1.0, 1.0, 0.0, 0.0, peak_bytes=1, memory={})
    same = replace(ZERO1, strategy="other", scheduler="other", prediction=prediction)
    assert same.hash == ZERO1.hash
    assert Plan.from_json(same.to_json()).strategy == "other"


def test_the_same_plan_with_a_budget_is_another() -> None:
    assert len({replace(of_job(ZERO1, reserve=r), budget=b).hash for b, r in ((None, 0), (10**6, 0), (10**6, 1))}) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a plan"),
        ("[1]", "not a plan"),
        ("3", "not a plan"),
        ("{}", "not a plan: KeyError"),
        (json.dumps(SAVED | {"schema": 0}), "plan schema 0 is not the supported 2"),
        (json.dumps({k: v for k, v in SAVED.items() if k != "blocks"}), r"'blocks'"),
        (json.dumps({k: v for k, v in SAVED.items() if k != "hash"}), "plan says hash None"),
        (json.dumps(SAVED | {"strategies": ["zero9", "dp"]}), "not a plan: .*zero9"),
        (json.dumps(SAVED | {"prediction": {"step_s": 1}}), "not a plan: TypeError"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("strategy", "rank", "block", "expected"),
    [
        # Segments of 7 and 2 elements, padded to 10, in blocks of 6 and 4; a rank has 3 and 2 of them.
        ("zero2", 0, 0, [(0, 3, 0)]),
        ("zero2", 1, 0, [(3, 3, 0)]),
        ("zero2", 0, 1, [(6, 1, 0), (7, 1, 1)]),
        ("zero2", 1, 1, [(8, 2, 1)]),  # the padding belongs to the last segment
        ("dp", 0, 1, [(6, 1, 0), (7, 3, 1)]),
        ("dp", 1, 0, [(0, 6, 0)]),
    ],
)
def test_boundaries_of_segments_cut_what_a_rank_updates(
    strategy: str, rank: int, block: int, expected: list[tuple[int, int, int]]
) -> None:
    profile = chain(9, world=2)
    plan = planned(replace(profile, units=(replace(profile.units[0], segments=(7, 2)),)), strategy)
    messages = tuple(replace(m, parts=((0, 0), (0, 1))) for m in plan.messages)
    assert replace(plan, blocks=((6, 4),), messages=messages).runs(0, block, rank) == expected
