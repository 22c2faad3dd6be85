"""Hosts on this machine: `python -m tests.launch.hosts FOLDER COMMAND …` runs the command in each of two network namespaces.

`{node}` in it is the host's number, `{address}` the first one's address; each has a folder of its own, FOLDER/host{node}, to be
in, for its output (`log`) and for its cache. The host that FOLDER/vanish names is gone: its link first, so that nothing says
goodbye, then its processes. Exits with the code of the first that is left.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from launch.network import Network, addresses
from launch.rank import die_with_parent

HOSTS, RATE_GBIT = 2, 2.0


def main(folder: Path, command: list[str]) -> int:
    die_with_parent(os.getppid())
    network = Network(HOSTS, RATE_GBIT)
    hosts = []
    for node in range(HOSTS):
        own = folder / f"host{node}"
        own.mkdir()
        filled = [part.replace("{node}", str(node)).replace("{address}", addresses(1)[0]) for part in command]
        with network.inside(node), (own / "log").open("wb") as log:
            hosts.append(
                subprocess.Popen(
                    filled, cwd=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    env={**os.environ, "MDCS_CACHE": str(own / "cache")},
                )  # fmt: skip
            )
    gone: int | None = None
    try:
        while any(host.poll() is None for node, host in enumerate(hosts) if node != gone):
            if gone is None and (said := folder / "vanish").exists():
                gone = int(said.read_text())
                subprocess.run(["ip", "link", "set", f"port{gone}", "down"], check=True)
                end(hosts[gone].pid)
                (folder / "vanished").write_text(str(time.time()))
            time.sleep(0.05)
        return next(host.returncode for node, host in enumerate(hosts) if node != gone)
    finally:
        for host in hosts:
            end(host.pid)


def end(leader: int) -> None:
    """All that descends from `leader`, whatever sessions it is in: a host takes everything along."""
    left = [leader]
    for pid in left:
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                left += [int(child) for child in file.read_text().split()]
            except OSError:  # it has ended meanwhile
                pass
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
