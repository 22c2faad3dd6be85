"""Words that people type out of habit are answered with the key, before Hydra or argparse say something else."""

import pytest

from experiments import plan
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
