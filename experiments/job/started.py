"""Configs of jobs whose ranks are started by others: torchrun, srun, or a launcher that hands jobs in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from experiments.config.schema import ClusterConfig, Config, ConfigError


def with_ranks(config: Config, starter: str, ranks: int, hosts: int, network: str | None) -> Config:
    """The config with the ranks of the starter, unchecked. Raises ConfigError for a cluster that starts its own ranks."""
    if config.cluster.name not in ("local", "joined"):
        raise ConfigError("cluster.name", f"must be local: {starter} starts the ranks; got {config.cluster.name}")
    several = hosts > 1
    cluster = dataclasses.replace(
        config.cluster,
        name="joined",
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
