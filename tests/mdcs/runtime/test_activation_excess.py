"""Batches larger than the profiled one, and what a loop keeps beside its step.

Where messages can wait the budget is kept; where they cannot this is said once, and counted in records.

Tensor memory is counted in all ranks.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import mdcs
from mdcs.plan.ledger import SlotBytes, min_feasible_budget
from mdcs.planner.schedulers import Wfbp
from mdcs.planner.strategies import Uniform
from mdcs.profile.schema import INPUTS
from mdcs.profiler.consensus import on_rank_zero
from mdcs.runtime.errors import ErrorContext, OverBudget
from mdcs.runtime.slots import ActivationExcess, BatchSizes, from_words, in_words
from mdcs.sizes import MIB
from tests.mdcs.profiles import chain, of_job, planned
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import measured

WIDTH, BLOCKS, CLASSES, SAMPLES = 128, 6, 512, 16
BLOCK = WIDTH * (WIDTH + 1) * 4
"""Bytes of a block's gradients."""


def make() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES))


def batch_of(samples: int, step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, WIDTH, generator=generator), torch.randint(CLASSES, (samples,), generator=generator)


def loss_of(model: nn.Module, samples: int, step: int = 0) -> Tensor:
    x, y = batch_of(samples, step)
    return F.cross_entropy(model(x), y)


@contextmanager
def in_need(
    strategy: str = "fsdp", room: int = 0, *, is_slow: bool = False, **options: Any
) -> Iterator[tuple[nn.Module, mdcs.Session, list[str]]]:
    """A model, its run under a budget of what its schedule needs and ``room``, and the warnings.

    Behind a slow link messages are in flight for longer than slots.
    """
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0 if is_slow else 0.9)
    units = mdcs.partition(model, mdcs.ByClass("Linear"))
    link = mdcs.Link.uniform(0.05, 100.0, 2, True) if is_slow else mdcs.Link.uniform(1.0, 50.0)
    profile = measured(model, units, lambda: loss_of(model, SAMPLES), optimizer, link=link)
    # The same plan in every run: activations are the measured ones, times are not.
    profile = dataclasses.replace(profile, slots=tuple(dataclasses.replace(slot, seconds=1e-3) for slot in profile.slots))
    plan = on_rank_zero(lambda: mdcs.make_plan(profile, Uniform(strategy), Wfbp()))
    plan = dataclasses.replace(plan, budget=min_feasible_budget(plan) + room)
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with mdcs.parallelize(model, optimizer, plan, units, timeout_s=20, **options) as parallel:
                yield model, parallel, said
        finally:
            said += [str(w.message) for w in caught]


