"""The trade-off curve of a sweep."""

# %% [markdown]
# # The trade-off curve
#
# Step time over `budget.schedule_share`: to the left the memory above the floor is spent on the strategy, to the right
# on the schedule. `RUNS` names the runs: a folder, or `wandb:ENTITY/PROJECT/GROUP`.

# %% tags=["parameters"]
RUNS = "tests/analysis/sweep/plans"

# %%
# %matplotlib inline
import pandas as pd

import analysis
from analysis import pictures, questions
from mdcs.sizes import MIB

frame = analysis.runs(RUNS)
curves = questions.share_curves(frame)
if not curves:
    raise ValueError("no curve: that needs runs of one budget with two schedule shares or more")

# %% [markdown]
# ## Stop points
#
# The share of least step time of each curve; a row per budget, strategy and scheduler.

# %%
stops = []
for curve in curves:
    for label, rows in questions.series(questions.drawn(curve)).items():
        if rows["schedule_share"].nunique() >= 2:
            time = questions.time_of(rows)
            stop = questions.stop_point(rows, time)
            alone = rows.groupby("schedule_share")[time].median()
            stops.append({
                "plan": label, "budget MiB": stop["budget_bytes"] / MIB, "share": stop["schedule_share"],
                "step ms": stop["step_s"] * 1e3, "p10 ms": stop["step_s_p10"] * 1e3, "p90 ms": stop["step_s_p90"] * 1e3,
                "predicted ms": stop["predicted_step_s"] * 1e3, "all for the strategy": alone.iloc[0] / stop[time],
                "all for the schedule": alone.iloc[-1] / stop[time],
            })  # fmt: skip
table = pd.DataFrame(stops).sort_values(["budget MiB", "step ms"], ignore_index=True)
table.round(3)

# %% [markdown]
# The last two columns: how many times as long a step takes with the least and with the greatest share.
#
# ## Curves

# %%
pictures.tradeoff_curve(frame)
