"""Schedulers that are not quite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mdcs.options import option
from mdcs.plan.plan import Plan
from mdcs.planner.schedulers import StrategyAssignment, sequential

if TYPE_CHECKING:
    Nowhere = int


@dataclass(frozen=True)
class Nameless:
    ahead: int = option(1, "nobody knows how it is called")

    def schedule(self, mix: StrategyAssignment) -> Plan:
        return sequential(mix)


@dataclass(frozen=True)
class Untyped(Nameless):
    name = "untyped"

    since: Nowhere = option(1, "of a type that is not there when it runs")


@dataclass(frozen=True)
class Careless(Nameless):
    name = "careless"

    def schedule(self, mix: StrategyAssignment) -> Plan:
        return {}["plan"]
