"""Figures for Plotly in the browser, as the JSON it takes: measured is solid, predicted is dashed or hollow."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pandas as pd

from analysis import questions as ask
from analysis.pictures import style
from analysis.pictures.gantt import Bar, panels
from analysis.pictures.memory_by_slot import CATEGORY_COLOURS, RECOMPUTES, stack
from analysis.pictures.step_time import PANELS
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import Timeline

Figure = dict[str, Any]

_SYMBOLS = {
    "o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down", "<": "triangle-left",
    ">": "triangle-right", "X": "x", "P": "cross", "h": "hexagon", "p": "pentagon", "d": "diamond-tall",
}  # fmt: skip
"""Plotly's names of the marks that :func:`analysis.pictures.style.looks` gives."""
_PATTERNS = {"AR": "x", "RS": "/", "AG_F": "\\", "AG_B": "."}
"""Beside colour, so that kinds of messages are told apart in print, too."""


def of_sweep(title: str, rows: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Step time over memory, then the trade-off curve of each budget; nothing of what the runs do not have."""
    looks = style.looks(rows)
    points = ask.over_memory(rows)
    if len(points):
        yield {"title": f"step time over memory · {title}", **_over_memory(points, ask.time_of(ask.drawn(rows)), looks)}
    for curve in ask.share_curves(rows):
        heading = f"trade-off curve · {ask.budget_words(curve['budget_bytes'].iloc[0])}"
        yield {"title": f"{heading} · {title}", **_curve(curve, looks)}


def _curve(curve: pd.DataFrame, looks: style.Looks) -> dict[str, Any]:
    traces: list[dict[str, Any]] = []
    points = ask.over_share(curve)
    for number, (column, _) in enumerate(PANELS, start=1):
        for label, of_label in points.groupby("label"):
            traces += _pair(of_label, column, str(label), looks[str(label)], f"y{number}")
    star, words = _star(points, ask.time_of(ask.drawn(curve)))
    traces.append(star)
    axes: dict[str, Any] = {"annotations": []}
    for number, ((_, heading), domain) in enumerate(zip(PANELS, ([0.56, 0.96], [0.29, 0.47], [0, 0.2]), strict=True), start=1):
        axes[f"yaxis{number}"] = {"title": {"text": "ms"}, "domain": domain, "anchor": "x",
                                  "rangemode": "normal" if number == 1 else "tozero"}  # fmt: skip
        above = {"x": 0, "xref": "paper", "xanchor": "left", "y": domain[1], "yref": "paper", "yanchor": "bottom"}
        axes["annotations"].append({"text": heading, "showarrow": False, **above})
    axis = {"title": {"text": "← strategy   schedule_share   schedule →"}, "anchor": "y3"}
    return {"told": words, "figure": {"data": traces, "layout": {"height": 620, "xaxis": axis, **axes}}}


def _over_memory(points: pd.DataFrame, time: str, looks: style.Looks) -> dict[str, Any]:
    points[["at", "predicted_at"]] /= MIB
    traces: list[dict[str, Any]] = []
    for label, of_label in points.groupby("label"):
        traces += _pair(of_label, "step_s", str(label), looks[str(label)], "y")
    star, words = _star(points, time)
    layout = {
        "height": 460, "xaxis": {"title": {"text": "peak memory per rank (MiB)<br>of each budget the best share"}},
        "yaxis": {"title": {"text": "time per iteration (ms)"}},
    }  # fmt: skip
    return {"told": words, "figure": {"data": [*traces, star], "layout": layout}}


def _pair(points: pd.DataFrame, column: str, label: str, look: dict[str, str], axis: str) -> list[dict[str, Any]]:
    """Measured, with bars from p10 to p90 where it is step time, and predicted. Only step times are in the legend."""
    made: list[dict[str, Any]] = []
    legend = column == "step_s"
    shared = {"x": list(points["at"]), "yaxis": axis, "legendgroup": label, "mode": "lines+markers"}
    measured = points[column] * 1e3
    if measured.notna().any():
        trace = {
            **shared, "y": list(measured), "name": label, "showlegend": legend,
            "line": {"color": look["color"], "width": 2}, "marker": {"symbol": _SYMBOLS[look["marker"]], "size": 8},
            "hovertemplate": f"{label}<br>%{{x:.4g}}: %{{y:.4g}} ms measured<extra></extra>",
        }  # fmt: skip
        if legend:
            up, down = points["step_s_p90"] * 1e3 - measured, measured - points["step_s_p10"] * 1e3
            bars = {"type": "data", "symmetric": False, "array": list(up), "arrayminus": list(down), "thickness": 1.2, "width": 3}
            trace["error_y"] = bars
        made.append(trace)
    if points[f"predicted_{column}"].isna().all():
        return made
    made.append({
        **shared, "x": list(points["predicted_at"]), "y": list(points[f"predicted_{column}"] * 1e3),
        "name": f"{label}, predicted", "showlegend": legend and not made,
        "line": {"color": look["color"], "width": 1.2, "dash": "dash"},
        "marker": {"symbol": f"{_SYMBOLS[look['marker']]}-open", "size": 10},
        "hovertemplate": f"{label}<br>%{{x:.4g}}: %{{y:.4g}} ms predicted<extra></extra>",
    })  # fmt: skip
    return made


def _star(points: pd.DataFrame, time: str) -> tuple[dict[str, Any], str]:
    """The fastest of all points, and what is told of it."""
    best, words = ask.fastest(points, time)
    marker = {"symbol": "star", "size": 15, "color": "#FFD700", "line": {"color": style.INK, "width": 1}}
    return {"x": [best["at"]], "y": [best[time] * 1e3], "name": "fastest of all shown", "mode": "markers", "marker": marker,
            "hovertemplate": f"{words}<extra></extra>"}, words  # fmt: skip


def timeline(shown: Timeline, predicted: Timeline | None, recomputed: Collection[str] = ()) -> Figure:
    """The panels of `gantt`, one below the other."""
    by_kind: dict[tuple[str, bool], list[tuple[int, Bar]]] = {}
    words: list[str] = []
    for panel in panels(shown, predicted, recomputed=recomputed):
        for bar in panel.bars:
            by_kind.setdefault((bar.kind, bar.recomputes), []).append((len(words) + bar.row, bar))
        for name, rows in panel.lanes:
            words += [f"{panel.name}: {name}", *[""] * (rows - 1)]
    traces = [_bars(kind, again, by_kind[kind, again]) for kind in style.KIND_COLOURS for again in (False, True)
              if (kind, again) in by_kind]  # fmt: skip
    rows_axis = {"tickvals": list(range(len(words))), "ticktext": words, "autorange": "reversed", "fixedrange": True,
                 "automargin": True}  # fmt: skip
    layout = {
        "height": 130 + 24 * len(words), "barmode": "overlay", "yaxis": rows_axis,
        "xaxis": {"title": {"text": "ms from the first backward slot"}},
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _bars(kind: str, recomputes: bool, bars: list[tuple[int, Bar]]) -> dict[str, Any]:
    shape = "/" if recomputes else _PATTERNS.get(kind, "")
    pattern = {"shape": shape, "size": 5, "solidity": 0.25, "fgcolor": "white", "fillmode": "overlay"}
    return {
        "type": "bar", "orientation": "h", "width": 0.84,
        "name": style.KIND_WORDS[kind] + (" with recomputation" if recomputes else ""),
        "y": [row for row, _ in bars],
        "base": [bar.start for _, bar in bars],
        "x": [bar.length for _, bar in bars],
        "text": [bar.words for _, bar in bars],
        "textposition": "none",
        "marker": {"color": style.KIND_COLOURS[kind], "line": {"color": "white", "width": 0.5}, "pattern": pattern},
        "hovertemplate": "%{text}<br>%{x:.4g} ms, from %{base:.4g}<extra></extra>",
    }  # fmt: skip


def memory(timeline: Timeline | None, budget_bytes: float, recomputed: Collection[str] = ()) -> Figure | None:
    """The stack of `memory_by_slot`, with its total, the predicted one and the budget; None without any."""
    if timeline is None or not timeline.memory:
        return None
    shown = stack(timeline, recomputed)
    at = list(range(len(shown.slots)))
    traces: list[dict[str, Any]] = [
        {
            "type": "bar", "name": category.replace("_", " "), "x": at, "y": sizes,
            "marker": {"color": CATEGORY_COLOURS.get(category, "#BBBBBB")}, "text": shown.slots, "textposition": "none",
            "hovertemplate": "%{text}: %{y:.4g} MiB<extra>%{fullData.name}</extra>",
        }
        for category, sizes in shown.layers.items()
    ]  # fmt: skip
    for totals, word, dash in ((shown.total, shown.source, "solid"), (shown.predicted, "predicted", "dash")):
        if totals:
            traces.append({"x": at, "y": totals, "name": f"total, {word}", "mode": "lines",
                           "line": {"color": style.INK, "width": 1.5, "dash": dash, "shape": "hvh"}})  # fmt: skip
    again = f" ({RECOMPUTES} recomputes activations)" if any(label.endswith(RECOMPUTES) for label in shown.labels) else ""
    layout: dict[str, Any] = {
        "height": 380, "barmode": "stack", "bargap": 0,
        "xaxis": {"title": {"text": f"slots of the period{again}", "standoff": 12}, "automargin": True,
                  "tickvals": at, "ticktext": shown.labels},
        "yaxis": {"title": {"text": "MiB per rank"}},
    }  # fmt: skip
    if not pd.isna(budget_bytes):
        traces.append({"x": [-0.5, len(at) - 0.5], "y": [budget_bytes / MIB] * 2, "name": ask.budget_words(budget_bytes),
                       "mode": "lines", "line": {"color": "#B00020", "width": 2}})  # fmt: skip
    return {"data": traces, "layout": layout}
