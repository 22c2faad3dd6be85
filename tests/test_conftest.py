"""How the tests themselves are run."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

FATAL = "import os\ndef test_before(): pass\ndef test_fatal(): os._exit(1)\ndef test_after(): pass\n"


def run(folder: Path, *options: str, **env: str) -> str:
    (folder / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)]
    env = {"PATH": "/usr/bin:/bin", **env}
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=200).stdout


@pytest.mark.slow
def test_a_worker_that_dies_fails_one_test_and_the_others_run(tmp_path):
    (tmp_path / "test_a.py").write_text(FATAL)
    for name in "bcd":
        (tmp_path / f"test_{name}.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    said = run(tmp_path, "-n", "2", "--dist", "loadfile")
    assert "crashed while running" in said
    assert "1 failed, 8 passed" in said


def test_no_test_begins_when_time_is_over(tmp_path):
    (tmp_path / "test_a.py").write_text("def test_one(): pass\n")
    assert "1 skipped" in run(tmp_path, MDCS_TESTS_UNTIL=str(time.time() - 1))
