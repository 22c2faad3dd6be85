"""Errors while a plan runs, and the rank and step that they name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class RunError(RuntimeError):
    """A failure while training: names rank, step, and the parameter, unit or message in which it happened."""


class OverBudget(RunError):
    """A step that took more bytes than the budget has, where ``over_budget`` is "raise"."""


@dataclass
class ErrorContext:
    """Rank and step, with which error messages begin."""

    rank: int
    step: int = 1
    explain: Callable[[str], str] = str
    """Adds the known cause to the message of a collective that failed."""

    def error(self, what: str) -> RunError:
        """Return the error to raise."""
        return RunError(f"rank {self.rank}, step {self.step}: {what}")

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Name rank and step in errors of collectives that are no messages of the plan."""
        try:
            yield
        except RunError:
            raise
        except RuntimeError as e:
            raise self.error(self.explain(f"{what}: {e}")) from e
