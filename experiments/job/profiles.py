"""Profiles that a job need not measure: named by its config, calculated, or kept by an equal job before it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import warnings
from pathlib import Path

from experiments.config.identity import identity
from experiments.config.schema import Config, ProfileConfig
from mdcs.profile.algorithms import Collectives
from mdcs.profile.analytic import Device, Network, Transformer, analytic_profile
from mdcs.profile.contents import SCHEMA, Profile
from mdcs.profile.link import Link

_MEASURED = 8
"""Raised when equal jobs measure something else than before: the runtime, the links or what is measured have changed."""


class Profiles:
    """The cache on disk, and the profiles that this program has measured: jobs that share one are compared fairly."""

    def __init__(self) -> None:
        self._measured: dict[str, Path] = {}

    def find(self, config: Config) -> Path | None:
        """The profile of an equal job: one of this program, or else one of the cache if the config lets it."""
        if config.profile.name != "measured" or config.profile.path is not None:
            return None
        key = key_of(config)
        if (measured := self._measured.get(key)) is not None and measured.exists():
            return measured
        cached = cache_folder() / f"{key}.json"
        return cached if config.profile.cache and not config.profile.refresh and _read(cached) else None

    def adopt(self, config: Config, folder: Path) -> bool:
        """Remember the profile that another program has left in a folder, if it was measured on the like of this."""
        profile = _read(folder / "profile.json") if measures(config) else None
        if profile is None:
            return False
        about = {"cluster.ranks": str(profile.world), **profile.about}  # one written by hand may say nothing of itself
        if any(about.get(key, value) != value for key, value in identity(config).items()):
            return False
        self._measured.setdefault(key_of(config), folder / "profile.json")
        return True

    def leave(self, config: Config, folder: Path) -> None:
        """Leave the profile of an equal job in the folder, for other programs, if it has none and there is one."""
        found, target = self.find(config), folder / "profile.json"
        if found is None or target.exists():
            return
        part = folder / f"profile.json.{os.getpid()}"
        shutil.copyfile(found, part)
        part.replace(target)

    def keep(self, config: Config, folder: Path) -> None:
        """Remember the profile that a job has measured and left in its folder, if it is whole."""
        profile = _read(folder / "profile.json")
        if config.profile.name != "measured" or config.profile.path is not None or profile is None:
            return
        key, path = key_of(config), folder / "profile.json"
        self._measured = {k: p for k, p in self._measured.items() if p != path}  # a folder has the profile of its last job
        self._measured.setdefault(key, path)
        has_memory = any(slot.peak for slot in profile.slots)
        if config.profile.cache and has_memory == config.cluster.measure_memory:
            written = cache_folder() / f"{key}.{os.getpid()}"
            try:
                cache_folder().mkdir(parents=True, exist_ok=True)
                written.write_text(profile.to_json(), encoding="utf-8")
                written.replace(cache_folder() / f"{key}.json")  # whole, whoever else writes it now
            except OSError as error:  # the job itself has ended well
                written.unlink(missing_ok=True)
                warnings.warn(f"the profile is not kept for later jobs: {error}", stacklevel=2)


def measures(config: Config) -> bool:
    """Whether a job needs a profile that is measured."""
    return config.profile.name == "measured" and config.profile.path is None and config.engine.plans


def cache_folder() -> Path:
    """`$MDCS_CACHE/profiles`, or that of the user: `~/.cache/mdcs/profiles`."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mdcs"
    return Path(os.environ.get("MDCS_CACHE") or home) / "profiles"


def known(config: Config) -> Profile | None:
    """The profile that the config names or describes, with the config's link; None: it has to be measured."""
    if config.profile.name == "analytic":
        return _analytic(config.profile, config.link.depth or 1)
    if config.profile.path is None:
        return None
    profile = Profile.from_json(Path(config.profile.path).read_text(encoding="utf-8"))
    collectives = profile.collectives
    link = dataclasses.replace(profile.link, depth=collectives.in_flight(config.link.depth) or profile.link.depth)
    link, collectives = emulated(config) or (link, collectives)  # is what the config says, whatever was measured
    return dataclasses.replace(profile, link=link, collectives=collectives)


def emulated(config: Config) -> tuple[Link, Collectives] | None:
    """The emulated link with its algorithms; None for a real one."""
    link = config.link
    if link.name != "emulated":
        return None
    assert link.rate_gbit is not None and link.latency_us is not None and link.depth is not None
    collectives = dataclasses.replace(
        Collectives.default(config.cluster.resolved_backend()), **config.collectives.named()
    )
    depth = collectives.in_flight(link.depth) or link.depth
    return Link.uniform(link.rate_gbit, link.latency_us, depth, emulated=True), collectives


def ranks(profile: Profile) -> str:
    """How many, in words."""
    compute = ", timed compute" if profile.about.get("model.compute") == "timed" else ""
    return f"{profile.world} {'emulated ' if 'emulated' in profile.about else ''}ranks{compute}"


def rehearsed(profile: Profile) -> str:
    """A line: how far predictions with this profile are from the steps of the plans that were rehearsed; empty if none was."""
    off = (f"{name} {predicted / measured - 1:+.1%}" for name, (predicted, measured) in profile.rehearsed.items())
    return "predicted against measured in rehearsal: " + ", ".join(off) if profile.rehearsed else ""


def _analytic(c: ProfileConfig, depth: int) -> Profile:
    values = {key: value for key, value in dataclasses.asdict(c).items() if value is not None}
    model = Transformer(**{f.name: values[f.name] for f in dataclasses.fields(Transformer)})
    device = Device(values["tflops"] * 1e12, values["efficiency"], values["memory_gbyte"] * 1e9)
    network = Network(
        values["nodes"], values["per_node"],
        values["intra_us"] * 1e-6, 1 / (values["intra_gbyte"] * 1e9),
        values["inter_us"] * 1e-6, 1 / (values["inter_gbyte"] * 1e9),
    )  # fmt: skip
    return analytic_profile(model, device, network, group=c.group, depth=depth)


def key_of(config: Config, *, elsewhere: bool = False) -> str:
    """What equal jobs share a measured profile by; elsewhere: jobs that another machine will run (`identity`)."""
    parts = identity(config, elsewhere=elsewhere) | {"schema": str(SCHEMA), "measured": str(_MEASURED)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


def _read(path: Path) -> Profile | None:
    try:
        return Profile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, AttributeError):
        return None
