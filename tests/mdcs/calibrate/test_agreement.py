"""Ranks agree: on one profile, on rank 0's plan, and on its error, whatever it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from mdcs import InfeasibleBudget, Job
from mdcs.calibrate.agreement import agree, on_rank_zero
from mdcs.plan.message import Message
from mdcs.plan.messages import Plan
from mdcs.plan.strategy import Strategy
from mdcs.profile.contents import Profile
from mdcs.profile.link import Kind, Link

from ..profiles import chain
from ..runtime.conftest import two  # noqa: F401  # the ranks that the runtime's tests share
from ..runtime.ranks import Ranks


def test_a_unit_is_in_use_where_it_is_on_any_rank(two: Ranks) -> None:  # noqa: F811
    for agreed in two.run(agree_on_uses):
        assert [(u.forward, u.backward, u.aliased, bool(u.gradients)) for u in agreed.units[:2]] == [
            ((0, 2), (1, 2), True, False), ((1, 1), (1, 1), False, True),
        ]  # fmt: skip


def agree_on_uses() -> Profile:
    profile = chain(100, 100, 100)
    units = [replace(u, gradients=((100, 0.5),)) for u in profile.units]
    if dist.get_rank() == 1:
        units[0] = replace(units[0], forward=(0, 2), backward=(1, 2), gradients=(), aliased=True)
    return agree(replace(profile, units=tuple(units)))


class Odd(Exception):
    """Cannot be made again from what pickle keeps."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


def a_plan() -> Plan:
    return Plan(Job(chain(100)), (Strategy.dp,), ((100,),), (Message(Kind.AR, ((0, 0),), 1),))


def raised(what: str) -> Exception:
    if what == "local":

        class Local(Exception):
            """Has no name by which pickle could find it."""

        return Local("mine")
    errors = {
        "ValueError": ValueError("bad"),
        "KeyError": KeyError("scheduler"),
        "MemoryError": MemoryError("no room"),
        "InfeasibleBudget": InfeasibleBudget(10, 20, "even all fsdp"),
        "Odd": Odd("solver", "gone"),
    }
    return errors[what]


def plan_or_error(what: str) -> tuple[Plan, bool]:
    called = []

    def make() -> Plan:
        called.append(dist.get_rank())
        if what:
            raise raised(what)
        return a_plan()

    plan = on_rank_zero(make)
    return plan, called == ([0] if dist.get_rank() == 0 else [])


@pytest.mark.parametrize("what", ["ValueError", "KeyError", "MemoryError", "InfeasibleBudget"])
def test_rank_zeros_error_is_every_ranks(two: Ranks, what: str) -> None:  # noqa: F811
    first, second = two.outcomes(plan_or_error, what, timeout_s=20)
    assert first.kind == second.kind == what
    assert first.message == second.message == str(raised(what))


@pytest.mark.parametrize(("what", "kind"), [("Odd", "Odd"), ("local", "Local")])
def test_an_error_that_cannot_be_sent_is_its_text_elsewhere(two: Ranks, what: str, kind: str) -> None:  # noqa: F811
    first, second = two.outcomes(plan_or_error, what, timeout_s=20)
    assert (first.kind, first.message) == (kind, str(raised(what)))
    assert (second.kind, second.message) == ("RuntimeError", f"{kind}: {first.message}")


def test_rank_zeros_plan_is_every_ranks(two: Ranks) -> None:  # noqa: F811
    (first, once), (second, never) = two.run(plan_or_error, "")
    assert first == second and once and never


def test_without_ranks_a_plan_and_an_error_are_ones_own() -> None:
    plan = a_plan()
    assert on_rank_zero(lambda: plan) is plan
    with pytest.raises(KeyError, match="scheduler"):
        on_rank_zero(lambda: {}["scheduler"])


def of_this_rank() -> Profile:
    rank = dist.get_rank()
    profile = chain(100, 200, forward_s=0.1 + 0.2 * rank)
    slots = tuple(replace(slot, live=10 * rank, peak=30 - 10 * rank) for slot in profile.slots)
    return agree(replace(profile, slots=slots, spread={"slot 0": (0.1 + rank, 0.2 + rank)}), Link.uniform(1, 50))


def test_a_profile_has_median_times_the_most_bytes_and_the_spread_over_all(two: Ranks) -> None:  # noqa: F811
    first, second = two.run(of_this_rank)
    assert first == second
    assert first.slots[0].seconds == pytest.approx(0.2)
    assert (first.slots[0].live, first.slots[0].peak) == (10, 30)
    assert first.spread == {"slot 0": (0.1, 1.2)}
    assert first.link == Link.uniform(1, 50)
