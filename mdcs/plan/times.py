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

    Derived:

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
    exposed_s: float | None = field(init=False)
    stalled_s: float | None = field(init=False)
    idle_s: float | None = field(init=False)
    overlap_ratio: float | None = field(init=False)

    def __post_init__(self) -> None:
        exposed_s = _less(self.communication_s, self.overlap_s)
        stalled_s = _less(self.step_s, self.compute_s)
        ratio = None
        if self.communication_s is not None and self.overlap_s is not None:
            ratio = min(1.0, self.overlap_s / self.communication_s) if self.communication_s > 0 else 0.0
        follows = {
            "exposed_s": exposed_s,
            "stalled_s": stalled_s,
            "idle_s": _less(stalled_s, exposed_s),
            "overlap_ratio": ratio,
        }
        for name, value in follows.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_dict(cls: type[Times], values: Mapping[str, Any]) -> Times:
        """Return the times of ``dataclasses.asdict``. Other names are ignored.

        Derived values are computed again. Raises TypeError if a required value is missing.
        """
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.init and f.name in values})


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
