"""`mdcs dev messages` measures what a message costs in processor time."""

import io
import json

import pytest
from rich.console import Console

from experiments.config.checks import compose_config, composing
from experiments.dev import messages as program
from tests.experiments import one_process


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


@pytest.mark.slow
def test_every_cut_is_measured(tmp_path, warm):
    start = warm.run

    def hasty(*arguments, module, **named):
        return start(*arguments, module="tests.experiments.hasty_messages", **named)

    asked = ("cluster.ranks=2", "cluster.threads=1", "collectives=ring", "hydra.run.dir=out")
    done = one_process.call(program, tmp_path, *asked, start=hasty)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out" / program.FILE).read_text())
    assert [row["messages"] for row in rows] == [24, 96]  # gather and reduce 3 blocks, in 4 and in 16 parts
    assert all(row["alone"][0] > 0 and row["backend"][0] > 0 and row["mdcs"][0] > 0 for row in rows)
    assert "gloo, 2 ranks: ms of processor time per step and rank" in done.stdout


def test_one_rank_sends_nothing(tmp_path):
    done = one_process.call(program, tmp_path, "cluster.ranks=1", "hydra.run.dir=out")
    assert done.returncode == 1
    assert "cluster.ranks: must be >= 2 to send messages, got 1" in done.stderr
