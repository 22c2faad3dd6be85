"""A Hydra sweeper: the grid of all values, and single jobs beside it; good jobs run when others cannot be composed.

Hydra's own sweeper refuses the whole sweep when one job cannot be composed, with many lines of output. This one calls
`judge` for each job before any starts, and launches those that it accepts, in the folders that it names. `also` adds
single jobs, each a string of overrides: baselines that need not be crossed with every axis.

Hydra finds this module by itself, and executes it again if it was imported before. So a program gets the class from the
module after `Plugins.instance()`, and sets `begin` and `judge` there. Without them this is Hydra's sweeper with `also`.
"""

import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


@dataclass
class MdcsSweeperConf:
    _target_: str = "hydra_plugins.mdcs_sweeper.MdcsSweeper"
    params: dict[str, str] | None = None
    also: list[str] = field(default_factory=list)


ConfigStore.instance().store(group="hydra/sweeper", name="mdcs", node=MdcsSweeperConf, provider="mdcs")


Begin = Callable[[DictConfig], None]
"""Called with the config of the sweep, not of its jobs, before all jobs."""

Judge = Callable[[Callable[[], DictConfig], Sequence[str]], str | None]
"""(function that composes a job, overrides of the job) → the job's folder inside the sweep's folder.

Empty: the folder of the config. None: the job is not run.
"""


class MdcsSweeper(Sweeper):
    """Launches the jobs of a grid, and those beside it, that `judge` accepts.

    params: axes of the grid by key, values separated by commas; arguments of the command line replace them.
    """

    launcher: Launcher
    begin: ClassVar[Begin] = staticmethod(lambda config: None)
    judge: ClassVar[Judge] = staticmethod(lambda compose, overrides: "")

    def __init__(self, params: Mapping[str, str] | None = None, also: Sequence[str] = ()) -> None:
        self.params = dict(params or {})
        self.also = [shlex.split(job) for job in also]

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.loader, self.config = hydra_context.config_loader, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        config: Any = self.config
        type(self).begin(config)
        asked = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        jobs = self._with_others(_grid(OverridesParser.create(config_loader=self.loader).parse_overrides(asked)))
        out = Path(config.hydra.sweep.dir)
        out.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(config, out / "multirun.yaml")
        batch = []
        for job in jobs:
            folder = type(self).judge(partial(self.loader.load_sweep_config, config, job), job)
            if folder is not None:
                quoted = folder.replace("'", "\\'")
                batch.append([*job, f"hydra.sweep.subdir='{quoted}'"] if folder else job)
        returned = self.launcher.launch(batch, initial_job_idx=0)
        for each in returned:
            _ = each.return_value  # raises what a job has raised
        return [returned]

    def _with_others(self, grid: list[list[str]]) -> list[list[str]]:
        """The jobs of the grid and of `also`, each once.

        Overrides that all jobs of the grid share also hold for the jobs of `also`, unless such a job sets the same key
        or its group.
        """
        jobs, common = list(grid), [override for override in grid[0] if all(override in job for job in grid)]
        for job in self.also:
            own = {override.partition("=")[0] for override in job}
            keys = {override: override.partition("=")[0] for override in common}
            single = [each for each, key in keys.items() if not own & {key, key.partition(".")[0]}] + job
            jobs += [] if single in jobs else [single]
        return jobs


def _grid(overrides: Sequence[Override]) -> list[list[str]]:
    """The overrides of every combination. The last override of a key counts."""
    axes: dict[str, list[str]] = {}
    for each in overrides:
        key = each.get_key_element()
        if not each.is_sweep_override():
            axes[key] = [f"{key}={each.get_value_element_as_str()}"]
        elif each.is_discrete_sweep():
            axes[key] = [f"{key}={value}" for value in each.sweep_string_iterator()]
        else:
            raise HydraException(f"{key}: a grid needs values, got {each.input_line}; list them, as in {key}=1,2")
    return [list(job) for job in itertools.product(*axes.values())]
