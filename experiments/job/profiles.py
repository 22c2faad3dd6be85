"""Profiles that a job need not measure: named by its config, or kept from an equal job."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from experiments.config.identity import identity, measures_recomputation
from experiments.config.schema import Config
from experiments.job.planning import job_of
from mdcs.planner.pipeline import lacks_recomputation
from mdcs.planner.recompute import AUTO, Planned, is_measured
from mdcs.profile import cache
from mdcs.profile.cache import cache_folder
from mdcs.profile.link import Collectives, Link
from mdcs.profile.schema import Profile
from mdcs.sizes import Budget


class Profiles:
    """The cache on disk, and the profiles that this program has measured. Jobs with the same profile compare fairly."""

    def __init__(self) -> None:
        self._measured: dict[str, Path] = {}

    def find(self, config: Config) -> Path | None:
        """The profile of an equal job: one of this program, else one of the cache if the config allows it; else None.
        """
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
    """Return whether a job needs a measured profile."""
    return config.profile.measures and config.engine.plans


def is_short(config: Config, profile: Profile, *others: Budget) -> bool:
    """Return whether the config's budget, or one of others, needs recomputation that the profile does not have."""
    job = job_of(config, profile)
    return config.recompute == AUTO and any(lacks_recomputation(job, each) for each in (config.budget.value, *others))


def with_recomputation(config: Config) -> Config:
    """The config of a job whose profile has recomputation."""
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
    """The number and kind of a profile's ranks, in words."""
    compute = ", timed compute" if profile.about.get("model.compute") == "timed" else ""
    return f"{profile.world} {'emulated ' if 'emulated' in profile.about else ''}ranks{compute}"


def calibration_errors(profile: Profile) -> str:
    """One line: the prediction errors of the profile's calibration runs. Empty if none was."""
    off = (
        f"{name} {predicted / measured - 1:+.1%}" for name, (predicted, measured) in profile.calibration_runs.items()
    )
    return "predicted against measured in calibration runs: " + ", ".join(off) if profile.calibration_runs else ""


def key_of(config: Config, *, elsewhere: bool = False) -> str:
    """The key by which equal jobs share a measured profile.

    elsewhere: for jobs that another machine will run (`identity`).
    """
    return cache.key_of(identity(config, elsewhere=elsewhere))
