"""Plan without training: print the plan that `mdcs train` would run, its predicted costs, and the reasons.

    mdcs plan strategy=greedy scheduler=fusion budget=0.5GiB
    mdcs plan strategy=greedy scheduler=dear budget=0.5GiB profile.path=outputs/…/profile.json
    mdcs plan strategy=fsdp scheduler=dear budget=72GiB profile.path=FILE
    mdcs plan plan.format=json strategy=greedy budget=0.5GiB
    mdcs plan -m strategy=greedy scheduler=priority,dear budget=floor+5%,floor+10%,floor+20%
    mdcs plan strategy=greedy scheduler=priority recompute=planned budget=0.1GiB batch.find=largest

A known profile (named, calculated, or kept by an earlier job) is used at once. Else the job's own ranks are started to
measure one. With -m there is a row for every plan, and the plans share measured profiles. `plan.format=json` prints one
JSON document and nothing else. With batch.find the plan is that of the largest batch within the budget, or of the
fastest; profiles of a few batches are measured, and those of the others calculated from them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console
from rich.table import Table

from analysis.table import milliseconds, new_console, new_table
from experiments import explain
from experiments.config.identity import job_identity
from experiments.config.schema import BatchConfig, BudgetConfig, Config, ConfigError
from experiments.explain import bounds_of
from experiments.job import app, profiles, record
from experiments.job import run as jobs
from experiments.job.profiles import Profiles, calibration_errors, job_of, make_plan, ranks, write_plan
from experiments.job.record import INFEASIBLE
from experiments.job.resolved import resolve
from experiments.job.sweep import Session, varied
from experiments.job.tracking import show_files
from mdcs.plan.cost import Prediction
from mdcs.plan.job import chosen_options
from mdcs.plan.plan import Plan
from mdcs.planner.batch import BatchScaling, PlannedBatch, batches_that_fit, fastest_of
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.pipeline import floor_bytes
from mdcs.planner.recompute import AUTO, in_words
from mdcs.profile.recompute import NONE
from mdcs.profile.schema import INPUTS, Profile
from mdcs.sizes import MIB

SCHEMA = 2
BOUNDS_S = 20.0  # time limit of each of two solves
_COLUMNS = ("strategy", "scheduler", "budget", "budget.limit")  # keys that have a column in every table of plans
_MANY = 4  # equal rows of units from which they become one row


def main() -> int:
    as_json = False
    known, plans, chosen = Profiles(), list[Plan](), list[PlannedBatch | None]()

    def plan(config: Config, folder: Path) -> str:
        nonlocal as_json
        as_json, in_sweep, found = config.plan.format == "json", config.run.sweep is not None, None
        console = new_console(stderr=as_json)
        if config.batch.find is not None:
            found, reason = find(config, folder, console, known=known)
        else:
            quiet = Console(quiet=True) if in_sweep else console
            reason = jobs.prepare("plan", config, folder, quiet, known=known)
        if reason:
            return reason
        made = Plan.from_json((folder / "plan.json").read_text(encoding="utf-8"))
        if in_sweep:
            plans.append(made)
            chosen.append(None if found is None else found.wanted(config))
        elif as_json:
            print(json.dumps(document(made) | ({} if found is None else batches_document(found, config)), indent=1))
        else:
            if found is not None:
                console.print(batches_table(found))
            show(made, console)
            console.print(f"the plan is in {folder}", markup=False, highlight=False, soft_wrap=True)
        return ""

    def show_all(session: Session) -> None:
        planned = [result for result in session.results if result.status == "ok"]
        if as_json:
            rows = [{"overrides": each.overrides, "folder": str(each.folder), **told(made), **_told_batch(found)}
                    for each, made, found in zip(planned, plans, chosen, strict=True)]  # fmt: skip
            bad = [{"overrides": each.overrides, "reason": each.reason}
                   for each in session.results if each.status == INFEASIBLE]  # fmt: skip
            print(json.dumps({"schema": SCHEMA, "plans": rows, "infeasible": bad}, indent=1))
        else:
            asked, console = [each.overrides for each in planned], new_console()
            console.print(sweep_table(plans, [varied(each, asked, but=_COLUMNS) for each in asked], chosen))
            for each in session.results:
                if each.status == INFEASIBLE:
                    console.print(f"{' '.join(each.overrides)}: {each.reason}", highlight=False, soft_wrap=True)
            console.print(f"{len(plans)} plans in {session.sweep}", markup=False, highlight=False, soft_wrap=True)

    return app.Program(plan, own=("plan",), on_sweep_end=show_all).run()


def told(plan: Plan) -> dict[str, Any]:
    """Identity and prediction of a plan, in seconds and bytes."""
    return {
        "plan": plan.hash, "strategy": plan.strategy, "scheduler": plan.scheduler, "outcome": plan.outcome,
        "world": plan.world, "messages": len(plan.messages), "recomputed": recomputed(plan),
        "budget_bytes": plan.budget, "floor_bytes": floor_bytes(plan.job),
        "predicted": dataclasses.asdict(_prediction(plan)),
    }  # fmt: skip


def recomputed(plan: Plan) -> dict[str, Any]:
    """Units that recompute their activations, the bytes that this frees, and its seconds per step."""
    options = chosen_options(plan.job.profile, plan.recompute)
    seconds = plan.micro_steps * sum(option.seconds for option in options)
    return {"units": len(options), "frees_bytes": sum(option.freed for option in options), "costs_s": seconds}


def _told_batch(found: PlannedBatch | None) -> dict[str, Any]:
    return {} if found is None else {"batch": found.batch, "samples_per_s": found.samples_per_s}


def batches_document(found: Found, asked: Config) -> dict[str, Any]:
    return _told_batch(found.wanted(asked)) | {
        "batches": [_told_batch(each) | told(each.plan) for each in found.batches], "profiled_batches": found.profiled,
    }  # fmt: skip


def batches_table(found: Found) -> Table:
    """A row for each batch that fits: samples per second and what its plan is predicted to take."""
    title = f"batches per rank within {(found.batches[0].plan.budget or 0) / MIB:.1f} MiB"
    used = dict.fromkeys((*found.profiled[:1], *found.profiled[-1:]))
    title += f", from profiles of {' and '.join(map(str, used))}" if used else ""
    rows = []
    for each in found.batches:
        p = _prediction(each.plan)
        units = sum(choice != NONE for choice in each.plan.recompute)
        named = [name for name, of in (("largest", found.largest), ("fastest", found.fastest)) if of is each]
        rows.append([
            str(each.batch), f"{each.samples_per_s:.1f}", milliseconds(p.step_s), milliseconds(p.exposed_s),
            f"{units} of {len(each.plan.strategies)}", f"{p.peak_bytes / MIB:.1f}", ", ".join(named),
        ])  # fmt: skip
    headings = "batch", "samples/s", "step ms", "exposed ms", "recomputing", "peak MiB", ""
    return new_table(title, headings, left=("",), rows=rows)


def sweep_table(
    plans: Sequence[Plan], varied: Sequence[Sequence[str]], batches: Sequence[PlannedBatch | None] = ()
) -> Table:
    """A row for each plan, in the order of the jobs. varied: for each plan, the settings KEY=VALUE that distinguish it
    from the others, besides the columns of every table. batches: the batches that were found for the plans, if any."""
    swept = list(dict.fromkeys(setting.partition("=")[0] for settings in varied for setting in settings))
    of_batches = batches if any(batches) else [None] * len(plans)
    sizes, rows = ("batch", "samples/s") if any(batches) else (), []
    for plan, settings, found in zip(plans, varied, of_batches, strict=True):
        p, told = _prediction(plan), dict(setting.split("=", 1) for setting in settings)
        rows.append([
            plan.strategy, plan.scheduler, *(told.get(key, "") for key in swept),
            *(() if not sizes else ("", "") if found is None else (str(found.batch), f"{found.samples_per_s:.1f}")),
            "–" if plan.budget is None else f"{plan.budget / MIB:.1f}", milliseconds(p.step_s),
            milliseconds(p.exposed_s), f"{p.overlap_ratio:.2f}", f"{p.peak_bytes / MIB:.1f}", str(len(plan.messages)),
        ])  # fmt: skip
    left = "strategy", "scheduler"
    right = "budget MiB", "step ms", "exposed ms", "overlap ratio", "peak MiB", "messages"
    return new_table("predicted for one step", (*left, *swept, *sizes, *right), left, rows=rows)


def document(plan: Plan) -> dict[str, Any]:
    return {
        "schema": SCHEMA, **told(plan),
        "bounds": dataclasses.asdict(bounds_of(plan, BOUNDS_S)),
        "binding_slot": dataclasses.asdict(explain.binding_slot(plan)),
        "schedule": dataclasses.asdict(explain.schedule_choice(plan)),
        "units": [dataclasses.asdict(choice) for choice in explain.choices(plan)],
    }  # fmt: skip


def show(plan: Plan, console: Console) -> None:
    """Print the plan's units with the reasons, its prediction and bounds, and its memory."""
    console.print(units_table(plan, units := explain.choices(plan)))
    if better := [unit.unit for unit in units if unit.is_better]:
        words = ", ".join(better[:3]) + (f" and {len(better) - 3} more" if len(better) > 3 else "")
        said = f"there are faster plans within the budget: see {words}; strategy=joint tries more"
        console.print(said, highlight=False)
    schedule = explain.schedule_choice(plan)
    words = f"{milliseconds(abs(schedule.step_s))} ms {'less' if schedule.step_s <= 0 else 'more'}"
    words += f" and {abs(schedule.peak_bytes) / MIB:.2f} MiB {'less' if schedule.peak_bytes < 0 else 'more'}"
    console.print(f"than the sequential schedule of the same strategies this one takes {words}", highlight=False)
    if line := in_words(plan):
        console.print(line, highlight=False, soft_wrap=True)
    if plan.outcome:
        console.print(f"outcome: {plan.outcome}", markup=False, highlight=False)
    console.print()
    console.print(prediction_table(plan))
    console.print(bounds_table(plan))
    if line := calibration_errors(plan.profile):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(memory_table(plan))


