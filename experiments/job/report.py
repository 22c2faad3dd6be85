"""The end of a sweep: the record of its jobs, the table, and the pictures."""

from __future__ import annotations

import json
import time
import warnings

import analysis
from experiments.job import record
from experiments.job.sweep import Session, sweep_name
from experiments.job.tracking import show_sweep


def report(session: Session, started: float) -> None:
    """Write sweep.json, table.csv and the pictures into the sweep's folder, and print the table: of all its runs but
    those that a job of other code, on another machine or with other libraries has left.

    started: unix time in seconds. A picture that cannot be drawn is only a warning: the runs are complete.
    """
    folder = session.sweep
    assert folder is not None
    jobs = [
        {
            "overrides": list(result.overrides),
            "status": result.status,
            "reason": result.reason,
            "folder": None if result.folder is None else str(result.folder.resolve().relative_to(folder)),
        }
        for result in session.results
    ]
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
            raise ValueError("no job has begun: what is there is of other code or another machine")
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
