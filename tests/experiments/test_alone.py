"""Programs that start their ranks themselves, started by srun: all but `train.py` would run once for every task."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_program_but_train_is_refused_as_one_of_several_tasks(tmp_path):
    files = [*sorted(ROOT.glob("experiments/*.py")), *sorted(ROOT.glob("experiments/dev/*.py"))]
    programs = [path for path in files if '__name__ == "__main__"' in path.read_text()]
    assert len(programs) > 10
    for program in programs:
        if program.name in ("train.py", "departures.py"):  # they join ranks that others have started
            continue
        said = [
            subprocess.run(
                [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
                env={**os.environ, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": rank},
            )
            for rank in ("0", "1")
        ]  # fmt: skip
        assert [done.returncode for done in said] == [2, 2], program.name
        assert said[0].stderr.count("\n") == 1 and said[0].stderr.startswith(f"{program.name}: srun has started it 2 times")
        assert (said[0].stdout, said[1].stdout, said[1].stderr) == ("", "", "")
    assert not list(tmp_path.iterdir())
