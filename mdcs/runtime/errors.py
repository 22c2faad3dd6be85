"""What goes wrong while a plan runs."""

from __future__ import annotations


class RunError(RuntimeError):
    """A failure while training: names rank, step, and the parameter, unit or message it happened in."""
