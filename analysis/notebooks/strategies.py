"""Strategies, schedulers and budgets of a sweep."""

# %% [markdown]
# # Strategies × schedulers × budgets
#
# `RUNS` names the runs: a folder, or `wandb:ENTITY/PROJECT/GROUP`. Times are medians in milliseconds
# (p10–p90), memory is in MiB per rank.

# %% tags=["parameters"]
RUNS = "tests/analysis/sweep/plans"

# %%
# %matplotlib inline
import analysis
from analysis import page, pictures, questions

frame = analysis.runs(RUNS)
workload, rows = questions.workloads(frame)[0]
measured = questions.measured(rows)
workload

# %% [markdown]
# ## Step time
#
# Each cell is the fastest share of a plan within one budget, of repetitions the median; `*` is the fastest of its
# budget.

# %%
points = questions.best_points(measured, "budget_bytes")
points["budget"] = points["budget_bytes"].map(questions.budget_words)
best_of_budget = points.groupby("budget")["step_s"].transform("min")
points["cell"] = [
    f"{row.step_s * 1e3:.0f} ({row.step_s_p10 * 1e3:.0f}–{row.step_s_p90 * 1e3:.0f}){'*' if row.step_s == best else ''}"
    for row, best in zip(points.itertuples(), best_of_budget, strict=True)
]
order = points.sort_values("budget_bytes")["budget"].unique()
table = points.pivot(index="label", columns="budget", values="cell")[order].fillna("")
table

# %%
pictures.step_time_over_memory(rows)

# %% [markdown]
# ## The best plan of each budget
#
# Also one that was made for a smaller budget, where that was faster.

# %%
best_plans = page.best_plans(rows)
best_plans

# %% [markdown]
# ## What was not measured

# %%
failed = questions.not_measured(frame)[["name", "status", "reason"]]
failed