def units_table(plan: Plan, units: Sequence[explain.UnitChoice]) -> Table:
    """A row per unit: bytes, strategy, messages per kind, and what another strategy would change. Consecutive units
    with equal values share a row."""
    rows = []
    for cells, alike in itertools.groupby(units, _cells):
        names = [choice.unit for choice in alike]
        names = names if len(names) < _MANY else [f"{names[0]} … {names[-1]} ({len(names)} alike)"]
        rows += [[name, *cells] for name in names]
    return new_table(
        f"plan {plan.hash}: {plan.strategy}, {plan.scheduler}; {ranks(plan.profile)},"
        f" {len(plan.messages)} messages\ncollectives: {plan.profile.collectives}",
        ("unit", "MB", "strategy", "messages", "instead", "needs MiB", "step ms"),
        left=("unit", "strategy", "messages", "instead"), rows=rows,
        caption="instead: with this strategy of this unit alone, the smallest budget and the step change by so much",
    )  # fmt: skip


def _cells(choice: explain.UnitChoice) -> tuple[str, ...]:
    messages = ", ".join(f"{count} {kind}" for kind, count in choice.messages.items())
    strategy = choice.strategy if choice.recompute == "none" else f"{choice.strategy}, recompute {choice.recompute}"
    cells = (f"{choice.bytes / 1e6:.2f}", strategy, messages, choice.instead or "–")
    if choice.needs_bytes is None:
        return cells
    step = "no room" if choice.step_s is None else f"{choice.step_s * 1e3:+.2f}"
    return (*cells, f"{choice.needs_bytes / MIB:+.2f}", step)


