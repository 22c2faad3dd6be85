"""Ranks that somebody else starts: torchrun or srun for this program, or a launcher for jobs that run later."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.config.schema import ClusterConfig, Config, ConfigError


@dataclass(frozen=True)
class Started:
    """The ranks of this program.

    - starter: torchrun or srun.
    - ranks, hosts: how many.
    - network: the interface towards rank 0, with its rate.
    - run: runs a job on them, as `launch.elastic.run` does.
    """

    starter: str
    ranks: int
    hosts: int
    network: str
    run: Callable[..., Any]


here: Started | None = None
"""Set on rank 0 of ranks that torchrun or srun has started, while its program runs (`experiments.job.spmd`)."""


def adapted(config: Config, overrides: Sequence[str]) -> Config:
    """The config with the ranks of this program, if they are started already. Raises ConfigError if it asks for others.
    """
    if here is None:
        return config
    said = {override.partition("=")[0].lstrip("+") for override in overrides}
    if config.profile.path is not None:  # its ranks and network are compared with those that are here, not asked for
        usual = {
            name: getattr(ClusterConfig(), name)
            for name in ("ranks", "nodes", "network")
            if f"cluster.{name}" not in said
        }
        config = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, **usual))
    made = with_ranks(config, here.starter, here.ranks, here.hosts, here.network)
    require_as_asked(config, made, overrides)
    return made


def with_ranks(
    config: Config, starter: str, ranks: int, hosts: int, network: str | None, *, name: str = "joined"
) -> Config:
    """The config with the ranks of the starter, unchecked. Raises ConfigError for a cluster that starts its own ranks.
    """
    if config.cluster.name not in ("local", "joined"):
        raise ConfigError("cluster.name", f"must be local: {starter} starts the ranks; got {config.cluster.name}")
    several = hosts > 1
    cluster = dataclasses.replace(
        config.cluster,
        name=name,
        ranks=ranks,
        nodes=hosts if several else None,
        network=(config.cluster.network or network) if several else None,
    )
    return dataclasses.replace(config, cluster=cluster)


def require_as_asked(composed: Config, config: Config, overrides: Sequence[str] = ()) -> None:
    """Raise ConfigError if `composed` requests other ranks or hosts than `config` has.

    A default value requests nothing unless it is among the overrides.
    """
    said = {override.partition("=")[0].lstrip("+") for override in overrides}
    for name, there in (("ranks", config.cluster.ranks), ("nodes", config.cluster.nodes or 1)):
        asked = getattr(composed.cluster, name)
        if asked in (None, there) or asked == getattr(ClusterConfig(), name) and f"cluster.{name}" not in said:
            continue
        raise ConfigError(f"cluster.{name}", f"must be {there}, as many as are started; got {asked}")
