"""Predict what mdcs gains for large models on large clusters, and write a part of docs/predictions.md.

    python -m benchmarks.scale                      # make scale
    python -m benchmarks.scale --out outputs/scale --models Llama-3-8B --node-gbit 800

Nothing is measured. A job is calculated from its model, devices and network, as for published runs, planned and
replayed. Within each budget the best plan that is the same for all blocks is compared with plans that decide block by
block: the sharding, the schedule, what is recomputed, or all of them. scale.json has every plan's step and memory,
scale.md and the pictures are made of it.
"""

from __future__ import annotations

import itertools
import json
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import benchmarks
from analysis.pictures import save
from analysis.table import markdown as table
from benchmarks import pictures
from benchmarks.published_runs import CONTEXT_BYTES, DECODERS, DEVICES, INTERFERENCE, NCCL_BYTES, Case
from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.pipeline import Scheduler, StrategyPlanner, floor_bytes, make_plan
from mdcs.planner.priority import Priority
from mdcs.planner.recompute import ladder
from mdcs.planner.schedulers import Wfbp
from mdcs.planner.strategies import Greedy, Uniform
from mdcs.profile.recompute import FULL, NONE, SELECTIVE, uniform
from mdcs.sizes import GIB

SCHEMA = 1
LEAST = 1.02  # gains below count as none: predictions are not that exact
LEVERS = ("sharding", "scheduling", "recomputation")
TOGETHER, NOTHING = "only together", "1.0 ×"
STRATEGIES = ("fsdp", "sdp", "hsdp", "hsdp_no_reshard")
SHARES = (0.5, 0.25)  # of the slack for the schedule, which are tried where strategies differ by block


@dataclass(frozen=True)
class Settings:
    """Jobs to plan: models and devices of published.yaml, eight devices a node, Gbit/s of a node's network, GiB of a
    device, tokens of a sequence, sequences per device, and TFLOP/s that a device reaches."""

    models: tuple[str, ...] = ("Llama-3-8B", "Llama-3-70B")
    device: str = "h100-80"
    devices: tuple[int, ...] = (64, 256, 1024)
    node_gbit: tuple[float, ...] = (100, 400, 3200)
    budgets_gib: tuple[float, ...] = (40, 50, 60, 70, 80)
    sequence: int = 8192
    batch: int = 1
    tflops: float = 429.0
    """With which torchtitan's step of Llama 3.1 8B, compiled, on 8 H100 is the published one."""


@dataclass(frozen=True)
class Tried:
    """A plan: what all its blocks have (else ``mixed``), seconds of a step, and bytes that the device needs."""

    strategy: str
    recompute: str
    schedule: str
    step_s: float
    exposed_s: float
    bytes: int

    @classmethod
    def of(cls, plan: Plan) -> Tried:
        told = plan.prediction
        assert told is not None and told.exposed_s is not None
        blocks = [u for u, unit in enumerate(plan.profile.units) if unit.name != "root"]
        strategies = {str(plan.strategies[u]) for u in blocks}
        chosen = {plan.recompute[u] for u in blocks} if plan.recompute else {NONE}
        strategy, recompute = (each.pop() if len(each) == 1 else "mixed" for each in (strategies, chosen))
        needed = told.peak_bytes + CONTEXT_BYTES + NCCL_BYTES
        return cls(strategy, recompute, plan.scheduler, told.step_s, told.exposed_s, needed)


