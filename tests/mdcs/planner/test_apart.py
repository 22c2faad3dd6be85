"""A call in a process of its own: its value, its errors and its end."""

import os

import pytest

from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.trials import call_apart


def refused(budget: int) -> int:
    print("what it prints is not its answer")
    if budget < 2:
        raise InfeasibleBudget(budget, 2, "the root")
    return os.getpid()


def test_a_value_comes_from_another_process() -> None:
    assert call_apart(refused, 2) not in (0, os.getpid())


def test_an_error_is_raised_as_it_was() -> None:
    with pytest.raises(InfeasibleBudget, match="the root does not fit 1 bytes") as error:
        call_apart(refused, 1)
    assert error.value.smallest == 2


def test_a_process_that_is_killed_is_an_error() -> None:
    with pytest.raises(ChildProcessError, match="exit status 3"):
        call_apart(os._exit, 3)
