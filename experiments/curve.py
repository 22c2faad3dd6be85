"""The trade-off of a job: step time over the division of one budget, and over budgets, predicted and measured.

    mdcs curve strategy=greedy scheduler=priority budget=floor+20% profile.path=outputs/…/profile.json
    mdcs curve strategy=greedy,zero2 scheduler=dear,priority budget=floor+20%
    mdcs curve … curve.measure=stop
    mdcs curve … recompute=planned curve.plane=9 curve.measure=plane

With a budget, the program makes the curve over `budget.schedule_share` and finds its stop point. `curve.plane` divides
the budget in three, for schedule, activations and strategies. For `curve.budgets`, it makes the front of step time over
memory. Times are predicted by replay. `curve.measure` also trains the jobs of some points.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import pandas as pd
from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from rich.table import Table

import analysis
import mdcs
from analysis.pictures.comparisons import SHARES, three_shares
from analysis.pictures.style import save
from analysis.questions import budget_words, plateau, workloads
from analysis.table import milliseconds, new_console, new_table
from experiments.config.checks import compose_config
from experiments.config.schema import Config, ConfigError, ProfileConfig
from experiments.job import app, profiles
from experiments.job import run as jobs
from experiments.job.arguments import with_lists
from experiments.job.events import job_event, start_event
from experiments.job.profiles import is_short, with_recomputation
from experiments.job.resolved import resolve
from experiments.job.sweep import sweep_name
from mdcs.planner.pipeline import unsharded_bytes
from mdcs.planner.recompute import Planned
from mdcs.sizes import MIB, Budget

SCHEMA = 2
MEASURED = ("step_s", "step_s_p10", "step_s_p90", "overlap_s", "exposed_s", "stalled_s", "peak_bytes")
Make = Callable[[int, float | None, float | None], mdcs.Plan]
"""(budget in bytes, schedule_share, activation_share) -> plan with its prediction. Raises InfeasibleBudget."""


@dataclass(frozen=True)
class Point:
    """The plan for a budget (bytes) and shares of its slack, or the reason why there is none."""

    budget: int
    share: float | None  # for the schedule; None: not divided
    activations: float | None  # of the rest
    plan: mdcs.Plan | None
    reason: str = ""
    planned_for: int | None = None  # the budget that the plan was made for, if smaller than `budget`

    @property
    def step_s(self) -> float:
        """Predicted step time, in seconds. Infinite without a plan."""
        return math.inf if self.plan is None or self.plan.prediction is None else self.plan.prediction.step_s


def shares(count: int) -> tuple[float, ...]:
    """Return ``count`` equally spaced shares from 0 to 1."""
    return tuple(i / (count - 1) for i in range(count))


def point(make: Make, budget: int, share: float | None, activations: float | None = None) -> Point:
    try:
        return Point(budget, share, activations, make(budget, share, activations))
    except mdcs.InfeasibleBudget as error:
        return Point(budget, share, activations, None, str(error))


def plane(make: Make, budget: int, count: int) -> list[Point]:
    """Return a point for each division of the slack into ``count`` - 1 parts: schedule, activations, strategies."""
    parts = count - 1
    return [
        point(make, budget, schedule / parts, activations / max(1, parts - schedule))
        for schedule in range(count) for activations in range(count - schedule)
    ]  # fmt: skip


def best(points: Iterable[Point]) -> Point:
    """Return the point with the smallest predicted step time, the first of several. On a curve it is the stop point."""
    return min(points, key=lambda p: p.step_s)


def front(make: Make, budgets: Iterable[int], of: Sequence[float] = ()) -> list[Point]:
    """Return the fastest point for every budget, in ascending order. It is the fastest of three: the plan with
    undivided slack, the stop point over the shares ``of``, and the plan of the budget before, which also fits. So a
    larger budget never gives a slower plan."""
    found: list[Point] = []
    for budget in sorted(set(budgets)):
        candidates = [point(make, budget, share) for share in (None, *of)]
        for before in found[-1:]:
            earlier = before.planned_for or before.budget
            candidates.append(dataclasses.replace(before, budget=budget, planned_for=earlier))
        found.append(best(candidates))
    return found


@dataclass(frozen=True)
class Planner:
    """A strategy planner with a scheduler: a job's config in which only the budget is open."""

    config: Config
    profile: mdcs.Profile
    floor: int

    @property
    def label(self) -> str:
        planners = (self.config.strategy, self.config.scheduler)
        return " · ".join(planner.name for planner in planners if planner is not None)

    def job(self, budget: int, share: float | None, activations: float | None = None) -> Config:
        limit = str(Budget(budget))
        own = dataclasses.replace(self.config.budget, limit=limit, schedule_share=share, activation_share=activations)
        return dataclasses.replace(self.config, budget=own)

    @cached_property
    def planned_for(self) -> mdcs.Job:
        return profiles.job_of(self.config, self.profile)

    def make(self, budget: int, share: float | None, activations: float | None = None) -> mdcs.Plan:
        return profiles.make_plan(self.job(budget, share, activations), self.planned_for, self.floor)


