"""The family of collectives that a budget leaves: rings where the buffers of gloo's own do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import mdcs
from mdcs.planner.pipeline import floor_bytes, unsharded_bytes
from mdcs.profiler import autoprofile
from mdcs.profiler.link_timing import MeasuredLink
from mdcs.sizes import Budget

from ..profiles import chain, link

CPU = torch.device("cpu")
RINGS = MeasuredLink(link(1e-9), mdcs.Collectives("ring"), {"gap of all-reduce": (1.0, 2.0)})
NATIVE = chain(*[1000] * 6, 64, frozen=range(6), collectives=mdcs.Collectives("native"), link=link(5e-10))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of each measurement of the link."""
    calls: list[dict[str, Any]] = []

    def measure(device: torch.device, **options: Any) -> MeasuredLink:
        calls.append(options)
        return RINGS

    monkeypatch.setattr(autoprofile, "measure_link", measure)
    return calls


@pytest.mark.parametrize("as_share", [False, True])
def test_a_budget_that_only_rings_can_keep_is_kept_by_rings(asked: list[dict[str, Any]], as_share: bool) -> None:
    floor = floor_bytes(NATIVE)
    budget = Budget(of_ddp=(floor - 1) / unsharded_bytes(NATIVE)) if as_share else Budget(floor - 1)
    found = autoprofile.link_of_rings(mdcs.Job(NATIVE), budget, CPU, depth=3)
    assert found == RINGS and asked == [{"depth": 3, "algorithm": "ring"}]
    profile = autoprofile.with_link(NATIVE, found)
    assert profile == replace(NATIVE, link=RINGS.link, collectives=mdcs.Collectives("ring"), spread=RINGS.spread)
    assert floor_bytes(profile) < floor


def test_the_fastest_family_stays_where_it_fits_or_nothing_else_would(asked: list[dict[str, Any]]) -> None:
    floor = floor_bytes(NATIVE)
    rings = replace(NATIVE, collectives=mdcs.Collectives("ring"))
    alike = replace(NATIVE, units=chain(*[1000] * 7).units)  # gradients take as many bytes as gloo's copies
    for profile, budget, device in (
        (NATIVE, None, CPU), (NATIVE, floor, CPU), (NATIVE, "100%", CPU), (rings, 1, CPU), (alike, 1, CPU),
        (NATIVE, 1, torch.device("cuda")),
    ):  # fmt: skip
        assert autoprofile.link_of_rings(mdcs.Job(profile), Budget.of(budget), device) is None
    assert asked == []


@pytest.mark.filterwarnings("ignore:measuring the model holds it whole")
def test_a_profile_measures_the_model_once_and_the_link_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process for two ranks: gloo's own collectives look faster, and their floor is above the budget."""
    asked: list[str | None] = []

    def measure(device: torch.device, *, algorithm: str | None = None, **_: Any) -> MeasuredLink:
        asked.append(algorithm)
        return MeasuredLink(link(1e-9), mdcs.Collectives(algorithm or "native"), {})

    monkeypatch.setattr(autoprofile, "measure_link", measure)
    monkeypatch.setattr(autoprofile, "measure_contention", lambda profile, *_, **options: profile)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)), torch.nn.Linear(32, 2))
    model[:6].requires_grad_(False)
    optimizer = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)
    units = mdcs.partition(model, mdcs.ByLeaf())
    batches: list[Any] = [torch.ones(2, 32), torch.ones(4, 32)]
    emulate = mdcs.Emulation(0, 2)

    def profiled(**options: Any) -> mdcs.Profile:
        asked.clear()
        step = lambda x: model(x).square().mean()  # noqa: E731
        return mdcs.autoprofile(model, optimizer, units, step, batches=batches, emulate=emulate, iterations=1, **options)

    native = profiled()
    assert native.collectives == mdcs.Collectives("native") and asked == [None]
    budget = floor_bytes(native) - 1
    assert profiled(budget=budget).collectives == mdcs.Collectives("ring") and asked == [None, "ring"]
    with pytest.raises(mdcs.InfeasibleBudget):
        profiled(budget=budget, algorithm="native")
    assert asked == ["native"]
