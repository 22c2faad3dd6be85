"""The page docs/scale.md: what mdcs is predicted to gain for large models on large clusters."""

from __future__ import annotations

from collections import Counter
from typing import Any

from experiments.markdown import head, row
from experiments.outside_cases import INTERFERENCE
from mdcs.sizes import GIB

LEAST = 1.02
"""Gains below count as none: predictions are not that exact."""
LEVERS = ("sharding", "scheduling", "recomputation")
TOGETHER, NOTHING = "only together", "1.0 ×"

_HEAD = """# Scale on paper

<!-- Written by `mdcs scale scale.out=docs` from conf/scale/h100.yaml. Change these, not this page. -->

The predicted speed-up of mdcs over the best plan that treats all blocks alike, for {models} on {devices} H100, eight
per node, with {sequence:,} tokens per device and step. **Nothing here was measured.** [Published runs](outside.md) are predicted
in the same way; that page shows the errors.

**The baseline** treats all blocks alike, as FSDP2 does: FSDP or HSDP, with or without resharding after forward, and no,
selective or full recomputation. Of these plans it is the fastest that fits. Messages are sent as they become ready, gathers one
block ahead.

**A gain** is the baseline's step time divided by that of a plan within the same memory that may treat each block differently: in
*sharding* only, in *scheduling* only, in *recomputation* only, or in all three. A gain below {least:.0%} counts as 1.0 ×. The
plans are found by heuristics, so better ones may exist, above all for scheduling.

**Memory** (GiB) includes a CUDA context and NCCL's buffers. Computing reaches {tflops:g} TFLOP/s, as in torchtitan's
published step of Llama 3.1 8B on eight H100. While a message is in flight, computing is {slower:.1%} slower. *Exposed* is
communication that no computing hides.

"""


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
    text = _HEAD.format(
        models=" and ".join(asked["models"]), devices=_list(asked["devices"]), sequence=asked["batch"] * asked["sequence"],
        least=LEAST - 1, tflops=asked["tflops"], slower=INTERFERENCE,
    )  # fmt: skip
    lines = [*_answer(document), "![What decides, by budget and cluster](scale.png)", ""]
    for model in asked["models"]:
        lines += _model(document, model)
    return text + "\n".join(lines)


def _answer(document: dict[str, Any]) -> list[str]:
    points, every = feasible(document), sum(len(curve["points"]) for curve in document["curves"])
    found = Counter(map(decides, points))
    seconds = [curve["seconds"] for curve in document["curves"]]
    lines = ["## What decides", "", f"At {every - len(points)} of {every} points nothing fits. Of the other {len(points)}:", ""]
    lines += head("what gains most", "points", "its gain", "gain of all together", "where")
    for what in (*LEVERS, TOGETHER, NOTHING):
        some = [point for point in points if decides(point) == what]
        if not some:
            lines.append(row(what, 0, "", "", ""))
            continue
        alone, together = (_range([gain(point, name) for point in some]) if name in some[0] else "–" for name in (what, "all"))
        lines.append(row(what, found[what], alone, together, _where(document, what)))
    budgets = len(document["settings"]["budgets_gib"])
    took = f"Planning a curve of {budgets} budgets takes {min(seconds):.0f} to {max(seconds):.0f} s of one core."
    return [*lines, "", took, ""]


def _where(document: dict[str, Any], what: str) -> str:
    """Models and rates of the network of the points, with their number."""
    found = Counter(
        (curve["model"], curve["gbit"])
        for curve in document["curves"] for point in curve["points"] if point["base"] and decides(point) == what
    )  # fmt: skip
    models = dict.fromkeys(model for model, _ in found)
    rates = {m: ", ".join(f"{gbit:,g} ({n})" for (name, gbit), n in sorted(found.items()) if name == m) for m in models}
    return "; ".join(f"{model} at {told} Gbit/s" for model, told in rates.items())


def _model(document: dict[str, Any], model: str) -> list[str]:
    curves = [curve for curve in document["curves"] if curve["model"] == model]
    lines = [f"## {model}", "", f"{curves[0]['parameters'] / 1e9:.1f} · 10⁹ parameters. Without communication, and keeping all "
             f"activations, a step takes {curves[0]['compute_s']:.2f} s.", "",
             f"![Step time over memory](scale-{model}.png)", ""]  # fmt: skip
    lines += head("devices", "Gbit/s of a node", "GiB", "baseline", "s", "exposed s", *LEVERS, "all", "decides")
    for curve in curves:
        for point in curve["points"]:
            lines.append(_point(curve, point))
    return [*lines, ""]


def _point(curve: dict[str, Any], point: dict[str, Any]) -> str:
    where = curve["devices"], f"{curve['gbit']:,g}", f"{point['gib']:g}"
    if not (base := point["base"]):
        return row(*where, f"nothing fits: {curve['floor_bytes'] / GIB:.1f} GiB are the least", *[""] * 7)
    recompute = "" if base["recompute"] == "none" else f", {base['recompute']} recomputation"
    gains = [f"{gain(point, lever):.2f}" for lever in (*LEVERS, "all")]
    step = f"{base['step_s']:.2f}", f"{base['exposed_s']:.2f}"
    return row(*where, f"`{base['strategy']}`{recompute}", *step, *gains, decides(point))


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return f"{low} ×" if low == high else f"{low} to {high} ×"


def _list(values: list[Any]) -> str:
    words = [f"{value:,}" for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