@dataclass(eq=False)
class Entry:
    """A point of a planner, and the folder of the run that measured the point, once there is one."""

    planner: Planner
    point: Point
    part: str  # "curve", "plane" or "front"
    is_stop: bool = False
    run: Path | None = None

    @property
    def planned_for(self) -> tuple[int, float | None, float | None]:
        return self.point.planned_for or self.point.budget, self.point.share, self.point.activations

    @property
    def division(self) -> tuple[float, float, float]:
        """Shares of the slack for schedule, activations and strategies, of a point of the plane."""
        schedule, activations = self.point.share or 0.0, self.point.activations or 0.0
        return schedule, (1 - schedule) * activations, (1 - schedule) * (1 - activations)

    def row(self) -> dict[str, Any]:
        """A row for :mod:`analysis`: the prediction and the measurements."""
        point, planner = self.point, self.planner
        config, profile = planner.job(*self.planned_for), planner.profile
        start = {"world": profile.world, "emulated": profile.link.emulated, "floor_bytes": planner.floor}
        if point.plan is not None:
            start = start_event(config, point.plan, planner.floor)
        start = job_event(resolve(config)) | start | {"budget_bytes": point.budget, "schedule_share": point.share}
        known = analysis.Run(self.run or Path(), start, pd.DataFrame(), {}, {}).row()
        known |= {"status": "infeasible" if point.plan is None else "predicted", "reason": point.reason}
        if self.run is not None:
            measured = analysis.load_run(self.run).row()
            known |= {k: v for k, v in measured.items() if v is not None and k not in start}  # of another share
        return known


def main() -> int:
    console = new_console()

    def trade(config: Config, folder: Path) -> str:
        configs = compared(config)
        if reason := jobs.prepare("profile", config, folder, console):
            return reason
        path = folder / "profile.json"
        profile = mdcs.Profile.from_json(path.read_text(encoding="utf-8"))
        if is_short(config, profile, *map(Budget.of, config.curve.budgets)) and config.profile.measures:
            if reason := jobs.prepare("profile", with_recomputation(config), folder, console):
                return reason
            profile = mdcs.Profile.from_json(path.read_text(encoding="utf-8"))
        floor = profiles.floor_of(config, profiles.job_of(config, profile))
        with console.status("planning"):
            entries = [e for c in configs for e in entries_of(Planner(c, profile, floor), config)]
        folder.mkdir(parents=True, exist_ok=True)
        failed = measure(entries, path, folder, console)
        write(entries, folder)
        show(entries, console)
        rows = [entry.row() for entry in entries if entry.part != "plane"]
        written = [*analysis.write_report(analysis.table_of(rows), folder), *draw_planes(entries, folder)]
        names = ", ".join(["curve.json", *(file.name for file in written)])
        console.print(f"in {folder}: {names}", markup=False, highlight=False, soft_wrap=True)
        return f"{len(failed)} jobs failed: {'; '.join(failed)}" if failed else ""

    keys = {"strategy": "curve.strategies", "scheduler": "curve.schedulers"}
    return app.Program(trade, own=("curve",), lists=partial(with_lists, keys=keys, keep_first=True)).run()


def compared(config: Config) -> list[Config]:
    """The job with every strategy and scheduler to compare. Raises ConfigError for an impossible combination."""
    made: list[Config] = []
    for strategy, scheduler in itertools.product(config.curve.strategies or [""], config.curve.schedulers or [""]):
        chosen = {group: name for group, name in (("strategy", strategy), ("scheduler", scheduler)) if name}
        given = [o for o in HydraConfig.get().overrides.task if o.partition("=")[0] not in chosen]
        one = compose_config([*given, *(f"{group}={name}" for group, name in chosen.items())])
        _check_plane(one)
        made += [one] if one not in made else []  # a strategy that decides the schedule gives equal configs
    return made


