"""Compare mdcs with its peers, under one or several budgets: paired runs that take turns, in one session.

    mdcs compare [--rounds 3] [--budgets 10%,30%,none] [--engines ddp,fsdp2] [override …]

Every round runs mdcs once per budget and every peer once. Each round starts with the next candidate. A budget is in
GiB, a share of mdcs's floor on top of that floor (10%), or none. A peer fits a budget if no rank ever exceeded it.
Ratios are taken within a round. All losses are compared with those of the first run of mdcs. Overrides of strategy,
scheduler, collectives and profile apply only to mdcs. FSDP2 has a group per block whatever `model.wrap` is.
`--mdcs 'strategy=greedy scheduler=wfbp'` adds mdcs with another plan. The files comparison.json and comparison.png and
the runs are left in `--out`. An interrupted session shows the rounds that ended.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import re
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from launch.place import require_alone

    require_alone(Path(__file__).name)

from rich.console import Console

import mdcs
from analysis import load_run, pictures
from analysis.comparison import Row, lines, loss_differences
from experiments.compare_tables import show
from experiments.config.budgets import Budget
from experiments.config.checks import compose_config, positive, run_composing
from experiments.config.identity import device_name
from experiments.config.schema import Config, ConfigError
from experiments.config.targets import plain
from experiments.job import run as jobs
from experiments.job.planning import floor_of, job_of
from experiments.job.profiles import Profiles
from mdcs.planner.bounds import bounds_of, ideal_ddp_s

SCHEMA = 2
BOUNDS_S = 20.0  # time limit of each of two solves
PEERS = {
    "ddp": "engine=ddp",
    "ddp-8MiB": "engine=ddp engine.bucket_mib=8",
    "ddp-4MiB": "engine=ddp engine.bucket_mib=4",
    "ddp-1MiB": "engine=ddp engine.bucket_mib=1",
    "ddp-no-overlap": "engine=ddp_no_overlap",
    "fsdp2": "engine=fsdp2 model.wrap=block",  # a group per block of the model, as users of FSDP2 choose
    "fsdp2-keep": "engine=fsdp2 model.wrap=block engine.reshard=never",
    "fsdp2-a2a": "engine=fsdp2 model.wrap=block engine.prefetch=2 engine.reduce_scatter=all_to_all",
    "fsdp2-keep-a2a": "engine=fsdp2 model.wrap=block engine.reshard=never engine.prefetch=2 engine.reduce_scatter=all_to_all",
    "fairscale": "engine=fairscale",
    "fairscale-fsdp": "engine=fairscale_fsdp",
    "zero-1": "engine=deepspeed engine.stage=1",
    "zero-2": "engine=deepspeed engine.stage=2",
    "zero-3": "engine=deepspeed engine.stage=3",
}
BASE = "mdcs"
PLANNED = ("strategy", "scheduler", "collectives", "profile", "link", "run.cross_iteration")
"""Groups and a key that are removed from the configs of peers: only mdcs uses them."""


@dataclass(frozen=True)
class Candidate:
    """One of the engines that take turns in every round: a peer, or mdcs under a budget."""

    name: str
    config: Config
    budget: Budget | None = None


def main(module: str = jobs.WORKER) -> int:
    """Run the comparison of the command line. Return the exit code. The jobs' ranks run the module `module`."""
    parser = argparse.ArgumentParser(prog="mdcs compare", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=positive, default=3, help="how often each engine runs")
    parser.add_argument("--budgets", type=_each(_budget), default=[Budget()], help="e.g. 10%%,1.5GiB,none")
    parser.add_argument("--engines", type=_each(_peer), help=f"peers, of {', '.join(PEERS)}; default: all that can run here")
    parser.add_argument("--mdcs", action="append", default=[], metavar="OVERRIDES", help="mdcs with another plan as well")
    parser.add_argument("--tolerance", type=float, default=5e-3, help="greatest relative difference of equal losses")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="format of the output")
    parser.add_argument("--out", type=Path, default=Path("results/compare"), help="the folder for what is written")
    parser.add_argument("overrides", nargs="*", help="config overrides for all, e.g. model.layers=4")
    arguments = parser.parse_intermixed_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run_composing(lambda: Comparison(arguments, module).run())
    except KeyboardInterrupt:
        print("interrupted: all ranks were ended", file=sys.stderr)
        return 130


