"""Sweepers of others: a job's task returns its step time, and `.hydra/` is in its folder. The ranks run a stub."""

import math
import sys
import types

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

from experiments import train
from tests.experiments import one_process, stub_slurm

SEEN: list[float] = []


class HalvingSweeper(Sweeper):
    """Tries one value after another, as an optimizer does: each job is chosen by what the one before returned."""

    def setup(self, *, hydra_context, task_function, config) -> None:
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments) -> None:
        SEEN.clear()
        steps = 8
        for number in range(3):
            name = "fine" if number < 2 else "raise"
            [done] = self.launcher.launch([[*arguments, f"run.steps={steps}", f"run.name={name}"]], initial_job_idx=number)
            SEEN.append(done.return_value)
            steps //= 2 if done.return_value < math.inf else 1


@pytest.fixture
def halving(monkeypatch, no_pictures):
    package = types.ModuleType("hydra_plugins.halving")  # where Hydra wants its plugins
    package.HalvingSweeper = HalvingSweeper
    monkeypatch.setattr(HalvingSweeper, "__module__", package.__name__)
    monkeypatch.setitem(sys.modules, package.__name__, package)
    Plugins.instance().register(HalvingSweeper)
    node = {"_target_": "hydra_plugins.halving.HalvingSweeper"}
    ConfigStore.instance().store(group="hydra/sweeper", name="halving", node=OmegaConf.create(node))


def test_a_sweeper_of_others_is_told_the_step_time(tmp_path, halving):
    asked = ("-m", "hydra/sweeper=halving", "run.unmeasured_steps=1", "hydra.sweep.dir=out")
    done = one_process.call(train, tmp_path, *asked, worker="tests.experiments.stub_worker")
    assert pytest.approx([0.1, 0.1, math.inf]) == SEEN, done.stderr
    assert done.returncode == 1 and "rank 1 failed: RuntimeError: the stub fails as told" in done.stderr
    assert OmegaConf.load(tmp_path / "out/1/.hydra/overrides.yaml") == ["run.unmeasured_steps=1", "run.steps=4", "run.name=fine"]
    assert OmegaConf.load(tmp_path / "out/1/.hydra/config.yaml").run.steps == 4
    assert OmegaConf.load(tmp_path / "out/1/.hydra/hydra.yaml").hydra.mode == "MULTIRUN"
    assert OmegaConf.load(tmp_path / "out/2/.hydra/config.yaml").run.name == "raise"  # of a job that fails, too
    assert (tmp_path / "out/sweep.json").is_file() and (tmp_path / "out/table.csv").is_file()


def test_it_is_told_the_step_time_of_jobs_of_slurm_too_once_they_have_ended(tmp_path, halving, monkeypatch):
    stub_slurm.install(tmp_path / "slurm", monkeypatch)
    asked = ("-m", "hydra/sweeper=halving", "hydra/launcher=mdcs_slurm", "run.unmeasured_steps=1", "hydra.sweep.dir=out")
    done = one_process.call(train, tmp_path, *asked)
    assert [0.25, 0.25, math.inf] == SEEN, done.stderr
    done = one_process.call(train, tmp_path, *asked, "hydra.launcher.wait=false")
    line = "config: hydra.launcher.wait: must be true, as this hydra/sweeper needs the results of jobs\n"
    assert (done.returncode, done.stderr) == (2, line)
