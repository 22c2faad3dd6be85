"""Continuous integration passes only if at most two tests had to run again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[1] / ".ci/run"


@pytest.fixture
def clone(tmp_path):
    """A clone whose `make` fails for the targets in a file, and whose repeated tests pass."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/run").write_text(RUN.read_text())
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".pytest_cache/v/cache").mkdir(parents=True)
    write = {
        ".venv/bin/python": f'[ "$1" = -m ] || exec {sys.executable} "$@"',
        "id": "echo 1000",
        "make": 'echo "make $*"; for each; do ! grep -qx -e "$each" failing || exit 1; done',
    }
    for name, body in write.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def ci(clone: Path, failed: int, *failing: str) -> subprocess.CompletedProcess[str]:
    (clone / "failing").write_text("\n".join(failing))
    names = {f"tests/test_a.py::test_{i}": True for i in range(failed)}
    (clone / ".pytest_cache/v/cache/lastfailed").write_text(json.dumps(names))
    env = {**os.environ, "PATH": f"{clone}:{os.environ['PATH']}"}
    return subprocess.run(["bash", ".ci/run"], cwd=clone, env=env, capture_output=True, text=True)


def test_what_fails_runs_again_and_is_listed(clone):
    done = ci(clone, 2, "test")
    assert done.returncode == 0 and "tests/test_a.py::test_1" in done.stdout
    assert "make test-slow" in done.stdout


@pytest.mark.parametrize(("failed", "failing"), [(3, ["test"]), (2, ["test", "test-slow"]), (1, ["lint"]), (1, ["docs"])])
def test_more_than_two_reruns_or_bad_style_fail(clone, failed, failing):
    assert ci(clone, failed, *failing).returncode != 0