@dataclass(frozen=True)
class Curve:
    """A model on a cluster, for all budgets. ``gbit``: rate of a node's network, all of its cards together. ``rate``:
    operations per second that a device reaches.
    """

    case: Case
    gbit: float
    rate: float

    @cached_property
    def job(self) -> Job:
        return Job(self.case.profile(self.rate), cross_iteration=False)

    @cached_property
    def ladder(self) -> list[Job]:
        """The job with more and more recomputation."""
        return ladder(self.job)

    @cached_property
    def alike(self) -> list[tuple[Job, Tried]]:
        """Plans in which all blocks have the same strategy and recomputation."""
        profile = self.job.profile
        chosen = [uniform(profile.recompute, len(profile.units), choice) for choice in (NONE, SELECTIVE, FULL)]
        jobs = [replace(self.job, recompute=choices) for choices in chosen]
        return [
            (job, Tried.of(make_plan(job, Uniform(strategy), Wfbp())))
            for strategy, job in itertools.product(STRATEGIES, jobs)
        ]

    def point(self, gib: float) -> dict[str, Any]:
        """The best plan within the budget that is alike for all blocks, and the best that decide something by block."""
        limit = int(gib * GIB)
        fitting = [(job, tried) for job, tried in self.alike if tried.bytes <= limit]
        if not fitting:
            return {"gib": gib, "base": None}
        job, base = min(fitting, key=lambda pair: pair[1].step_s)
        recomputing = {strategy: least for strategy in STRATEGIES if (least := self._least(strategy, limit))}
        alone = [recomputing[base.strategy][1]] if base.strategy in recomputing else []
        levers = {
            "sharding": [
                *(t for _, t in fitting if t.recompute == base.recompute),
                *self._within(job, Greedy(), Wfbp(), limit, SHARES),
            ],
            "scheduling": [*self._within(job, Uniform(base.strategy), Priority(), limit)],
            "recomputation": [*(t for _, t in fitting if t.strategy == base.strategy), *alone],
        }
        best, found = min([(job, base), *recomputing.values()], key=lambda pair: pair[1].step_s)
        together = [tried for some in levers.values() for tried in some] + [found]
        together += self._within(best, Uniform(found.strategy), Priority(), limit)
        together += self._within(best, Greedy(), Priority(), limit, SHARES[:1])
        levers["all"] = together
        gained = {name: min([base, *some], key=lambda tried: tried.step_s) for name, some in levers.items()}
        return {"gib": gib, "base": asdict(base)} | {name: asdict(tried) for name, tried in gained.items()}

    def _least(self, strategy: str, limit: int) -> tuple[Job, Tried] | None:
        """The first step of the ladder that fits with this strategy for all blocks."""
        last = len(self.ladder) - 1
        if self._on_ladder(strategy, last).bytes > limit:
            return None
        step = bisect_left(range(last), True, key=lambda step: self._on_ladder(strategy, step).bytes <= limit)
        return self.ladder[step], self._on_ladder(strategy, step)

    @cached_property
    def _on_ladder(self) -> Callable[[str, int], Tried]:
        return cache(lambda strategy, step: Tried.of(make_plan(self.ladder[step], Uniform(strategy), Wfbp())))

    def _within(
        self, job: Job, strategy: StrategyPlanner, scheduler: Scheduler, limit: int,
        shares: Iterable[float | None] = (None,),
    ) -> Iterator[Tried]:  # fmt: skip
        budget = limit - CONTEXT_BYTES - NCCL_BYTES
        for share in shares:
            with suppress(InfeasibleBudget):
                yield Tried.of(make_plan(job, strategy, scheduler, budget=budget, schedule_share=share))

    def document(self, budgets: Iterable[float]) -> dict[str, Any]:
        """All points, plans that are the same for all blocks, and the processor seconds that it took."""
        began = time.process_time()
        points = [self.point(gib) for gib in budgets]
        return {
            "model": self.case.model, "devices": self.case.devices, "gbit": self.gbit,
            "parameters": sum(unit.numel for unit in self.job.profile.units),
            "floor_bytes": floor_bytes(self.ladder[-1]) + CONTEXT_BYTES + NCCL_BYTES,
            "compute_s": sum(self.job.period.seconds),
            "alike": [asdict(tried) for _, tried in self.alike],
            "points": points, "seconds": round(time.process_time() - began, 1),
        }  # fmt: skip


def curves(asked: Settings) -> list[Curve]:
    """Return the curves of all models and clusters. Raises ValueError for fewer than two full nodes."""
    if partial := [n for n in asked.devices if n % Case.per_node or n < 2 * Case.per_node]:
        raise ValueError(f"must be two nodes of {Case.per_node} devices or more, got {partial[0]}")
    made = itertools.product(asked.models, asked.devices, asked.node_gbit)
    shared: dict[str, Any] = {"strategy": "fsdp", "precision": "bf16-fp32", "sequence": asked.sequence}
    return [
        Curve(Case(model, DEVICES[asked.device], devices, asked.batch, card_gbit=gbit / Case.cards, **shared), gbit,
              asked.tflops * 1e12)
        for model, devices, gbit in made
    ]  # fmt: skip


def gain(point: dict[str, Any], lever: str) -> float:
    """The baseline's step as a multiple of the lever's."""
    return float(point["base"]["step_s"] / point[lever]["step_s"])


