"""One host's ranks of a SLURM job: `srun --ntasks-per-node 1 python -m launch.node RANKS MODULE [ARGUMENT …]`.

Every host's agent starts RANKS processes of MODULE. All of them are ranks of one world (`launch.place`). The agents
meet on the job's first host, at a port computed from the job's number. Outside of SLURM this host is the only one.
"""

from __future__ import annotations

import os
import sys
import tempfile

from launch import orphans, preemption, rendezvous
from launch.place import NoPlace, expand, resolved

_FIRST_PORT, _PORTS = 30_000, 2_500
_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 15
"""Seconds that ranks get to finish their work when the job is ended from outside."""


def main(ranks: int, module: str, arguments: list[str]) -> int:
    """Run this host's ranks to their end. Return 0 when every rank ended well, else 1. Raises NoPlace."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    orphans.die_with_parent(os.getppid())
    node, hosts = host()
    address = resolved(hosts[0]) if len(hosts) > 1 else "127.0.0.1"
    if len(hosts) > 1 and address.startswith("127."):
        raise NoPlace(f"host {hosts[0]} is {address} here, the loopback, which {len(hosts)} hosts do not share")
    job = int(os.environ.get("SLURM_JOB_ID", 0))
    port = _FIRST_PORT + job % _PORTS if len(hosts) > 1 else 0
    rendezvous.offer(address, port, node=node, nodes=len(hosts))
    with tempfile.TemporaryDirectory() as logs:
        config = LaunchConfig(
            min_nodes=len(hosts),
            max_nodes=len(hosts),
            nproc_per_node=ranks,
            rdzv_backend=rendezvous.BACKEND,
            local_addr=address if node == 0 else None,
            run_id=f"{job}.{os.environ.get('SLURM_RESTART_COUNT', 0)}",
            max_restarts=0,
            monitor_interval=_POLL_SECONDS,
            **rendezvous.shutdown_within(_CLOSE_SECONDS),
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            signals_to_handle="SIGINT" if preemption.expected() else "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
        except (ChildFailedError, SignalException):  # the ranks have reported the reason
            return 1
    return 0


def host() -> tuple[int, list[str]]:
    """Index of this host among the job's hosts, and the names of all hosts."""
    if "SLURM_JOB_ID" not in os.environ:
        return 0, [""]
    hosts = expand(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", ""))
    return int(os.environ.get("SLURM_NODEID", 0)), hosts


if __name__ == "__main__":
    if preemption.expected():
        preemption.ignore()
    try:
        sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
    except NoPlace as error:
        sys.exit(str(error))