def prediction_table(plan: Plan) -> Table:
    told = _prediction(plan)
    names = "step", "compute", "communication", "stalled", "exposed"
    cells = [*(milliseconds(getattr(told, f"{name}_s")) for name in names), f"{told.overlap_ratio:.2f}"]
    return new_table("predicted for one step", (*(f"{name} ms" for name in names), "overlap ratio"), rows=[cells])


def bounds_table(plan: Plan) -> Table:
    """Distance of the predicted step from bounds for all plans within the budget that recompute as this one."""
    step_s, bounds, rows = _prediction(plan).step_s, bounds_of(plan, BOUNDS_S), []
    for name, seconds in (
        ("fewest bytes", bounds.traffic_s), ("fewest bytes, in their windows", bounds.structural_s),
        ("the solver's own", bounds.solver_s),
    ):  # fmt: skip
        above = max(0.0, 1 - seconds / step_s) if seconds is not None and step_s else 0.0
        words = "no solver was asked" if seconds is None else f"{above:.1%} of the step"
        rows.append([name, milliseconds(seconds), words])
    title = f"no plan within the budget{_recomputing(plan)} is faster than"
    return new_table(title, ("bound", "ms", "this plan is above it by"), left=("bound",), rows=rows)


def memory_table(plan: Plan) -> Table:
    """Predicted bytes by category: each at its own peak, and in the slot with the highest sum; floor and budget."""
    told, binding = _prediction(plan), explain.binding_slot(plan)
    title = f"memory per rank; the sum is highest in {binding.slot}"
    headings = ("category", "at its peak MiB", f"in {binding.slot} MiB")
    rows = [[of, f"{told.memory[of] / MIB:.2f}", f"{size / MIB:.2f}"] for of, size in binding.memory.items()]
    table = new_table(title, headings, left=("category",), rows=rows)
    table.add_section()
    table.add_row("sum", f"{told.peak_bytes / MIB:.2f}", f"{binding.bytes / MIB:.2f}")
    table.add_row(f"floor: smallest feasible{_recomputing(plan)}", f"{floor_bytes(plan.job) / MIB:.2f}")
    table.add_row("budget", "unlimited" if plan.budget is None else f"{plan.budget / MIB:.2f}")
    return table


