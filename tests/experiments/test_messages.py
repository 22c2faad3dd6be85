"""`messages.py` measures what a message costs in processor time."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from experiments import messages as program
from experiments.config.checks import compose_config, composing

ROOT = Path(__file__).resolve().parents[2]


def test_what_a_message_costs_is_beyond_the_backend_and_the_loop():
    rows = [
        {"strategy": "zero2", "block_mib": 0.25, "messages": 500}
        | {"alone": [0.030, 0.030], "backend": [0.100, 0.040], "mdcs": [0.190, 0.110]}
    ]
    console = Console(width=110, record=True, file=io.StringIO())
    with composing():
        console.print(program.table(rows, compose_config(["cluster.ranks=4"])))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["zero2", "256", "500", "30", "100", "190", "120", "80"] in lines


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "experiments/messages.py"), "hydra.run.dir=out", *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=500)


@pytest.mark.slow
def test_every_cut_is_measured(tmp_path):
    done = run(tmp_path, "cluster.ranks=2", "collectives=ring")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out" / program.FILE).read_text())
    assert [row["messages"] for row in rows if row["strategy"] == "zero2"] == [24, 144, 576, 2304]
    assert all(0 < row["alone"][0] < row["mdcs"][0] for row in rows)


@pytest.mark.slow
def test_one_rank_sends_nothing(tmp_path):
    done = run(tmp_path, "cluster.ranks=1")
    assert done.returncode == 1
    assert "cluster.ranks: must be >= 2 to send messages, got 1" in done.stderr
