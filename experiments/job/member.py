"""A program whose ranks torchrun or srun has started: rank 0 runs the program, the other ranks run jobs for it.

Only rank 0 composes configs, and its folder is the job's folder. The other ranks get the resolved config and a
temporary folder; their logs are kept in the job's folder.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.config import checks, started
from experiments.config.schema import ClusterConfig
from experiments.config.started import Started
from experiments.job import resolved
from launch import orphans, preemption
from launch.elastic import Cluster, Outcome
from launch.place import NoPlace, Place, described, place
from launch.serving import Gone, Server

if TYPE_CHECKING:
    from launch.joined import Membership  # torch takes seconds


def take_part(place: Place, program: Callable[[], int]) -> int:
    """Run the program as rank 0, or the jobs of another rank. Return the exit code, which is the same on all ranks."""
    if place.rank:
        return serve(place)
    orphans.die_with_parent(os.getppid())
    from launch.joined import Membership

    if not preemption.expected():
        signal.signal(signal.SIGTERM, preemption.terminate)
    try:
        with Membership(place) as member:
            return _lead(member, program)
    except NoPlace as error:
        print(f"rank 0: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 130


def serve(place: Place) -> int:
    """Run jobs as this rank, which is this process. Return the program's exit code."""
    server = Server(("-m", "experiments.job.member"))
    if server.added is None:  # before torch is imported: what the environment probably is for jobs
        cluster = ClusterConfig(name="joined", ranks=place.world, nodes=place.hosts)
        server.start_again(resolved.environment(cluster), 0)
    try:
        return server.serve(place, _prepare)
    except (NoPlace, Gone) as error:
        print(f"rank {place.rank}: {error}", file=sys.stderr, flush=True)
        return 1


def _prepare(folder: Path, payload: str, environment: Mapping[str, str]) -> dict[str, str]:
    (folder / "config.yaml").write_text(payload, encoding="utf-8")
    return resolved.environment(checks.load(folder / "config.yaml").cluster, environment)


def _lead(member: Membership, program: Callable[[], int]) -> int:
    def start(
        folder: Path, cluster: Cluster, env: Mapping[str, str], *, module: str, arguments: Sequence[str], on_tick: Any
    ) -> Outcome:
        config = checks.load(folder / "config.yaml")
        payload = checks.as_yaml(dataclasses.replace(config, profile=dataclasses.replace(config.profile, path=None)))
        return member.run(
            folder, cluster, env, payload=payload, module=module, arguments=arguments[1:], on_tick=on_tick
        )  # without the folder: each rank adds its own

    place = member.place
    started.here = Started(place.starter, place.world, place.hosts, described(member.interface), start)
    try:
        member.exit_code = program()
        return member.exit_code
    finally:
        started.here = None


if __name__ == "__main__":
    joined = place()
    assert joined is not None
    sys.exit(serve(joined))
