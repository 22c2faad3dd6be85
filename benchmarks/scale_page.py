"""The page docs/scale.md: what mdcs is predicted to gain for large models on large clusters."""

from __future__ import annotations

from collections import Counter
from typing import Any

import benchmarks
from benchmarks.published_runs import INTERFERENCE
from experiments.markdown import table

LEAST = 1.02
"""Gains below count as none: predictions are not that exact."""
LEVERS = ("sharding", "scheduling", "recomputation")
TOGETHER, NOTHING = "only together", "1.0 ×"


def gain(point: dict[str, Any], lever: str) -> float:
    """The baseline's step as a multiple of the lever's."""
    return float(point["base"]["step_s"] / point[lever]["step_s"])


def decides(point: dict[str, Any]) -> str:
    """The lever that gains most at a point, if any gains enough."""
    best = max(LEVERS, key=lambda lever: gain(point, lever))
    if gain(point, best) >= LEAST:
        return best
    return TOGETHER if gain(point, "all") >= LEAST else NOTHING


def feasible(document: dict[str, Any]) -> list[dict[str, Any]]:
    """All points at which something fits."""
    return [point for curve in document["curves"] for point in curve["points"] if point["base"]]


def page(document: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    asked = document["settings"]
    return benchmarks.page(
        "scale", list_of_models=" and ".join(asked["models"]), devices=_list(asked["devices"]),
        sequence=asked["batch"] * asked["sequence"], least=LEAST - 1, tflops=asked["tflops"], slower=INTERFERENCE,
        answer=_answer(document), models="\n\n".join(_model(document, model) for model in asked["models"]),
    )  # fmt: skip


def _answer(document: dict[str, Any]) -> str:
    points, every = feasible(document), sum(len(curve["points"]) for curve in document["curves"])
    found = Counter(map(decides, points))
    seconds = [curve["seconds"] for curve in document["curves"]]
    rows: list[list[Any]] = []
    for what in (*LEVERS, TOGETHER, NOTHING):
        some = [point for point in points if decides(point) == what]
        if not some:
            rows.append([what, 0])
            continue
        alone, together = (
            _range([gain(point, name) for point in some]) if name in some[0] else "–" for name in (what, "all")
        )
        rows.append([what, found[what], alone, together, _where(document, what)])
    told = table(["what gains most", "points", "its gain", "gain of all together", "where"], rows)
    budgets = len(document["settings"]["budgets_gib"])
    took = f"Planning a curve of {budgets} budgets takes {min(seconds):.0f} to {max(seconds):.0f} s of one core."
    return f"At {every - len(points)} of {every} points nothing fits. Of the other {len(points)}:\n\n{told}\n\n{took}"


def _where(document: dict[str, Any], what: str) -> str:
    """Models and rates of the network of the points, with their number."""
    found = Counter(
        (curve["model"], curve["gbit"])
        for curve in document["curves"] for point in curve["points"] if point["base"] and decides(point) == what
    )  # fmt: skip
    models = dict.fromkeys(model for model, _ in found)
    rates = {m: ", ".join(f"{gbit:,g} ({n})" for (name, gbit), n in sorted(found.items()) if name == m) for m in models}
    return "; ".join(f"{model} at {told} Gbit/s" for model, told in rates.items())


def _model(document: dict[str, Any], model: str) -> str:
    curves = [curve for curve in document["curves"] if curve["model"] == model]
    about = f"{curves[0]['parameters'] / 1e9:.1f} · 10⁹ parameters. Without communication, and keeping all activations,"
    about += f" a step takes {curves[0]['compute_s']:.2f} s."
    return f"## {model}\n\n{about}\n\n![Step time over memory](scale-{model}.png)"


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return f"{low} ×" if low == high else f"{low} to {high} ×"


def _list(values: list[Any]) -> str:
    words = [f"{value:,}" for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
