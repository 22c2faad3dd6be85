"""A network on one machine: a namespace per rank, joined by a bridge, behind a link of one rate in both directions.

The kernel enforces the rates: a token bucket (tbf) at both ends of each link limits all senders. Namespaces have no
names: one lasts while a process is in it or holds it open, and its links end with it. So nothing is left of a job whose
processes have ended, however they ended.
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
from typing import Any

INTERFACE = "eth0"
"""Name of the interface in every rank's namespace."""

_SUBNET = ipaddress.ip_network("10.77.0.0/16")  # cannot collide: nothing else is in these namespaces
# Token buckets. The burst (bytes that pass at once after a pause) holds a segment as TCP hands it over (64 KiB and
# headers), which would be cut otherwise, and the bytes that the rate carries in _BURST_SECONDS, until a timer has
# certainly fired. _LIMIT: bytes that may queue.
_BURST_BYTES, _BURST_SECONDS = 128 << 10, 0.5e-3
_LIMIT = "2mb"
_MTU = "9000"  # jumbo frames, as in cluster networks: headers take less than 1 % of the rate
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PLACES = os.pathsep.join(["/usr/sbin", "/sbin", "/usr/bin", "/bin"])  # a user's PATH need not have them
_TRY_SECONDS = 30.0
_QUIETLY: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
ROOT = Path(__file__).resolve().parent.parent


class NetworkError(RuntimeError):
    """Raised when this machine cannot make the network for this user. The message is one line."""


def addresses(ranks: int) -> list[str]:
    return [str(_SUBNET.network_address + 1 + rank) for rank in range(ranks)]


def refusal(rate_gbit: float) -> str:
    """Why a link of this rate is impossible here, in one line; empty if another process can make it."""
    if sys.platform != "linux":
        return f"needs Linux, this is {sys.platform}"
    for program in ("ip", "tc"):
        if _found(program) is None:
            return f"needs the program {program} (of iproute2)"
    attempt = [sys.executable, "-c", f"from launch import network; network.Network(1, {rate_gbit!r})"]
    try:
        done = subprocess.run(attempt, cwd=ROOT, timeout=_TRY_SECONDS, **_QUIETLY)
    except subprocess.TimeoutExpired:
        return f"gave no network within {_TRY_SECONDS:g} s"
    last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
    return "" if done.returncode == 0 else last.partition("NetworkError: ")[2] or last


def congestion_control() -> str:
    """TCP's congestion control here, and so in new namespaces; empty where it cannot be read."""
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class Network:
    """Network namespaces for `ranks` ranks, with their links, while this process or one started in them exists.

    Moves this process into a network namespace that holds the bridge; without privileges, first into a user namespace
    in which it is root, where the system allows that. Raises NetworkError.
    """

    def __init__(self, ranks: int, rate_gbit: float) -> None:
        _unshare_network()
        self._bridge = _namespace()
        self._ranks: list[int] = []
        _run(f"ip link add bridge mtu {_MTU} type bridge".split())
        _run(["ip", "link", "set", "bridge", "up"])
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
        """Run the block in the namespace of `rank`: processes that it starts are there."""
        _enter(self._ranks[rank])
        try:
            yield
        finally:
            _enter(self._bridge)


def port_commands(rank: int, namespace: str, rate_gbit: float) -> list[list[str]]:
    """Commands that link the namespace at this path to the bridge. Traffic to the rank passes at its rate."""
    port = f"port{rank}"
    return [
        f"ip link add {port} mtu {_MTU} type veth peer name {INTERFACE} mtu {_MTU} netns {namespace}".split(),
        shape_command(port, rate_gbit),
        f"ip link set {port} master bridge up".split(),
    ]


def rank_commands(address: str, rate_gbit: float) -> list[list[str]]:
    """Commands that set up a rank's interfaces in its namespace. Traffic from the rank passes at its rate."""
    return [
        ["ip", "link", "set", "lo", "up"],
        f"ip address add {address}/{_SUBNET.prefixlen} dev {INTERFACE}".split(),
        shape_command(INTERFACE, rate_gbit),
        f"ip link set {INTERFACE} up".split(),
    ]


def shape_command(device: str, rate_gbit: float) -> list[str]:
    rate = round(rate_gbit * 1e9)
    burst = max(_BURST_BYTES, round(rate / 8 * _BURST_SECONDS))
    return f"tc qdisc add dev {device} root tbf rate {rate}bit burst {burst}b limit {_LIMIT}".split()


def _run(command: Sequence[str], *kept: int) -> None:
    program = _found(command[0])
    if program is None:
        raise NetworkError(f"needs the program {command[0]} (of iproute2)")
    done = subprocess.run([program, *command[1:]], pass_fds=kept, **_QUIETLY)
    if done.returncode:
        words = " ".join(done.stderr.split()) or f"ended with {done.returncode}"
        raise NetworkError(f"{' '.join(command)}: {words}")


def _found(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path=_PLACES)


def _unshare_network() -> None:
    user, group = os.getuid(), os.getgid()
    try:
        _unshare(_CLONE_NEWNET)
        return
    except PermissionError:
        pass
    except OSError as error:
        raise NetworkError(f"cannot make a network namespace: {error.strerror}") from error
    try:
        _unshare(_CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        _unshare(_CLONE_NEWNET)
    except OSError as error:
        needs = "needs root, or a system that lets users make user namespaces with a network"
        raise NetworkError(f"{needs}: {error.strerror}") from error


def _namespace() -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _unshare(flags: int) -> None:
    _check(ctypes.CDLL(None, use_errno=True).unshare(flags))


def _enter(namespace: int) -> None:
    _check(ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET))


def _check(returned: int) -> None:
    if returned:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
