"""The identity of a measured profile: everything that it depends on. Jobs with equal identities share a profile.

A profile says its identity. So `profile.path=FILE` needs nothing else on the command line (`with_profile`).
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from experiments.config.schema import ClusterConfig, Config, ConfigError, LinkConfig
from experiments.config.targets import TARGET, load, plain
from launch import network
from mdcs.options import options, shown
from mdcs.planner.recompute import AUTO, KEEP
from mdcs.profile import cache
from mdcs.profile.schema import Profile

CODE = "code"  # last part of the key for the hash of a group's code
RECOMPUTATION = {"recomputation": "measured"}
_JOB_GROUPS = ("model", "data", "optimizer")
_MACHINES_OWN = ("congestion_control", "threads", "device")
_JOB_KEYS = ("run.precision", "run.grad_precision", "cluster.ranks")
_UNCHANGED = ("mdcs", "launch", "hydra_plugins", "experiments.config", "experiments.job")
"""Packages that run options but define none: `mdcs.profile.cache.MEASURED` is raised when they change."""


def code_of(cls: type) -> str:
    """Hash of the code of an option's class. A profile of a model whose code has changed no longer applies."""
    return cache.code_of(cls, without=_UNCHANGED)


def job_identity(config: Config) -> dict[str, str]:
    """The job's part of the identity, by full key: everything that units, slots and bytes depend on. For the class of
    an option: the hash of its code, and its fields, except those that :func:`mdcs.options.option` declares with
    ``profiled=False``."""
    out = {}
    for group in _JOB_GROUPS:
        made = getattr(config, group)
        left_out = {name for name, field in options(made).items() if not field.metadata.get("profiled", True)}
        described = plain(made) or {}
        out[group], out[f"{group}.{CODE}"] = str(described.pop(TARGET)), code_of(type(made))
        out |= {f"{group}.{name}": shown(value) for name, value in described.items() if name not in left_out}
    out |= {f"model.{name}": value for name, value in config.model.made_of.items()}
    for key in _JOB_KEYS:
        group, _, name = key.partition(".")
        out[key] = shown(getattr(getattr(config, group), name))
    return out


def machine_identity(config: Config) -> dict[str, str]:
    """The machine's part of the identity, by key: link, device and libraries. Measured times depend on them too."""
    link, cluster = config.link, config.cluster
    return {
        "link": f"{link.name} {shown(link.rate_gbit)} Gbit/s {shown(link.latency_us)} us {shown(link.depth)} in flight",
        "collectives": config.collectives.named or "", "shaped_link": cluster.shaped_link(),
        "congestion_control": network.congestion_control(), **hosts_identity(config),
        **({"emulated": f"rank {cluster.rank}"} if cluster.emulated else {}),
        **(RECOMPUTATION if measures_recomputation(config) else {}),
        "threads": str(cluster.resolved_threads()), "backend": cluster.resolved_backend(),
        "device": device_name(config), "iterations": str(config.run.profile_iterations),
        "torch": importlib.metadata.version("torch"), "python": platform.python_version(),
    }  # fmt: skip


def measures_recomputation(config: Config) -> bool:
    """Return whether a profile measures recomputation whatever the budget is."""
    return config.recompute not in (KEEP, AUTO)


def about(config: Config) -> dict[str, str]:
    """Identity and model name of a measured profile's job."""
    return identity(config) | {"model.name": config.model.name}


def hosts_identity(config: Config) -> dict[str, str]:
    cluster = config.cluster
    return {} if cluster.nodes is None else {"hosts": f"{cluster.hosts}", "network": cluster.network or ""}


def identity(config: Config, *, elsewhere: bool = False) -> dict[str, str]:
    """The whole identity of a measured profile, by key. elsewhere: leave out the keys that only the machine that
    measures can know."""
    left_out = _MACHINES_OWN if elsewhere else ()
    return job_identity(config) | {k: value for k, value in machine_identity(config).items() if k not in left_out}


def device_name(config: Config) -> str:
    """Name of the GPU, or of the processor with the number of cores that this process may use."""
    if config.cluster.device == "cuda":
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return cache.processor()


