"""Predictions beside measurements."""

# %% [markdown]
# # Predicted against measured
#
# Every prediction was made before its run. `RUNS` names the runs: a folder, or `wandb:ENTITY/PROJECT/GROUP`.

# %% tags=["parameters"]
RUNS = "tests/analysis/sweep/plans"

# %%
# %matplotlib inline
import pandas as pd

import analysis
from analysis import pictures, questions
from mdcs.sizes import MIB

frame = questions.measured(analysis.runs(RUNS))
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
# Relative to what was measured, by scheduler: `median` has a sign (below zero was predicted too fast, or too small),
# `median of |…|` and `greatest` have none.

# %%
WHAT = {"step_off": "step", "compute_off": "compute", "peak_off": "peak memory"}
off = both.set_index("scheduler")[list(WHAT)]
size = off.abs().groupby(level=0)
parts = {"median": off.groupby(level=0).median(), "median of |…|": size.median(), "greatest": size.max()}
table = pd.concat(parts, axis=1)
table.columns = [f"{WHAT[name]}: {kind}" for kind, name in table]
table.insert(0, "runs", both.groupby("scheduler").size())
table.style.format("{:+.1%}", subset=table.columns[1:])

# %%
pictures.predictions("time per iteration", "ms", pd.DataFrame({
    "series": both["scheduler"], "predicted": both["predicted_step_s"] * 1e3, "measured": both["step_s"] * 1e3,
    "low": both["step_s_p10"] * 1e3, "high": both["step_s_p90"] * 1e3,
}))  # fmt: skip

# %%
pictures.predictions("peak memory of a rank", "MiB", pd.DataFrame({
    "series": both["scheduler"], "predicted": both["predicted_peak_bytes"] / MIB, "measured": both["peak_bytes"] / MIB,
}))  # fmt: skip
