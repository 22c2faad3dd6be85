"""The jobs of a sweep: which of them run, and in which folders.

A repeated sweep goes on in its folder, and runs only the jobs that have not ended well.
"""

from __future__ import annotations

import json
import re
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import analysis
from analysis.questions import short
from experiments.config.schema import Config, ConfigError
from experiments.job import record
from experiments.job.record import Record
from experiments.job.tracking import show_sweep
from hydra_plugins import _mdcs_jobs
from launch.elastic import Occupied, claim
from mdcs.planner.pipeline import decides_schedule

ID = "sweep.id"
_NUMBER = re.compile(r"\$\{hydra\.job\.(num|id)\}")
_ENDED = (record.OK, record.FAILED, record.INFEASIBLE)

@dataclass(frozen=True)
class JobResult:
    """Outcome of a job. status: ok, failed, infeasible (no plan keeps its budget), invalid (its config is wrong; it has
    no folder), left out (after a job that failed), or submitted (it has not ended)."""

    status: str
    overrides: tuple[str, ...]
    reason: str = ""  # one line; empty if the job ended well
    folder: Path | None = None
    kept: bool = False  # an earlier sweep ran the job


@dataclass
class Session:
    """One call of a program.

    - accepted: configs of the sweep's valid jobs, including jobs that its folder has already run.
    - claimed: holds the lock of the sweep's folder: no other sweep may number jobs there meanwhile.
    - earlier: runs that the sweep's folder had, by identity: the run's folder in it, and the run's record.
    - outdated: folders of earlier runs of an accepted job's config whose code, machine or libraries were others.
    """

    results: list[JobResult] = field(default_factory=list)
    sweep: Path | None = None  # its folder
    accepted: list[Config] = field(default_factory=list)
    asked: list[tuple[str, ...]] = field(default_factory=list)  # overrides of the accepted jobs
    claimed: ExitStack = field(default_factory=ExitStack)
    earlier: dict[str, tuple[str, Record]] = field(default_factory=dict)
    outdated: set[Path] = field(default_factory=set)
    _parts: dict[str, record.Parts] = field(default_factory=dict)  # of the identities of earlier runs, by folder
    _subdir: str = ""  # the config's pattern for the folders of jobs
    _taken: set[str] = field(default_factory=set)  # folders of jobs in the sweep's

    def begin(self, config: DictConfig, *, continues: bool) -> None:
        """Begin a sweep, or go on with the one in its folder. continues: jobs that the folder already has runs of may
        be left out."""
        self.sweep = Path(str(config.hydra.sweep.dir)).resolve()
        try:
            self.claimed.enter_context(claim(self.sweep))
        except Occupied as error:
            raise ConfigError("hydra.sweep.dir", str(error)) from error
        if continues:
            named: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
            self._subdir = str(named["subdir"])
            for path in sorted(file.parent for file in self.sweep.rglob(record.FILE)):
                if said := record.read(path):
                    self.earlier[said.identity] = str(path.relative_to(self.sweep)), said
            self._taken = {name for name, _ in self.earlier.values()}
            self._parts = {name: record.read_parts(self.sweep / name) for name in self._taken}
        if self.earlier and not config.sweep.force:
            print(f"going on in {self.sweep} (sweep.force=true runs every job)", flush=True)

    def refuse(self, reason: str, overrides: Sequence[str]) -> None:
        """Report a job whose config is wrong. Equal reasons are printed once, not for every job of an axis."""
        if all(reason != result.reason for result in self.results):
            print(f"{reason} (job {' '.join(overrides)})", file=sys.stderr)
        self.results.append(JobResult("invalid", tuple(overrides), reason))

    def place(
        self, config: Config, parts: record.Parts, overrides: Sequence[str],
        on_earlier: Callable[[Config, Path], object] | None,
    ) -> str | None:  # fmt: skip
        """The job's folder in the sweep's folder; empty for the one that the config gives.

        None if the job is not run: it equals another one, or an earlier sweep has run it to its end, or has submitted
        it and it has not ended.

        - parts: of the job's identity.
        - on_earlier: called for a job that the sweep's folder already has a run of.
        """
        job, asked = " ".join(overrides), tuple(overrides)
        if config in self.accepted:
            why = f": {decides(config)}" if decides_schedule(config.strategy) else ""
            print(f"same as job {self.accepted.index(config)}{why} (job {job})", file=sys.stderr)
            return None
        self.accepted.append(config)
        self.asked.append(asked)
        if self.sweep is None or on_earlier is None:
            return ""
        identity = record.hash_of(parts)
        changes = {n: found for n, old in self._parts.items() if (found := record.changed(old, parts))}
        self.outdated |= {self.sweep / n for n in changes}
        if identity not in self.earlier:
            for n, found in list(changes.items())[-1:]:
                print(f"{n}: another {' and '.join(found)} than then, runs again elsewhere (job {job})", flush=True)
            return self._new_place()
        name, before = self.earlier[identity]
        folder, ended = self.sweep / name, before.state in _ENDED
        if not ended and (state := _mdcs_jobs.state(folder)):
            submitted = JobResult(record.SUBMITTED, asked, record.SUBMITTED, folder, kept=True)
            self._keep(submitted, f"{name}: submitted before and {state}")
            return None
        if config.sweep.force:
            return name
        on_earlier(config, folder)
        if ended and (before.state != record.FAILED or not config.sweep.retry_failed):
            self._keep(JobResult(before.state, asked, before.reason, folder, kept=True), f"{name}: {before.state}")
            return None
        state = "not finished" if before.state == record.RUNNING else before.state
        print(f"{name}: {state}, runs again (job {job})", flush=True)
        return name

    def _new_place(self) -> str:
        """A folder that no other job has, by the number of the job. Empty: the folder that the config gives."""
        number = len(self.accepted) - 1
        if not self.earlier or not _NUMBER.search(self._subdir):
            return ""
        while (name := _NUMBER.sub(str(number), self._subdir)) in self._taken:
            number += 1
        self._taken.add(name)
        return name

    def _keep(self, result: JobResult, state: str) -> None:
        self.results.append(result)
        print(f"{state}, not run again (job {' '.join(result.overrides)})", flush=True)


