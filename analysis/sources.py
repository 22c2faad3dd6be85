"""Runs as one table, wherever they are: what notebooks, reports and tables begin with."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from analysis import wandb_runs
from analysis.load import load_sweep, run_folders, table_of
from analysis.wandb_report import WANDB


def runs(source: str | Path) -> pd.DataFrame:
    """One row per run, with :data:`analysis.load.COLUMNS` and the settings in which runs differ; times in seconds, sizes in
    bytes.

    `source` is one of

    - the folder of a sweep or of a run, as `train.py` wrote it, at any depth;
    - a folder with offline runs of W&B and nothing else of theirs;
    - `wandb:ENTITY/PROJECT` or `wandb:ENTITY/PROJECT/GROUP` (a sweep is a group): asked of W&B, with this machine's account.

    Raises FileNotFoundError if a folder does not exist, ValueError if there are no runs, or what W&B says.
    """
    if str(source).startswith(WANDB):
        entity, slash, rest = str(source).removeprefix(WANDB).partition("/")
        project, _, group = rest.partition("/")
        if not (entity and slash and project):
            raise ValueError(f"{source}: expected {WANDB}ENTITY/PROJECT or {WANDB}ENTITY/PROJECT/GROUP")
        found = wandb_runs.project_runs(f"{entity}/{project}", group or None)
        if not found:
            raise ValueError(f"{source} has no runs")
        return table_of([run.row() for run in found])
    folder = Path(source)
    if folder.is_dir() and not run_folders(folder) and (found := wandb_runs.offline_runs(folder)):
        return table_of([run.row() for run in found])
    return load_sweep(folder)
