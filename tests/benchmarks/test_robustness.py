"""Shaken costs: the page is made of its data, and only costs are shaken."""

import json
import random
from pathlib import Path

import pytest

import benchmarks
from benchmarks import robustness
from benchmarks.planners import chain

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_made_of_its_data():
    document = json.loads((DOCS / "robustness.json").read_text(encoding="utf-8"))
    assert robustness.page(document) == benchmarks.part(DOCS, "robustness"), "make robustness writes another page"
    assert document["settings"] == robustness.SETTINGS
    assert all(len(of) == robustness.SETTINGS["draws"] for each in document["points"] for of in each["slower"].values())


def test_only_costs_are_shaken_each_by_its_own_factor():
    profile = chain(6, 0, ratio=1.5)
    other = robustness.shaken(profile, random.Random(0))
    factors = [new.seconds / old.seconds for old, new in zip(profile.slots, other.slots, strict=True)]
    factors.append(other.link.beta[0] / profile.link.beta[0])
    assert len({round(factor, 6) for factor in factors}) == 13
    assert min(factors) >= 1 - robustness.SETTINGS["shaken"] and max(factors) <= 1 + robustness.SETTINGS["shaken"]
    assert other.units == profile.units and [s.peak for s in other.slots] == pytest.approx([s.peak for s in profile.slots])
