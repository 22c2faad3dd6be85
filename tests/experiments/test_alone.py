"""Programs that run in one process, started by srun: each task would run all of it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


ACROSS_RANKS = {
    "train.py", "profile.py", "plan.py", "curve.py", "compare.py",
}  # fmt: skip
"""They join the ranks that others have started."""
HARMLESS = {"__main__.py"}  # starts another program


def test_programs_of_one_process_are_refused_as_one_of_several_tasks(tmp_path):
    programs = [path for path in sorted(ROOT.glob("experiments/*.py")) if '__name__ == "__main__"' in path.read_text()]
    assert {program.name for program in programs} > ACROSS_RANKS | HARMLESS
    for program in programs:
        if program.name in ACROSS_RANKS | HARMLESS:
            continue
        env = {**os.environ, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}  # the other says nothing: launch/test_place.py
        command = [sys.executable, str(program)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, env=env)
        name, _, reason = done.stderr.partition(": ")
        assert (done.returncode, done.stdout, reason.count("\n")) == (2, "", 1), program.name
        assert name in (program.name, f"mdcs {program.stem}") and reason.startswith("srun has started it 2 times")
    assert not list(tmp_path.iterdir())
