"""Words that people type out of habit are answered with the key, before Hydra or argparse say something else."""

import pytest
from hydra import compose

from experiments import plan
from experiments.config import checks
from experiments.config.files import CONF
from experiments.config.schema import ConfigError
from experiments.job.arguments import require_own, submits
from experiments.job.submission import launcher_of
from hydra_plugins import mdcs_slurm
from tests.experiments import one_process


@pytest.mark.parametrize(
    ("typed", "key", "names"),
    [
        (("--steps", "10"), "--steps", "run.steps"),
        (("--batch-size=8",), "--batch-size=8", "data.batch_size"),
        (("--strategy", "fsdp"), "--strategy", "strategy=VALUE"),
        (("--format=json",), "--format=json", "plan.format"),
        (("--qqqq",), "--qqqq", "KEY=VALUE"),
        (("-m", "strategy=dp,", "fsdp"), "strategy", "no spaces"),
        (("-m", "strategy=dp", ",fsdp"), ",fsdp", "no spaces"),
    ],
)
def test_dashes_and_spaces_in_a_list_are_one_line_with_the_key(tmp_path, typed, key, names):
    done = one_process.call(plan, tmp_path, *typed)
    assert done.returncode == 2 and not done.stdout
    [line] = done.stderr.splitlines()
    assert line.startswith(f"{key}: ") and names in line


def test_help_is_a_word_too(tmp_path):
    done = one_process.call(plan, tmp_path, "help")
    assert done.returncode == 0 and "run.steps=" in done.stdout


@pytest.mark.parametrize("preset", [file.stem for file in (CONF / "hydra/launcher").glob("*.yaml")])
def test_a_preset_of_slurm_submits_jobs(preset):
    chosen = f"hydra/launcher={preset}"
    with checks.composing():
        composed = compose("config", [chosen, "hydra.mode=MULTIRUN", "hydra.launcher.nodes=3"], return_hydra_config=True)
    asked = launcher_of(composed.hydra)
    mdcs_slurm.check(mdcs_slurm.MdcsSlurmConf(**composed.hydra.launcher))
    assert submits([chosen]) and asked["nodes"] == 3 and asked["ranks_per_node"] > 1


@pytest.mark.parametrize("key", ["run.varied", "run.sweep"])
def test_what_a_program_sets_is_no_key(key):
    with pytest.raises(ConfigError, match=f"^{key}: no such key"):
        require_own(f"{key}=x", ())
