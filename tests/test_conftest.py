"""How the tests themselves are run."""

import subprocess
import sys
from pathlib import Path

DRAWN = """
from hypothesis import given, strategies
@given(strategies.integers())
def test_drawn(number): print("drawn", number)
"""


def run(folder: Path, *options: str) -> str:
    (folder / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)]
    return subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, cwd=folder, capture_output=True, text=True, timeout=200).stdout


def test_shards_are_all_tests_once(tmp_path):
    for name in "abcdefgh":
        (tmp_path / f"test_{name}.py").write_text("def test_one(): pass\n")
    parts = [run(tmp_path, "-v", f"--shard={part}/2").count(" PASSED") for part in (1, 2)]
    assert sum(parts) == 8 and all(parts)


def test_the_seed_of_a_day_is_printed_and_draws_its_examples_again(tmp_path):
    (tmp_path / "test_drawn.py").write_text(DRAWN)
    today = run(tmp_path, "-s")
    [seed] = [line.split("=")[1] for line in today.splitlines() if "--hypothesis-seed=" in line]
    drawn = [[line for line in said.splitlines() if line.startswith("drawn")] for said in
             (today, run(tmp_path, "-s", f"--hypothesis-seed={seed}"), run(tmp_path, "-s", "--hypothesis-seed=1"))]  # fmt: skip
    assert len(drawn[0]) > 50 and drawn[0] == drawn[1] != drawn[2]
