"""The process between the launcher and the agents of a shaped cluster: `python -m launch.shaped RUN_DIR LAUNCHER_PID`.

    launcher → this process, which holds the network (`launch.network`) → an agent per node, in its namespace → its ranks

The launcher treats this process like the one agent of a plain cluster: it leads a process group, and it ends when the
ranks have ended, with 1 if one failed. When this process ends, the kernel kills agents and ranks, and the network
disappears.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from launch import orphans
from launch.network import Network, NetworkError

_POLL_SECONDS = 0.05
_REPORT_SECONDS = 3.0
"""Seconds that the other agents get when one has failed: its ranks need not be the first that failed."""


def main(folder: Path, launcher: int) -> int:
    """Run the job of `folder`/launch.json. Return 0 when every rank ended well, else 1."""
    job = json.loads((folder / "launch.json").read_text(encoding="utf-8"))
    orphans.die_with_parent(launcher)
    try:
        network = Network(job["nodes"], job["rate_gbit"])
    except NetworkError as error:
        print(error)  # the last line of agent.log is the launcher's reason
        return 1
    agents = []
    for node in range(job["nodes"]):
        with network.inside(node):
            command = [sys.executable, "-m", "launch.agent", str(folder), str(os.getpid()), str(node)]
            agents.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
    _wait(agents)
    for agent in agents:
        agent.kill()
    return int(any([agent.wait() for agent in agents]))


def _wait(agents: list[subprocess.Popen[bytes]]) -> None:
    """Wait until all agents have ended, or until _REPORT_SECONDS after one has failed."""
    failed = None
    while None in (codes := [agent.poll() for agent in agents]):
        now = time.monotonic()
        if any(codes):
            failed = failed or now
            if now - failed > _REPORT_SECONDS:
                return
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
