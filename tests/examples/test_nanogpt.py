"""A port of a training program: as few lines as README says, and DDP's losses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (ROOT / "examples/nanogpt.py").read_text()
WAS = re.compile(r"^( *)(.*?) *# was: (.*)$", re.M)


def losses(program: Path) -> list[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=250)
    assert said.returncode == 0, said.stderr
    return [float(number) for number in re.findall(r"(?:loss|held out) ([\d.]+)$", said.stdout, re.M)]


def test_five_lines_are_changed():
    assert len(WAS.findall(PROGRAM)) == 5


@pytest.mark.slow
def test_the_ported_program_has_the_losses_of_the_program_that_it_was(tmp_path):
    before = tmp_path / "before.py"
    before.write_text(WAS.sub(r"\1\3", PROGRAM))
    assert "mdcs." not in before.read_text().split('"""')[2]
    text = ROOT / "examples/nanogpt.py"
    before.write_text(before.read_text().replace("Path(__file__).read_bytes()", f"Path({str(text)!r}).read_bytes()"))
    wanted, found = losses(before), losses(text)
    assert len(wanted) == 22
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 2e-4, (found, wanted)
    assert found[:2] == wanted[:2]  # nothing was clipped yet, and no plan is made
