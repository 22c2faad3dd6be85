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


def test_how_far_repeated_links_differ_and_how_good_the_choices_were():
    took = {"native": 2.0, "ring": 1.0, "direct": 1.1, "reduce_broadcast": 3.0, "all_to_all": 3.0, "broadcast": 3.0}
    one_by_one = took | {"direct": 1.8}
    rows = [
        {"operation": operation, "algorithm": name, "seconds": [took[name]], "one_by_one": [one_by_one[name]]}
        for operation, names in ALGORITHMS["gloo"].items()
        for name in names
    ]

    def link(beta: float, algorithm: str) -> dict[str, object]:
        values = {"alpha": [2e-4] * 4, "gap": [1e-5] * 4, "beta": [beta] * 4}
        return {"seconds": 3.0, "chosen": dict.fromkeys(ALGORITHMS["gloo"], algorithm)} | values

    links = [link(16e-9, "ring"), link(16.8e-9, "direct"), link(16e-9, "ring")]
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(program.repeated(links, rows, 2, "gloo"))
    text = " ".join(console.export_text().split())
    assert "measured 3 times in 3.0 s each" in text
    assert "all_reduce ring 2, direct 1 10.0%, 80.0% 0.476 – 0.500 5.0% 10 – 10 200 – 200" in text


def test_what_operations_take_in_turns():
    teams = [("native", "ring", "ring"), ("ring", "ring", "ring")]
    seconds = [(0.018, 0.080), (0.017, 0.070)]
    took = [
        {"size": size, "seconds": each} | dict(zip(ALGORITHMS["gloo"], team, strict=True))
        for team, by_size in zip(teams, seconds, strict=True)
        for size, each in zip(program.TURNS, by_size, strict=True)
    ]
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(program.turns(took, 4, "gloo"))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["native", "ring", "ring", "18.00", "80.00", "0.42"] in lines  # of 4 MiB 3/4, twice by all-reduces
    assert ["ring", "ring", "ring", "*17.00", "*70.00", "0.48"] in lines


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "experiments/collectives.py"), "hydra.run.dir=out", *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.slow
def test_all_algorithms_are_measured(tmp_path):
    done = run(tmp_path, "cluster.ranks=2")
    assert done.returncode == 0, done.stderr
    assert "gloo, 2 ranks: median ms" in done.stdout
    found = json.loads((tmp_path / "out" / program.FILE).read_text())
    rows, turns = found["rows"], found["turns"]
    assert len(rows) == 12 and all(min(row["seconds"]) > 0 for row in rows)
    assert "operations in turns" in done.stdout
    assert {(each["all_reduce"], each["reduce_scatter"]) for each in turns} >= {(a, a) for a in ("native", "ring", "direct")}
    assert all(each["seconds"] > 0 for each in turns)


def test_one_rank_has_nothing_to_compare(tmp_path):
    done = run(tmp_path, "cluster.ranks=1")
    assert done.returncode == 1
    assert "cluster.ranks: must be >= 2 to compare collectives, got 1" in done.stderr
