"""Compare predicted with measured step times: each run beside the replay of its plan.

    mdcs accuracy [--models gpt2 bert resnet] [--ranks 2 3] [override …]     # on the emulated link
    mdcs accuracy --timed [--ranks 2 4] [override …]     # compute that takes no core, behind real links

The rate of the link is chosen so that the communication of a plan with all units zero2 takes 0.5, 1 and 3 × as long as
compute. Strategies, schedulers and, with `--timed`, budgets take turns. The error is (predicted - measured) / measured,
with the median of the measured steps. `--json FILE` writes all runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from launch.place import require_alone

    require_alone(Path(__file__).name)

from rich.console import Console
from rich.table import Table

from analysis import load_run
from experiments.config.checks import compose_config, parse_with_overrides, positive, run_composing
from experiments.job import run as jobs
from experiments.job.profiles import Profiles
from mdcs.profile.schema import Profile
from mdcs.sizes import MIB

MODELS = {
    "gpt2": "model=gpt2-tiny data=stdlib_bytes model.layers=6 model.width=192 model.sequence=128 data.batch_size=4",
    "bert": "model=bert-tiny data=stdlib_bytes model.layers=6 model.width=192 model.sequence=128 data.batch_size=4",
    "resnet": "model=resnet-tiny data=digits model.depths=[2,2,2,2] model.width_divisor=4 data.batch_size=64",
}
RATIOS = (0.5, 1.0, 3.0)
PLANS = (
    "strategy=zero2 scheduler=dear",
    "strategy=fsdp scheduler=wfbp",
    "strategy=greedy scheduler=priority budget=over_floor budget.over_floor=0.2",
    "strategy=joint budget=over_floor budget.over_floor=0.2",
    "strategy=dp scheduler=wfbp",
    "strategy=sdp scheduler=partitioning",
    "strategy=fsdp scheduler=sequential",
    "strategy=greedy scheduler=memory_aware budget=over_floor budget.over_floor=0.2",
)
PER_RATIO = 2  # plans per ratio, taken in turn from PLANS
TIMED = "model=timed data=synthetic optimizer.fused=true cluster.threads=1"
TIMED_PLANS = (
    "strategy=zero2 scheduler=priority",
    "strategy=dp scheduler=wfbp",
    "strategy=joint",
    "strategy=greedy scheduler=priority budget=over_floor budget.over_floor=0.1",
    "strategy=joint budget=over_floor budget.over_floor=0.3",
    "strategy=fsdp scheduler=wfbp",
    "strategy=zero2 scheduler=dear",
    "strategy=sdp scheduler=partitioning",
    "strategy=joint budget=over_floor budget.over_floor=0.1",
    "strategy=greedy scheduler=memory_aware budget=over_floor budget.over_floor=0.3",
    "strategy=greedy scheduler=dear budget=over_floor budget.over_floor=0.6",
    "strategy=joint budget=over_floor budget.over_floor=0.6",
)
TIMED_PER_RATIO = 6
STEPS = "run.steps=26 run.warmup_steps=5 run.profile_iterations=12"


Row = tuple[str, int, float, dict[str, Any]]
"""Model, ranks, ratio, and the run's row of results."""
KEPT = ("strategy", "scheduler", "budget_gib", "shaped_gbit", "predicted_step_s", "step_s", "step_s_p10", "step_s_p90")
"""Columns of the results that are written as JSON."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="mdcs accuracy", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--timed", action="store_true", help="the stand-in, behind shaped links, instead of the models")
    parser.add_argument("--ranks", type=positive, nargs="+", help="default: 2 3; with --timed 2 4")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all runs, as JSON")
    parser.add_argument("overrides", nargs="*", help="config overrides for all, e.g. run.steps=30")
    arguments = parse_with_overrides(parser, sys.argv[1:])
    return run_composing(lambda: measure(arguments))


def measure(arguments: argparse.Namespace) -> int:
    """Run everything and show the table of the runs that ended well. Return the exit code. Raises ConfigError."""
    models = {"timed": TIMED} if arguments.timed else MODELS
    turn, each = (TIMED_PLANS, TIMED_PER_RATIO) if arguments.timed else (PLANS, PER_RATIO)
    in_turn, failed = itertools.cycle(turn), 0
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="mdcs-accuracy-") as folder:
        for model, ranks in itertools.product(models, arguments.ranks or ([2, 4] if arguments.timed else [2, 3])):
            plans = list(itertools.islice(in_turn, len(RATIOS) * each))
            if not arguments.timed and model not in arguments.models:  # the plans of other models do not shift
                continue
            common = [*f"{models[model]} cluster.ranks={ranks} {STEPS}".split(), *arguments.overrides]
            for row in compare(Path(folder) / f"{model}-{ranks}", common, plans, shaped=arguments.timed):
                failed += row is None
                rows += [] if row is None else [(model, ranks, *row)]
    show(rows, "compute is timed, links are shaped" if arguments.timed else "emulated link")
    if arguments.json:
        kept = [{"model": m, "ranks": n, "ratio": r, **{key: row[key] for key in KEPT}} for m, n, r, row in rows]
        arguments.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    return 1 if failed else 0


def compare(
    folder: Path, common: list[str], plans: list[str], *, shaped: bool
) -> Iterator[tuple[float, dict[str, Any]] | None]:
    """Run one model on one number of ranks. Yield (ratio, results) of each run, and None for a run that failed."""
    known, console = Profiles(), Console(stderr=True)

    def run(name: str, *overrides: str, only: str | None = None) -> Path | None:
        outcome = jobs.run(compose_config([*common, *overrides]), folder / name, console, known=known, only=only)
        if not outcome.ok:
            console.print(f"{' '.join([*common, *overrides])}: {outcome.reason}", markup=False)
        return folder / name if outcome.ok else None

    first = run("profile", "profile.refresh=true", "strategy=zero2", "link=emulated", only="profile")
    if first is None:
        yield None
        return
    profile = Profile.from_json((first / "profile.json").read_text(encoding="utf-8"))
    each = len(plans) // len(RATIOS)
    for i, ratio in enumerate(RATIOS):
        kind = "cluster=shaped cluster" if shaped else "link=emulated link"
        link = ("profile.refresh=true", *f"{kind}.rate_gbit={rate_gbit(profile, ratio):.4g}".split())
        for plan in plans[i * each :][:each]:
            path = run(f"{ratio} {plan}", *link, *plan.split())
            yield None if path is None else (ratio, load_run(path).row())


def rate_gbit(profile: Profile, ratio: float) -> float:
    """Rate (Gbit/s) at which a reduce-scatter and an all-gather of the whole model take ``ratio`` × the compute time.
    """
    size = sum(u.numel for u in profile.units) * (profile.param_bytes + profile.grad_bytes)
    sent = size * (profile.world - 1) / profile.world
    return sent * 8e-9 / (ratio * sum(slot.seconds for slot in profile.slots))


def show(rows: list[Row], link: str) -> None:
    table = Table(title=f"step time by replay and as measured; {link}")
    for heading in ("model", "ranks", "comm. / comp.", "strategy", "scheduler", "budget", "predicted ms", "measured ms", "error"):
        table.add_column(heading, justify="left" if heading in ("model", "strategy", "scheduler") else "right")
    errors = []
    for model, ranks, ratio, row in rows:
        predicted, measured = row["predicted_step_s"], row["step_s"]
        errors.append(predicted / measured - 1)
        table.add_row(
            model, str(ranks), f"{ratio:g}", row["strategy"], row["scheduler"],
            "–" if row["budget_bytes"] is None else f"{row['budget_bytes'] / MIB:.0f} MiB", f"{predicted * 1e3:.1f}",
            f"{measured * 1e3:.1f}", f"{errors[-1]:+.1%}",
        )  # fmt: skip
    console = Console(width=110)
    console.print(table)
    sizes = [abs(e) for e in errors]
    if sizes:
        console.print(f"{len(sizes)} runs: median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}")


if __name__ == "__main__":
    sys.exit(main())
