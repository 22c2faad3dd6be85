"""A network on one machine: a namespace per rank, joined by a bridge, each behind a link of one rate in both directions.

The rates are real ones: the kernel's token buckets (tbf) at both ends of each link let no more through, whoever
sends. As root this makes network namespaces, as anybody else a user namespace first, where the system allows that.

Namespaces have no names. They last while a process is in them or holds them open, and take their links along when
they go: nothing is left of a job whose processes have ended, however they did.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

INTERFACE = "eth0"
"""Of every rank: each has its own."""

_SUBNET = ipaddress.ip_network("10.77.0.0/16")  # nothing else is in these namespaces
# Of the token buckets. What passes at once after a pause: at least a segment as TCP hands it over (64 KiB and headers),
# or it would be cut, and what the rate carries until a timer is sure to have fired. And what may wait.
_BURST_BYTES, _BURST_SECONDS = 128 << 10, 0.5e-3
_LIMIT = "2mb"
_MTU = "9000"  # jumbo frames, as in networks of clusters: headers take less than 1 % of the rate
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PLACES = os.pathsep.join(["/usr/sbin", "/sbin", "/usr/bin", "/bin"])  # where users' PATH need not lead
_TRY_SECONDS = 30.0
ROOT = Path(__file__).resolve().parent.parent


class NetworkError(RuntimeError):
    """This machine has no such network for this user; the message is one line."""


def addresses(ranks: int) -> list[str]:
    """The address of each rank."""
    first = int(_SUBNET.network_address) + 1
    return [str(ipaddress.ip_address(first + rank)) for rank in range(ranks)]


def refusal(rate_gbit: float) -> str:
    """Why there can be no link of this rate here, in one line; empty if there can. Tries it, in a process of its own."""
    if sys.platform != "linux":
        return f"needs Linux, this is {sys.platform}"
    for program in ("ip", "tc"):
        if _found(program) is None:
            return f"needs the program {program} (of iproute2)"
    attempt = [sys.executable, "-c", f"from launch import network; network.Network(1, {rate_gbit!r})"]
    try:
        done = subprocess.run(
            attempt, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TRY_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"gave no network within {_TRY_SECONDS:g} s"
    last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
    return "" if done.returncode == 0 else last.partition("NetworkError: ")[2] or last


def congestion_control() -> str:
    """TCP's, in this process's network namespace; a new one has the machine's. Empty where there is none to read."""
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class Network:
    """Namespaces for `ranks` ranks with their links, which exist while this process does, or one started in them.

    Moves this process into a network namespace that holds the bridge, and unless it is privileged into a user
    namespace in which it is root. Raises NetworkError.
    """

    def __init__(self, ranks: int, rate_gbit: float) -> None:
        _unshare_network()
        self._bridge = _namespace()
        self._ranks: list[int] = []
        for command in bridge_commands():
            _run(command)
        for rank, address in enumerate(addresses(ranks)):
            _unshare(_CLONE_NEWNET)
            namespace = _namespace()
            self._ranks.append(namespace)
            _enter(self._bridge)
            for command in port_commands(rank, f"/proc/self/fd/{namespace}", rate_gbit):
                _run(command, namespace)
            with self.inside(rank):
                for command in rank_commands(address, rate_gbit):
                    _run(command)

    @contextmanager
    def inside(self, rank: int) -> Iterator[None]:
        """What is started inside is in the namespace of `rank`."""
        _enter(self._ranks[rank])
        try:
            yield
        finally:
            _enter(self._bridge)


# ---- the commands of iproute2


def bridge_commands() -> list[list[str]]:
    """What makes the bridge, in its own namespace."""
    return [["ip", "link", "add", "bridge", "mtu", _MTU, "type", "bridge"], ["ip", "link", "set", "bridge", "up"]]


def port_commands(rank: int, namespace: str, rate_gbit: float) -> list[list[str]]:
    """What links `namespace`, a path, to the bridge; what goes to the rank passes at its rate."""
    port = f"port{rank}"
    return [
        ["ip", "link", "add", port, "mtu", _MTU, "type", "veth", "peer", "name", INTERFACE, "mtu", _MTU, "netns", namespace],
        shape_command(port, rate_gbit),
        ["ip", "link", "set", port, "master", "bridge", "up"],
    ]


def rank_commands(address: str, rate_gbit: float) -> list[list[str]]:
    """What gives a rank its interfaces, in its namespace; what it sends passes at its rate."""
    return [
        ["ip", "link", "set", "lo", "up"],
        ["ip", "address", "add", f"{address}/{_SUBNET.prefixlen}", "dev", INTERFACE],
        shape_command(INTERFACE, rate_gbit),
        ["ip", "link", "set", INTERFACE, "up"],
    ]


def shape_command(device: str, rate_gbit: float) -> list[str]:
    """What lets `device` send `rate_gbit` Gbit/s and no more."""
    rate = round(rate_gbit * 1e9)
    burst = max(_BURST_BYTES, round(rate / 8 * _BURST_SECONDS))
    shape = ["tbf", "rate", f"{rate}bit", "burst", f"{burst}b", "limit", _LIMIT]
    return ["tc", "qdisc", "add", "dev", device, "root", *shape]


def _run(command: Sequence[str], *kept: int) -> None:
    program = _found(command[0])
    if program is None:
        raise NetworkError(f"needs the program {command[0]} (of iproute2)")
    done = subprocess.run(
        [program, *command[1:]], stdin=subprocess.DEVNULL, capture_output=True, text=True, pass_fds=kept, check=False
    )
    if done.returncode:
        words = " ".join(done.stderr.split()) or f"ended with {done.returncode}"
        raise NetworkError(f"{' '.join(command)}: {words}")


def _found(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path=_PLACES)


# ---- namespaces of this process


def _unshare_network() -> None:
    user, group = os.getuid(), os.getgid()
    try:
        _unshare(_CLONE_NEWNET)
        return
    except PermissionError:
        pass
    except OSError as error:
        raise NetworkError(f"gets no network namespace: {error.strerror}") from error
    try:
        _unshare(_CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        _unshare(_CLONE_NEWNET)
    except OSError as error:
        raise NetworkError(
            f"needs root, or a system that lets users make user namespaces with a network: {error.strerror}"
        ) from error


def _namespace() -> int:
    """This process's network namespace, held open."""
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _unshare(flags: int) -> None:
    _check(ctypes.CDLL(None, use_errno=True).unshare(flags))


def _enter(namespace: int) -> None:
    _check(ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET))


def _check(returned: int) -> None:
    if returned:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
