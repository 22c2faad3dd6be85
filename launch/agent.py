"""Process between launcher and ranks: torch's elastic agent, `python -m launch.agent RUN_DIR PARENT [NODE]`.

Reads `launch.json`, runs the ranks to their end without restarts, and writes the exit code of each failed rank to
`agent.json`. The launcher (`launch.elastic`) decides what a failure means; it also sees the reasons that ranks leave.
With NODE, an agent runs the ranks of that node only; other agents run the other nodes (`launch.shaped`).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from launch import network, orphans
from launch.rank import AGENT_PID
from launch.reserved import ReservedFile

_POLL_SECONDS = 0.05
_CLOSE_SECONDS = 2
_REPORT_BYTES = 4 << 10
LOOPBACK = "127.0.0.1"
_PORT = 29500  # of the rendezvous; free, because the network namespace is the job's own


def main(folder: Path, parent: int, node: int | None) -> int:
    """Run the job of `folder`/launch.json, or the part of `node`. Return 0 when every rank ended well, else 1."""
    job = json.loads((folder / "launch.json").read_text(encoding="utf-8"))
    orphans.die_with_parent(parent)

    # Import torch only now: before the line above, a launcher that dies would leave this process behind.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from launch import rendezvous

    os.environ.update(job["env"])  # for the ranks only; this process started without, e.g. its memory is not measured
    os.environ[AGENT_PID] = str(os.getpid())
    agents = 1 if node is None else job["nodes"]  # the first agent serves the store, the others use it
    addresses = [LOOPBACK] if node is None else network.addresses(agents)
    rendezvous.offer(addresses[0], 0 if node is None else _PORT, node=node or 0, nodes=agents)
    with tempfile.TemporaryDirectory() as logs:
        config = LaunchConfig(
            min_nodes=agents,
            max_nodes=agents,
            nproc_per_node=job["ranks"] // agents,
            rdzv_backend=rendezvous.BACKEND,
            local_addr=addresses[node or 0],
            run_id=job["id"],
            max_restarts=0,
            monitor_interval=_POLL_SECONDS,
            **rendezvous.shutdown_within(_CLOSE_SECONDS),
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        rank = ("-m", "launch.rank", str(folder), job["module"], *job["arguments"])
        exit_codes: dict[int, int] = {}
        try:
            elastic_launch(config, sys.executable)("-u", *rank)
        except ChildFailedError as error:
            exit_codes = {int(rank): failure.exitcode for rank, failure in error.failures.items()}
    report_of(folder, node).write(json.dumps({"schema": 1, "exit_codes": exit_codes}))
    return 1 if exit_codes else 0


def report_of(folder: Path, node: int | None) -> ReservedFile:
    """The file in which an agent leaves the exit codes of its ranks."""
    return ReservedFile(folder / ("agent.json" if node is None else f"agent{node}.json"), _REPORT_BYTES)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else None))
