"""The identity of a measured profile: everything that it depends on. Jobs with equal identities share a profile."""

from __future__ import annotations

import importlib.metadata
import platform

from experiments.config.schema import Config
from experiments.config.targets import TARGET, plain
from launch import network
from mdcs.options import options, shown
from mdcs.planner.recompute import AUTO, KEEP
from mdcs.profile import cache

CODE = "code"
"""Last part of the key for the hash of a group's code."""
_JOB_GROUPS = ("model", "data", "optimizer")
_MACHINES_OWN = ("congestion_control", "threads", "device")
_JOB_KEYS = ("run.precision", "run.grad_precision", "cluster.ranks")
_NOT_FOLLOWED = ("mdcs", "launch", "hydra_plugins", "experiments.config", "experiments.job")
"""Packages that run options but define none: `mdcs.profile.cache.MEASURED` is raised when they change."""


def code_of(cls: type) -> str:
    """Hash of the code of an option's class. A profile of a model whose code has changed no longer applies."""
    return cache.code_of(cls, _NOT_FOLLOWED)


def job_identity(config: Config) -> dict[str, str]:
    """The job's part of the identity, by full key: everything that units, slots and bytes depend on.

    For the class of an option: the hash of its code, and its fields, except those that :func:`mdcs.options.option`
    declares with ``profiled=False``.
    """
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
        "collectives": config.collectives.named or "",
        "shaped_link": cluster.shaped_link(),
        "congestion_control": network.congestion_control(),
        **hosts_identity(config),
        **({"emulated": f"rank {cluster.rank}"} if cluster.emulated else {}),
        **({"recomputation": "measured"} if measures_recomputation(config) else {}),
        "threads": str(cluster.resolved_threads()),
        "backend": cluster.resolved_backend(),
        "device": device_name(config),
        "iterations": str(config.run.profile_iterations),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
    }


def measures_recomputation(config: Config) -> bool:
    """Whether a profile measures recomputation whatever the budget is."""
    return config.recompute not in (KEEP, AUTO)


def about(config: Config) -> dict[str, str]:
    """Identity and model name of a measured profile's job."""
    return identity(config) | {"model.name": config.model.name}


def hosts_identity(config: Config) -> dict[str, str]:
    """Number of hosts and their network, for jobs with `cluster.nodes`; else empty."""
    cluster = config.cluster
    told = {"hosts": f"{cluster.hosts}", "network": cluster.network or ""}
    return {} if cluster.nodes is None else told


def identity(config: Config, *, elsewhere: bool = False) -> dict[str, str]:
    """The whole identity of a measured profile, by key.

    elsewhere: leave out the keys that only the machine that measures can know.
    """
    machine = machine_identity(config)
    if elsewhere:
        machine = {key: value for key, value in machine.items() if key not in _MACHINES_OWN}
    return job_identity(config) | machine


def device_name(config: Config) -> str:
    """Name of the GPU, or of the processor with the number of cores that this process may use."""
    if config.cluster.device == "cuda":
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return cache.processor()
