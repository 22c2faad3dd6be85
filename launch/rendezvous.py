"""How the agents of a job find each other: a store on one address of the first node. All nodes know their index.

The stores of torch's own rendezvous listen on all interfaces of the machine, whatever address is requested, and its
dynamic rendezvous unpickle data from the store. Here the socket is bound before the store gets it, and nothing is
unpickled.
"""

from __future__ import annotations

import datetime
import os
import socket
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "mdcs"
_JOIN = datetime.timedelta(minutes=10)


def offer(address: str, port: int, *, node: int, nodes: int) -> None:
    """Register `BACKEND` with torch: agents of this process join as `node` of `nodes`.

    Node 0 serves the store on `address`.

    port: 0 takes a free port. Only this process knows it, so `nodes` must be 1. The ranks use the same store.
    """
    rendezvous_handler_registry.register(
        BACKEND, lambda parameters: Rendezvous(address, port, node, nodes, parameters.run_id)
    )


def serve(address: str, port: int = 0) -> tuple[TCPStore, int]:
    """A store that listens on `address` alone, and its port. Port 0 takes a free one. The store ends with this process.
    """
    listener = socket.create_server((address, port), backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return serve_on(listener.detach(), address, port), port


def serve_on(listener: int, address: str, port: int) -> TCPStore:
    """A store that listens on a socket that is already bound to `address` and `port`."""
    return TCPStore(address, port, None, True, _JOIN, wait_for_workers=False, master_listen_fd=listener)


def join(address: str, port: int) -> TCPStore:
    """The store that another process serves at this address. Waits until it is there."""
    return TCPStore(address, port, None, False, _JOIN, wait_for_workers=False)


def meet(seconds: float) -> None:
    """Wait until every rank of this rank's job has called this function.

    Afterwards a rank that started late is not mistaken for a lost one in a collective. Raises torch's DistStoreError, a
    RuntimeError, when a rank has not come within `seconds`.
    """
    store = join(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store.set(f"here/{os.environ['RANK']}", "")
    everyone = [f"here/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
    store.wait(everyone, datetime.timedelta(seconds=seconds))


class Rendezvous(RendezvousHandler):
    """torch's interface by which an agent gets its place in a job. The place is known beforehand.

    Raises OSError where the address is not this machine's, or the port is taken.
    """

    def __init__(self, address: str, port: int, node: int, nodes: int, run_id: str) -> None:
        self._node, self._nodes, self._run_id = node, nodes, run_id
        if node == 0:
            self._store, port = serve(address, port)
        else:
            self._store = join(address, port)
        self._place = RendezvousStoreInfo(address, port)

    def get_backend(self) -> str:
        """Name of the backend."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: the ranks use the agent's store. A store of their own would be served by rank 0 on all interfaces."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The node's place. It is the same at every call."""
        return RendezvousInfo(PrefixStore(self._run_id, self._store), self._node, self._nodes, self._place)

    def get_run_id(self) -> str:
        """Id of the job."""
        return self._run_id

    def is_closed(self) -> bool:
        """False: a node never joins later."""
        return False

    def set_closed(self) -> None:
        """Do nothing: a node never joins later."""

    def num_nodes_waiting(self) -> int:
        """0: a node never joins later."""
        return 0

    def shutdown(self) -> bool:
        """True: the store ends with the process."""
        return True


def shutdown_within(seconds: int) -> dict[str, Any]:
    """Return the option of torch's LaunchConfig that kills ranks so long after they were told to end, if it has one."""
    from torch.distributed.launcher.api import LaunchConfig

    return {"shutdown_timeout": seconds} if "shutdown_timeout" in LaunchConfig.__dataclass_fields__ else {}