def decides(point: dict[str, Any]) -> str:
    """The lever that gains most at a point, if any gains enough."""
    best = max(LEVERS, key=lambda lever: gain(point, lever))
    if gain(point, best) >= LEAST:
        return best
    return TOGETHER if gain(point, "all") >= LEAST else NOTHING


def page(document: dict[str, Any]) -> str:
    asked = document["settings"]
    return benchmarks.page(
        "scale", list_of_models=" and ".join(asked["models"]), devices=_list(asked["devices"]),
        sequence=asked["batch"] * asked["sequence"], least=LEAST - 1, tflops=asked["tflops"], slower=INTERFERENCE,
        answer=_answer(document), models="\n\n".join(_model(document, model) for model in asked["models"]),
    )  # fmt: skip


def _answer(document: dict[str, Any]) -> str:
    every = sum(len(curve["points"]) for curve in document["curves"])
    pairs = [(curve, point) for curve in document["curves"] for point in curve["points"] if point["base"]]
    seconds = [curve["seconds"] for curve in document["curves"]]
    rows: list[list[Any]] = []
    for what in (*LEVERS, TOGETHER, NOTHING):
        some = [(curve, point) for curve, point in pairs if decides(point) == what]
        if not some:
            rows.append([what, 0])
            continue
        alone, together = (
            _range([gain(point, name) for _, point in some]) if name in some[0][1] else "–" for name in (what, "all")
        )
        where = _where(Counter((curve["model"], curve["gbit"]) for curve, _ in some))
        rows.append([what, len(some), alone, together, where])
    told = table(["what gains most", "points", "its gain", "gain of all together", "where"], rows)
    budgets = len(document["settings"]["budgets_gib"])
    took = f"Planning a curve of {budgets} budgets takes {min(seconds):.0f} to {max(seconds):.0f} s of one core."
    return f"At {every - len(pairs)} of {every} points nothing fits. Of the other {len(pairs)}:\n\n{told}\n\n{took}"


def _where(found: Counter[tuple[str, float]]) -> str:
    """Models and rates of the network of the points, with their number."""
    models = dict.fromkeys(model for model, _ in found)
    rates = {m: ", ".join(f"{gbit:,g} ({n})" for (name, gbit), n in sorted(found.items()) if name == m) for m in models}
    return "; ".join(f"{model} at {told} Gbit/s" for model, told in rates.items())


def _model(document: dict[str, Any], model: str) -> str:
    curves = [curve for curve in document["curves"] if curve["model"] == model]
    about = f"{curves[0]['parameters'] / 1e9:.1f} · 10⁹ parameters. Without communication, and keeping all activations,"
    about += f" a step takes {curves[0]['compute_s']:.2f} s."
    return f"### {model}\n\n{about}\n\n![Step time over memory](scale-{model}.png)"


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return f"{low} ×" if low == high else f"{low} to {high} ×"


def _list(values: list[Any]) -> str:
    words = [f"{value:,}" for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def main() -> None:
    parser = benchmarks.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=DECODERS, default=Settings.models)
    parser.add_argument("--devices", nargs="+", type=int, default=Settings.devices, help="in all, eight a node")
    parser.add_argument("--node-gbit", nargs="+", type=float, default=Settings.node_gbit)
    parser.add_argument("--budgets-gib", nargs="+", type=float, default=Settings.budgets_gib)
    given = vars(parser.parse_args())
    out: Path = given.pop("out")
    chosen: dict[str, Any] = {name: tuple(value) for name, value in given.items()}
    settings, made = Settings(**chosen), list[dict[str, Any]]()
    for curve in curves(settings):
        made.append(told := curve.document(settings.budgets_gib))
        print(f"{told['model']} on {told['devices']} devices, {told['gbit']:g} Gbit/s: {told['seconds']} s", flush=True)
    document = {"schema": SCHEMA, "settings": asdict(settings), "curves": made}
    benchmarks.write(out / "scale.json", json.dumps(document, indent=1) + "\n")
    benchmarks.write_part(out, "scale", page(document))
    save(pictures.scale_map(document, decides), out / "scale.png")
    for model in settings.models:
        save(pictures.scale_curves(document, model), out / f"scale-{model}.png")


if __name__ == "__main__":
    main()
