"""Predict where memory is best divided between strategies and schedule, and write its part of docs/predictions.md.

    python -m benchmarks.shares                     # make shares (an hour of one core); goes on where it was ended
    python -m benchmarks.shares --out FOLDER

Nothing is measured. A model is calculated layer by layer. For each ratio of communication to computing and each
budget, `greedy` makes a plan for every share of the slack, with `priority` and with `dear`; the faster one counts.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import benchmarks
from analysis.pictures.style import save
from analysis.table import markdown as table
from benchmarks import pictures
from benchmarks.layers import Decoder, Layer, Precision, layers_profile, resnet
from mdcs.plan.job import Job
from mdcs.plan.plan import PlanError
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.pipeline import Scheduler, floor_bytes, make_plan, unsharded_bytes
from mdcs.planner.priority import Priority
from mdcs.planner.schedulers import Dear
from mdcs.planner.strategies import Greedy
from mdcs.profile.link import Link
from mdcs.profile.schema import Optimizer, Profile
from mdcs.sizes import MIB

RATIOS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # seconds of gathering all parameters once, over those of forward
BUDGETS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75)  # of the way from the floor to the peak of data parallelism
SHARES = tuple(i / 8 for i in range(9))
EQUAL = 0.01
SETTINGS: dict[str, Any] = {
    "ranks": 8, "tflops": 20.0, "latency_us": 20, "messages": 64, "shares": SHARES, "schedulers": ["priority", "dear"]
}  # fmt: skip

_GPT2 = partial(Decoder, 12, 768, 12, 12, 3072, gated=False, tied=True, biases=True)
_LLAMA = Decoder(16, 2048, 32, 8, 8192, 128256, tied=True)
MODELS: dict[str, Callable[[], Sequence[Layer]]] = {
    "12 equal blocks": lambda: [Layer(f"block.{i}", 7_000_000, 1e11) for i in range(12)],
    "GPT-2, bytes, 1 × 1,024": lambda: _GPT2(257, positions=1024).of_batch(1, 1024),
    "GPT-2, 1 × 1,024": lambda: _GPT2(50257, positions=1024).of_batch(1, 1024),
    "GPT-2, 8 × 1,024": lambda: _GPT2(50257, positions=1024).of_batch(8, 1024),
    "BERT, 4 × 512": lambda: _GPT2(30522, positions=512).of_batch(4, 512),
    "BERT, 16 × 512": lambda: _GPT2(30522, positions=512).of_batch(16, 512),
    "Llama 1B, 1 × 2,048": lambda: _LLAMA.of_batch(1, 2048),
    "Llama 1B, 8 × 2,048": lambda: _LLAMA.of_batch(8, 2048),
    "ResNet-152, 8": lambda: resnet(152, 8),
    "ResNet-152, 64": lambda: resnet(152, 64),
}
"""Layers by name: with decoders and BERT sequences × tokens, with ResNet images."""


@cache
def profile(model: str, ratio: float) -> Profile:
    """The profile of a model whose gathering takes `ratio` times as long as its forward pass."""
    layers, ranks = MODELS[model](), SETTINGS["ranks"]
    size, rate = 4 * sum(layer.parameters for layer in layers), SETTINGS["tflops"] * 1e12
    forward_s = sum(layer.operations for layer in layers) / rate
    gbit = 8e-9 * size * (ranks - 1) / ranks / (ratio * forward_s)
    link = replace(Link.uniform(gbit, SETTINGS["latency_us"]), block=max(MIB, size // SETTINGS["messages"]))
    adam = Optimizer("adam", 2, seconds_per_element=2e-11)
    return layers_profile(layers, rate, ranks, link, precision=Precision(4, 4), optimizer=adam)


def curve(model: str, ratio: float, budget: float) -> dict[str, Any]:
    """Predicted steps (s) at every share, and with undivided slack; null where no plan fits."""
    made = profile(model, ratio)
    job, floor, whole = Job(made), floor_bytes(made), unsharded_bytes(made)
    limit = int(floor + budget * (whole - floor))
    schedulers: dict[str, Scheduler] = {"priority": Priority(made.block / MIB), "dear": Dear()}  # messages as set

    def step_s(share: float | None, scheduler: str) -> float:
        try:
            plan = make_plan(job, Greedy(), schedulers[scheduler], budget=limit, schedule_share=share)
        except (InfeasibleBudget, PlanError):
            return math.inf
        assert plan.prediction is not None
        return plan.prediction.step_s

    steps = [min(step_s(share, scheduler) for scheduler in SETTINGS["schedulers"]) for share in (*SHARES, None)]
    *divided, undivided = [None if math.isinf(step) else round(step, 6) for step in steps]
    return {
        "gbit": round(8e-9 / made.link.beta[0], 1), "floor_mib": round(floor / MIB), "whole_mib": round(whole / MIB),
        "step_s": divided, "undivided_s": undivided,
    }  # fmt: skip


def points() -> list[dict[str, Any]]:
    cells = itertools.product(MODELS, RATIOS, BUDGETS)
    return [{"model": model, "ratio": ratio, "budget": budget} for model, ratio, budget in cells]


def best(found: dict[str, Any]) -> tuple[str, float, float]:
    """Return the place of the best share, the smallest such share, and the fraction by which the faster end is slower.
    Steps within 1 % of the least count as equal: where both ends are, no share matters; where one is, it is the best.
    """
    steps = [math.inf if step is None else step for step in found["step_s"]]
    least = min(steps)
    share = SHARES[next(i for i, step in enumerate(steps) if step <= 1.001 * least)]
    strategies, schedule = (end / least - 1 for end in (steps[0], steps[-1]))
    if max(steps) <= (1 + EQUAL) * least:
        return "any", share, 0.0
    if min(strategies, schedule) > EQUAL:
        return "inside", share, min(strategies, schedule)
    return ("strategies" if strategies <= schedule else "schedule"), share, 0.0


def page(document: dict[str, Any]) -> str:
    rows = []
    for model, of in itertools.groupby(document["points"], lambda each: each["point"]["model"]):
        cells = list(of)
        found = [best(cell) for cell in cells]
        counts = Counter(where for where, _, _ in found)
        top = max(range(len(cells)), key=lambda i: found[i][2])
        point, (_, share, gain) = cells[top]["point"], found[top]
        where = f"{gain:.0%}: share {share:g}, ratio {point['ratio']:g}, budget {point['budget']:.0%}"
        given = [cell["undivided_s"] / min(filter(None, cell["step_s"])) - 1 for cell in cells]
        slack = f"{cells[0]['floor_mib']:,} to {cells[0]['whole_mib']:,}"
        numbers = [counts[name] for name in pictures.BEST]
        rows.append([model, slack, *numbers, where if gain else "", f"{max(given):+.0%}"])
    places = "0", "inside", "1", "any"  # in the order of pictures.BEST
    headings = "model", "floor to peak of DDP, MiB", *places, "inside, the most", "undivided, the worst"
    inside = [gain for where, _, gain in map(best, document["points"]) if where == "inside"]
    return benchmarks.page(
        "shares", table=table(headings, rows), cells=len(document["points"]), inside=len(inside),
        clear=sum(gain >= 0.03 for gain in inside), **SETTINGS,
    )  # fmt: skip


def main() -> None:
    out = benchmarks.parser(__doc__).parse_args().out
    document = benchmarks.resumed(out / "shares.json", SETTINGS, points(), curve)
    found = {tuple(each["point"].values()): best(each) for each in document["points"]}
    maps = {m: [[found[m, ratio, budget] for budget in BUDGETS] for ratio in RATIOS] for m in MODELS}
    save(pictures.share_map(maps, RATIOS, BUDGETS), out / "shares.png")
    benchmarks.write_part(out, "shares", page(document))


if __name__ == "__main__":
    main()
