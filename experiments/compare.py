"""Compare jobs that take turns: engines, schedulers, numbers of ranks, or what else conf/compare/ or you let vary.

    mdcs compare strategy=joint engine=mdcs,ddp,fsdp2 budget=floor+10%,none
    mdcs compare strategy=dp,fsdp,greedy scheduler=wfbp,dear budget=floor+30%
    mdcs compare experiment=bench                         # schedulers beside none (make bench)
    mdcs compare compare=ranks experiment=timed-8         # 2, 3, 4, 6 and 8 ranks
    mdcs compare compare=accuracy experiment=bench        # plans and rates of the link: predicted and measured
    mdcs compare … "+compare.vary.mine='strategy=greedy scheduler=dear,priority'"

Every candidate of `compare.vary` is the job of the command line with some overrides. A value with commas makes several
candidates. Every round runs each of them once, and starts with the next one. Candidates with a plan run once under each
of `compare.budgets` (`budget=A,B` is the same): 40GiB, 75% of ddp, floor+10% (the candidate's own floor), or none.
`engine=A,B` chooses candidates, as `compare.only` does. Lists of other keys make a candidate of each combination. A
candidate that does not fit is a row that says what it needs. Other engines fit a budget if no rank ever exceeded it,
with the floor of the base; overrides of a plan do not apply to them. Ratios to `compare.base` are taken within a round,
losses are compared with the base's. comparison.json, comparison.png, step_time.png and the runs are left in the folder.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from hydra.core.hydra_config import HydraConfig
from rich.console import Console

import mdcs
from analysis import load_run, pictures, table_of
from analysis.comparison import lines, loss_differences
from experiments.candidates import Candidate, candidates, group_of
from experiments.compare_tables import show
from experiments.config.identity import device_name
from experiments.config.schema import Config, ConfigError
from experiments.config.targets import plain
from experiments.explain import bounds_of
from experiments.job import app
from experiments.job import run as jobs
from experiments.job.arguments import with_lists
from experiments.job.profiles import Profiles, floor_of, job_of, make_plan
from mdcs.planner.pipeline import floor_bytes, unsharded_bytes
from mdcs.planner.recompute import AUTO, Planned
from mdcs.planner.strategies import Uniform
from mdcs.sizes import Budget

SCHEMA = 3
TOLERANCE = 5e-3  # greatest relative difference of equal losses
BOUNDS_S = 20.0  # time limit of each of two solves


def main() -> int:
    def compare(config: Config, folder: Path) -> str:
        given = [o for o in HydraConfig.get().overrides.task if group_of(o) != "compare"]
        return Comparison(config, given, folder).run()

    keys = {"engine": "compare.only", "budget": "compare.budgets"}
    lists = partial(with_lists, keys=keys, rest="compare.over", alone=("budget",))
    return app.Program(compare, own=("compare",), on_sweep_end=lambda session: None, lists=lists).run()


class Comparison:
    """One session: the candidates and the results of their runs. Raises ConfigError before anything is started."""

    def __init__(self, config: Config, given: Sequence[str], folder: Path) -> None:
        self.config, self.given, self.folder = config, given, folder
        self.asked = config.compare
        self.budgets = [Budget.of(str(budget)) for budget in self.asked.budgets]
        self.console = Console(stderr=True)
        self.known = Profiles()
        self.candidates, self.left_out = candidates(config, given, self.budgets)
        if not self.candidates:
            raise ConfigError("compare.vary", self._nobody())
        over = [str(budget) for budget in self.budgets if budget.size is None and budget.is_limit]
        if over and not any(each.config.engine.plans for each in self.candidates):
            problem = f"{over[0]} is a share of a plan's memory, and no candidate has a plan"
            raise ConfigError("compare.budgets", problem)
        self.base = self.asked.base or self.candidates[0].name
        if self.base not in {each.name for each in self.candidates}:
            raise ConfigError("compare.base", f"no such candidate {self.base}")
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self.failed: dict[str, str] = {}
        self.wholes: dict[str, int] = {}  # what DDP needs, bytes, by the same names
        self.recomputed: dict[str, int] = {}  # floors with recomputation, of candidates whose budget needs it
        self.floors: dict[str, int] = {}  # bytes, of candidates with a plan, by name; empty if no budget needs them
        self.solved: dict[tuple[mdcs.Job, int | None], tuple[float, float]] = {}
        self.infeasible: dict[str, tuple[Candidate, int | None]] = {}  # with the bytes that they need
        self.planned_for: dict[str, mdcs.Job] = {}
        self.rounds = 0  # rounds that have ended

    def run(self) -> str:
        """Run all rounds, show and write the results. Return the reason of a failure, empty if there is none."""
        if any(budget != Budget() for budget in self.budgets):
            if reason := self._find_floors():
                return reason
            self._leave_out_below_floors()
            if not self.candidates:
                return self._nobody()
        interrupted = False
        try:
            for number in range(self.asked.rounds):
                first = number % len(self.candidates)
                for candidate in [*self.candidates[first:], *self.candidates[:first]]:
                    if str(candidate) not in {*self.failed, *self.left_out}:
                        self._turn(number, candidate)
                self.rounds = number + 1
        except KeyboardInterrupt:
            interrupted = True
            self.console.print("interrupted: all ranks were ended; what was measured before:")
        document = self.write(bounded=False)
        if not interrupted:
            try:
                document = self.write(bounded=True)
            except KeyboardInterrupt:
                interrupted = True
                self.console.print("interrupted: without bounds:")
        if any(part["lines"] for part in document["budgets"]):
            pictures.save(pictures.engine_comparison(document), self.folder / "comparison.png")
        rows = table_of([row for rows in self.runs.values() for row in rows])
        if rows["peak_bytes"].notna().any():
            pictures.save(pictures.step_time_over_memory(rows), self.folder / "step_time.png")
        show(document)
        told = f"in {self.folder}: comparison.json, comparison.png, step_time.png, runs"
        self.console.print(told, markup=False, highlight=False, soft_wrap=True)
        if interrupted:
            raise KeyboardInterrupt
        failed = "; ".join(f"{name}: {reason}" for name, reason in self.failed.items())
        return failed or ("" if document["losses"]["equal"] else "losses differ")

    def _find_floors(self) -> str:
        """Find the floors of all plans, measuring unknown profiles. Return the reason of a failure, or ""."""
        for each in self.candidates:
            if not each.config.engine.plans or each.name in self.floors and not self._recomputes(each):
                continue
            name = str(each) if each.name in self.floors else each.name
            folder = self.folder / "runs" / f"profile-{_file_name(name)}"
            if reason := jobs.prepare("profile", each.config, folder, self.console, known=self.known):
                return f"no profile of {each.name}: {reason}"
            profile = mdcs.Profile.from_json((folder / "profile.json").read_text(encoding="utf-8"))
            job = self.planned_for[str(each)] = job_of(each.config, profile)
            self.planned_for.setdefault(each.name, job)
            if each.name not in self.floors:
                self.floors[each.name], self.wholes[each.name] = floor_of(each.config, job), unsharded_bytes(job)
            if self._recomputes(each):
                self.recomputed[str(each)] = floor_bytes(job, Planned())
        return ""

    def _recomputes(self, candidate: Candidate) -> bool:
        """Return whether no plan of the candidate keeps its budget without recomputation, which it may choose."""
        limit = self._limit(candidate.budget, candidate.name)
        return candidate.config.recompute == AUTO and limit is not None and limit < self.floors[candidate.name]

    def _leave_out_below_floors(self) -> None:
        """Leave out the candidates whose budget is below their own floor, or below what their one strategy needs."""
        for each in [*self.candidates]:
            limit = self._limit(each.budget, each.name)
            if each.budget is None or limit is None:
                continue
            floor, recomputed = self.floors[each.name], self.recomputed.get(str(each), self.floors[each.name])
            try:
                if limit < min(floor, recomputed):
                    lower = recomputed if recomputed < floor else None
                    error = mdcs.InfeasibleBudget(limit, floor, "the model", recomputed=lower)
                    raise error.in_words_of(each.budget, partial(self.wholes.__getitem__, each.name))
                if isinstance(each.config.strategy, Uniform):  # without choices: it fits or not
                    make_plan(each.config, self.planned_for.get(str(each), self.planned_for[each.name]), floor)
            except mdcs.InfeasibleBudget as error:
                self._does_not_fit(each, str(error), error.smallest)
                self.candidates.remove(each)

    def _does_not_fit(self, candidate: Candidate, reason: str, needs: int | None) -> None:
        self.left_out[str(candidate)], self.infeasible[str(candidate)] = reason, (candidate, needs)
        self.console.print(f"{candidate}: {reason}", markup=False, soft_wrap=True)

    def _nobody(self) -> str:
        return "no candidate is left: " + "; ".join(f"{name}: {reason}" for name, reason in self.left_out.items())

    def _limit(self, budget: Budget | None, name: str) -> int | None:
        """Bytes of a budget per rank for the candidate of that name; of engines without a plan as of the base's, or of
        the first plan."""
        if budget is None:
            return None
        of = name if name in self.floors else self.base if self.base in self.floors else next(iter(self.floors), "")
        return budget.bytes(lambda: self.wholes.get(of, 0), lambda: self.floors.get(of, 0))

    def _turn(self, number: int, candidate: Candidate) -> None:
        name = str(candidate)
        folder = self.folder / "runs" / f"{number}-{self.candidates.index(candidate)}-{_file_name(name)}"
        outcome = jobs.run(candidate.config, folder, self.console, known=self.known, kind="compare")
        if outcome.infeasible:
            self._does_not_fit(candidate, outcome.reason, None)
            return
        if not outcome.ok:
            self.failed[name] = outcome.reason
            self.console.print(f"{name}: {outcome.reason}", markup=False, soft_wrap=True)
            return
        run = load_run(folder)
        losses = [float(loss) for loss in run.steps["loss"]]
        steps_s = [float(seconds) for seconds in run.measured_steps["step_s"]]
        self.runs.setdefault(name, []).append(run.row() | {"folder": folder, "losses": losses, "steps_s": steps_s})

    def write(self, *, bounded: bool) -> dict[str, Any]:
        """Write comparison.json and return what it says. bounded: with the bounds, which may take a while."""
        budgets: Sequence[Budget | None] = self.budgets or [None]
        config, whole = self.config, max(1, self.rounds)  # an interrupted first round counts with its runs so far
        complete = {name: rows[:whole] for name, rows in self.runs.items() if len(rows) >= whole}
        ended = [each for each in self.candidates if str(each) in self.runs]
        base = next((each for each in ended if each.name == self.base), next(iter(ended), None))
        alike = [each for each in ended if base is not None and each.trains == base.trains]
        curves = {str(each): [row["losses"] for row in self.runs[str(each)]] for each in alike}
        differences = {} if base is None else loss_differences(curves, str(base))
        plans = filter(None, (_plan(rows[0]["folder"]) for rows in self.runs.values()))
        parameters = next((sum(unit.numel for unit in plan.profile.units) for plan in plans), None)
        document = {
            "schema": SCHEMA, "date": time.strftime("%Y-%m-%d"), "device": device_name(config),
            "torch": importlib.metadata.version("torch"), "model": config.model.label, "options": plain(config.model),
            "batch_size": config.data.batch_size, "world": config.cluster.ranks,
            "shaped_link": config.cluster.shaped_link(), "threads": config.cluster.resolved_threads(),
            "steps": config.run.steps, "rounds": whole, "overrides": self.given, "base": self.base,
            "floor_bytes": self.floors.get(self.base, next(iter(self.floors.values()), None)), "floors": self.floors,
            "losses": {
                "base": base and str(base), "tolerance": TOLERANCE,
                "differences": {name: value if math.isfinite(value) else None for name, value in differences.items()},
                "equal": all(difference <= TOLERANCE for difference in differences.values()),
            },
            "left_out": self.left_out, "failed": self.failed, "parameters": parameters,
            "candidates": [self._repetitions(each, complete[str(each)]) for each in ended if str(each) in complete],
            "budgets": [self._under(budget, complete, bounded) for budget in budgets],
        }  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "comparison.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
        return document

    def _repetitions(self, candidate: Candidate, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """All runs of a candidate, a row per round."""
        kept, budget = ("step_s", "steps_s", "predicted_step_s", "peak_bytes", "processor_s"), candidate.budget
        return {
            "name": candidate.name, "overrides": candidate.words, "plans": candidate.config.engine.plans,
            "budget": None if budget is None else str(budget), "budget_bytes": self._limit(budget, candidate.name),
            "rounds": [{key: row.get(key) for key in kept} for row in rows],
        }  # fmt: skip

    def _under(self, budget: Budget | None, complete: Mapping[str, Any], bounded: bool) -> dict[str, Any]:
        """The candidates under one of the budgets, beside those without one."""
        here = [each for each in self.candidates if each.budget in (None, budget) and str(each) in complete]
        plans = {each.name: plan for each in here if (plan := _plan(complete[str(each)][0]["folder"])) is not None}
        bounds = {name: self._bounds(plan) for name, plan in plans.items()} if bounded else {}
        base = next((each for each in here if each.name == self.base and each.name in bounds), None)
        shared = bounds[base.name] if base is not None and len({*bounds.values()}) == 1 else None
        for each in here:  # engines stand beside the plans of the same training
            if base is not None and each.trains == base.trains:
                bounds.setdefault(each.name, bounds[base.name])
        rows = {each.name: [row | {"bound_s": bounds.get(each.name, (None, None))[1]} for row in complete[str(each)]]
                for each in here}  # fmt: skip
        limits = {each.name: self._limit(budget, each.name) for each in here}
        return {
            "budget": None if budget is None else str(budget), "budget_bytes": self._limit(budget, self.base),
            "bounds": {} if shared is None else {"traffic": shared[0], "structural": shared[1]},
            "lines": lines(rows, self.base, limits),
            "infeasible": {each.name: needs for each, needs in self.infeasible.values() if each.budget == budget},
        }  # fmt: skip

    def _bounds(self, plan: mdcs.Plan) -> tuple[float, float]:
        """The traffic bound and the structural bound of a plan's job and budget, in seconds."""
        key = plan.job, plan.budget
        if key not in self.solved:
            found = bounds_of(plan, BOUNDS_S)
            self.solved[key] = found.traffic_s, found.structural_s
        return self.solved[key]


def _file_name(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower())


def _plan(folder: Path) -> mdcs.Plan | None:
    path = folder / "plan.json"
    return mdcs.Plan.from_json(path.read_text(encoding="utf-8")) if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
