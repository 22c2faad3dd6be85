"""`peaks.py` compares measured peaks with the ledger's, from the floor with recomputation to dp's peak."""

import json

import pytest

from experiments.dev import peaks as program
from tests.experiments import one_process

RIGHT = {"budget": 3000, "ledger": 2900, "measured": 2890, "registered_off": 0}


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({}, True),
        ({"measured": 2901}, False),  # above the ledger
        ({"budget": 2880}, False),
        ({"registered_off": 1}, False),
        ({"measured": 2885}, False),  # 0.52 % below
    ],
)
def test_a_peak_is_right_within_the_budget_and_close_to_the_ledger(wrong, right):
    assert program.is_right(RIGHT | wrong) is right


@pytest.mark.slow
def test_peaks_are_the_ledgers_from_the_floor_to_dp(tmp_path, warm, monkeypatch):
    monkeypatch.setitem(program.MODELS, "llama", "model=llama-tiny data=stdlib_bytes model.layers=3 data.batch_size=4")
    start = warm.run

    def hasty(*arguments, module, **named):
        return start(*arguments, module="tests.experiments.hasty_peaks", **named)

    asked = ("--models", "llama", "--json", "rows.json", "scheduler=sequential")
    done = one_process.call(program, tmp_path, *asked, start=hasty)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["recomputed"] for row in rows] == ["3 full", rows[1]["recomputed"], "none"]
    assert [row["budget"] for row in rows] == sorted(row["budget"] for row in rows)
    assert "3 of 3 right" in done.stdout