class Comparison:
    """One session: the candidates and the results of their runs. Raises ConfigError before anything is started."""

    def __init__(self, arguments: argparse.Namespace, module: str) -> None:
        self.asked, self.module, self.out = arguments, module, arguments.out.resolve()
        self.console = Console(stderr=True)
        self.known = Profiles()
        self.plans = {BASE: _planned(arguments.overrides)}
        for extra in arguments.mdcs:
            name = " ".join([BASE, *(o.partition("=")[2] for o in extra.split())])
            self.plans[name] = [*_without(self.plans[BASE], extra.split()), *extra.split()]
        self.config = compose_config(self.plans[BASE])
        self.left_out: dict[str, str] = {}
        self.peers = list(self._peers(arguments.engines, arguments.overrides))
        self.runs: dict[tuple[str, Budget | None], list[Row]] = {}
        self.curves: dict[str, list[list[float]]] = {}
        self.failed: dict[str, str] = {}
        self.rounds = 0  # rounds that have ended

    def _peers(self, names: Sequence[str] | None, overrides: Sequence[str]) -> Iterable[Candidate]:
        """Yield the peers. Raises ConfigError for a requested peer that cannot run; other peers are left out."""
        if self.config.link.name == "emulated":
            raise ConfigError("link.name", "an emulated link paces mdcs alone: peers are compared on a real one")
        kept = [o for o in overrides if not {_group(o), o.partition("=")[0]} & {*PLANNED}]
        usual = ["strategy=dp", "scheduler=wfbp", "collectives=auto", "profile=measured", "link=real"]
        for name in names if names is not None else PEERS:
            try:
                config = compose_config([*kept, *usual, *PEERS[name].split(), f"run.name={name}"])
                config.engine.require()
                yield Candidate(name, config)
            except ConfigError as error:
                if names is not None or error.key != "engine":
                    raise
                self.left_out[name] = str(error)

    def run(self) -> int:
        """Run all rounds, show and write the results. Return the exit code."""
        floor = self._floor()
        if floor is None:
            return 1
        own = list(self._own(floor))
        interrupted = False
        try:
            for number in range(self.asked.rounds):
                self._round(number, [*own, *self.peers])
                self.rounds = number + 1
        except KeyboardInterrupt:
            interrupted = True
            self.console.print("interrupted: all ranks were ended; what was measured before:")
        document = self.document(floor)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "comparison.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
        if any(budget["lines"] for budget in document["budgets"]):
            pictures.save(pictures.engine_comparison(document), self.out / "comparison.png")
        if self.asked.format == "json":
            print(json.dumps(document, indent=1))
        else:
            show(document)
        self.console.print(f"in {self.out}: comparison.json, comparison.png, runs", markup=False, highlight=False, soft_wrap=True)
        return 130 if interrupted else 1 if self.failed or not document["losses"]["equal"] else 0

    def _round(self, number: int, candidates: list[Candidate]) -> None:
        first = number % len(candidates)
        for candidate in [*candidates[first:], *candidates[:first]]:
            if _key(candidate) not in self.failed:
                self._turn(number, candidate)

    def _floor(self) -> int | None:
        """The floor in bytes by the profile, which is measured if it is not known. None, after one line, if that fails.
        """
        folder = self.out / "runs" / "profile"
        outcome = jobs.run(self.config, folder, self.console, known=self.known, only="profile", worker=self.module)
        if not outcome.ok:
            self.console.print(f"no profile: {outcome.reason}", markup=False, soft_wrap=True)
            return None
        profile = mdcs.Profile.from_json((folder / "profile.json").read_text(encoding="utf-8"))
        return floor_of(self.config, job_of(self.config, profile))

    def _own(self, floor: int) -> Iterable[Candidate]:
        """Yield mdcs with every plan under every budget. A budget below the floor is left out."""
        for budget in self.asked.budgets:
            if (limit := budget.bytes(floor)) is not None and limit < floor:
                self.left_out[f"{BASE} @ {budget}"] = f"the smallest feasible budget is {floor} bytes, got {limit}"
                continue
            for name, overrides in self.plans.items():
                yield Candidate(name, compose_config([*overrides, *budget.overrides, f"run.name='{name}'"]), budget)

    def _turn(self, number: int, candidate: Candidate) -> None:
        folder = self.out / "runs" / f"{number}-{re.sub(r'[^a-z0-9.]+', '-', _key(candidate).lower())}"
        outcome = jobs.run(candidate.config, folder, self.console, known=self.known, kind="compare", worker=self.module)
        if not outcome.ok:
            self.failed[_key(candidate)] = outcome.reason
            self.console.print(f"{_key(candidate)}: {outcome.reason}", markup=False, soft_wrap=True)
            return
        run = load_run(folder)
        self.runs.setdefault((candidate.name, candidate.budget), []).append(run.row() | {"folder": str(folder)})
        self.curves.setdefault(_key(candidate), []).append([float(loss) for loss in run.steps["loss"]])

    # ---- what is written and shown

    def document(self, floor: int) -> dict[str, Any]:
        config, whole = self.config, max(1, self.rounds)  # an interrupted first round counts with its runs so far
        complete = {key: rows[:whole] for key, rows in self.runs.items() if len(rows) >= whole}
        own = [key for key in self.curves if key.partition(" @ ")[0] == BASE]
        base = next(iter([*own, *self.curves]), None)
        differences = {} if base is None else loss_differences(self.curves, base)
        return {
            "schema": SCHEMA, "date": time.strftime("%Y-%m-%d"), "device": device_name(config),
            "torch": importlib.metadata.version("torch"), "model": config.model.label, "options": plain(config.model),
            "batch_size": config.data.batch_size, "world": config.cluster.ranks, "shaped_link": config.cluster.shaped_link(),
            "threads": config.cluster.resolved_threads(), "steps": config.run.steps,
            "rounds": whole, "overrides": self.asked.overrides, "base": BASE, "floor_bytes": floor,
            "losses": {
                "base": base, "tolerance": self.asked.tolerance,
                "differences": {key: value if math.isfinite(value) else None for key, value in differences.items()},
                "equal": all(difference <= self.asked.tolerance for difference in differences.values()),
            },
            "left_out": self.left_out, "failed": self.failed,
            "budgets": [self._under(budget, floor, complete) for budget in self.asked.budgets],
        }  # fmt: skip

    def _under(
        self, budget: Budget, floor: int, complete: dict[tuple[str, Budget | None], list[Row]]
    ) -> dict[str, Any]:
        runs = {name: rows for (name, of), rows in complete.items() if of in (None, budget)}
        bounds: dict[str, float] = {}
        if BASE in runs:
            plan = mdcs.Plan.from_json((Path(runs[BASE][0]["folder"]) / "plan.json").read_text(encoding="utf-8"))
            known = bounds_of(plan, BOUNDS_S)
            bounds = {"traffic": known.traffic_s, "structural": known.structural_s}
        limit = budget.bytes(floor)
        made = [dataclasses.asdict(line) for line in lines(runs, BASE, limit, bounds)]
        ddp = ideal_ddp_s(plan.job.profile, plan.micro_steps) if bounds and limit is None else None
        return {"budget_bytes": limit, "over_floor": budget.over_floor, "bounds": bounds, "ideal_ddp_s": ddp, "lines": made}


