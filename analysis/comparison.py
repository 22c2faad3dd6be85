"""Two sweeps side by side; and engines side by side: runs that took turns, beside one of them, a budget and bounds.

A *round* is one run of every engine, one after the other. Figures are medians over rounds; a ratio is taken within a
round, so that what slows a machine for a while slows both sides. What an engine does not tell is None.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis import questions as ask
from analysis.load import WORKLOAD


def compare(one: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """Step times of two sweeps (:func:`analysis.runs`): a row for each workload and plan that both have measured, and a
    last one over all of them. Raises ValueError if no plan is in both.

    - workload: in words; what the sweeps tell differently, such as the link's measured rate, of both.
    - runs, other_runs: number of runs; step_s, other_step_s: their medians.
    - ratio: the other's median as a multiple of the first's; in the last row the geometric mean.
    - low, high: ends of its 95 % bootstrap interval over runs (in the last row over plans); NaN of one run alone.
    """
    both = _steps(one).join(_steps(other).rename(columns={"step_s": "theirs", "title": "their_title"}), how="inner")
    if not len(both):
        raise ValueError("the sweeps have no measured plan in common: model, ranks, link, strategy, scheduler, budget, "
                         "share and what was swept must be alike")  # fmt: skip
    rows = []
    for row in both.itertuples():
        own, theirs, ends = row.step_s, row.theirs, (np.nan, np.nan)
        if min(len(own), len(theirs)) > 1:
            ends = ask.bootstrap(lambda a, b, axis: np.median(b, axis) / np.median(a, axis), own, theirs)
        workload = _of_both(row.title, row.their_title)
        rows.append((workload, row.Index[-1], len(own), len(theirs), np.median(own), np.median(theirs), *ends))
    columns = ["workload", "plan", "runs", "other_runs", "step_s", "other_step_s", "low", "high"]
    table = pd.DataFrame(rows, columns=columns)
    table.insert(6, "ratio", table["other_step_s"] / table["step_s"])
    logs = np.log(table["ratio"])
    ends = tuple(np.exp(ask.bootstrap(np.mean, logs))) if len(logs) > 1 else (np.nan, np.nan)
    last = ["", "all", table["runs"].sum(), table["other_runs"].sum(), np.nan, np.nan, np.exp(logs.mean()), *ends]
    table.loc[len(table)] = last
    return table


def _steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Workload in words and step times of the measured runs, by what must be alike: workload and plan."""
    told = [
        rows[list(WORKLOAD)].astype(str).assign(plan=ask.settings(rows), title=title, step_s=rows["step_s"])
        for title, rows in ask.workloads(ask.measured(frame))
    ]
    if not told:
        return pd.DataFrame(columns=["title", "step_s"])
    groups = pd.concat(told).groupby([*WORKLOAD, "plan"], sort=False, dropna=False)
    return groups.agg({"title": "first", "step_s": list})


def _of_both(one: str, other: str) -> str:
    """The parts of two sweeps' titles of a workload: those that differ are of the first sweep and of the other."""
    parts, others = one.split(" · "), other.split(" · ")
    if len(parts) != len(others):
        return f"{one} and {other}"
    return " · ".join(a if a == b else f"{a} and {b}" for a, b in zip(parts, others, strict=True))


Row = Mapping[str, Any]
"""A run: a row of :mod:`analysis.load`."""


class Spread(NamedTuple):
    """Median, least and greatest over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


_MEDIANS = {name: name for name in ("bound_s", "processor_s", "compute_s", "communication_s", "exposed_s", "stalled_s",
                                    "overlap_ratio")}  # fmt: skip
_MEDIANS |= {"predicted_s": "predicted_step_s", "sent_bytes": "bytes_total", "messages": "messages_total"}


def lines(runs: Mapping[str, Sequence[Row]], base: str, limits: Mapping[str, int | None]) -> list[dict[str, Any]]:
    """Lines of comparison.json, one per engine, the fastest first; ``runs`` has a row per round of each. ``base`` may
    be missing. limits: the budget of each engine in bytes; None, or no entry: no limit.

    Beside medians of columns of the rows (no plan of the job, budget and recomputation is faster than `bound_s`):

    - step_s: spread of its step times; ratio: that of its step times as multiples of the base's.
    - fits: whether no rank of any run held more than the budget; None where memory was not measured.
    """
    made, bases = [], [float(row["step_s"]) for row in runs.get(base, ())]
    for engine, rows in runs.items():
        steps, peaks = [float(row["step_s"]) for row in rows], [row["peak_bytes"] for row in rows]
        limit = limits.get(engine)
        ratios = [own / of_base for own, of_base in zip(steps, bases, strict=False)]
        peak = None if None in peaks else max(peaks)
        made.append({
            "engine": engine,
            "fits": True if limit is None else None if peak is None else peak <= limit,
            "step_s": Spread.of(steps)._asdict(),
            "ratio": Spread.of(ratios)._asdict() if ratios else None,
            **{name: _median(rows, column) for name, column in _MEDIANS.items()},
            "peak_bytes": peak,
        })  # fmt: skip
    return sorted(made, key=lambda line: line["step_s"]["median"])


def _median(rows: Sequence[Row], key: str) -> float | None:
    known = [float(value) for row in rows if (value := row.get(key)) is not None]
    return statistics.median(known) if len(known) == len(rows) else None


def loss_differences(curves: Mapping[str, Sequence[Sequence[float]]], base: str) -> dict[str, float]:
    """The greatest relative difference of any loss of an engine from that of the first run of ``base`` at the same
    step; infinite for another number of steps, and for a loss that is not finite."""
    wanted = curves[base][0]
    return {engine: max(_difference(curve, wanted) for curve in of) for engine, of in curves.items()}


def _difference(curve: Sequence[float], wanted: Sequence[float]) -> float:
    if len(curve) != len(wanted) or not all(map(math.isfinite, curve)):
        return math.inf
    return max(abs(own - other) / max(abs(other), 1e-12) for own, other in zip(curve, wanted, strict=True))
