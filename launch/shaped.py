"""The process between the launcher and the ranks of a shaped cluster: `python -m launch.shaped PARENT`, a job on stdin.

    launcher → this process, which holds the network (`launch.network`) → `launch.forks` per node, in its namespace → its ranks

It leads a process group, and ends when the ranks have ended, with 1 if one failed. When this process ends, the kernel
kills the others, and the network disappears.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from launch import orphans
from launch.network import Network, NetworkError

_POLL_SECONDS = 0.05
_REPORT_SECONDS = 3.0
"""Seconds that the other nodes get when one has failed: its ranks need not be the first that failed."""


def main(launcher: int) -> int:
    """Run the job. Return 0 when every rank ended well, else 1."""
    orphans.die_with_parent(launcher)
    job = json.loads(sys.stdin.readline())
    try:
        network = Network(job["nodes"], job["rate_gbit"])
    except NetworkError as error:
        print(error)  # the last line of agent.log is the launcher's reason
        return 1
    nodes = []
    for node in range(job["nodes"]):
        with network.inside(node):
            command = [sys.executable, "-u", "-m", "launch.forks", str(os.getpid())]
            nodes.append(subprocess.Popen(command, stdin=subprocess.PIPE, text=True))
    for node, process in enumerate(nodes):
        assert process.stdin is not None
        process.stdin.write(json.dumps(job | {"node": node}) + "\n")
        process.stdin.close()
    _wait(nodes)
    for process in nodes:
        process.kill()
    return int(any([process.wait() for process in nodes]))


def _wait(nodes: list[subprocess.Popen[str]]) -> None:
    """Wait until all have ended, or until _REPORT_SECONDS after one has failed."""
    failed = None
    while None in (codes := [node.poll() for node in nodes]):
        now = time.monotonic()
        if any(codes):
            failed = failed or now
            if now - failed > _REPORT_SECONDS:
                return
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