def _check_plane(config: Config) -> None:
    """Raise ConfigError if a plane is asked for and the job has nothing that can be divided in three."""
    if not config.curve.plane:
        if config.curve.measure == "plane":
            raise ConfigError("curve.measure", "plane needs curve.plane, the number of shares along an edge")
        if config.budget.activation_share is not None:
            raise ConfigError("budget.activation_share", "is set by mdcs curve itself: see curve.plane")
        return
    if not config.budget.limited:
        raise ConfigError("curve.plane", "needs a budget to divide: add budget=40GiB or budget=floor+10%")
    if config.recompute != Planned():
        raise ConfigError("curve.plane", f"needs recompute=planned, got {config.recompute.name}")
    if config.scheduler is None:
        name = config.strategy.name
        raise ConfigError("curve.plane", f"has no effect with strategy={name}, which divides the budget itself")


def entries_of(planner: Planner, config: Config) -> list[Entry]:
    """The curve of the config's budget with its stop point, if it has one, and the front over `curve.budgets`."""
    make, asked = cache(planner.make), config.curve
    divides = planner.config.scheduler is not None
    of = shares(asked.shares) if divides else ()
    budget = profiles.budget_bytes(config, planner.floor, planner.planned_for) if divides else None
    out: list[Entry] = []
    if budget is not None:
        parts = {"curve": [point(make, budget, share) for share in of]}
        if asked.plane:
            parts["plane"] = plane(make, budget, asked.plane)
        for part, points in parts.items():
            stop = best(points)
            out += [Entry(planner, p, part, p is stop and p.plan is not None) for p in points]
    whole = partial(unsharded_bytes, planner.planned_for)
    budgets = [Budget.of(budget).bytes(whole, lambda: planner.floor) for budget in asked.budgets]
    return out + [Entry(planner, p, "front") for p in front(make, filter(None, budgets), of)]


def measure(entries: list[Entry], profile: Path, folder: Path, console: Console) -> list[str]:
    """Train the jobs of the points that `curve.measure` names. Return the failures. Writes curve.json after each job,
    and puts the runs into `entries`. After a failure the other jobs are still run."""
    what = entries[0].planner.config.curve.measure if entries else "none"
    runs: dict[tuple[Any, ...], Path] = {}
    failed = []
    for entry in shown(entries):
        wanted = entry.is_stop if what == "stop" else what in (entry.part, "all")
        if not wanted or (plan := entry.point.plan) is None:
            continue
        # Several shares may give one plan.
        key = entry.planner.label, plan.execution_hash, plan.prediction and plan.prediction.step_s
        if key not in runs:
            runs[key] = folder / "runs" / str(len(runs))
            job = entry.planner.job(*entry.planned_for)
            own = dataclasses.replace(job.run, sweep=sweep_name(folder))
            job = dataclasses.replace(job, profile=ProfileConfig(path=str(profile)), run=own)
            outcome = jobs.run(job, runs[key], console)
            failed += [] if outcome.ok else [f"{runs[key].name} ({entry.planner.label}): {outcome.reason}"]
        entry.run = runs[key]
        write(entries, folder)
    return failed


