"""Make docs/period.png: one period of a training step, drawn from plans for two budgets.

    python docs/period.py

The plans are made and replayed here, for a calculated cluster.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

if __name__ == "__main__":  # from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import mdcs
from analysis.pictures import save
from analysis.pictures.period import Panel, draw
from analysis.questions import count
from benchmarks.layers import Decoder, Precision
from benchmarks.rings import Cluster, cluster_profile
from mdcs.planner.priority import Priority
from mdcs.planner.strategies import Greedy
from mdcs.sizes import GIB
from mdcs.telemetry.timeline import PREDICTED_RANK, RankTimeline

MODEL = Decoder(layers=8, width=4096, heads=32, kv_heads=32, hidden=16384, vocab=50257, gated=False, tied=True)
CLUSTER = Cluster(nodes=8, per_node=1, inside_rate=250e9, card_rate=25e9)
OVER_FLOOR = (0.02, 0.4)
SHARES = (None, 0.0, 0.25, 0.5, 0.75, 1.0)


def profile_on(cluster: Cluster) -> mdcs.Profile:
    """The profile of two sequences of 2,048 tokens per GPU, each of which reaches 156 TFLOP/s."""
    layers = MODEL.of_batch(2, 2048)
    return cluster_profile(layers, 156e12, cluster, precision=Precision(2, 2, 4), memory_rate=1.6e12)


def best_plan(job: mdcs.Job, budget: int) -> mdcs.Plan:
    """The fastest of the greedy plans over the divisions of the budget."""
    plans = [mdcs.make_plan(job, Greedy(), Priority(), budget=budget, schedule_share=share) for share in SHARES]
    return min(plans, key=lambda plan: plan.prediction.step_s if plan.prediction else float("inf"))


def panel(job: mdcs.Job, over_floor: float) -> Panel:
    """The period of the best plan within a budget, with the plan in its headline."""
    budget = int(mdcs.floor_bytes(job) * (1 + over_floor))
    plan = best_plan(job, budget)
    replay, predicted = mdcs.replay(plan), plan.prediction
    assert predicted is not None and predicted.peak_bytes <= budget
    strategies = ", ".join(f"{many} × {name}" for name, many in Counter(map(str, plan.strategies)).most_common())
    words = f"budget {budget / GIB:.1f} GiB (least possible + {over_floor:.0%}): {strategies}; "
    words += f"{predicted.step_s * 1e3:.0f} ms"
    return Panel(RankTimeline(PREDICTED_RANK, tuple(replay.intervals)), replay.period_s, words)


def main() -> None:
    """Draw and write the picture."""
    job = mdcs.Job(profile_on(CLUSTER))
    size = count(sum(unit.numel for unit in job.profile.units))
    title = f"one period, predicted · transformer, {size} parameters · 8 GPUs · link of 200 Gbit/s"
    figure = draw([panel(job, over_floor) for over_floor in OVER_FLOOR], title)
    print(f"wrote {save(figure, Path(__file__).with_name('period.png'))}")


if __name__ == "__main__":
    main()
