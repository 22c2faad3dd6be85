"""A job's profile, if it need not measure one: named by its config, or kept from an equal job; and its plan."""

from __future__ import annotations

import dataclasses
import traceback
from pathlib import Path

import mdcs
from experiments.config.identity import identity, measures_recomputation
from experiments.config.schema import Config
from mdcs.planner.pipeline import lacks_recomputation, unsharded_bytes
from mdcs.planner.recompute import AUTO, Planned, is_measured
from mdcs.profile import cache
from mdcs.profile.cache import cache_folder
from mdcs.profile.link import Collectives, Link
from mdcs.profile.schema import Profile
from mdcs.sizes import MIB, Budget
from mdcs.telemetry.timeline import PREDICTED_RANK, RankTimeline, SlotMemory, Timeline


class Profiles:
    """The cache on disk, and the profiles that this program has measured. Jobs with the same profile compare fairly."""

    def __init__(self) -> None:
        self._measured: dict[str, Path] = {}

    def find(self, config: Config) -> Path | None:
        """The profile of an equal job, of this program, else of the cache if the config allows it; else None."""
        if not measures(config):
            return None
        keys = [key_of(config)]
        if not measures_recomputation(config):  # what was measured of recomputation is beside the rest
            keys.append(key_of(with_recomputation(config)))

        def serves(path: Path) -> bool:
            return (profile := cache.read(path)) is not None and not is_short(config, profile)

        found = next((path for key in keys if (path := self._measured.get(key)) is not None and serves(path)), None)
        if found is not None or not config.profile.cache or config.profile.refresh:
            return found
        return next((path for key in keys if serves(path := cache_folder() / f"{key}.json")), None)

    def adopt(self, config: Config, folder: Path) -> bool:
        """Remember the profile that another program has left in a folder. Return whether it is one of an equal job."""
        profile = cache.read(folder / "profile.json") if measures(config) else None
        if profile is None:
            return False
        about = {"cluster.ranks": str(profile.world), **profile.about}  # may be empty if written by hand
        if any(about.get(key, value) != value for key, value in identity(config).items()):
            return False
        self._measured.setdefault(key_of(config), folder / "profile.json")
        return True

    def leave(self, config: Config, folder: Path) -> None:
        """Copy the profile of an equal job, if it is known, into the folder for other programs, unless it has one."""
        found, target = self.find(config), folder / "profile.json"
        if found is not None and not target.exists() and (profile := cache.read(found)) is not None:
            cache.keep(profile, target)

    def keep(self, config: Config, folder: Path) -> None:
        """Remember the profile that a job has measured and left in its folder, if the file can be read."""
        profile = cache.read(folder / "profile.json") if measures(config) else None
        if profile is None:
            return
        asked = with_recomputation(config) if config.recompute == AUTO and is_measured(profile) else config
        key, path = key_of(asked), folder / "profile.json"
        self._measured = {k: p for k, p in self._measured.items() if p != path}  # overwritten by this job
        self._measured.setdefault(key, path)
        if config.profile.cache and any(slot.peak for slot in profile.slots):
            cache.keep(profile, cache_folder() / f"{key}.json")


def measures(config: Config) -> bool:
    return config.profile.measures and config.engine.plans


def is_short(config: Config, profile: Profile, *others: Budget) -> bool:
    """Return whether the config's budget, or one of others, needs recomputation that the profile does not have."""
    job = job_of(config, profile)
    return config.recompute == AUTO and any(lacks_recomputation(job, each) for each in (config.budget.value, *others))


def with_recomputation(config: Config) -> Config:
    return dataclasses.replace(config, recompute=Planned())


def known(config: Config) -> Profile | None:
    """The profile that the config names, with the config's link. None: it has to be measured."""
    if config.profile.path is None:
        return None
    profile = Profile.from_json(Path(config.profile.path).read_text(encoding="utf-8"))
    collectives = profile.collectives
    link = dataclasses.replace(profile.link, depth=collectives.in_flight(config.link.depth) or profile.link.depth)
    link, collectives = emulated(config) or (link, collectives)  # an emulated link replaces the measured one
    return dataclasses.replace(profile, link=link, collectives=collectives)


