"""The process between the launcher and the ranks: torch's elastic agent, `python -m launch.agent RUN_DIR`.

Reads `launch.json`, runs the ranks to their end with no restarts, and writes each failed rank's exit code
to `agent.json`. What a failure means is decided by the launcher (`launch.elastic`), which also sees the
ranks' own reasons.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from launch import orphans
from launch.rank import AGENT_PID

_POLL_SECONDS = 0.05
_CLOSE_SECONDS = 2


def main(folder: Path) -> int:
    """Run the job described by `folder`/launch.json; 0 when every rank ended well."""
    job = json.loads((folder / "launch.json").read_text(encoding="utf-8"))
    orphans.die_with_parent(job["parent"])

    # Imported only now: until the line above a launcher that died would leave this process behind.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.update(job["env"])  # for the ranks only: this process has started without, e.g. unmeasured
    os.environ[AGENT_PID] = str(os.getpid())
    with tempfile.TemporaryDirectory() as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=job["ranks"],
            run_id=job["id"],
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # this agent serves the rendezvous, on a port that was free
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=_POLL_SECONDS,
            shutdown_timeout=_CLOSE_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        rank = ("-m", "launch.rank", str(folder), job["module"], *job["arguments"])
        exit_codes: dict[int, int] = {}
        try:
            elastic_launch(config, sys.executable)("-u", *rank)
        except ChildFailedError as error:
            exit_codes = {int(rank): failure.exitcode for rank, failure in error.failures.items()}
    temporary = folder / "agent.json.part"
    temporary.write_text(json.dumps({"schema": 1, "exit_codes": exit_codes}), encoding="utf-8")
    temporary.replace(folder / "agent.json")
    return 1 if exit_codes else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
