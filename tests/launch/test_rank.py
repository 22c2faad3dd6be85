"""A file whose room was taken when there was some."""

import json
import subprocess
import sys
from pathlib import Path

from launch.rank import ReservedFile

ROOT = Path(__file__).resolve().parents[2]
FULL = """
import os, pathlib, resource, sys
from launch.rank import ReservedFile
file = ReservedFile(pathlib.Path(sys.argv[1]), 4096)
file.take()
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # from here on no file may grow beyond what there is
file.write("[1]")
ReservedFile(pathlib.Path(sys.argv[2]), 4096).write("x" * 5000)
"""


def test_it_is_written_whole_or_not_at_all(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path / "fits", tmp_path / "large"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert json.loads((tmp_path / "fits").read_text()) == [1]
    assert "OSError" in done.stderr and not (tmp_path / "large").exists()


def test_room_that_was_not_needed_is_given_back(tmp_path):
    file = ReservedFile(tmp_path / "reason", 64)
    file.take()
    ReservedFile(tmp_path / "reason", 64).give_back()
    assert list(tmp_path.iterdir()) == []
