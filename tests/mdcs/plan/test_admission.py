"""Admission by itself: what fits beside promises and messages in flight."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mdcs.plan.admission import Admission, InFlightBytes, max_in_flight_bytes


def test_excess_counts_as_far_as_waiting_makes_room_for_it() -> None:
    admission = Admission(100, 40, depth=1)
    admission.issue(held=0, transient=10, freed=0)
    assert admission.admits(50) and not admission.admits(51)
    admission.excess = 20
    assert admission.admits(30)  # all fits
    assert not admission.admits(40)  # the message's 10 bytes come back: it waits for them
    assert admission.admits(50)  # nothing that ends makes room: it goes on as the plan does
    assert not admission.admits(51)  # but never beyond the plan


def test_a_message_that_is_done_gives_back_what_it_frees() -> None:
    admission = Admission(100, 40, depth=2)
    admission.reserve(30)
    admission.issue(held=5, transient=20, freed=30)
    assert admission.reserved == 75 and not admission.has_room(6, 0) and admission.fits(25)
    admission.update()
    assert admission.reserved == 75 and admission.has_room(25, 0)
    admission.finish(freed=30)
    assert admission.reserved == 45 and admission.has_room(55, 0)
    admission.restart()
    assert admission.reserved == 40
    assert Admission(None, 40, depth=2).admits(1 << 60)  # no limit


def test_a_soft_cap_is_waited_for_and_refuses_nothing() -> None:
    admission = Admission(None, 10, depth=1, soft_cap=15)
    assert admission.admits(5) and not admission.admits(6) and not admission.has_room(2, 4)
    assert admission.fits(1 << 60)


def summed(sizes: list[int], depth: int) -> int:
    return max(sum(sizes[i : i + depth]) for i in range(max(1, len(sizes) - depth + 1)))


@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_only_neighbours_are_in_flight_together(depth: int, events: list[tuple[bool, int]]) -> None:
    """Messages are issued (True) and end, in any order of the two."""
    in_flight, waiting = InFlightBytes(depth), list[int]()
    for issued, size in events:
        if issued:
            in_flight.add(size)
            waiting.append(size)
        elif waiting:
            in_flight.remove()
            del waiting[0]
        assert in_flight.most() == max_in_flight_bytes(waiting, depth) == summed(waiting, depth)
        assert in_flight.most(size) == summed([*waiting, size], depth)
