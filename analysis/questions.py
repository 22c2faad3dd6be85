"""The questions a sweep answers: which rows form one curve, and where its minimum (the stop point) is."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from mdcs.sizes import GIB, MIB


class Workload(NamedTuple):
    """What must be equal for step times to be comparable."""

    model: str
    world: int
    emulated: bool  # the link
    emulated_ranks: bool
    shaped_gbit: float | None

    @property
    def title(self) -> str:
        ranks = "1 rank" if self.world == 1 else f"{self.world} {'emulated ' if self.emulated_ranks else ''}ranks"
        link = ["emulated link"] if self.emulated else []
        link += [] if self.shaped_gbit is None else [f"link shaped to {self.shaped_gbit:g} Gbit/s"]
        return " · ".join([self.model, ranks, *link])


def workloads(frame: pd.DataFrame) -> list[tuple[Workload, pd.DataFrame]]:
    """The sweep's rows by workload, the one with most rows first.

    Runs that failed too early to know their workload go with the only one there is, or are left out.
    """
    known = frame[frame["model"].notna() & frame["world"].notna() & frame["emulated"].notna()]
    one_process = known["emulated_ranks"].eq(True)  # a run that does not say has real ones
    groups = [
        (Workload(str(model), int(world), bool(emulated), bool(alone), None if pd.isna(rate) else float(rate)), rows)
        for (model, world, emulated, alone, rate), rows in known.groupby(
            ["model", "world", "emulated", one_process, "shaped_gbit"], dropna=False
        )
    ]
    if len(groups) == 1:
        return [(groups[0][0], frame)]
    return sorted(groups, key=lambda group: -len(group[1]))


def measured(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that can be drawn: complete, with a step time."""
    return frame[(frame["status"] == "ok") & frame["step_s"].notna()]


PREDICTED = "predicted"
"""The status of a row that is a plan with its prediction, and no run."""


def drawn(frame: pd.DataFrame) -> pd.DataFrame:
    """What is measured, and what is only predicted."""
    return frame[((frame["status"] == "ok") & frame["step_s"].notna()) | (frame["status"] == PREDICTED)]


def not_measured(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that should have been measured: failed, infeasible or incomplete."""
    return frame[~frame["status"].isin(["ok", PREDICTED])]


def time_of(frame: pd.DataFrame) -> str:
    """The column that says which of these rows is fastest: measured, if all that can be drawn are measured."""
    return "predicted_step_s" if (frame["status"] == PREDICTED).any() else "step_s"


def label(row: pd.Series | dict) -> str:
    """How the memory of a run was spent, in words: strategy · scheduler."""
    strategy, scheduler = (str(row[key]) if pd.notna(row[key]) else "?" for key in ("strategy", "scheduler"))
    words = [strategy] if strategy == scheduler else [strategy, scheduler]
    if pd.notna(row["cross_iteration"]) and not row["cross_iteration"]:
        words.append("barrier")
    return " · ".join(words)


def series(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows by `label`, in alphabetical order."""
    labels = frame.apply(label, axis=1) if len(frame) else pd.Series(dtype=str)
    return {str(name): rows for name, rows in frame.groupby(labels)}


def median_by(frame: pd.DataFrame, axis: str) -> pd.DataFrame:
    """One row per value of `axis`, sorted: medians of all numbers, so that repeated runs are one point."""
    return frame.groupby(axis).median(numeric_only=True).reset_index().sort_values(axis)


def stop_point(frame: pd.DataFrame, time: str = "step_s") -> pd.Series:
    """The row of least step time over schedule_share; the smaller share if two are equal.

    `time` is step_s (measured) or predicted_step_s. Raises ValueError if no row has both a share and a time.
    """
    rows = frame[frame["schedule_share"].notna() & frame[time].notna()]
    if time == "step_s":
        rows = measured(rows)
    if not len(rows):
        raise ValueError(
            f"no run has both schedule_share and {time}: there is no curve to find a stop point on"
        )
    points = median_by(rows, "schedule_share")
    return points.loc[points[time].idxmin()]


def share_curves(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """The sub-sweeps that are trade-off curves: one workload, one budget, two shares or more; most shares first."""
    curves = []
    for _, rows in workloads(frame):
        with_share = rows[rows["schedule_share"].notna()]
        for _, curve in with_share.groupby("budget_bytes", dropna=False):
            if _most_shares(curve) >= 2:
                curves.append(curve)
    return sorted(curves, key=lambda curve: -_most_shares(curve))


def _most_shares(curve: pd.DataFrame) -> int:
    return max((rows["schedule_share"].nunique() for rows in series(drawn(curve)).values()), default=0)


def has_budget_axis(frame: pd.DataFrame) -> bool:
    """Whether runs of this sweep differ in their budget (no budget counts as one)."""
    return drawn(frame)["budget_bytes"].nunique(dropna=False) >= 2


def best_run(frame: pd.DataFrame) -> pd.Series | None:
    """The row of least measured step time, None if nothing was measured."""
    rows = measured(frame)
    return rows.loc[rows["step_s"].idxmin()] if len(rows) else None


def best_within_budgets(frame: pd.DataFrame) -> pd.DataFrame:
    """For each budget of a workload, the smallest first and none last, the row of least measured step time within it.

    A run that was made for a smaller budget may be the fastest; `within_bytes` has the budget that is asked about.
    """
    rows = measured(frame)
    budgets = list(rows["budget_bytes"].sort_values().unique())  # none, NaN, is last
    found = [rows[rows["budget_bytes"] <= budget] if pd.notna(budget) else rows for budget in budgets]
    best = rows.loc[[within["step_s"].idxmin() for within in found]]
    return best.assign(within_bytes=budgets)


def gib(size: float) -> str:
    """A size in words, in GiB or MiB."""
    return f"{size / GIB:.3g} GiB" if size >= GIB else f"{size / MIB:.4g} MiB"


def budget_words(budget_bytes: float) -> str:
    return "no budget" if pd.isna(budget_bytes) else f"budget {gib(budget_bytes)}"