def planes(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.part == "plane":
            found.setdefault(entry.planner.label, []).append(entry)
    return found


def shown(entries: Sequence[Entry]) -> list[Entry]:
    """All entries but those of planes that are neither a corner nor the middle nor the stop point."""
    places = (1, 0, 0), (0, 1, 0), (0, 0, 1), (1 / 3, 1 / 3, 1 / 3)
    few = [min(plane, key=lambda entry: math.dist(place, entry.division))
           for plane in planes(entries).values() for place in places]  # fmt: skip
    return [entry for entry in entries if entry.part != "plane" or entry.is_stop or entry in few]


def write(entries: Sequence[Entry], folder: Path) -> None:
    """Write curve.json: every point with its prediction and, if there was a run, its measurements."""
    points = []
    for entry in entries:
        row, point = entry.row(), entry.point
        made = None if point.plan is None else point.plan.prediction
        measured = None if entry.run is None else {
            "run": str(entry.run.relative_to(folder)), "status": row["status"], **{key: row[key] for key in MEASURED},
        }  # fmt: skip
        points.append({
            "part": entry.part, "strategy": row["strategy"], "scheduler": row["scheduler"],
            "budget_bytes": point.budget, "schedule_share": point.share, "activation_share": point.activations,
            "stop_point": entry.is_stop,
            "planned_for_bytes": entry.planned_for[0], "plan_hash": point.plan.hash if point.plan else None,
            "reason": row["reason"], "predicted": None if made is None else dataclasses.asdict(made),
            "measured": measured,
        })  # fmt: skip
    about = {}
    if entries:
        planner = entries[0].planner
        of = planner.profile
        about = {"floor_bytes": planner.floor, "world": of.world, "emulated": of.link.emulated, "profile": of.about}
    document = {"schema": SCHEMA, **about, "points": points}
    (folder / "curve.json").write_text(json.dumps(document, indent=1), encoding="utf-8")


def draw_planes(entries: Sequence[Entry], folder: Path) -> list[Path]:
    files: list[Path] = []
    for label, of_plane in planes(entries).items():
        rows = [entry.row() for entry in of_plane]
        points = [
            dict(zip(SHARES, entry.division, strict=True)) | {"is_stop": entry.is_stop}
            | {name: row[name] for name in ("predicted_step_s", "step_s")}
            for entry, row in zip(of_plane, rows, strict=True)
        ]  # fmt: skip
        workload = workloads(analysis.table_of(rows))[0][0]
        title = f"{workload} · {label} · {budget_words(of_plane[0].point.budget)}"
        suffix = f"-{len(files)}" if files else ""
        if any(point["predicted_step_s"] is not None for point in points):
            files.append(save(three_shares(pd.DataFrame(points), title), folder / f"plane{suffix}.png"))
    return files


def show(entries: Sequence[Entry], console: Console) -> None:
    """Print a table for each part, then each planner's stop point. Of a plane only some points are shown."""
    few = shown(entries)
    for part, title in (("curve", "curve over budget.schedule_share (* is the stop point)"),
                        ("plane", "plane of both shares (* is the stop point)"),
                        ("front", "front over budgets")):  # fmt: skip
        if rows := [entry for entry in few if entry.part == part]:
            console.print(_table(rows, title))
    for entry in entries:
        if entry.is_stop and entry.part == "plane":
            where = " on the plane"
            at = ", ".join(f"{part:.0%} {name}" for part, name in zip(entry.division, SHARES, strict=True))
        elif entry.is_stop:
            curve = [each.row() for each in entries if (each.planner, each.part) == (entry.planner, entry.part)]
            low, high = plateau(analysis.table_of(curve), "predicted_step_s")
            alike = f" ({low:.3g} to {high:.3g} are as fast)" if low < high else ""
            where, at = "", f"schedule_share {entry.point.share:.3g}{alike}"
        else:
            continue
        words = f"stop point of {entry.planner.label}{where}: {at}, step {entry.point.step_s * 1e3:.1f} ms predicted"
        console.print(words, markup=False, highlight=False)


def _table(entries: Sequence[Entry], title: str) -> Table:
    measured = ("step ms", "peak MiB") if any(entry.run is not None for entry in entries) else ()
    predicted = ("step ms", "overlap ms", "extra ms", "peak MiB")
    headings = ("budget MiB", "share", *(f"pred.\n{x}" for x in predicted), *(f"meas.\n{x}" for x in measured))
    rows = [_cells(entry) for entry in entries]
    return new_table(title, (of := "strategy · scheduler", *headings), left=(of,), rows=rows, no_wrap=True)


def _cells(entry: Entry) -> list[str]:
    point, row = entry.point, entry.row()
    share = "–" if point.share is None else f"{point.share:.3g}"
    share += "" if point.activations is None else f" / {point.activations:.3g}"
    share += " *" if entry.is_stop else ""
    cells = [entry.planner.label, f"{point.budget / MIB:.1f}", share]
    if point.plan is None:
        return [*cells, "infeasible"]
    cells += [milliseconds(row[f"predicted_{name}"]) for name in ("step_s", "overlap_s", "extra_communication_s")]
    cells.append(f"{row['predicted_peak_bytes'] / MIB:.1f}")
    if entry.run is not None:
        peak = row["peak_bytes"]
        ended = milliseconds(row["step_s"]) if row["status"] == "ok" else str(row["status"])
        cells += [ended, "–" if peak is None else f"{peak / MIB:.1f}"]
    return cells


if __name__ == "__main__":
    sys.exit(main())
