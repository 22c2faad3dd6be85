"""Who has a unit's memory: the plan, or a use that the plan does not have."""

from __future__ import annotations

from mdcs.runtime.context import RunContext
from mdcs.runtime.errors import ErrorContext
from mdcs.runtime.units import Units
from tests.mdcs.runtime.test_storage import plan_of, storage_of


def units() -> tuple[Units, RunContext]:
    context = RunContext(plan_of(16, "sdp"), ErrorContext(0))
    return Units(context, [storage_of(0)[0]]), context


def test_a_unit_outside_of_the_plan_is_the_plan_s_again_once_it_is_gathered() -> None:
    made, context = units()
    size = made.storages[0].full_bytes
    made.take_outside(0)
    assert context.account.live["full_parameters"] == made.outside_bytes == size
    made.begin_gather(0)
    assert context.account.live["full_parameters"] == size and made.outside_bytes == 0
    made.free_outside()
    assert made.storages[0].is_full  # it is no more outside of the plan


def test_what_has_no_memory_is_not_freed_again() -> None:
    made, context = units()
    made.allocate(0), made.allocate(0), made.free(0), made.free(0)
    made.allocate_gradient(0), made.allocate_gradient(0)
    assert context.account.live["full_parameters"] == 0
    assert context.account.live["gradients"] == made.storages[0].layout.grad_bytes
    made.free_gradients(((0, made.storages[0].layout.grad_bytes),))
    assert context.account.live["gradients"] == 0


def test_a_restart_leaves_what_is_at_rest() -> None:
    made, context = units()
    made.take_outside(0), made.allocate_gradient(0), made.restart()
    assert not made.storages[0].is_full and made.outside_bytes == 0
    assert context.account.live == {**context.account.live, **context.ledger.at_rest, "full_parameters": 0, "gradients": 0}