def emulated(config: Config) -> tuple[Link, Collectives] | None:
    """The emulated link with its algorithms; None for a real link."""
    link = config.link
    if link.name != "emulated":
        return None
    assert link.rate_gbit is not None and link.latency_us is not None
    backend, named = config.cluster.resolved_backend(), config.collectives.named
    collectives = Collectives.default(backend) if named is None else Collectives(named, backend)
    depth = collectives.in_flight(link.depth) or link.depth
    return Link.uniform(link.rate_gbit, link.latency_us, depth, emulated=True), collectives


def ranks(profile: Profile) -> str:
    compute = ", timed compute" if profile.about.get("model.compute") == "timed" else ""
    return f"{profile.world} {'emulated ' if 'emulated' in profile.about else ''}ranks{compute}"


def calibration_errors(profile: Profile) -> str:
    """One line: the prediction errors of the profile's calibration runs. Empty if none was."""
    runs = profile.calibration_runs
    off = (f"{name} {predicted / measured - 1:+.1%}" for name, (predicted, measured) in runs.items())
    return "predicted against measured in calibration runs: " + ", ".join(off) if runs else ""


def key_of(config: Config, *, elsewhere: bool = False) -> str:
    """The key by which equal jobs share a measured profile. elsewhere: for jobs that another machine will run
    (`identity`)."""
    return cache.key_of(identity(config, elsewhere=elsewhere))


def job_of(config: Config, profile: mdcs.Profile) -> mdcs.Job:
    """The planner's job for a config and a profile."""
    run = config.run
    crosses = run.cross_iteration and config.optimizer.clip_norm is None and run.precision != "fp16"
    return mdcs.Job(  # clipping, and fp16: all gradients together decide about an update
        profile, micro_steps=run.accumulation, cross_iteration=crosses, reserve=int(config.budget.reserve_mib * MIB),
    )  # fmt: skip


def make_plan(config: Config, job: mdcs.Job, floor: int) -> mdcs.Plan:
    """Make the plan of the config. `floor` is the smallest feasible budget of the job in bytes. Raises ValueError,
    InfeasibleBudget, which is one, and PlannerFault."""
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
    except Exception as error:
        for group, planner in (("strategy", config.strategy), ("scheduler", config.scheduler)):
            if where := _own_line(type(planner), error):
                target = f"{type(planner).__module__}.{type(planner).__qualname__}"
                raise PlannerFault(f"{group} {target}, {where}: {type(error).__name__}: {error}") from error
        raise


class PlannerFault(Exception):
    """Error: a strategy planner or a scheduler that is not of mdcs has failed. The message has its class and line."""


def _own_line(planner: type, error: Exception) -> str:
    """File and line of the planner's own code that an error has passed last. Empty if none, or for one of mdcs."""
    own = {cls.__module__ for cls in planner.__mro__ if cls.__module__.partition(".")[0] not in ("mdcs", "builtins")}
    frames = traceback.walk_tb(error.__traceback__)
    lines = [f"{f.f_code.co_filename}:{line}" for f, line in frames if f.f_globals.get("__name__") in own]
    return lines[-1] if lines else ""


def require_activations(why: str) -> None:
    """Raise ValueError for a reason why a profile has no activations. Empty: it has them."""
    if why:
        raise ValueError(f"a budget counts activations, and the profile does not have them: {why}")


def floor_of(config: Config, job: mdcs.Job) -> int:
    """The smallest feasible budget of the config's plans in bytes."""
    return mdcs.floor_bytes(job, config.recompute)


def budget_bytes(config: Config, floor: int | None, job: mdcs.Job | None) -> int | None:
    """The config's budget in bytes per rank. None for no limit, and for a share of a floor or job that is not known."""
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
    lanes = (RankTimeline(PREDICTED_RANK, tuple(replay.intervals)),)
    timeline = Timeline(replay.period_s, names, lanes, memory)
    (folder / "predicted_timeline.json").write_text(timeline.to_json(), encoding="utf-8")
