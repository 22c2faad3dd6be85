"""Costs of messages, spread over the bytes of a block."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mdcs.plan.cost import CostModel
from mdcs.planner.ilp.linear_costs import linearize_costs
from mdcs.profile.contention import Contention
from tests.mdcs.profiles import chain, link


def test_a_link_without_gaps_is_its_own_price() -> None:
    profile = chain(64, 64, link=link(1 / 64, alpha=0.5))
    assert linearize_costs(profile) is profile


def test_a_block_takes_as_long_and_costs_computing_as_much() -> None:
    gaps = replace(link(1 / 64), gap=(0.5, 0.25, 0.25, 0.125), block=1024)
    profile = replace(chain(4096, link=gaps), contention=Contention(message_seconds=30.0, compute_per_message=4.0))
    model, pieces = linearize_costs(profile), ((0, profile.block // 4),)
    for kind in profile.link.kinds:
        before, after = CostModel(profile).message(kind, pieces), CostModel(model).message(kind, pieces)
        assert after.transfer == pytest.approx(before.gap + before.transfer)
        assert after.gap == after.lost == 0
    slowest = max(4.0 / (c.gap + c.transfer) for c in (CostModel(profile).message(k, pieces) for k in profile.link.kinds))
    assert 1 - 1 / (1 + model.interference) == pytest.approx(slowest)
