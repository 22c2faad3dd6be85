"""The period of one run."""

# %% [markdown]
# # One run: timeline and memory
#
# `RUNS` is the folder of a run, or of a sweep, of which the fastest run that has a timeline is shown.

# %% tags=["parameters"]
RUNS = "tests/analysis/sweep/plans"

# %%
# %matplotlib inline
from pathlib import Path

import pandas as pd

import analysis
from analysis import pictures, questions
from mdcs.plan.lifetimes import CATEGORIES
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import PREDICTED_RANK

frame = questions.measured(analysis.runs(RUNS)).sort_values("step_s")
recorded = frame[[(Path(folder) / "timeline.json").is_file() for folder in frame["folder"]]]
if not len(recorded):
    raise ValueError("no run that ended well has a timeline")
row = recorded.iloc[0]
run, workload = analysis.load_run(row["folder"]), questions.workloads(recorded.head(1))[0][0]
measured, predicted = run.timeline(), run.predicted_timeline()
title = " · ".join([workload, questions.label(row), questions.budget_words(row["budget_bytes"])])
title

# %% [markdown]
# ## Where the time of a step went
#
# Milliseconds: the prediction, the median over all measured steps, and the one period that was recorded, on each rank.

# %%
PARTS = ("step_s", "compute_s", "communication_s", "overlap_s", "exposed_s", "stalled_s", "idle_s")
columns = {"predicted": [row[f"predicted_{part}"] for part in PARTS], "measured": [row[part] for part in PARTS]}
for rank in measured.ranks:
    columns[f"{rank.label}, this period"] = [getattr(measured.times_of(rank.rank), part) for part in PARTS]
table = pd.DataFrame(columns, index=[part.removesuffix("_s") for part in PARTS], dtype=float) * 1e3
table.round(1)

# %%
pictures.gantt(measured, predicted, title)

# %% [markdown]
# ## Messages
#
# What was sent in the period, by kind, on the first rank.

# %%
first = next(rank for rank in measured.ranks if rank.rank != PREDICTED_RANK)
sent = pd.DataFrame([{"kind": m.kind, "MiB": m.bytes / MIB, "ms": m.duration_s * 1e3} for m in first.lane("message")])
messages = sent.groupby("kind").agg(count=("MiB", "size"), MiB=("MiB", "sum"), ms=("ms", "sum"))
messages.round(2)

# %% [markdown]
# ## Memory by slot

# %%
pictures.memory_over_period(measured, row["budget_bytes"], title)

# %% [markdown]
# In the slot that holds most, MiB by category; each at its highest within the slot.

# %%
slot = max(measured.memory, key=lambda each: each.predicted["total"])
sizes = {"predicted": slot.predicted, "measured": slot.measured or {}}
memory = pd.DataFrame(sizes, index=[*CATEGORIES, "total"]) / MIB
memory.rename_axis(slot.slot).round(2)
