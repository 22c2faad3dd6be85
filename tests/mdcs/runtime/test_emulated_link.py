"""The emulated link holds real messages back to the simulator's formula, on a clock that stands still."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mdcs import emulation
from mdcs.emulation import Pacer
from mdcs.profile.link import Kind, Link

ALPHA, BETA = 0.002, 1e-6
LINK = Link((ALPHA,) * 4, (BETA,) * 4, emulated=True)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(emulation, "time", clock)
    return clock


@pytest.fixture
def pacers(tmp_path: Path) -> list[Pacer]:
    Pacer.create(tmp_path / "link", 2)
    return [Pacer(tmp_path / "link", rank, 2, LINK) for rank in range(2)]


def test_a_message_begins_with_the_last_rank_and_ends_by_the_formula(clock: Clock, pacers: list[Pacer]):
    pacers[0].started(0)
    clock.now += 0.010
    pacers[1].started(0)
    pacers[0].hold(0, Kind.RS, 1000)
    assert clock.now == pytest.approx(100.010 + ALPHA + 1000 * BETA)
    ends = clock.now
    pacers[1].hold(0, Kind.RS, 1000)  # the other rank finds that it is over
    assert clock.now == ends


@pytest.mark.parametrize("gap", [0.0, 0.003])
def test_bytes_go_one_message_after_the_other_with_a_gap_and_latencies_together(clock: Clock, pacers: list[Pacer], gap: float):
    for sequence in range(3):
        for pacer in pacers:
            pacer.link = replace(LINK, gap=(gap,) * 4)
            pacer.started(sequence)
    begin = clock.now
    for sequence in range(3):
        pacers[0].hold(sequence, Kind.AG_F, 5000)
        assert clock.now == pytest.approx(begin + ALPHA + (sequence + 1) * 5000 * BETA + sequence * gap)


def test_a_late_message_is_not_held(clock: Clock, pacers: list[Pacer]):
    for pacer in pacers:
        pacer.started(0)
    clock.now += 1.0
    pacers[0].hold(0, Kind.AR, 1000)
    assert clock.now == 101.0


def test_entries_of_an_earlier_round_of_the_ring_do_not_count(clock: Clock, pacers: list[Pacer]):
    pacers[1].started(0)
    clock.now += 50
    pacers[0].started(emulation._RING)  # the same place
    pacers[0].hold(emulation._RING, Kind.AR, 0)
    assert clock.now == pytest.approx(150 + ALPHA)
