"""mdcs beside other engines."""

# %% [markdown]
# # Beside other engines
#
# `RUNS` names a sweep over `engine=`: a folder, or `wandb:ENTITY/PROJECT/GROUP`. Runs of one workload
# (model, ranks, link) and one budget are compared; every plan and share of mdcs, and every value of a swept setting, is a line.
# Only runs that differ in nothing but their seed are one line, with its median and spread. For figures to rely on, in turns and
# with bounds, there is `experiments/compare.py`.

# %%
# %matplotlib inline
import os
from pathlib import Path

import pandas as pd

import analysis
from analysis import pictures, questions
from analysis.comparison import lines
from mdcs.sizes import MIB

EXAMPLE = Path(analysis.__file__).parents[1] / "tests/analysis/sweep/engines"
frame = questions.measured(analysis.runs(os.environ.get("RUNS", EXAMPLE)))
workload, rows = questions.workloads(frame)[0]
own = rows["engine"].isna() | (rows["engine"] == "mdcs")
names = rows.apply(questions.setting, axis=1)
names = names.where(~own, "mdcs " + names)
base = names[own].iloc[0] if own.any() else names.iloc[0]
workload.title

# %% [markdown]
# ## Step time, exposed communication and memory
#
# A ratio of 2 takes twice as long as the first plan of mdcs.

# %%
table = []
for budget, of_budget in rows.groupby("budget_bytes", dropna=False):
    runs = names[of_budget.index].value_counts()
    limit = None if pd.isna(budget) else int(budget)
    by_name = {name: of.to_dict("records") for name, of in of_budget.groupby(names)}
    table += [
        {
            "budget": questions.budget_words(budget), "engine": line.engine, "runs": runs[line.engine],
            "step ms": line.step_s.median * 1e3, "least ms": line.step_s.low * 1e3, "most ms": line.step_s.high * 1e3,
            "ratio": line.ratio.median if line.ratio else None, "exposed ms": line.exposed_s and line.exposed_s * 1e3,
            "overlap ratio": line.overlap_ratio, "sent MB": line.sent_bytes and line.sent_bytes / 1e6,
            "peak MiB": line.peak_bytes and line.peak_bytes / MIB,
        }
        for line in lines(by_name, base, dict.fromkeys(by_name, limit))
    ]  # fmt: skip
table = pd.DataFrame(table)
table.round(2)

# %%
pictures.step_time_over_memory(rows)

# %% [markdown]
# ## Losses
#
# After the last step. Engines that train the same differ in the order of their sums alone.

# %%
losses = rows.assign(name=names).groupby("name")["loss"].agg(["min", "max"])
losses
