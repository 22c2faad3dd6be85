"""`collectives.py` compares algorithms on real ranks."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from experiments import collectives as program
from mdcs.profile.algorithms import ALGORITHMS

ROOT = Path(__file__).resolve().parents[2]


def test_the_fastest_of_each_size_is_marked_and_bytes_are_per_byte():
    times = {"native": 3.0, "ring": 1.0, "reduce_broadcast": 2.0, "all_to_all": 2.0, "broadcast": 2.0, "direct": 2.0}
    rows = [
        {"operation": operation, "algorithm": name, "seconds": [times[name] * 1e-3] * len(program.SIZES)}
        for operation, names in ALGORITHMS["gloo"].items()
        for name in names
    ]
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(program.table(rows, 4, "gloo"))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["all_reduce", "ring", *["*1.00"] * 5, "1.50", "0.25", "201.33"] in lines
    assert ["all_reduce", "reduce_broadcast", *["2.00"] * 5, "2.00", "1.00", "134.22"] in lines
    assert ["reduce_scatter", "all_to_all", *["2.00"] * 5, "0.75", "1.00", "50.33"] in lines
    assert sum(cell.startswith("*") for line in lines for cell in line) == 3 * len(program.SIZES)


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "experiments/collectives.py"), "hydra.run.dir=out", *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.slow
def test_all_algorithms_are_measured(tmp_path):
    done = run(tmp_path, "cluster.ranks=2")
    assert done.returncode == 0, done.stderr
    assert "gloo, 2 ranks: median ms" in done.stdout
    rows = json.loads((tmp_path / "out" / program.FILE).read_text())
    assert len(rows) == 12 and all(min(row["seconds"]) > 0 for row in rows)


def test_one_rank_has_nothing_to_compare(tmp_path):
    done = run(tmp_path, "cluster.ranks=1")
    assert done.returncode == 1
    assert "cluster.ranks: must be >= 2 to compare collectives, got 1" in done.stderr
