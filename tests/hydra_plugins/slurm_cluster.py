"""A real SLURM of two nodes on this machine: `unshare -nm python -m tests.hydra_plugins.slurm_cluster FOLDER COMMAND …`.

Starts munge, a controller and two node daemons in a network namespace of their own, where the nodes have names and addresses,
runs the command there, and ends with its code; all daemons end too. Needs root and Debian's slurm-wlm and munge. Everything is
below FOLDER.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launch.rank import die_with_parent

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
NODES = ("n0", "n1")
ADDRESSES = ("10.78.0.1", "10.78.0.2")
_START_SECONDS = 60.0

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmctldParameters=enable_configless
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,sched_min_interval=0,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=45
InactiveLimit=0
KillWait=10
JobRequeue=1
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=debug Nodes={all} Default=YES MaxTime=60 State=UP OverSubscribe=NO
"""


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [name for name in PROGRAMS if _program(name) is None]
    return f"needs {', '.join(absent)} (Debian: slurm-wlm, munge)" if absent else ""


class Cluster:
    """Daemons, and the environment in which SLURM's commands speak to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.daemons = folder, dict[str, subprocess.Popen[bytes]]()
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("wb") as log:
            program = _program(command[0])
            assert program is not None
            self.daemons[name] = subprocess.Popen([program, *command[1:]], stdout=log, stderr=log, env=self.env)

    def says(self, *command: str) -> str:
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=False).stdout


@contextmanager
def cluster(folder: Path, *, cpus: int = 2, port: int = 36817) -> Iterator[Cluster]:
    """A cluster that is up; raises TimeoutError with its logs when it does not come up."""
    for name in ("state", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
    nodes = "\n".join(
        f"NodeName={node} NodeAddr={ADDRESSES[i]} NodeHostname={os.uname().nodename} Port={port + 1 + i} CPUs={cpus}"
        for i, node in enumerate(NODES)
    )
    text = CONF.format(folder=folder, host=os.uname().nodename, port=port, nodes=nodes, all=",".join(NODES))
    (folder / "slurm.conf").write_text(text)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    folder.chmod(0o755)
    made = Cluster(folder)
    try:
        made.start(
            "munged", "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed",
        )  # fmt: skip
        _until(lambda: (folder / "munge.socket").exists(), made)
        made.start("slurmctld", "slurmctld", "-D", "-c", "-f", str(folder / "slurm.conf"))
        for node in NODES:
            made.start(node, "slurmd", "-D", "-N", node, "-f", str(folder / "slurm.conf"))
        _until(lambda: made.says("sinfo", "-h", "-o", "%T").split() == ["idle"], made)
        yield made
    finally:
        with suppress(OSError):
            made.says("scancel", "--full", "--state=RUNNING", f"--user={os.environ.get('USER', 'root')}")
        for name in reversed(list(made.daemons)):
            made.daemons[name].terminate()
        for daemon in made.daemons.values():
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def processes_of(folder: Path, node: str, *, steps: bool = False) -> list[int]:
    """The daemon of a node, and all that it has started, however deep; with the daemons of its jobs' steps or without.

    Processes of another cluster whose node has the same name are not among them.
    """
    ours = {f"SLURMD_NODENAME={node}", f"SLURM_CONF={folder}/slurm.conf"}
    left = [pid for pid in _processes() if f"-N\0{node}\0-f\0{folder}/" in _said(pid, "cmdline")]
    for pid in left:
        left += [int(child) for child in _said(pid, f"task/{pid}/children").split()]
        left += [each for each in _processes() if ours <= {*_said(each, "environ").split("\0")} and each not in left]
    parents = {int(_said(pid, "stat").rpartition(")")[2].split()[1]) for pid in left if _said(pid, "stat")} if steps else set()
    return [*left, *(pid for pid in parents if _said(pid, "comm").startswith("slurmstepd") and pid not in left)]


def _processes() -> list[int]:
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]


def _said(pid: int, what: str) -> str:
    try:
        return Path(f"/proc/{pid}/{what}").read_text(errors="replace")
    except OSError:  # it has ended
        return ""


def _network(folder: Path) -> None:
    """Both nodes' addresses on one interface, and their names, for this process's namespaces."""
    commands = ["ip link set lo up", "ip link add eth0 type bridge", *(f"ip address add {a}/16 dev eth0" for a in ADDRESSES)]
    for command in (*commands, "ip link set eth0 up", "mount --make-rprivate /"):
        subprocess.run(command.split(), check=True)
    hosts = [f"127.0.0.1 localhost {os.uname().nodename}", *(" ".join(each) for each in zip(ADDRESSES, NODES, strict=True))]
    (folder / "hosts").write_text("\n".join(hosts) + "\n")
    subprocess.run(["mount", "--bind", str(folder / "hosts"), "/etc/hosts"], check=True)


def main(folder: Path, command: list[str]) -> int:
    die_with_parent(os.getppid())
    folder.mkdir(parents=True)
    _network(folder)
    with cluster(folder) as made:
        return subprocess.run(command, env=made.env, check=False).returncode


def _until(there, made: Cluster) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not there():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{file.name}: {file.read_text(errors='replace')[-1500:]}" for file in made.folder.glob("*.log"))
            raise TimeoutError(f"SLURM does not come up: {made.says('sinfo')}\n{logs}")
        time.sleep(0.2)


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
