"""A repeated sweep: the folder in which it continues, and the runs that its jobs already have there."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.config.schema import ConfigError
from experiments.job import record
from experiments.job.record import Record
from hydra_plugins.mdcs_slurm import MEASURED

_ASKED = "multirun.yaml"  # Hydra writes it for every sweep
_TIME = re.compile(r"\$\{now:[^}]*\}")
_NUMBER = re.compile(r"\$\{hydra\.job\.(num|id)\}")


class Earlier:
    """The runs in a sweep's folder, and the folders of its jobs. `subdir` is the config's pattern for their names."""

    def __init__(self, folder: Path, subdir: str) -> None:
        self._folder, self._subdir = folder, subdir
        self._runs: dict[str, tuple[str, Record]] = {}
        for path in _runs_in(folder):
            if (made := record.read(path)) is not None:
                self._runs[made.identity] = str(path.relative_to(folder)), made
        self._taken = {name for name, _ in self._runs.values()}

    def find(self, identity: str) -> tuple[str, Record] | None:
        """The folder of a job's run, relative to the sweep's folder, and its record; None if there is none."""
        return self._runs.get(identity)

    def place(self, number: int) -> str:
        """A folder that no other job has, for the job of this number. Empty: the folder that the config gives."""
        if not self._runs or not _NUMBER.search(self._subdir):
            return ""
        while (name := _NUMBER.sub(str(number), self._subdir)) in self._taken:
            number += 1
        self._taken.add(name)
        return name


def folder_of(config: DictConfig) -> Path | None:
    """The folder in which a sweep continues; None for `hydra.sweep.dir`. Raises ConfigError for a wrong `sweep.resume`.

    A `hydra.sweep.dir` that contains the time gives every sweep a new folder. There, the newest folder counts whose
    sweep had the same overrides and has runs.
    """
    asked, pattern = str(config.sweep.resume), str(OmegaConf.to_container(config.hydra.sweep, resolve=False)["dir"])  # type: ignore[index,call-overload]
    pattern = pattern.replace("${paths.root}", str(config.paths.root))
    if asked != "auto":
        if any(str(each).startswith("hydra.sweep.dir=") for each in config.hydra.overrides.hydra):
            raise ConfigError("sweep.resume", f"and hydra.sweep.dir exclude each other, got {asked}")
        if not Path(asked).is_dir():
            raise ConfigError("sweep.resume", f"no such folder: {asked}")
        return Path(asked).resolve()
    if config.sweep.force is True or not _TIME.search(pattern):
        return None
    question = _asked(config)
    for folder in _like(pattern):
        try:
            same = _asked(OmegaConf.load(folder / _ASKED)) == question
        except (OSError, OmegaConfBaseException, AttributeError):
            continue
        if same and any(_runs_in(folder)):
            return folder.resolve()
    return None


_OF_THE_QUESTION = ("hydra.sweeper", "hydra/launcher", *(f"hydra.launcher.{name}" for name in MEASURED))


def _asked(config: Any) -> tuple[str, set[str]]:
    task, hydras = ([str(each) for each in said] for said in (config.hydra.overrides.task, config.hydra.overrides.hydra))
    said = [*task, *(each for each in hydras if _is_of(each, _OF_THE_QUESTION))]
    return str(config.hydra.job.config_name), {each for each in said if not each.lstrip("+").startswith("sweep.")}


def _is_of(override: str, keys: Sequence[str]) -> bool:
    """Whether an override sets one of the keys, or a key below one of them."""
    key = override.partition("=")[0].lstrip("+~")
    return any(key == each or key.startswith(f"{each}.") for each in keys)


def _like(pattern: str) -> list[Path]:
    """The folders of a pattern's sweeps at any time, the newest first."""
    found = map(Path, glob.glob("*".join(map(glob.escape, _TIME.split(pattern)))))
    return sorted((path for path in found if (path / _ASKED).is_file()), key=lambda path: -(path / _ASKED).stat().st_mtime)


def _runs_in(folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.rglob(record.FILE))
