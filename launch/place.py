"""Find out whether torchrun or srun started this process as a rank, and its place among the other ranks."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.rank import AGENT_PID

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SIOCGIFADDR = 0x8915
_SRUN_PORTS = 20_000, 10_000, 101
"""First port, number of ports, and ports of a SLURM job. Each of a job's steps uses one of them, the same on all hosts.
Jobs of near numbers, which may share a node, have no port in common. 101 divides no power of 10: all ports are in use.
"""


class NoPlace(RuntimeError):
    """The starter has left out or misstated a value that a rank needs. The message is one line."""


@dataclass(frozen=True)
class Place:
    """The place of a rank: its number among the `world` ranks of all hosts, and (`local`) among those `beside` it on
    its host, where ranks meet, whether this process has to open that (`serves`), and the starter, torchrun or srun."""

    rank: int
    world: int
    local: int
    beside: int
    hosts: int
    address: str
    port: int
    serves: bool
    starter: str

    def environment(self) -> dict[str, str]:
        """Environment variables that torch needs, without MASTER_PORT."""
        said = {"RANK": self.rank, "WORLD_SIZE": self.world, "LOCAL_RANK": self.local, "LOCAL_WORLD_SIZE": self.beside}
        return {key: str(value) for key, value in said.items()} | {"MASTER_ADDR": self.address}


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return this process's place, or None if nobody started it as a rank. Raises NoPlace."""
    starter, number = _starter(environment), functools.partial(_number, environment)
    if not starter:
        return None
    if starter == "torchrun":
        rank, world, local, beside = map(number, _TORCHRUN[:4])
        hosts = number("GROUP_WORLD_SIZE", -(-world // beside))
        address, port = environment["MASTER_ADDR"], number("MASTER_PORT")
        serves = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return Place(rank, world, local, beside, hosts, address, port, serves, starter)
    rank, world, local = map(number, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"))
    hosts = number("SLURM_STEP_NUM_NODES", 1)
    first, *_ = expand(environment.get("SLURM_STEP_NODELIST", "")) or [""]
    beside = _number({"": re.split("[(,]", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))[0]}, "", world)
    start, count, most = _SRUN_PORTS
    port = start + (number("SLURM_JOB_ID") * most + number("SLURM_STEP_ID", 0)) % count
    return Place(rank, world, local, beside, hosts, resolved(first), port, rank == 0, starter)


def require_alone(program: str, environment: Mapping[str, str] = os.environ) -> None:
    """Exit with code 2 where this process is one of several ranks, each of which would run the whole program. Rank 0
    prints the reason, in one line."""
    starter = _starter(environment)
    rank, world = ("RANK", "WORLD_SIZE") if starter == "torchrun" else ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    if not starter or environment[world] == "1":
        return
    if environment[rank] == "0":
        why = f"{starter} has started it {environment[world]} times, and each would run all of it"
        print(f"{program}: {why}: start it once; programs that train or measure run across ranks", file=sys.stderr)
    sys.exit(2)


def _starter(environment: Mapping[str, str]) -> str:
    if AGENT_PID in environment:  # a rank of ours
        return ""
    if all(key in environment for key in _TORCHRUN):
        return "torchrun"
    return "srun" if _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1 else ""


def expand(nodes: str) -> list[str]:
    """The hosts of a SLURM list such as `n[1-3],m7`. A list with brackets is expanded by scontrol. Raises NoPlace."""
    if "[" not in nodes:
        return [name for name in nodes.split(",") if name]
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
        return done.stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoPlace(f"scontrol cannot list the hosts of {nodes}: {error}") from error


def resolved(host: str) -> str:
    """The IP address of `host`. Raises NoPlace where the name has no address; this machine is never taken instead."""
    if not host:
        raise NoPlace("SLURM_STEP_NODELIST is empty: the host of rank 0 is unknown")
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise NoPlace(f"host {host} has no address here: {error.strerror}") from error


def interface(place: Place) -> tuple[str, str]:
    """The network interface towards the first rank, and this host's address on it.

    Raises NoPlace where there is no route, or only this machine's loopback while ranks are on several hosts.
    """
    address = resolved(place.address)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, place.port))  # sends nothing: the kernel only chooses a route
            own = probe.getsockname()[0]
    except OSError as error:
        raise NoPlace(f"no route to {place.address}: {error.strerror}") from error
    if own.startswith("127.") and place.hosts > 1:
        what = "--master-addr" if place.starter == "torchrun" else "/etc/hosts"
        raise NoPlace(
            f"{place.address} is this machine's loopback ({own}), which the ranks of {place.hosts} hosts do not share: "
            f"give an address of its network in {what}, also where all of them run on one machine"
        )
    return next((name for _, name in socket.if_nameindex() if _address(name) == own), ""), own


def described(name: str) -> str:
    """Name of an interface, with its rate if the system knows it."""
    try:
        rate = int(Path(f"/sys/class/net/{name}/speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        rate = -1
    return f"{name} {rate / 1000:g} Gbit/s" if rate > 0 else name


def _address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))[20:24])
        except OSError:  # the interface has no address
            return ""


def _number(environment: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = environment.get(key, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise NoPlace(f"{key} must be a whole number, got {text or 'nothing'}") from None