_EMULATED = re.compile(r"emulated (?P<rate_gbit>\S+) Gbit/s (?P<latency_us>\S+) us (?P<depth>\S+) in flight")


def with_profile(composed: DictConfig, said: Sequence[str], like: str | None = None) -> DictConfig:
    """Return the composed config with what `profile.path`, or else `like`, says and the overrides `said` do not.

    These are model, data, optimizer, precision, ranks, hosts, network and link. An experiment says the first four
    itself. A file that is missing or no profile changes nothing: the checks refuse it. Raises ConfigError for a profile
    of a class that is not here, e.g. because it has another name now.
    """
    path = OmegaConf.select(composed, "profile.path") or like
    try:
        profile = Profile.from_json(Path(str(path)).read_text(encoding="utf-8"))
    except (OSError, ValueError, AttributeError):
        return composed
    about = {"cluster.ranks": str(profile.world), **profile.about}
    keys = {each.partition("=")[0].lstrip("+~") for each in said}
    made = composed.copy()
    with read_write(made), open_dict(made):
        if "experiment" not in keys:
            for group in ("model", "data", "optimizer"):
                if group in about and group not in keys:
                    try:
                        made[group] = _option(group, made[group], about, keys)
                    except ConfigError as error:
                        told = f"{path} was measured with other code than is here: leave it out to measure anew"
                        raise ConfigError("profile.path", f"{told} ({error})") from error
            for key in ("run.precision", "run.grad_precision"):
                if key in about and key not in keys:
                    OmegaConf.update(made, key, about[key])
        if "link" not in keys:
            _take(made.link, "link", LinkConfig(), _link(about.get("link", "")), keys)
        cluster = {"ranks": int(about["cluster.ranks"])} if "cluster" in keys else _cluster(about, made.link.name)
        _take(made.cluster, "cluster", ClusterConfig(), cluster, keys)
    return made


def _take(group: DictConfig, name: str, usual: Any, values: dict[str, Any], keys: set[str]) -> None:
    """Set the values that nobody has said, neither an override nor a file."""
    for key, value in values.items():
        if f"{name}.{key}" not in keys and group[key] == getattr(usual, key):
            group[key] = value


def _option(group: str, given: DictConfig, about: dict[str, str], keys: set[str]) -> dict[str, Any]:
    own = {key.removeprefix(f"{group}."): text for key, text in about.items() if key.startswith(f"{group}.")}
    cls = load(group, about[group], own)
    told: Any = OmegaConf.to_container(given, resolve=True)
    same, declared = told.get(TARGET) == about[group], options(cls)
    values = {key: value for key, value in told.items() if same and key != "name"}
    profiled = {name for name, field in declared.items() if field.metadata.get("profiled", True)}
    known = {name: _value(text) for name, text in own.items() if name in profiled}
    if "name" in declared:
        known["name"] = own.get("name", cls.__name__)
    asked = {name: told[name] for name in told if any(f"{key}.".startswith(f"{group}.{name}.") for key in keys)}
    return values | known | asked | {TARGET: about[group]}


def _link(text: str) -> dict[str, Any]:
    """Keys of the group link, from the text of a profile's identity."""
    found = _EMULATED.fullmatch(text)
    return {"name": "emulated", **{key: _value(each) for key, each in found.groupdict().items()}} if found else {}


def _cluster(about: dict[str, str], link: str) -> dict[str, Any]:
    """Keys of the group cluster, from a profile's identity. An emulated link stands in for hosts and their network."""
    found: dict[str, Any] = {"ranks": int(about["cluster.ranks"])}
    if about.get("backend") == "nccl":
        found["device"] = "cuda"
    if "emulated" in about:
        return found | {"name": "emulated", "rank": int(about["emulated"].removeprefix("rank "))}
    if link == "emulated":
        return found
    nodes = int(about["hosts"]) if about.get("hosts") else None
    if rate := about.get("shaped_link"):
        return found | {"name": "shaped", "rate_gbit": float(rate.partition(" ")[0]), "nodes": nodes}
    return found | ({"name": "joined", "nodes": nodes, "network": about.get("network") or None} if nodes else {})


def _value(text: str) -> Any:
    try:
        return OverridesParser.create().parse_override(f"value={text}").value()
    except HydraException:
        return text
