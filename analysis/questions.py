"""The questions a sweep answers: which rows form one curve, and where its minimum (the stop point) is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import pandas as pd

from analysis.load import WORKLOAD
from mdcs.plan.period import Strategy
from mdcs.sizes import GIB, MIB


def workloads(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Title and rows of each workload (runs whose step times can be compared), the one with most rows first. Runs that
    failed too early to know theirs go with the only one there is, or are left out."""
    known = frame[frame["model"].notna() & frame["world"].notna() & frame["emulated"].notna()]
    real = known["emulated_ranks"].ne(True).rename("emulated_ranks")  # also of a run that does not say
    by = [real if column == "emulated_ranks" else known[column] for column in WORKLOAD]
    groups = [(_title(rows), rows) for _, rows in known.groupby(by, dropna=False)]
    if len(groups) == 1:
        return [(groups[0][0], frame)]
    return sorted(groups, key=lambda group: -len(group[1]))


def _title(rows: pd.DataFrame) -> str:
    """A workload in words: its model, ranks and link."""
    first = rows.iloc[0]
    model, link = str(first["model"]), "emulated link" if first["emulated"] else ""
    if rows["parameters"].notna().any():
        model += f", {count(rows['parameters'].max())} parameters"
    emulated = "emulated " if rows["emulated_ranks"].eq(True).all() else ""
    ranks = "1 rank" if first["world"] == 1 else f"{first['world']:.0f} {emulated}ranks"
    shaped = pd.notna(first["shaped_gbit"])
    rates = rows["shaped_gbit" if shaped else "link_gbit"].dropna()  # as set, or as measured
    if len(rates) and first["world"] > 1:
        low, high = rates.min(), rates.max()
        rate = f"{low:.3g}" if high <= 1.05 * low else f"{low:.2g} to {high:.2g}"
        link = f"{link or 'link'} {'shaped to' if shaped else 'of'} {rate} Gbit/s"
    return " · ".join(filter(None, [model, ranks, link]))


def count(number: float) -> str:
    scale, word = next(((s, w) for s, w in ((1e9, " B"), (1e6, " M"), (1e3, " k")) if number >= s), (1, ""))
    return f"{number / scale:.3g}{word}"


