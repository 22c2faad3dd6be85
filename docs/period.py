"""Make docs/period.html and period.png: one period of a training step, drawn from plans for many budgets.

    python docs/period.py

The plans are made and replayed here, for a calculated cluster, and put into the page; nothing is planned in the browser. The
picture is the page as Chromium shows it, for readers of the plain Markdown.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any

if __name__ == "__main__":  # from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import mdcs
from analysis.pictures.memory_by_slot import CATEGORY_COLOURS
from analysis.pictures.style import KIND_COLOURS
from analysis.trace import sublanes
from mdcs.planner.registry import Scheduler
from mdcs.planner.schedulers.priority import Priority
from mdcs.planner.schedulers.sequential import Sequential
from mdcs.planner.schedulers.wfbp import Wfbp
from mdcs.planner.strategies.greedy import Greedy
from mdcs.profile.analytic import Device, Network, Transformer, analytic_profile
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import LANES, RankTimeline

HERE = Path(__file__).resolve().parent
MODEL = Transformer(layers=8, width=4096, heads=32, sequence=2048, vocab=50257, batch=2)
GPU = Device(peak_flops=312e12, efficiency=0.5, memory_rate=1.6e12)
CLUSTER = Network(nodes=8, per_node=1, intra_alpha=2e-6, intra_beta=1 / 250e9, inter_alpha=5e-6, inter_beta=1 / 25e9)
OVER_FLOOR = (0, 0.02, 0.05, 0.08, 0.11, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4)
SHARES = (None, 0.0, 0.25, 0.5, 0.75, 1.0)
SCHEDULERS: tuple[Scheduler, ...] = (Sequential(), Wfbp(), Priority())


def best_plan(job: mdcs.Job, scheduler: Scheduler, budget: int) -> mdcs.Plan:
    """The fastest of the greedy plans over the divisions of the budget."""
    plans = [mdcs.make_plan(job, Greedy(), scheduler, budget=budget, schedule_share=share) for share in SHARES]
    return min(plans, key=lambda plan: plan.prediction.step_s if plan.prediction else float("inf"))


def document() -> dict[str, Any]:
    """Return the numbers that the page draws: milliseconds from the first backward slot, MiB per rank."""
    job = mdcs.Job(analytic_profile(MODEL, GPU, CLUSTER, depth=2))
    floor = mdcs.floor_bytes(job)
    budgets = [int(floor * (1 + over)) for over in OVER_FLOOR]
    plans = {scheduler.name: [best_plan(job, scheduler, budget) for budget in budgets] for scheduler in SCHEDULERS}
    return {
        "kinds": KIND_COLOURS,
        "categories": CATEGORY_COLOURS,
        "units": [unit.name for unit in job.profile.units],
        "over_floor": OVER_FLOOR,
        "budgets": [budget / MIB for budget in budgets],
        "plans": {name: [_drawn(plan) for plan in of] for name, of in plans.items()},
    }


def _drawn(plan: mdcs.Plan) -> dict[str, Any]:
    assert plan.prediction is not None
    replay, predicted = mdcs.replay(plan), plan.prediction
    return {
        "strategies": [strategy.value for strategy in plan.strategies],
        "step": predicted.step_s * 1e3,
        "exposed": (predicted.exposed_s or 0.0) * 1e3,
        "overlap_ratio": predicted.overlap_ratio,
        "messages": len(plan.messages),
        "peak": predicted.peak_bytes / MIB,
        "intervals": list(_intervals(replay)),
        "memory": [[slot.get(category, 0) // MIB for category in CATEGORY_COLOURS] for slot in replay.curve],
    }


def _intervals(replay: Any) -> Iterator[list[Any]]:
    """Row, kind, name, begin and end; rows 0 (compute), 1 and 2 (messages), 3 (updates)."""
    rank = RankTimeline(0, tuple(replay.intervals))
    for lane, first in zip(LANES, (0, 1, 3), strict=True):
        intervals = rank.lane(lane)
        for interval, row in zip(intervals, sublanes(intervals), strict=True):
            yield [first + row, interval.kind, interval.name, *(round(t * 1e3, 2) for t in (interval.start, interval.end))]


def picture(page: Path, to: Path) -> None:
    """The page as Chromium shows it. Raises FileNotFoundError without Chromium."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        raise FileNotFoundError("period.png needs Chromium")
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1.5"]
        own = [f"--user-data-dir={profile}", f"--screenshot={to}", "--window-size=900,640"]
        subprocess.run([program, *flags, *own, page.as_uri()], check=True, stderr=subprocess.DEVNULL)


def main() -> None:
    """Write both files."""
    text = (HERE / "period.template.html").read_text(encoding="utf-8")
    data = json.dumps(document(), separators=(",", ":"))
    page = HERE / "period.html"
    page.write_text(Template(text).substitute(data=data), encoding="utf-8")
    picture(page, HERE / "period.png")
    print(f"wrote {page} ({page.stat().st_size / 1e3:.0f} kB) and period.png")


if __name__ == "__main__":
    main()
