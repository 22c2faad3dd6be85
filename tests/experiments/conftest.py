"""Fixtures of the tests of programs: ranks that are forks of one process, and programs that draw nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis.table import write_csv
from launch.elastic import Warm


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program writes its table alone: to draw takes longer than what is looked at."""
    table = lambda frame, folder, *_: [write_csv(frame, Path(folder) / "table.csv")]  # noqa: E731
    monkeypatch.setattr("analysis.report.write_report", table)


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    with Warm() as started:
        yield started