def run(samples: list[int], strategy: str = "fsdp", keeps: int = 0, room: int = 0) -> dict[str, Any]:
    """Steps of these batches, of which a variable ``keeps`` so many bytes until the next has its own, as no profiled one."""
    kept = None
    with in_need(strategy, room, is_slow=True) as (model, parallel, said):
        for step, size in enumerate(samples):
            loss = loss_of(model, size, step)
            kept = torch.zeros(keeps // 4)
            loss.backward()
            parallel.step()
        parallel.drain()
        records = parallel.records(flush=True)
        peak, plan = parallel.memory()["measured"]["total"], parallel.plan
    del kept
    return {
        "said": [text for text in said if "above the budget" in text],
        "over": [r.over_budget for r in records],
        "slots": [r.slots_over_budget for r in records],
        "peak": peak,
        "budget": plan.budget,
    }


def test_a_longer_batch_is_said_once_with_sizes_and_bytes_and_counted(two: Ranks):
    larger = 16 * SAMPLES
    for found in two.run(run, [SAMPLES, SAMPLES, larger, larger, SAMPLES, larger]):
        [said] = found["said"]
        above = found["over"][2] / MIB
        assert f"step 3: {above:.2f} MiB above the budget of {found['budget'] / MIB:.2f} MiB in the " in said
        assert f"The batch is {larger} x {WIDTH}, the measured one was {SAMPLES} x {WIDTH}: measure the largest batch" in said
        assert [size > 0 for size in found["over"]] == [False, False, True, True, False, True]
        assert [slots > 0 for slots in found["slots"]] == [False, False, True, True, False, True]
        assert found["peak"] == found["budget"] + max(found["over"])


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_messages_make_room_for_what_the_loop_keeps(two: Ranks, strategy: str):
    """The schedule would run ahead of its reductions as far as the budget goes, and what the loop keeps would come on top."""
    keeps = 2 * BLOCK
    for found in two.run(run, [SAMPLES] * 6, strategy, keeps, keeps + BLOCK):
        assert found["said"] == [] and set(found["over"]) == {0}
        assert found["peak"] <= found["budget"]


def test_what_the_loop_keeps_and_nothing_makes_room_for_is_said(two: Ranks):
    keeps = 2 * BLOCK
    for found in two.run(run, [SAMPLES] * 6, "zero2", keeps):
        [said] = found["said"]
        assert "step 1: 0.13 MiB above the budget" in said and "batch" not in said
        assert "The loop keeps what the measured step does not" in said and "delete it before backward(), or plan with" in said
        assert found["over"] == [keeps] * 6 and found["peak"] == found["budget"] + keeps


def evaluating() -> tuple[list[str], int]:
    """Whole parameters, a state dict and an evaluation between steps: they hold more than the budget, and are no training."""
    with in_need() as (model, parallel, said):
        for step in range(4):
            loss_of(model, SAMPLES, step).backward()
            parallel.step()
            with parallel.full_parameters():
                copies = [p.detach().flatten().repeat(4) for p in model.parameters()]
            with parallel.evaluate(), torch.no_grad():
                loss_of(model, 64 * SAMPLES)
            del copies
        records = parallel.records(flush=True)
    return said, sum(r.slots_over_budget for r in records)


def test_evaluations_and_whole_parameters_between_steps_are_not_counted(two: Ranks):
    assert two.run(evaluating) == [([], 0)] * 2


def holding(what: str) -> list[str]:
    """Warnings of steps whose loop holds a state dict, of model or optimizer, or outputs of an evaluation with many samples."""
    with in_need() as (model, parallel, said):
        for step in range(3):
            loss_of(model, SAMPLES, step).backward()
            parallel.step()
            if what == "state":
                held = parallel.state_dict()
            elif what == "moments":
                held = parallel.optimizer.state_dict()
            else:
                with parallel.evaluate():
                    held = model(batch_of(64 * SAMPLES)[0])
        del held
    return said


@pytest.mark.parametrize("what", ["state", "moments", "outputs"])
def test_what_the_loop_holds_between_steps_is_said_once_and_is_no_batch(two: Ranks, what: str):
    for [said] in two.run(holding, what):
        assert "MiB above the budget of" in said and "The loop keeps what the measured step does not" in said


# ---- one process


def slots(*peaks: int) -> list[SlotBytes]:
    return [SlotBytes((), (), peak // 2, peak) for peak in peaks]


def excess(budget: int | None = 1000, reserve: int = 0) -> ActivationExcess:
    plan = dataclasses.replace(of_job(planned(chain(8, 8), "dp"), reserve=reserve), budget=budget)
    return ActivationExcess(plan, slots(100, 100, 100, 100), ErrorContext(0), BatchSizes([]))


def test_less_than_a_256th_of_the_budget_is_no_reason_to_wait_but_where_it_mattered():
    seen = excess()
    assert seen.arrived(0, {"activations": 53}) == 0 == seen.entered(0)
    assert seen.arrived(0, {"activations": 54}) == 4 == seen.entered(0)
    seen.ended(1, {"activations": 101, "total": 1001})
    assert seen.arrived(1, {"activations": 51}) == 1


def test_layers_that_the_measured_step_left_out_are_named():
    profile = chain(8, 8)
    left_out = dataclasses.replace(profile.slots[1], seconds=0.0)
    for known in (profile, dataclasses.replace(profile, slots=(profile.slots[0], left_out, *profile.slots[2:]))):
        plan = dataclasses.replace(planned(known, "dp"), budget=1000)
        seen = ActivationExcess(plan, slots(100, 100, 100, 100), ErrorContext(0), BatchSizes([]), raises=True)
        seen.ended(1, {"activations": 101, "total": 1001})
        with pytest.raises(OverBudget) as told:
            seen.end_step(1)
        assert (f"left out {profile.units[1].name}" in str(told.value)) is (known is not profile)


def test_the_reserve_is_for_larger_activations():
    seen = excess(reserve=30)
    assert seen.arrived(0, {"activations": 80}) == 0 and seen.arrived(0, {"activations": 90}) == 10


def test_what_one_large_batch_took_fades():
    seen = excess()
    seen.ended(2, {"activations": 900, "total": 900})
    first = seen.entered(2)
    for _ in range(40):
        seen.ended(2, {"activations": 100, "total": 100})
    assert first == 800 and seen.entered(2) < 8


def test_without_a_budget_or_a_reading_nothing_counts():
    seen = excess(budget=None)
    seen.ended(0, {"activations": 900, "total": 9000})
    assert seen.arrived(0, {"activations": 900}) == 0 == seen.entered(0) and seen.end_step(1) == (0, 0)
    seen = excess()
    seen.ended(0, {})
    assert seen.arrived(0, None) == 0 and seen.end_step(1) == (0, 0)


class Totals:
    """A meter of totals, as CUDA's is."""

    def __init__(self, *totals: int) -> None:
        self.totals = list(totals)

    def window(self) -> dict[str, int]:
        return {"total": self.totals.pop(0)}


def test_where_reading_takes_long_the_first_steps_and_larger_batches_are_read():
    first, seen = nn.Linear(4, 4), excess()
    seen._batch, seen._profiled = BatchSizes([first]), (2, 4)
    meter: Any = Totals(5000, 900, 900, 5000, 1300)
    counts = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(1, 8):
            first(torch.zeros(2 if step < 5 else 3, 4))
            seen.skips = step == 5  # an evaluation was before
            seen.read(step, meter)
            counts.append(seen.end_step(step))
            if step == 6:
                break
    assert counts == [(0, 0)] * 5 + [(1, 300)] and meter.totals == []
    [warning] = map(str, (each.message for each in said))
    assert "step 6: 0.00 MiB above the budget" in warning and "The batch is 3 x 4, the measured one was 2 x 4" in warning


def test_sizes_are_those_of_the_first_module_s_largest_tensor():
    first, second = nn.Linear(4, 2), nn.Linear(2, 2)
    sizes = BatchSizes([first, second])
    second(first(torch.zeros(3, 4)))
    first(torch.zeros(5, 4))
    first(input=torch.zeros(2, 2, 4))
    assert sizes.sizes == (5, 4) and in_words((5, 4)) == "5 x 4" and from_words("5 x 4") == (5, 4) and from_words("") is None
    sizes.restart()
    second(torch.zeros(1, 2))
    assert sizes.sizes == (1, 2)
    sizes.remove()
    second(torch.zeros(7, 2))
    assert sizes.sizes == (1, 2)


# ---- what the loop asks for instead: an error, or a plan of several batches


def raising(only: int | None) -> str:
    """Larger batches on all ranks, or on rank ``only``, in a run that raises: the error's text."""
    with in_need(over_budget="raise") as (model, parallel, _):
        for step in range(8):
            larger = step >= 2 and only in (None, dist.get_rank())
            try:
                loss_of(model, 16 * SAMPLES if larger else SAMPLES, step).backward()
                parallel.step()
            except RuntimeError as e:
                return str(e)
    return ""


def test_every_rank_ends_where_a_batch_above_the_budget_is_to_raise(two: Ranks):
    for rank, told in enumerate(two.run(raising, None)):
        assert f"rank {rank}, step 3: " in told or "rank 0 left" in told or "rank 1 left" in told
        assert "above the budget of" in told and f"The batch is {16 * SAMPLES} x {WIDTH}" in told, told


def test_a_rank_whose_batch_fits_ends_with_the_words_of_the_one_whose_does_not(two: Ranks):
    first, second = two.run(raising, 1)
    assert second.startswith("rank 1, step 3: ") and "said once" not in second
    assert "rank 1 left the run in step 3: OverBudget: rank 1, step 3: " in first and "above the budget of" in first


def planned_for(sizes: list[int]) -> tuple[list[int], str, int, int]:
    """The excess of a loop that draws these sizes, planned for all of them, and the peak beside its budget."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = mdcs.partition(model, mdcs.ByClass("Linear"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a busy machine
        plan = mdcs.autoplan(
            model, optimizer, units, lambda size: loss_of(model, size), batches=sizes, strategy="fsdp",
            seconds=0.2, progress=False,
        )  # fmt: skip
    plan = dataclasses.replace(plan, budget=min_feasible_budget(plan))
    with mdcs.parallelize(model, optimizer, plan, units, timeout_s=20, over_budget="raise") as parallel:
        for step, size in enumerate(sizes * 2):
            loss = loss_of(model, size, step)
            loss.backward()
            parallel.step()
        parallel.drain()
        records = parallel.records(flush=True)
        peak = parallel.memory()["measured"]["total"]
    return [r.over_budget for r in records], plan.profile.about[INPUTS], peak, plan.budget


def test_a_plan_of_several_batches_has_room_for_the_largest(two: Ranks):
    for over, inputs, peak, budget in two.run(planned_for, [SAMPLES, 16 * SAMPLES, 4 * SAMPLES], timeout_s=200.0):
        assert set(over) == {0} and peak <= budget and inputs == f"{16 * SAMPLES} x {WIDTH}"