def measured(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that can be drawn: complete, with a step time."""
    return frame[(frame["status"] == "ok") & frame["step_s"].notna()]


PREDICTED = "predicted"
"""The status of a row that is a plan with its prediction, and no run."""


def drawn(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that pictures can draw: measured runs and predictions."""
    return _pooled(frame[((frame["status"] == "ok") & frame["step_s"].notna()) | (frame["status"] == PREDICTED)])


def alike(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """The measured runs of each plan that several runs of one workload have run, for whatever budget."""
    rows = measured(frame)
    rows = rows[rows["execution_hash"].notna()]
    of_plans = "strategy.", "scheduler.", "recompute."
    others = (key for key in swept(rows) if not is_seed(key) and not key.startswith(of_plans))
    keys = [*WORKLOAD, "execution_hash", "predicted_step_s", *others]  # admission within a budget may take time
    return [runs for _, runs in rows.groupby(keys, dropna=False, sort=False) if len(runs) > 1]


def bootstrap(statistic: Callable[..., np.ndarray], *samples: Collection[float]) -> tuple[float, float]:
    """The ends of the 95 % bootstrap interval of a statistic of samples, which takes an array [draws, values] of each
    and `axis=1`. The draws are the same in every call."""
    rng = np.random.default_rng(0)
    drawn = [rng.choice(np.asarray(sample, dtype=float), (2000, len(sample))) for sample in samples]
    low, high = np.quantile(statistic(*drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)


def interval(values: Collection[float]) -> tuple[float, float]:
    """Return the ends of the 95 % bootstrap interval of the median of a few runs."""
    return bootstrap(np.median, values)


_BARS = ["step_s_p10", "step_s_p90"]


def _pooled(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, where the runs of one plan have one step time: their median, with its interval in place of p10, p90."""
    rows = rows.copy()
    for runs in alike(rows):
        rows.loc[runs.index, ["step_s", *_BARS]] = [runs["step_s"].median(), *interval(runs["step_s"])]
    return rows


def not_measured(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that should have been measured: failed, infeasible or incomplete."""
    return frame[~frame["status"].isin(["ok", PREDICTED])]


def time_of(frame: pd.DataFrame) -> str:
    """The column that says which of these rows is fastest: measured, if all that can be drawn are measured."""
    return "predicted_step_s" if (frame["status"] == PREDICTED).any() else "step_s"


def swept(frame: pd.DataFrame | pd.Series) -> list[str]:
    """The settings in which runs differ, by full key: the columns with a dot (:func:`analysis.load.table_of`)."""
    return [str(key) for key in (frame.columns if isinstance(frame, pd.DataFrame) else frame.index) if "." in str(key)]


def label(row: pd.Series | dict, *, without: str = "") -> str:
    """Name a run in words: strategy · scheduler, and what was swept beside. Budget, share and seeds are not in it, nor
    the setting `without`, nor an option that is none."""
    strategy, scheduler = (str(row[key]) if pd.notna(row[key]) else "?" for key in ("strategy", "scheduler"))
    words = [strategy] if scheduler in (strategy, "own") else [strategy, scheduler]
    if pd.notna(row["cross_iteration"]) and not row["cross_iteration"]:
        words.append("barrier")
    keys = [str(key) for key in dict(row) if "." in str(key)]
    told = [key for key in keys if key != without and not is_seed(key) and pd.notna(row[key]) and row[key] != "none"]
    return " · ".join([*words, *(f"{short(key, keys)}={value(row[key])}" for key in told)])


def setting(row: pd.Series | dict) -> str:
    """The label, with the share that the schedule has, if there is one."""
    share = row["schedule_share"]
    return label(row) if pd.isna(share) else f"{label(row)} · share {share:.3g}"


def labels(frame: pd.DataFrame, *, without: str = "") -> pd.Series:
    return pd.Series([label(row, without=without) for _, row in frame.iterrows()], frame.index, dtype=str)


def series(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows by `label`, in alphabetical order."""
    return {str(name): rows for name, rows in frame.groupby(labels(frame))}


def peers(frame: pd.DataFrame) -> list[str]:
    """Labels of the series that another engine than mdcs has run."""
    return list(series(frame[frame["engine"].notna() & (frame["engine"] != "mdcs")]))


def median_by(frame: pd.DataFrame, *axes: str) -> pd.DataFrame:
    """One row per value of `axes`, sorted, for runs that are else alike: medians of all numbers over these `runs`.

    p10 and p90 of one run are those of its steps; of several they are the ends of the median's 95 % interval.
    """
    groups = frame.groupby(list(axes), dropna=False)
    points = groups.median(numeric_only=True).assign(runs=groups["step_s"].count())
    for i, column in enumerate(_BARS):  # runs of one plan have their interval already
        ends = groups["step_s"].agg(lambda of, i=i: interval(of.dropna())[i] if of.nunique() > 1 else np.nan)
        points[column] = np.where(ends.notna(), ends, points.get(column, np.nan))
    return points.reset_index()


def best_points(frame: pd.DataFrame, *axes: str) -> pd.DataFrame:
    """One row per series (a column `label`, or `label`) and value of these columns: the share, or no share, of least
    step time, as `median_by`."""
    rows = drawn(frame)
    rows, keys = rows if "label" in rows else rows.assign(label=labels(rows)), ["label", *axes]
    points = median_by(rows, *dict.fromkeys((*keys, "schedule_share")))
    return points.sort_values(time_of(rows), kind="stable").drop_duplicates(keys).sort_values(keys, ignore_index=True)


def over_memory(frame: pd.DataFrame) -> pd.DataFrame:
    """`best_points` of each budget at the peaks of a rank: bytes in `at`, and predicted ones in `predicted_at`. Points
    of which none is known are left out."""
    points = best_points(frame, "budget_bytes")
    peak = memory_of(points)
    points = points.assign(at=peak, predicted_at=points["predicted_peak_bytes"].fillna(peak))[peak.notna()]
    return points.sort_values(["label", "at"], kind="stable", ignore_index=True)


def over_share(curve: pd.DataFrame) -> pd.DataFrame:
    """`best_points` of each share, which is `at` and `predicted_at`."""
    points = best_points(curve, "schedule_share")
    return points.assign(at=points["schedule_share"], predicted_at=points["schedule_share"])


def fastest(points: pd.DataFrame, time: str) -> tuple[pd.Series, str]:
    """The fastest of rows with a `label`, and in words: which, its step time with its range, and how many others have a
    median in that range, so that noise decides."""
    best = points.loc[points[time].idxmin()]
    share = "" if pd.isna(best["schedule_share"]) else f", share {best['schedule_share']:.3g}"
    words = f"{best['label']}{share}: {milliseconds(best[time])} ms"
    if time != "step_s":
        return best, f"fastest, predicted: {words}"
    if pd.notna(best["step_s_p10"]):
        spread = f"95 % of {best['runs']:.0f} runs" if best.get("runs", 1) > 1 else "p10 to p90"
        words += f" ({spread}: {milliseconds(best['step_s_p10'])} to {milliseconds(best['step_s_p90'])})"
    others = points[points[time] != best[time]]  # runs of one plan have one time
    within = int((others[time] <= best["step_s_p90"]).sum())
    noise = f"; {within} of {len(others)} others within that: noise decides" if within > 0 else ""
    return best, f"fastest: {words}{noise}"


def ends(points: pd.DataFrame, best: pd.Series, time: str) -> str:
    """Say how much longer both ends of the fastest run's curve take; empty where the fastest is an end."""
    curve = points[points["label"] == best["label"]].sort_values("schedule_share")
    first, last = curve.iloc[0], curve.iloc[-1]
    if best["schedule_share"] in (first["schedule_share"], last["schedule_share"]):
        return ""
    words = [f"share {end['schedule_share']:g} takes {end[time] / best[time]:.2f} ×" for end in (first, last)]
    return " and ".join(words)


def on_front(points: pd.DataFrame, time: str) -> pd.DataFrame:
    """The points (`over_memory`) that no other point beats in both memory and time, the smallest first."""
    points = points.sort_values(["at", time])
    return points[points[time] < points[time].cummin().shift(fill_value=np.inf)]


def named(frame: pd.DataFrame) -> set[str]:
    """Labels of the series that an overview names: those on the front of time over memory, the curve with the least
    stop point, other engines, and the fastest of each strategy that is the same for all units."""
    rows, time = drawn(frame), time_of(drawn(frame))
    points, curves = over_memory(frame), share_curves(frame)
    names = {*on_front(points, time)["label"], *peers(rows)}
    if curves:
        names.add(fastest(over_share(curves[0]), time)[0]["label"])
    uniform = rows[rows["strategy"].isin([str(each) for each in Strategy])]
    best = uniform.assign(label=labels(uniform)).sort_values(time).drop_duplicates("strategy")
    return names | set(best["label"])


def milliseconds(seconds: float) -> str:
    """Return milliseconds as text of three digits or more; empty for an unknown value."""
    of = seconds * 1e3
    return "" if pd.isna(of) else f"{of:.0f}" if of >= 1000 else f"{of:.1f}" if of >= 10 else f"{of:.2f}"


def repeated(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Runs of one workload that differ in seeds alone, if several: how they were made in words, and the runs."""
    rows = measured(frame)
    return [(str(name), runs) for name, runs in rows.groupby(settings(rows), sort=False) if len(runs) > 1]


def middle_runs(frame: pd.DataFrame) -> pd.DataFrame:
    """Return, of repetitions, the run of median step time (of two, the slower); every other run as it is."""
    rows = _pooled(measured(frame))
    ranked = rows.sort_values("step_s", kind="stable")
    by = [settings(ranked), *WORKLOAD]
    chosen = [runs.index[len(runs) // 2] for _, runs in ranked.groupby(by, sort=False, dropna=False)]
    return rows[rows.index.isin(chosen)]


def settings(rows: pd.DataFrame) -> pd.Series:
    """Label, share and budget of each row, in words."""
    words = [f"{setting(row)}, {budget_words(row['budget_bytes'])}" for _, row in rows.iterrows()]
    return pd.Series(words, rows.index, dtype=str)


def setting_axis(frame: pd.DataFrame) -> str | None:
    """The swept number that most values were drawn of, if any: what step time can be drawn over."""
    rows = drawn(frame)
    counts = {key: numbers(rows[key]).nunique() for key in swept(rows) if not is_seed(key)}
    return max((key for key, n in counts.items() if n >= 2), key=counts.__getitem__, default=None)


def numbers(column: pd.Series) -> pd.Series:
    """A setting's values as numbers; NaN for those that are none (null, true)."""
    return pd.to_numeric(column.map(lambda each: None if isinstance(each, bool) else each), errors="coerce")


def stop_point(frame: pd.DataFrame, time: str = "step_s") -> pd.Series:
    """The row of least `time` (step_s or predicted_step_s) over schedule_share; the smaller share if two are equal.

    Raises ValueError if no row has both.
    """
    rows = frame[frame["schedule_share"].notna() & frame[time].notna()]
    if time == "step_s":
        rows = _pooled(measured(rows))
    if not len(rows):
        raise ValueError(f"no run has both schedule_share and {time}: there is no curve to find a stop point on")
    points = median_by(rows, "schedule_share")
    return points.loc[points[time].idxmin()]


def plateau(frame: pd.DataFrame, time: str = "step_s") -> tuple[float, float]:
    """The least and the greatest schedule_share around the stop point that are as fast: within its p10 to p90 if
    measured, within a thousandth if predicted. Raises ValueError as `stop_point` does."""
    stop = stop_point(frame, time)
    points = median_by(frame[frame["schedule_share"].notna() & frame[time].notna()], "schedule_share")
    limit = stop["step_s_p90"] if time == "step_s" and pd.notna(stop["step_s_p90"]) else stop[time] * 1.001
    alike = points[time] <= limit
    runs = (alike != alike.shift()).cumsum()
    around = points[runs == runs[points["schedule_share"] == stop["schedule_share"]].iloc[0]]["schedule_share"]
    return float(around.min()), float(around.max())


def share_curves(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """The sub-sweeps that are trade-off curves: one workload, one budget, two shares or more; most shares first."""
    shares: list[tuple[int, pd.DataFrame]] = []
    for _, rows in workloads(frame):
        for _, curve in rows[rows["schedule_share"].notna()].groupby("budget_bytes", dropna=False):
            of_series = [of["schedule_share"].nunique() for of in series(drawn(curve)).values()]
            shares.append((max(of_series, default=0), curve))
    return [curve for count, curve in sorted(shares, key=lambda each: -each[0]) if count >= 2]


def has_memory_axis(frame: pd.DataFrame) -> bool:
    """Return whether runs of this sweep differ in their budget (no budget counts as one) or engine."""
    rows = drawn(frame)
    return rows["budget_bytes"].nunique(dropna=False) >= 2 or rows["engine"].nunique() >= 2


def memory_of(rows: pd.DataFrame) -> pd.Series:
    """Peak bytes per rank of each row: as measured, else as predicted, else the budget. NaN where none is known."""
    return rows["peak_bytes"].fillna(rows["predicted_peak_bytes"]).fillna(rows["budget_bytes"])


def best_run(frame: pd.DataFrame) -> pd.Series | None:
    """The row of least measured step time, of repetitions by their median; None if nothing was measured."""
    rows = middle_runs(frame)
    return rows.loc[rows["step_s"].idxmin()] if len(rows) else None


def best_within_budgets(frame: pd.DataFrame) -> pd.DataFrame:
    """The row of least measured step time, of repetitions by their median, for each budget of a workload
    (`within_bytes`), the smallest first and none last. A run that was made for a smaller budget may be the fastest."""
    rows = middle_runs(frame)
    budgets = list(rows["budget_bytes"].sort_values().unique())  # none, NaN, is last
    found = [rows[rows["budget_bytes"] <= budget] if pd.notna(budget) else rows for budget in budgets]
    best = rows.loc[[within["step_s"].idxmin() for within in found]]
    return best.assign(within_bytes=budgets)


def gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB" if size >= GIB else f"{size / MIB:.4g} MiB"


def budget_words(budget_bytes: float) -> str:
    return "no budget" if pd.isna(budget_bytes) else f"budget {gib(budget_bytes)}"


# ---- keys and values of a config in words


def short(key: str, keys: Iterable[str]) -> str:
    """The key without its group, where no other key ends alike. The name of a group's option is the group."""
    group, _, last = key.rpartition(".")
    if last == "name":
        return group
    return key if sum(other.rpartition(".")[2] == last for other in keys) > 1 else last


def is_seed(key: str) -> bool:
    """Whether runs that differ in this setting alone are repetitions of each other."""
    return key.rpartition(".")[2] == "seed"


def value(of: Any) -> str:
    """A value as it is typed in a config."""
    return str(of).lower() if isinstance(of, bool) else f"{of:g}" if isinstance(of, float) else str(of)
