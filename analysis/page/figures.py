"""Figures for Plotly in the browser, as the JSON it takes: measured is solid, predicted is dashed or hollow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from analysis import questions as ask
from analysis.pictures import style
from analysis.pictures.budget import best_share
from analysis.pictures.memory_by_slot import CATEGORY_COLOURS
from analysis.trace import sublanes
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import LANES, PREDICTED_RANK, Interval, RankTimeline, Timeline

Figure = dict[str, Any]

_SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x", "triangle-left", "triangle-right")
_PATTERNS = {"AR": "x", "RS": "/", "AG_F": "\\", "AG_B": "."}
"""Beside colour, so that kinds of messages are told apart in print, too."""
_RANKS = 4
_CURVES = (("step_s", "time per iteration"), ("overlap_s", "overlap duration"), ("extra_communication_s", "extra communication"))


def of_sweep(title: str, rows: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """The trade-off curve of each budget, then step time over budgets; nothing of what the runs do not have."""
    looks = _looks(rows)
    for curve in ask.share_curves(rows):
        heading = f"trade-off curve · {ask.budget_words(curve['budget_bytes'].iloc[0])}"
        yield {"title": f"{heading} · {title}", "figure": _curve(curve, looks)}
    if len(ask.drawn(rows)):
        yield {"title": f"step time over budget · {title}", "figure": _over_budgets(rows, looks)}


def _looks(rows: pd.DataFrame) -> dict[str, dict[str, str]]:
    looks = style.look(ask.series(ask.drawn(rows)))
    return {
        label: {"color": look["color"], "symbol": _SYMBOLS[i % len(_SYMBOLS)]} for i, (label, look) in enumerate(looks.items())
    }


def _curve(curve: pd.DataFrame, looks: dict[str, dict[str, str]]) -> Figure:
    traces: list[dict[str, Any]] = []
    shown = ask.drawn(curve)
    for number, (column, _) in enumerate(_CURVES, start=1):
        for label, rows in ask.series(shown).items():
            points = ask.median_by(rows, "schedule_share")
            traces += _pair(points["schedule_share"], points, column, label, looks[label], f"y{number}", legend=number == 1)
    time, stops = ask.time_of(shown), []
    for rows in ask.series(shown).values():
        if rows["schedule_share"].nunique() >= 2:
            stops.append(ask.stop_point(rows, time))
    traces.append(_stars([s["schedule_share"] for s in stops], [s[time] * 1e3 for s in stops], "stop point"))
    axes = {}
    for number, ((_, heading), domain) in enumerate(zip(_CURVES, ([0.54, 1], [0.27, 0.48], [0, 0.21]), strict=True), start=1):
        axes[f"yaxis{number}"] = {"title": {"text": f"{heading}<br>(ms)"}, "domain": domain, "anchor": "x",
                                  "rangemode": "normal" if number == 1 else "tozero"}  # fmt: skip
    axis = {"title": {"text": "← memory for the strategy   schedule_share   for the schedule →"}, "anchor": "y3"}
    return {"data": traces, "layout": {"height": 620, "xaxis": axis, **axes}}


def _over_budgets(rows: pd.DataFrame, looks: dict[str, dict[str, str]]) -> Figure:
    shown, time = ask.drawn(rows), ask.time_of(rows)
    limited = shown["budget_bytes"].dropna()
    right = (limited.max() * 1.04 + (limited.max() - limited.min()) * 0.15) if len(limited) else 1.0  # where no limit stands
    traces: list[dict[str, Any]] = []
    for label, of_label in ask.series(shown).items():
        best = best_share(of_label, time, "budget_bytes")
        x = best["budget_bytes"].fillna(right) / MIB
        traces += _pair(x, best, "step_s", label, looks[label], "y", legend=True)
    every = pd.concat([best_share(of_label, time, "budget_bytes") for of_label in ask.series(shown).values()], ignore_index=True)
    fastest = every.loc[every.groupby("budget_bytes", dropna=False)[time].idxmin()]
    where = fastest["budget_bytes"].fillna(right) / MIB
    traces.append(_stars(list(where), list(fastest[time] * 1e3), "fastest of its budget"))
    axis: dict[str, Any] = {"title": {"text": "budget per rank (MiB), each at its best share"}}
    if shown["budget_bytes"].isna().any():
        ticks = sorted(limited.unique() / MIB)
        axis |= {"tickvals": [*ticks, right / MIB], "ticktext": [*(f"{tick:.4g}" for tick in ticks), "no limit"]}
    return {"data": traces, "layout": {"height": 460, "xaxis": axis, "yaxis": {"title": {"text": "time per iteration (ms)"}}}}


def _pair(
    x: pd.Series, points: pd.DataFrame, column: str, label: str, look: dict[str, str], axis: str, *, legend: bool
) -> list[dict[str, Any]]:
    """Measured, with bars from p10 to p90 where it is step time, and predicted."""
    made: list[dict[str, Any]] = []
    shared = {"x": list(x), "yaxis": axis, "legendgroup": label, "mode": "lines+markers"}
    measured = points[column] * 1e3
    if measured.notna().any():
        trace = {
            **shared, "y": list(measured), "name": label, "showlegend": legend,
            "line": {"color": look["color"], "width": 2}, "marker": {"symbol": look["symbol"], "size": 8},
            "hovertemplate": f"{label}<br>%{{x:.4g}}: %{{y:.4g}} ms measured<extra></extra>",
        }  # fmt: skip
        if column == "step_s":
            up, down = points["step_s_p90"] * 1e3 - measured, measured - points["step_s_p10"] * 1e3
            bars = {"type": "data", "symmetric": False, "array": list(up), "arrayminus": list(down), "thickness": 1.2, "width": 3}
            trace["error_y"] = bars
        made.append(trace)
    made.append({
        **shared, "y": list(points[f"predicted_{column}"] * 1e3), "name": f"{label}, predicted",
        "showlegend": legend and not made, "line": {"color": look["color"], "width": 1.2, "dash": "dash"},
        "marker": {"symbol": f"{look['symbol']}-open", "size": 10},
        "hovertemplate": f"{label}<br>%{{x:.4g}}: %{{y:.4g}} ms predicted<extra></extra>",
    })  # fmt: skip
    return made


def _stars(x: list[float], y: list[float], name: str) -> dict[str, Any]:
    marker = {"symbol": "star", "size": 15, "color": "#FFD700", "line": {"color": style.INK, "width": 1}}
    return {"x": x, "y": y, "name": name, "mode": "markers", "marker": marker,
            "hovertemplate": f"{name}: %{{y:.4g}} ms<extra></extra>"}  # fmt: skip


def timeline(shown: Timeline, predicted: Timeline | None) -> Figure:
    """Compute, messages and updates of one period; the prediction above the first ranks."""
    ranks: list[RankTimeline] = [] if predicted is None else [r for r in predicted.ranks if r.rank == PREDICTED_RANK][:1]
    ranks += sorted(shown.ranks, key=lambda rank: rank.rank)[:_RANKS]
    by_kind: dict[str, list[tuple[int, Interval]]] = {}
    words: list[str] = []
    for rank in ranks:
        for lane in LANES:
            intervals = rank.lane(lane)
            rows = sublanes(intervals)
            for interval, row in zip(intervals, rows, strict=True):
                by_kind.setdefault(interval.kind, []).append((len(words) + row, interval))
            words += [f"{rank.label}: {lane}", *[""] * max(rows, default=0)]
    traces = [_bars(kind, by_kind[kind]) for kind in style.KIND_COLOURS if kind in by_kind]
    rows_axis = {"tickvals": list(range(len(words))), "ticktext": words, "autorange": "reversed", "fixedrange": True}
    layout = {
        "height": 130 + 24 * len(words), "barmode": "overlay", "yaxis": rows_axis,
        "xaxis": {"title": {"text": "ms from the first backward slot (drag to zoom, double click to go back)"}},
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _bars(kind: str, intervals: list[tuple[int, Interval]]) -> dict[str, Any]:
    pattern = {"shape": _PATTERNS.get(kind, ""), "size": 5, "solidity": 0.25, "fgcolor": "white", "fillmode": "overlay"}
    return {
        "type": "bar", "orientation": "h", "name": {"F": "forward", "B": "backward"}.get(kind, kind), "width": 0.84,
        "y": [row for row, _ in intervals],
        "base": [interval.start * 1e3 for _, interval in intervals],
        "x": [interval.duration_s * 1e3 for _, interval in intervals],
        "text": [interval.name + (f", {interval.bytes / MIB:.3g} MiB" if interval.bytes else "") for _, interval in intervals],
        "textposition": "none",
        "marker": {"color": style.KIND_COLOURS[kind], "line": {"color": "white", "width": 0.5}, "pattern": pattern},
        "hovertemplate": "%{text}<br>%{x:.4g} ms, from %{base:.4g}<extra></extra>",
    }  # fmt: skip


def memory(timeline: Timeline | None, budget_bytes: float) -> Figure | None:
    """Bytes by category in each slot, measured where they were, with the predicted total and the budget; None without any."""
    if timeline is None or not timeline.memory:
        return None
    slots = timeline.memory
    is_measured = all(slot.measured is not None for slot in slots)
    stacked = [(slot.measured if is_measured else slot.predicted) or {} for slot in slots]
    names, at = [slot.slot for slot in slots], list(range(len(slots)))
    short = style.shortened(names)
    traces: list[dict[str, Any]] = [
        {
            "type": "bar", "name": category.replace("_", " "), "x": at, "y": [slot.get(category, 0) / MIB for slot in stacked],
            "marker": {"color": colour}, "text": names, "textposition": "none",
            "hovertemplate": "%{text}: %{y:.4g} MiB<extra>%{fullData.name}</extra>",
        }
        for category, colour in CATEGORY_COLOURS.items()
        if any(slot.get(category) for slot in stacked)
    ]  # fmt: skip
    for word, dash in (("measured", "solid"), ("predicted", "dash")) if is_measured else (("predicted", "solid"),):
        totals = [getattr(slot, word).get("total", sum(getattr(slot, word).values())) / MIB for slot in slots]
        traces.append({"x": at, "y": totals, "name": f"total, {word}", "mode": "lines",
                       "line": {"color": style.INK, "width": 1.5, "dash": dash, "shape": "hvh"}})  # fmt: skip
    layout: dict[str, Any] = {
        "height": 380, "barmode": "stack", "bargap": 0,
        "xaxis": {"title": {"text": "slots of the period", "standoff": 12}, "automargin": True,
                  "tickvals": at, "ticktext": [short[name] for name in names]},
        "yaxis": {"title": {"text": "MiB per rank"}},
    }  # fmt: skip
    if not pd.isna(budget_bytes):
        traces.append({"x": [-0.5, len(slots) - 0.5], "y": [budget_bytes / MIB] * 2, "name": ask.budget_words(budget_bytes),
                       "mode": "lines", "line": {"color": "#B00020", "width": 2}})  # fmt: skip
    return {"data": traces, "layout": layout}
