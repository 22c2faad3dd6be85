"""One job at a time in a folder."""

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from launch.elastic import LOCK, Occupied, claim

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import sys, pathlib
from launch.elastic import claim
with claim(pathlib.Path(sys.argv[1])):
    print("has it", flush=True)
    input()
"""


def test_the_second_is_told_who_is_there_and_touches_nothing(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "has it\n"
    before = (tmp_path / LOCK).read_bytes()
    with pytest.raises(Occupied, match=f"^{tmp_path} is in use by a job of process {holder.pid} on "), claim(tmp_path):
        pass
    assert ((tmp_path / LOCK).read_bytes(), [file.name for file in tmp_path.iterdir()]) == (before, [LOCK])
    holder.kill()
    holder.wait()
    with claim(tmp_path):  # a lock goes with its process
        pass


def test_a_folder_is_free_again_after_its_job(tmp_path):
    for _ in range(2):
        with claim(tmp_path / "new"), pytest.raises(Occupied), claim(tmp_path / "new"):
            pass


def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.warns(UserWarning, match="no locks"), claim(tmp_path):
        pass
