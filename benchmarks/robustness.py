"""Predict how much a plan loses where costs are not as profiled, and write its part of docs/predictions.md.

    python -m benchmarks.robustness                 # make robustness (minutes)

Nothing is measured. Plans are replayed a thousand times with shaken costs: slots, updates, and latency and rate
of the link. In some draws `greedy` and `joint` also plan anew.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import benchmarks
from analysis.pictures import style
from analysis.table import markdown as table
from benchmarks import shares
from benchmarks.planners import chain
from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.planner.ilp.joint import Joint
from mdcs.planner.pipeline import SCHEDULERS, floor_bytes, make_plan, unsharded_bytes
from mdcs.planner.strategies import Greedy, Uniform
from mdcs.profile.schema import Profile
from mdcs.simulator.simulate import replay

SETTINGS: dict[str, Any] = {"shaken": 0.1, "draws": 1000, "anew": 10, "solver_s": 5.0, "budget": 0.2}
"""A budget is a fraction of the way from the floor to the peak of data parallelism."""
INSTANCES = {
    "chain of 24 layers": lambda: chain(24, 0, ratio=1.5),
    "another chain of 24 layers": lambda: chain(24, 1, ratio=1.5),
    "GPT-2, bytes, 1 × 1,024": lambda: shares.profile("GPT-2, bytes, 1 × 1,024", 1.5),
}


def plans(profile: Profile) -> dict[str, Plan]:
    floor, whole = floor_bytes(profile), unsharded_bytes(profile)
    limit = int(floor + SETTINGS["budget"] * (whole - floor))
    asked = {f"{name} · {by}": (strategy, by) for name, strategy in (("greedy", Greedy()), ("fsdp", Uniform("fsdp")))
             for by in ("priority", "dear", "wfbp")}  # fmt: skip
    made = {name: make_plan(profile, of, SCHEDULERS[by](), budget=limit) for name, (of, by) in asked.items()}
    return {"joint": make_plan(profile, Joint(SETTINGS["solver_s"]), budget=limit), **made}


def shaken(profile: Profile, rng: random.Random) -> Profile:
    """The profile with costs that differ by up to the fraction."""
    factors = (1 + rng.uniform(-SETTINGS["shaken"], SETTINGS["shaken"]) for _ in itertools.count())
    slots = tuple(replace(slot, seconds=slot.seconds * next(factors)) for slot in profile.slots)
    latency, rate, link, update = next(factors), next(factors), profile.link, profile.optimizer
    link = replace(link, alpha=tuple(a * latency for a in link.alpha), beta=tuple(b * rate for b in link.beta))
    update = replace(update, seconds_per_element=update.seconds_per_element * next(factors))
    return replace(profile, slots=slots, link=link, optimizer=update)


def instance(name: str) -> dict[str, Any]:
    """Fractions by which each plan's step is longer than the best one's; `anew`: the best of these and new plans."""
    profile, rng = INSTANCES[name](), random.Random(0)
    made = plans(profile)
    rows, anew = [], []
    for draw in range(SETTINGS["draws"]):
        other = shaken(profile, rng)
        steps = {of: replay(replace(plan, job=Job(other))).period_s for of, plan in made.items()}
        rows.append({of: round(step / min(steps.values()) - 1, 5) for of, step in steps.items()})
        if draw < SETTINGS["anew"]:
            best = min(*steps.values(), *(replay(plan).period_s for plan in plans(other).values()))
            anew.append({of: round(step / best - 1, 5) for of, step in steps.items()})
    return {"slower": pd.DataFrame(rows).to_dict("list"), "anew": pd.DataFrame(anew).to_dict("list")}


@style.styled
def draw(document: dict[str, Any]) -> Figure:
    """Draw the number of draws in which a plan is at most so much slower: a line per planner, axes per instance."""
    names = [name.partition(" · ") for name in document["points"][0]["slower"]]
    colours, dashes = style.palette(name for name, *_ in names), {"priority": "--", "dear": ":", "wfbp": "-.", "": "-"}
    looks = {"".join(name): {"color": colours[name[0]]["color"], "ls": dashes[name[2]]} for name in names}
    figure = style.new_figure(10.5, 3.4, "Costs shaken by 10 %: how much slower than the best of the plans (predicted)")
    panels = figure.subplots(1, len(document["points"]), sharey=True)
    for axes, each in zip(panels, document["points"], strict=True):
        for name, look in looks.items():
            axes.ecdf(np.multiply(each["slower"][name], 100), **look)
        axes.set(title=each["point"]["name"], xlabel="% slower", xlim=(-0.5, None))
    panels[0].set_ylabel("part of the draws")
    style.legend_below(figure, style.series_handles(looks))
    return figure


def page(document: dict[str, Any]) -> str:
    cells, best, worst = pd.DataFrame(), list[float](), list[float]()
    for each in document["points"]:
        slower, anew = (pd.DataFrame(each[which]) * 100 for which in ("slower", "anew"))
        found = zip(slower.median(), slower.max(), strict=True)
        cells[each["point"]["name"]] = [f"{median:.1f} % ({most:.1f} %)" for median, most in found]
        cells.index = pd.Index(slower.columns, name="plan")
        worst.append(max(slower["joint"].max(), anew["joint"].max()))
        best.append(slower.drop(columns="joint").median().min())
    told = {"joint": f"{max(worst):.1f} %", "heuristics": f"{min(best):.1f} to {max(best):.1f} %"}
    rows = table(["plan", *cells.columns], [list(row) for row in cells.itertuples()])
    return benchmarks.page("robustness", table=rows, **told, **SETTINGS)


def main() -> None:
    out = benchmarks.parser(__doc__).parse_args().out
    document = benchmarks.resumed(out / "robustness.json", SETTINGS, [{"name": name} for name in INSTANCES], instance)
    style.save(draw(document), out / "robustness.png")
    benchmarks.write_part(out, "robustness", page(document))


if __name__ == "__main__":
    main()
