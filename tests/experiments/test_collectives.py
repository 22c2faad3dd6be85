"""`collectives.py` compares algorithms on real ranks."""

import io
import json

import pytest
from rich.console import Console

from analysis import pictures
from experiments import collectives as program
from mdcs.profile.link import ALGORITHMS
from tests.experiments import one_process


def test_the_fastest_of_each_size_is_marked_and_bytes_are_per_byte():
    times = {"native": 3.0, "ring": 1.0}
    rows = [
        {"operation": operation, "algorithm": name, "seconds": [times[name] * 1e-3] * len(program.SIZES)}
        for operation in program.TRAINS
        for name in ALGORITHMS["gloo"]
    ]
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(program.table(rows, 4, "gloo"))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["all_reduce", "ring", *["*1.00"] * 5, "1.50", "0.25", "201.33"] in lines
    assert ["reduce_scatter", "native", *["3.00"] * 5, "1.50", "0.00", "67.11"] in lines
    assert ["in", "turns", "ring", *["*1.00"] * 5, "1.00", "0.25", "134.22"] in lines  # 3/4, twice by all-reduces
    assert sum(cell.startswith("*") for line in lines for cell in line) == 4 * len(program.SIZES)
    figure = pictures.collectives(rows, program.SIZES, "gloo, 4 ranks")
    assert [axes.get_title("left") for axes in figure.axes] == [name.replace("_", "-") for name in program.TRAINS]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["64K", "256K", "1M", "4M", "16M"]


@pytest.mark.slow
def test_both_families_are_measured(tmp_path, warm):
    asked = ("cluster.ranks=2", "cluster.threads=1", "hydra.run.dir=out")
    done = one_process.call(program, tmp_path, *asked, start=warm.run)
    assert done.returncode == 0, done.stderr
    assert "gloo, 2 ranks: median ms" in done.stdout
    rows = json.loads((tmp_path / "out" / program.FILE).read_text())["rows"]
    assert {(row["operation"], row["algorithm"]) for row in rows} >= {("in turns", "native"), ("in turns", "ring")}
    assert len(rows) == 8 and all(min(row["seconds"]) > 0 for row in rows)


def test_one_rank_has_nothing_to_compare(tmp_path):
    done = one_process.call(program, tmp_path, "cluster.ranks=1", "hydra.run.dir=out")
    assert done.returncode == 1
    assert "cluster.ranks: must be >= 2 to compare collectives, got 1" in done.stderr
