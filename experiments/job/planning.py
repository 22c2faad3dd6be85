"""A job's plan: what its config says of it, and the files that it is written to."""

from __future__ import annotations

from pathlib import Path

import mdcs
from experiments.config.schema import Config
from mdcs.measure.timeline import PREDICTED_RANK, RankTimeline, SlotMemory, Timeline
from mdcs.sizes import GIB, MIB


def job_of(config: Config, profile: mdcs.Profile) -> mdcs.Job:
    """What a plan is made for: the profile, and how the config takes its steps."""
    crosses = (
        config.run.cross_iteration
        and config.optimizer.clip_norm is None
        and config.run.precision != "fp16"  # whether its update is left out, all gradients say together
    )
    return mdcs.Job(profile, config.run.accumulation, crosses, int(config.budget.reserve_mib * MIB))


def make_plan(config: Config, job: mdcs.Job, floor: int) -> mdcs.Plan:
    """The plan of the config's planners under its budget. Raises ValueError where the budget counts what was not measured."""
    budget = budget_bytes(config, floor)
    if budget is not None and not any(slot.peak for slot in job.profile.slots):
        raise ValueError("a budget counts activations, and the profile has not measured them (see the warning above)")
    return mdcs.make_plan(job, config.strategy, config.scheduler, budget=budget, schedule_share=config.budget.schedule_share)


def budget_bytes(config: Config, floor: int | None) -> int | None:
    if config.budget.gib is not None:
        return int(config.budget.gib * GIB)
    if config.budget.over_floor is None:
        return None
    assert floor is not None, "over_floor is refused where there is no floor"
    return int(floor * (1 + config.budget.over_floor))


def write_plan(folder: Path, plan: mdcs.Plan) -> None:
    """The plan, and the replay of one period in the format of a measured timeline."""
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    replay = mdcs.replay(plan)
    names = tuple(plan.period.name(q) for q in range(plan.period.length))
    memory = tuple(SlotMemory(name, curve) for name, curve in zip(names, replay.curve, strict=True))
    timeline = Timeline(
        replay.period_s, names, (RankTimeline(PREDICTED_RANK, tuple(replay.intervals)),), memory
    )
    (folder / "predicted_timeline.json").write_text(timeline.to_json(), encoding="utf-8")
