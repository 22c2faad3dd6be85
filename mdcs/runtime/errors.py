"""What goes wrong while a plan runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class RunError(RuntimeError):
    """A failure while training: names rank, step, and the parameter, unit or message it happened in."""


@dataclass
class Place:
    """Where a rank is: what errors begin with."""

    rank: int
    step: int = 1
    explain: Callable[[str], str] = str
    """Adds what is known of the cause to the message of a collective that has failed."""

    def error(self, what: str) -> RunError:
        """The error to raise."""
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