# ---- the command line


def _each(parse: Any) -> Any:
    def parse_all(text: str) -> list[Any]:
        return [parse(part.strip()) for part in text.split(",")]

    return parse_all


def _budget(words: str) -> Budget:
    try:
        return Budget.parse(words)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _peer(name: str) -> str:
    if name not in PEERS:
        raise argparse.ArgumentTypeError(f"no such engine {name}; engines: {', '.join(PEERS)}")
    return name


def _group(override: str) -> str:
    return override.partition("=")[0].partition(".")[0]


def _planned(overrides: Sequence[str]) -> list[str]:
    """Overrides of mdcs. The strategy is joint if none is named.

    Raises ConfigError for an override of a group that this program sets by an argument.
    """
    groups = {_group(override): override for override in overrides}
    for group, argument in (("engine", "--engines"), ("budget", "--budgets")):
        if group in groups:
            raise ConfigError(groups[group].partition("=")[0], f"is chosen with {argument} here")
    return [*overrides, *([] if groups.keys() & {"strategy", "scheduler", "experiment"} else ["strategy=joint"])]


def _without(overrides: Sequence[str], others: Sequence[str]) -> list[str]:
    """The overrides without strategy and scheduler, if `others` set either."""
    replaced = {"strategy", "scheduler"} if {"strategy", "scheduler"} & set(map(_group, others)) else set()
    return [o for o in overrides if _group(o) not in replaced]


def _key(candidate: Candidate) -> str:
    """Name of the candidate, with its budget if it has one: mdcs @ 10%."""
    is_limited = candidate.budget not in (None, Budget())
    return f"{candidate.name} @ {candidate.budget}" if is_limited else candidate.name


if __name__ == "__main__":
    sys.exit(main())
