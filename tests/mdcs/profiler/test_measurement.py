"""Bytes known before anything is measured: a budget that nothing fits is refused, and what measuring holds is said."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import mdcs
from mdcs.plan.ledger import min_feasible_budget
from mdcs.planner.pipeline import scheduler_named, strategy_named
from mdcs.profile.layout import WholeParameter
from mdcs.profiler import measurement
from tests.mdcs.measured import measure_profile
from tests.mdcs.profiles import chain

LINK = mdcs.Link.uniform(1, 50, emulated=True)


def made(frozen: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, list[mdcs.ModelUnit]]:
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 32, bias=False))
    model[0].requires_grad_(not frozen)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    return model, optimizer, mdcs.partition(model, mdcs.ByLeaf())


def test_every_plan_holds_shards_and_the_largest_unit_whole() -> None:
    _, optimizer, units = made()
    rest = (256 + 512) * 4 * 3  # parameters and two moments
    assert measurement.min_peak_bytes(units, optimizer, 1) == rest
    assert measurement.min_peak_bytes(units, optimizer, 4) == rest / 4 + 512 * 4 * 3 / 4
    _, optimizer, units = made(frozen=True)
    assert measurement.min_peak_bytes(units, optimizer, 1) == 256 * 4 + 512 * 4 * 3


@pytest.mark.parametrize("frozen", [True, False])
def test_no_plan_needs_less(frozen: bool) -> None:
    model, optimizer, units = made(frozen)
    measured = measure_profile(model, units, lambda: model(torch.ones(2, 16)).sum(), optimizer)
    for world in (2, 5):
        profile, least = replace(measured, world=world), measurement.min_peak_bytes(units, optimizer, world)
        assert least < mdcs.floor_bytes(profile)
        for strategy in ("dp", "zero2", "sdp", "fsdp"):
            plan = mdcs.make_plan(profile, strategy_named(strategy), scheduler_named("sequential"))
            assert least < min_feasible_budget(plan)


def test_a_budget_that_nothing_fits_is_refused_before_anything_is_measured() -> None:
    model, optimizer, units = made()

    def step() -> torch.Tensor:
        raise AssertionError("the model has been run")

    with pytest.raises(mdcs.InfeasibleBudget, match="does not fit 9.0 KiB; every plan needs more than 9.0 KiB"):
        mdcs.autoprofile(model, optimizer, units, step, link=LINK, budget=9216)


def test_a_budget_below_the_floor_is_refused_when_the_model_has_been_measured() -> None:
    model, optimizer, units = made()
    with pytest.raises(mdcs.InfeasibleBudget, match="the smallest budget is") as refused:
        mdcs.autoprofile(model, optimizer, units, lambda: model(torch.ones(2, 16)).sum(), link=LINK, budget=9300)
    assert refused.value.smallest is not None and refused.value.smallest > 9300


def test_measuring_above_the_budget_is_said_once_with_its_bytes() -> None:
    model, optimizer, units = made()
    assert measurement.profiling_bytes(units) == (256 + 512 + 512) * 4
    with pytest.warns(UserWarning, match=r"holds it whole: 2\.0 MiB per rank or more, above the budget of 1\.0 MiB"):
        measurement.warn_profiling_memory(2 << 20, 1 << 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measurement.warn_profiling_memory(1 << 20, 1 << 20)


def test_padding_of_whole_parameters_is_said() -> None:
    matrices = tuple(WholeParameter(n) for n in (8 << 18, 1 << 18, 1 << 18))
    plain = chain(10 << 18, 10 << 18)
    first = replace(plain.units[0], whole=matrices)
    padded = replace(plain, units=(first, plain.units[1]))
    small = chain(10, 10)
    small = replace(small, units=(replace(small.units[0], whole=tuple(map(WholeParameter, (8, 1, 1)))), small.units[1]))
    with pytest.warns(UserWarning, match=r"a: .* by one of 2 ranks, so 10.0 MiB take 16.0 .*\(20.0 and 26.0 in all\)"):
        measurement.warn_padding(padded)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measurement.warn_padding(plain)
        measurement.warn_padding(small)  # much of the model, but hardly any bytes
