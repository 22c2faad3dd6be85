"""Program of a submitted job: `python -m experiments.job.frozen FOLDER train|profile PROGRAM ARGUMENT…`, on every rank.

Rank 0's folder is FOLDER, with the config in frozen.yaml (`experiments.job.submission`). Other ranks have temporary
folders (`experiments.job.spmd`). The rest is the command line that has submitted the job: its records name that one.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from analysis.events import METRICS
from experiments.config import checks, rules
from experiments.config.schema import Config, ConfigError
from experiments.config.started import adapted
from experiments.job import checkpoints, profiles, record
from experiments.job import run as jobs
from experiments.job.profiles import Profiles
from experiments.job.spmd import on_rank_zero
from experiments.job.submission import BUDGETS, CONFIG, MEASURE, TRAIN, fail, why_no_profile
from hydra_plugins import _mdcs_jobs as submitted
from launch import preemption
from launch.claim import Occupied
from mdcs.planner.recompute import AUTO
from mdcs.profile import cache
from mdcs.sizes import Budget


def run(folder: Path, what: str = TRAIN) -> int:
    """Run the job on rank 0. Return the exit code."""
    before = record.read(folder)
    try:
        config = adapted(checks.load(folder / CONFIG), ("cluster.ranks", "cluster.nodes", "cluster.network"))
        rules.check(config)
        if what == MEASURE:
            reason = jobs.prepare(MEASURE, config, folder, Console())
            if not reason and _needs_recomputation(config, folder):
                reason = jobs.prepare(MEASURE, profiles.with_recomputation(config), folder, Console())
            if not reason:
                (folder / METRICS).unlink(missing_ok=True)  # written by an attempt that failed
        else:
            reason = _train(config, folder, None if before is None else before.identity)
    except ConfigError as error:
        # a job in the folder writes its own record
        if before is not None and not isinstance(error.__cause__, Occupied):
            record.write(folder, before.identity, record.FAILED, str(error))
        print(error, file=sys.stderr)
        return 2
    if reason:
        print(f"failed: {reason} (its logs are in {folder})", file=sys.stderr, flush=True)
    return 1 if reason else 0


def _needs_recomputation(config: Config, folder: Path) -> bool:
    """Return whether a job that waits for the profile in the folder has a budget that only recomputation keeps."""
    profile, file = cache.read(folder / "profile.json"), folder / BUDGETS
    if profile is None or not file.exists():
        return False
    budgets = map(Budget.of, {*file.read_text(encoding="utf-8").splitlines()})
    return profiles.is_short(replace(config, recompute=AUTO), profile, *budgets)


def _train(config: Config, folder: Path, identity: str | None) -> str:
    """Return the reason of a failure, else "". A job that is preempted is queued again."""
    known = Profiles()
    if preemption.restarted() and config.engine.plans:
        if config.run.resume is None or checkpoints.any_in(folder):
            config.run.resume = "auto"
        known.adopt(config, folder)
    shared = submitted.before(folder)
    for place in shared:
        _adopt(known, config, place)
    reason = jobs.run(config, folder, Console(), known=known, identity=identity).reason
    for place in shared:
        known.leave(config, place)
    after = record.read(folder)
    if after is not None and after.state == record.PREEMPTED:
        refused = preemption.requeue()
        reason += f"; {refused or 'queued again'}"
        if refused:
            fail(folder, after.identity, reason)
    return reason


def _adopt(known: Profiles, config: Config, folder: Path) -> None:
    """Use the profile in the folder for planning. Raises ConfigError if its job has ended without a profile.

    If the profile was measured on a different kind of node, this function warns, and the job measures its own.
    """
    if known.adopt(config, folder):
        return
    if (folder / "profile.json").exists():
        told = "was measured on another kind of node or with other libraries: this job measures its own"
        warnings.warn(f"the sweep's profile {folder / 'profile.json'} {told}", stacklevel=2)
    elif why := why_no_profile(folder):
        raise ConfigError("profile", why)


def main(folder: str, what: str, *command: str) -> int:
    """Run one rank of the job. Return the exit code."""
    sys.argv = [*command]
    if preemption.expected():
        preemption.ignore()  # the ranks listen, once they run
    return on_rank_zero(lambda: run(Path(folder), what))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