def decides(config: Config) -> str:
    return f"strategy={config.strategy.name} decides the schedule"


def varied(overrides: Sequence[str], sweep: Sequence[Sequence[str]], *, but: Sequence[str] = ()) -> list[str]:
    """The overrides of a job in which the jobs of its sweep differ, as `key=value` with shortened keys. A key is
    shortened to its last part unless two keys end alike. but: keys that are left out."""
    values: dict[str, set[str]] = {}
    for job in sweep:
        for key, _, value in (override.lstrip("+").partition("=") for override in job):
            values.setdefault(key, set()).add(value)
    keys = [key for key, several in values.items() if len(several) > 1 and key not in but]
    own = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
    return [f"{short(key, keys)}={own[key]}" for key in keys if key in own]


def sweep_name(folder: Path) -> str:
    """The name of a sweep in its runs, and their group in a tracker: its folder's name and 8 random digits. The folder
    keeps the digits for a sweep that continues in it. Sweeps in other folders of this name are other groups."""
    file = folder / ID
    try:
        digits = file.read_text(encoding="utf-8")
    except OSError:
        digits = uuid.uuid4().hex[:8]
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(digits, encoding="utf-8")
    return f"{folder.name}-{digits}"


def report(session: Session, started: float) -> None:
    """Write sweep.json, table.csv and the pictures into the sweep's folder, and print the table: of all its runs but
    those that a job of other code, on another machine or with other libraries has left. started: unix time in seconds.
    A picture that cannot be drawn is only a warning: the runs are complete."""
    folder = session.sweep
    assert folder is not None
    jobs = [
        {"overrides": list(result.overrides), "status": result.status, "reason": result.reason,
         "folder": None if result.folder is None else str(result.folder.resolve().relative_to(folder))}
        for result in session.results
    ]  # fmt: skip
    wall_s = time.time() - started
    told = {"schema": 1, "started": started, "wall_s": wall_s, "jobs": jobs}
    try:
        (folder / "sweep.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    except OSError as error:
        warnings.warn(f"the sweep is not recorded: {error}", stacklevel=2)
    waiting = sum(result.status == record.SUBMITTED for result in session.results)
    later = f"; {waiting} of them have not ended: mdcs jobs {folder} shows them" if waiting else ""
    try:
        frame = analysis.runs(folder)
        frame = frame[~frame["folder"].isin([str(run) for run in session.outdated])].reset_index(drop=True)
        if frame.empty:
            raise ValueError("no job has begun: the folder's runs are of other code or of another machine")
        for result in session.results:
            if result.status == record.SUBMITTED:  # what is there is of an earlier attempt, perhaps of other code
                assert result.folder is not None
                of = frame["folder"] == str(result.folder.resolve())
                frame.loc[of, ["status", "reason"]] = record.SUBMITTED, "its job has not ended"
    except ValueError as error:  # no job has begun
        print(f"{len(jobs)} jobs in {wall_s:.0f} s{later or f'; {error}'}", flush=True)
        return
    print()
    analysis.print_table(frame)
    try:
        written = analysis.write_report(frame, folder)
    except Exception as error:  # hours of runs must not end in a traceback of a plot
        warnings.warn(f"the sweep could not be drawn: {type(error).__name__}: {error}", stacklevel=2)
        written = [file for file in [folder / "table.csv"] if file.exists()]
    for config in session.accepted[:1]:
        show_sweep(config, config.run.sweep or sweep_name(folder), folder, frame, written)
    earlier = sum(result.kept for result in session.results)
    kept = f", {earlier} of them earlier," if earlier else ""
    drawn = ", ".join(path.name for path in written) or "nothing drawn"
    print(f"{len(jobs)} jobs{kept} in {wall_s:.0f} s; in {folder}: {drawn}{later}", flush=True)
