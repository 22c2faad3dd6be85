"""Larger worlds, predicted."""

# %% [markdown]
# # Scaling to larger worlds
#
# **Everything here is predicted**: plans for a calculated cluster, replayed by the simulator. Nothing was run.
# `mdcs plan profile=gpt3-1024 profile.nodes=…` plans single points of the same kind.

# %%
# %matplotlib inline
import pandas as pd

import mdcs
from analysis.pictures import style
from mdcs.planner.schedulers.sequential import Sequential
from mdcs.planner.schedulers.wfbp import Wfbp
from mdcs.planner.strategies.greedy import Greedy
from mdcs.planner.strategies.uniform import Uniform
from mdcs.profile.analytic import Device, Network, Transformer, analytic_profile
from mdcs.sizes import GIB

MODEL = Transformer(layers=24, width=4096, heads=32, sequence=2048, vocab=50257, batch=1)
GPU = Device(peak_flops=312e12, efficiency=0.5, memory_rate=1.6e12)
BUDGET_GIB = 40
NODES = (1, 2, 4, 8, 16, 32, 64)
PLANS = {
    "fsdp · sequential": (Uniform("fsdp"), Sequential()),
    "fsdp · wfbp": (Uniform("fsdp"), Wfbp()),
    "greedy · wfbp": (Greedy(), Wfbp()),
}

# %% [markdown]
# ## Plans
#
# 5 billion parameters in 24 blocks, 8 GPUs per node (250 GB/s), 200 Gbit/s per node between nodes, a budget of 40 GiB per GPU.
# *Efficiency* is the part of a step in which a GPU computes.

# %%
points = []
for nodes in NODES:
    network = Network(nodes, 8, intra_alpha=2e-6, intra_beta=1 / 250e9, inter_alpha=5e-6, inter_beta=1 / 3.125e9)
    job = mdcs.Job(analytic_profile(MODEL, GPU, network))
    for name, (strategy, scheduler) in PLANS.items():
        try:
            plan = mdcs.make_plan(job, strategy, scheduler, budget=BUDGET_GIB * GIB)
        except mdcs.InfeasibleBudget as error:
            points.append({"GPUs": network.world, "plan": name, "note": str(error)})
            continue
        step = plan.prediction
        points.append(
            {
                "GPUs": network.world, "plan": name, "step ms": step.step_s * 1e3, "exposed ms": step.exposed_s * 1e3,
                "efficiency": step.compute_s / step.step_s, "peak GiB": step.peak_bytes / GIB,
                "tokens/s": network.world * MODEL.tokens / step.step_s, "note": "",
            }
        )  # fmt: skip
table = pd.DataFrame(points)
table.pivot(index="GPUs", columns="plan", values=["step ms", "efficiency", "peak GiB"]).round(2)


# %%
@style.styled
def scaling():
    """Step time and efficiency over the number of GPUs; hollow, as all of it is predicted."""
    figure = style.new_figure(8.2, 3.6, "predicted · 5 billion parameters · 40 GiB per GPU")
    left, right = figure.subplots(1, 2)
    looks = style.look(PLANS)
    for name, rows in table[table["note"] == ""].groupby("plan"):
        for axes, column in ((left, "step ms"), (right, "efficiency")):
            look = {"ls": "--", "marker": looks[name]["marker"], "mfc": "white", "color": looks[name]["color"]}
            axes.plot(rows["GPUs"], rows[column], **look)
    best = table.loc[table.groupby("GPUs")["step ms"].idxmin().dropna()]
    left.plot(best["GPUs"], best["step ms"], "*", ms=11, mfc="#FFD700", mec=style.INK, ls="none", zorder=5)
    for axes, heading, unit in ((left, "time per iteration (* is the fastest)", "ms"), (right, "efficiency", "compute / step")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(table["GPUs"].unique()), sorted(table["GPUs"].unique()))
        axes.set_xlabel("GPUs")
        axes.set_title(heading)
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
    style.legend_below(figure, style.series_handles(looks))
    return figure


scaling()