def _prediction(plan: Plan) -> Prediction:
    """The replay's prediction, which every plan that was made has."""
    assert plan.prediction is not None
    return plan.prediction


def _recomputing(plan: Plan) -> str:
    return " with this recomputation" if any(choice != NONE for choice in plan.recompute) else ""


# ---- batch.find


@dataclass(frozen=True)
class Found:
    """Batches that fit, smallest first. ``profiled``: batches whose profile was measured."""

    batches: tuple[PlannedBatch, ...]
    profiled: tuple[int, ...] = ()

    @property
    def largest(self) -> PlannedBatch:
        return self.batches[-1]

    @property
    def fastest(self) -> PlannedBatch:
        return fastest_of(self.batches)

    def wanted(self, config: Config) -> PlannedBatch:
        return self.largest if config.batch.find == "largest" else self.fastest


def find(config: Config, folder: Path, console: Console, *, known: Profiles) -> tuple[Found, str]:
    """Return the batches within the budget, and the reason if there is none (else empty). The job's folder gets the
    profile and the plan of the batch that is asked for, and its folders `profile-N` the profiles that are measured, of
    N samples. Raises ConfigError where the profile would replace the one that the config names."""
    if config.profile.path is not None and Path(config.profile.path).resolve() == (folder / "profile.json").resolve():
        problem = "batch.find would put another batch's profile over profile.path: give another folder"
        raise ConfigError("hydra.run.dir", problem)
    measured, reason = _measured(config, folder, console, known)
    if reason:
        return Found(()), reason
    try:
        scaling = BatchScaling(measured)
    except ValueError as error:
        return Found(()), f"batch.profiles: {error}"

    def plan(profile: Profile) -> Plan:
        return make_plan(config, job_of(config, profile), floor=0)  # no budget is over a floor here

    try:
        batches = batches_that_fit(scaling.profile, plan, at_most=config.batch.at_most)
    except InfeasibleBudget as error:
        why = f"batch.find={config.batch.find}: no batch fits, not even of one sample: {error}"
        raise jobs.Infeasible(why) from error
    except ValueError as error:
        return Found(()), str(error)
    found = Found(batches, tuple(sorted(measured)))
    _write(config, folder, found.wanted(config), found.profiled)
    return found, ""


def _sized(config: Config, batch: int) -> Config:
    return replace(config, batch=BatchConfig(), data=replace(config.data, batch_size=batch))


def _measured(config: Config, folder: Path, console: Console, known: Profiles) -> tuple[dict[int, Profile], str]:
    """The profiles by batch, of equal jobs or measured now; and the reason of a failure, else empty."""
    own, out = config.data.batch_size, dict[int, Profile]()
    asked = profiles.with_recomputation(config) if config.recompute == AUTO else config  # some batch needs it
    sizes = [own] if config.profile.path is not None else config.batch.profiles or [own, 4 * own]
    for batch in sizes:
        place, job = folder / f"profile-{batch}", replace(_sized(asked, batch), budget=BudgetConfig())
        if reason := jobs.prepare("profile", job, place, console, known=known):
            return {}, f"the profile of batch {batch}: {reason} (its logs are in {place})"
        out[batch] = Profile.from_json((place / "profile.json").read_text(encoding="utf-8"))
    return out, ""


def _write(config: Config, folder: Path, planned: PlannedBatch, profiled: tuple[int, ...]) -> None:
    """Write the config, the profile and the plan of a job with this batch."""
    job, plan = _sized(config, planned.batch), planned.plan
    job = replace(job, profile=replace(job.profile, path=str((folder / "profile.json").resolve())))
    about = {key: value for key, value in plan.job.profile.about.items() if key != INPUTS}
    about |= job_identity(job) | {"calculated": f"from batches of {' and '.join(map(str, profiled))}"}
    plan = replace(plan, job=replace(plan.job, profile=replace(plan.job.profile, about=about)))
    with jobs.claimed(folder):
        jobs.begin(resolved := resolve(job), folder)
        (folder / "profile.json").write_text(plan.job.profile.to_json(), encoding="utf-8")
        write_plan(folder, plan)
        show_files(resolved, folder, "plan", record.identity_of(job))


if __name__ == "__main__":
    sys.exit(main())
