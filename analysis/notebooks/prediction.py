"""Predictions beside measurements."""

# %% [markdown]
# # Predicted against measured
#
# Every prediction was made before its run. `RUNS` names the runs: a folder, or `wandb:ENTITY/PROJECT/GROUP`.

# %%
# %matplotlib inline
import os
from pathlib import Path

import analysis
from analysis import questions
from analysis.pictures import style
from mdcs.sizes import MIB

EXAMPLE = Path(analysis.__file__).parents[1] / "tests/analysis/sweep"
frame = questions.measured(analysis.runs(os.environ.get("RUNS", EXAMPLE)))
both = frame[frame["predicted_step_s"].notna()]
if not len(both):
    raise ValueError("no run that ended well has a prediction")
both = both.assign(
    step_off=both["predicted_step_s"] / both["step_s"] - 1,
    compute_off=both["predicted_compute_s"] / both["compute_s"] - 1,
    peak_off=both["predicted_peak_bytes"] / both["peak_bytes"] - 1,
)
len(both)

# %% [markdown]
# ## By how much predictions are off
#
# Relative to what was measured, by scheduler: `median` has a sign (below zero was predicted too fast, or too small), `median of
# |…|` and `greatest` have none.

# %%
WHAT = {"step_off": "step", "compute_off": "compute", "peak_off": "peak memory"}
by = both.groupby("scheduler")[list(WHAT)]
size = both.assign(**{name: both[name].abs() for name in WHAT}).groupby("scheduler")[list(WHAT)]
table = by.median().add_suffix(" median").join(size.median().add_suffix(" median of |…|"))
table = table.join(size.max().add_suffix(" greatest"))
table.columns = [f"{WHAT[name.split()[0]]}: {name.split(maxsplit=1)[1]}" for name in table.columns]
table.insert(0, "runs", both.groupby("scheduler").size())
table.style.format("{:+.1%}", subset=table.columns[1:])


# %%
@style.styled
def scatter(what, unit, scale, heading):
    """Measured over predicted, with a band of 10 % and, for times, bars from p10 to p90."""
    figure = style.new_figure(5.4, 4.6, heading)
    axes = figure.subplots()
    for (label, rows), look in zip(both.groupby("scheduler"), style.look(both["scheduler"]).values(), strict=True):
        x, y = rows[f"predicted_{what}"] / scale, rows[what] / scale
        bars = [y - rows["step_s_p10"] / scale, rows["step_s_p90"] / scale - y] if what == "step_s" else None
        axes.errorbar(x, y, bars, fmt=look["marker"], color=look["color"], label=label, elinewidth=0.8, capsize=2)
    ends = [min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])]
    axes.plot(ends, ends, color=style.INK, lw=1)
    axes.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="#DDDDDD", zorder=0, label="± 10 %")
    axes.set_xlabel(f"predicted ({unit})")
    axes.set_ylabel(f"measured ({unit})")
    axes.grid(True, axis="both")
    axes.legend(fontsize=7)
    return figure


scatter("step_s", "ms", 1e-3, "time per iteration")

# %%
scatter("peak_bytes", "MiB per rank", MIB, "peak memory")
