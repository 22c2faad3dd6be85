"""A Hydra sweeper that runs the good jobs of a sweep when others cannot be composed.

Hydra's own sweeper refuses the whole sweep when one job cannot be composed, with many lines of output. This sweeper
calls `judge` for each job before any job starts. It launches the jobs that `judge` accepts, in the folders that
`judge` names. A repeated sweep continues in the folder that `begin` finds. `also` adds single jobs to the grid, each a
string of overrides: baselines that need not be crossed with every axis.

Hydra finds this module by itself, and executes it again if it was imported before. So a program gets the class from the
module after `Plugins.instance()`, and sets `begin` and `judge` there. Without them this is Hydra's sweeper with `also`.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, open_dict, read_write


@dataclass
class MdcsSweeperConf(BasicSweeperConf):
    _target_: str = "hydra_plugins.mdcs_sweeper.MdcsSweeper"
    also: list[str] = field(default_factory=list)


ConfigStore.instance().store(group="hydra/sweeper", name="mdcs", node=MdcsSweeperConf, provider="mdcs")


Begin = Callable[[DictConfig], str | None]
"""(config of the sweep, not of its jobs) → folder in which the sweep continues; None: the folder of the config."""

Judge = Callable[[Callable[[], DictConfig], Sequence[str]], str | None]
"""(function that composes a job, overrides of the job) → the job's folder inside the sweep's folder.

Empty: the folder of the config. None: the job is not run.
"""


class MdcsSweeper(BasicSweeper):
    """`BasicSweeper` over the jobs that `judge` accepts."""

    begin: ClassVar[Begin] = staticmethod(lambda config: None)
    judge: ClassVar[Judge] = staticmethod(lambda compose, overrides: "")
    """The application sets `begin` and `judge` before Hydra starts."""

    def __init__(self, also: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(**settings)
        self.also = [shlex.split(job) for job in also]

    def sweep(self, arguments: list[str]) -> Any:
        config: Any = self.config
        if (folder := type(self).begin(config)) is not None:
            with read_write(config), open_dict(config):
                config.hydra.sweep.dir = folder
                config.hydra.overrides.hydra.append(_override("hydra.sweep.dir", folder))  # each job is composed again
        return super().sweep(arguments)

    def get_job_batch(self) -> Sequence[Sequence[str]]:
        batch = list(super().get_job_batch())
        if self.is_done():
            # Overrides that all jobs of the grid share also hold for the jobs of `also`, unless such a job sets the
            # same key or its group.
            common = [override for override in batch[0] if all(override in job for job in batch)]
            for job in self.also:
                keys = {override.partition("=")[0] for override in job}
                single = [override for override in common if not keys & _key_and_group(override)] + job
                batch += [] if single in batch else [single]
        judged = [(list(job), type(self).judge(partial(self._compose, job), job)) for job in batch]
        return [
            [*job, _override("hydra.sweep.subdir", folder)] if folder else job
            for job, folder in judged
            if folder is not None
        ]

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Do nothing: `get_job_batch` has composed each job."""

    def _compose(self, overrides: Sequence[str]) -> DictConfig:
        assert self.hydra_context is not None and self.config is not None
        composed: Any = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        return composed


def _key_and_group(override: str) -> set[str]:
    key = override.partition("=")[0]
    return {key, key.partition(".")[0]}


def _override(key: str, text: str) -> str:
    quoted = text.replace("'", "\\'")
    return f"{key}='{quoted}'"
