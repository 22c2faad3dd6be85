"""Parts of a step's time, named as HTA and NVIDIA's tools name them. Plans, measurements and engines share them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

Times = TypeVar("Times", bound="StepTimes")


@dataclass(frozen=True)
class StepTimes:
    """Parts of one rank's step, in seconds. None: unknown.

    - compute_s: computing runs.
    - communication_s: at least one message runs.
    - overlap_s: both run.

    Derived (:meth:`of`):

    - exposed_s = communication_s - overlap_s: messages run and computing does not.
    - stalled_s = step_s - compute_s: computing does not run, because it waits for messages, updates or the training
      loop.
    - idle_s = stalled_s - exposed_s: neither runs.
    - overlap_ratio = overlap_s / communication_s, 0 without communication.
    """

    step_s: float
    compute_s: float | None = None
    communication_s: float | None = None
    overlap_s: float | None = None
    exposed_s: float | None = None
    stalled_s: float | None = None
    idle_s: float | None = None
    overlap_ratio: float | None = None

    @classmethod
    def of(
        cls: type[Times], step_s: float, compute_s: float | None = None, communication_s: float | None = None,
        overlap_s: float | None = None, **more: Any,
    ) -> Times:  # fmt: skip
        """Return the times with the derived ones. ``more``: fields of a subclass."""
        exposed_s, stalled_s, ratio = _less(communication_s, overlap_s), _less(step_s, compute_s), None
        if communication_s is not None and overlap_s is not None:
            ratio = min(1.0, overlap_s / communication_s) if communication_s > 0 else 0.0
        derived = exposed_s, stalled_s, _less(stalled_s, exposed_s), ratio
        return cls(step_s, compute_s, communication_s, overlap_s, *derived, **more)

    @classmethod
    def from_dict(cls: type[Times], values: Mapping[str, Any]) -> Times:
        """Return the times of ``dataclasses.asdict``. Other names are ignored.

        Raises TypeError if a required value is missing.
        """
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})


TIMES = tuple(f.name for f in fields(StepTimes))
"""Names of the times: columns of tables, keys of records."""


def _less(whole: float | None, part: float | None) -> float | None:
    """Return the difference, at least 0: rounding can make a sum of spans exceed the whole in the last bit."""
    return None if whole is None or part is None else max(0.0, whole - part)


@dataclass(frozen=True)
class Prediction(StepTimes):
    """Result of the replay of a plan: seconds per period, and bytes per rank.

    - ``peak_bytes``: peak of all categories together.
    - ``memory``: peak of each category (at its own time), and of all together as "total".
    """

    peak_bytes: int = field(kw_only=True)
    memory: dict[str, int] = field(kw_only=True)
