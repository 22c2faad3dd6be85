"""A job's plan: the settings in its config, and the files to which the plan is written."""

from __future__ import annotations

from pathlib import Path

import mdcs
from experiments.config.schema import Config
from mdcs.planner.pipeline import unsharded_bytes
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import PREDICTED_RANK, RankTimeline, SlotMemory, Timeline


def job_of(config: Config, profile: mdcs.Profile) -> mdcs.Job:
    """The planner's job for a config and a profile."""
    return mdcs.Job(
        profile,
        micro_steps=config.run.accumulation,
        cross_iteration=config.run.cross_iteration
        and config.optimizer.clip_norm is None
        and config.run.precision != "fp16",  # all gradients together decide whether an update is skipped
        reserve=int(config.budget.reserve_mib * MIB),
    )


def make_plan(config: Config, job: mdcs.Job, floor: int) -> mdcs.Plan:
    """Make the plan of the config. `floor` is the smallest feasible budget of the job in bytes.

    Raises ValueError, and InfeasibleBudget, which is one.
    """
    budget = budget_bytes(config, floor, job)
    if budget is not None and not any(slot.peak for slot in job.profile.slots):
        from mdcs.telemetry.memory_meter import unmeasured  # torch takes seconds

        require_activations(unmeasured(config.cluster.device) or "measure it anew")
    try:
        return mdcs.make_plan(
            job, config.strategy, config.scheduler, budget=budget, schedule_share=config.budget.schedule_share,
            activation_share=config.budget.activation_share, recompute=config.recompute,
        )  # fmt: skip
    except mdcs.InfeasibleBudget as error:
        raise error.in_words_of(config.budget.value, lambda: unsharded_bytes(job), "budget: ") from error


def require_activations(why: str) -> None:
    """Raise ValueError for a reason why a profile has no activations. Empty: it has them."""
    if why:
        raise ValueError(f"a budget counts activations, and the profile does not have them: {why}")


def floor_of(config: Config, job: mdcs.Job) -> int:
    """The smallest feasible budget of the config's plans in bytes."""
    return mdcs.floor_bytes(job, config.recompute)


def budget_bytes(config: Config, floor: int | None, job: mdcs.Job | None) -> int | None:
    """The config's budget in bytes per rank. None for no limit, and for a share of what is not known: floor, or DDP's
    job."""
    budget = config.budget.value
    if budget.over_floor is not None:
        return None if floor is None else budget.bytes(lambda: 0, lambda: floor)
    if budget.of_ddp is not None:
        return None if job is None else budget.bytes(lambda: unsharded_bytes(job), lambda: 0)
    return budget.size


def write_plan(folder: Path, plan: mdcs.Plan) -> None:
    """Write plan.json, and the replay of one period in the format of a measured timeline."""
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    replay = mdcs.replay(plan)
    names = tuple(plan.period.name(q) for q in range(plan.period.length))
    memory = tuple(SlotMemory(name, curve) for name, curve in zip(names, replay.curve, strict=True))
    timeline = Timeline(
        replay.period_s, names, (RankTimeline(PREDICTED_RANK, tuple(replay.intervals)),), memory
    )
    (folder / "predicted_timeline.json").write_text(timeline.to_json(), encoding="utf-8")
