"""How the agents of a job find each other: a store on one address of the first, where all know who is who beforehand.

torch's own rendezvous serve their stores on all interfaces of the machine, whatever address they are asked for, and the
dynamic ones unpickle what they find there. Here the socket is bound before the store gets it, and nothing is unpickled.
"""

from __future__ import annotations

import datetime
import os
import socket

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
    """Let agents of this process that ask for `BACKEND` join as `node` of `nodes`; node 0 serves the store on `address`.

    port: 0 takes one that is free, which is only known here: then `nodes` is 1. The ranks use the same store.
    """
    rendezvous_handler_registry.register(
        BACKEND, lambda parameters: Rendezvous(address, port, node, nodes, parameters.run_id)
    )


def serve(address: str, port: int = 0) -> tuple[TCPStore, int]:
    """A store that listens on `address` alone, and its port: 0 takes one that is free. It goes with the process."""
    listener = socket.create_server((address, port), backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return serve_on(listener.detach(), address, port), port


def serve_on(listener: int, address: str, port: int) -> TCPStore:
    """A store that listens on a socket which somebody has bound there."""
    return TCPStore(address, port, None, True, _JOIN, wait_for_workers=False, master_listen_fd=listener)


def join(address: str, port: int) -> TCPStore:
    """The store that somebody serves there, once it is there."""
    return TCPStore(address, port, None, False, _JOIN, wait_for_workers=False)


def meet(seconds: float) -> None:
    """Wait until every rank of this rank's job has come here: one that started late is not taken for lost in a collective then.

    Raises torch's DistStoreError, a RuntimeError, when one has not come in time.
    """
    store = join(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store.set(f"here/{os.environ['RANK']}", "")
    everyone = [f"here/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
    store.wait(everyone, datetime.timedelta(seconds=seconds))


class Rendezvous(RendezvousHandler):
    """What torch's agent asks for its place in a job; raises OSError where the address is not this machine's, or taken."""

    def __init__(self, address: str, port: int, node: int, nodes: int, run_id: str) -> None:
        self._node, self._nodes, self._run_id = node, nodes, run_id
        if node == 0:
            self._store, port = serve(address, port)
        else:
            self._store = join(address, port)
        self._place = RendezvousStoreInfo(address, port)

    def get_backend(self) -> str:
        """Its name."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: the ranks need none of their own, which rank 0 would serve on all interfaces."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The node's place, which is the same every time."""
        return RendezvousInfo(PrefixStore(self._run_id, self._store), self._node, self._nodes, self._place)

    def get_run_id(self) -> str:
        """That of the job."""
        return self._run_id

    def is_closed(self) -> bool:
        """False: nobody joins later."""
        return False

    def set_closed(self) -> None:
        """Nothing: nobody joins later."""

    def num_nodes_waiting(self) -> int:
        """None: nobody joins later."""
        return 0

    def shutdown(self) -> bool:
        """True: the store goes with the process."""
        return True
