"""Costs of departures: each kind of step runs, and departs or not as its name says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from experiments.dev import departures
from tests.mdcs.runtime.ranks import Ranks


def measured() -> dict[str, tuple[float, float]]:
    """Return by kind the wall milliseconds of a departing step, and those that the run counts."""
    departures.PAIRS = 1
    kinds = {
        name: step for name, (step, _) in departures.STEPS_OF.items() if "first" in name or "experts" in name or "nothing" in name
    }
    found = {name: departures.measure(step, 1, name.startswith(departures.AGAIN)) for name, step in kinds.items()}
    return {name: (wall[0], counted) for name, (_, wall, counted) in found.items()}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.mark.slow
def test_what_departs_costs_time_that_the_run_counts(two: Ranks) -> None:
    for found in two.run(measured, timeout_s=240):
        assert len(found) == 3
        assert all(wall > 0 for wall, _ in found.values())
        assert {name for name, (_, counted) in found.items() if counted == 0} == {"nothing departs"}


def test_the_command_line_needs_no_ranks_to_explain_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for arguments, code in (["--help"], 0), ([], 2):
        monkeypatch.setattr("sys.argv", ["mdcs dev departures", *arguments])
        with pytest.raises(SystemExit) as end:
            departures.main()
        assert end.value.code == code
    printed = capsys.readouterr()
    assert "departs from its plan" in printed.out and "needs ranks: torchrun" in printed.err
