"""Make docs/gpu-curve.png: the step of GPT-2 XL over the peak memory of a GPU, from docs/gpu-h200.json.

    python docs/gpu_curve.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt

DATA = Path(__file__).with_name("gpu-h200.json")
TO = Path(__file__).with_name("gpu-curve.png")
GIB = 2**30
SERIES = {  # part of the measurement -> planner, what its plans decide, and their colour
    "curve": ("joint", "sharding and schedule planned", "#0072B2"),
    "recompute": ("joint, recomputing", "recomputation too", "#D55E00"),
}


def main() -> None:
    """Draw the last complete measurement."""
    [*_, parts] = (
        {part["name"]: part["rows"] for part in run["parts"]} for run in json.loads(DATA.read_text())["runs"]
    )
    figure, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    for name, (planner, label, colour) in SERIES.items():
        rows = sorted((row for row in parts[name] if row["planner"] == planner), key=lambda row: row["peak_bytes"])
        peaks = [row["peak_bytes"] / GIB for row in rows]
        axes.plot(peaks, [row["measured_s"] * 1e3 for row in rows], "o-", color=colour, label=f"{label}, measured")
        predicted = [row["predicted_s"] * 1e3 for row in rows]
        axes.plot(peaks, predicted, "o--", color=colour, mfc="white", lw=1, label="the same, predicted")
    planned = [row for row in parts["curve"] if row["planner"] == "joint"]
    least_s = min(row["measured_s"] for row in planned)
    for rows, slower, offset in ((planned, 1.01, (-45, -45)), (parts["recompute"], 1.05, (10, 30))):  # the least memory
        row = min((row for row in rows if row["measured_s"] < slower * least_s), key=lambda row: row["peak_bytes"])
        x, y = row["peak_bytes"] / GIB, row["measured_s"] * 1e3
        axes.annotate(
            f"{y:.0f} ms in {x:.0f} GiB", (x, y), offset, textcoords="offset points", arrowprops={"arrowstyle": "-"}
        )
    axes.set(xlabel="peak memory of a rank (GiB)", ylabel="step (ms)", xlim=(0, None), ylim=(0, None))
    axes.set_title(
        "GPT-2 XL (1.5 B) on an H200, one rank of an emulated world of 8 at 100 Gbit/s:\n"
        "planned recomputation needs a quarter of the memory for 4 % more time",
        loc="left", fontsize=10,
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(TO, dpi=110)


if __name__ == "__main__":
    main()
