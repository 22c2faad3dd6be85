"""Keys that one command has beside those of its jobs: a group for each."""

from __future__ import annotations

from dataclasses import dataclass

from mdcs.options import option


@dataclass
class CurveConfig:
    """Settings of mdcs curve."""

    strategies: list[str] = option([], "options of strategy to compare; none: the job's own")
    schedulers: list[str] = option([], "options of scheduler to compare; none: the job's own")
    shares: int = option(17, "values of budget.schedule_share on the curve, from 0 to 1", at_least=3)
    budgets: list[str] = option(
        [f"floor+{more}%" for more in (0, 5, 10, 20, 40, 80)], "budgets of the front: floor+10%, 75% of ddp, 300MiB"
    )
    plane: int = option(
        0, "values of each share on the plane of both shares (recompute=planned); 0: no plane",
        at_least=0,
    )
    measure: str = option(
        "none", "plans that are also trained; plane: its corners, middle and stop point",
        choices=("none", "stop", "curve", "front", "plane", "all"),
    )


@dataclass
class CompareConfig:
    """Settings of mdcs compare."""

    vary: dict[str, str] = option(
        {}, "candidates: name → overrides; KEY=A,B makes one for each value"
    )
    base: str | None = option(None, "candidate that ratios and losses are compared with; null: the first")
    only: list[str] = option([], "candidates to run; none: all that can run here")
    over: list[str] = option([], "overrides with lists: each plan with every combination (KEY=A,B is the same)")
    rounds: int = option(3, "how often each runs", at_least=1)
    budgets: list[str] = option(
        [], "budgets of candidates with a plan: floor+10%, 75% of ddp, 1.5GiB, none; none: the job's own"
    )


@dataclass
class PlanConfig:
    """Settings of mdcs plan."""

    format: str = option("text", "json: one JSON document on stdout and nothing else", choices=("text", "json"))


OWN = {"curve": "curve", "compare": "compare", "plan": "plan"}
"""Groups that only one command has, with its name."""
