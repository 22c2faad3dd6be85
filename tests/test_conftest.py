"""How the tests themselves are run."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

FATAL = """
import os, time
from pathlib import Path
def test_before(): pass
def test_fatal():
    Path("begun").touch()
    while {waits} and not Path("done").exists():
        time.sleep(0.01)
    os._exit(1)
def test_after(): pass
"""
OTHERS = """
import time
from pathlib import Path
def test_one():
    while not Path("begun").exists():
        time.sleep(0.01)
def test_two(): pass
"""


def run(folder: Path, *options: str, **env: str) -> str:
    (folder / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)]
    env = {"PATH": "/usr/bin:/bin", **env}
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=200).stdout


@pytest.mark.slow
@pytest.mark.parametrize("waits", [False, True])
def test_a_worker_that_dies_fails_one_test_and_the_others_run(tmp_path, waits):
    """It dies while the other worker has tests, or when no test was left for the other, which has therefore ended."""
    (tmp_path / "test_a.py").write_text(FATAL.format(waits=waits))
    for name in "bcd":
        (tmp_path / f"test_{name}.py").write_text(OTHERS)
    with (tmp_path / "test_c.py").open("a") as last:
        last.write("def test_three(): Path('done').touch()\n")
    said = run(tmp_path, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    assert "crashed while running" in said
    assert "1 failed, 9 passed" in said


def test_no_test_begins_when_time_is_over(tmp_path):
    (tmp_path / "test_a.py").write_text("def test_one(): pass\n")
    assert "1 skipped" in run(tmp_path, MDCS_TESTS_UNTIL=str(time.time() - 1))
