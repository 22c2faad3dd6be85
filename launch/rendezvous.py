"""The store by which ranks find each other: it listens on one address.

Stores that torch's own rendezvous makes listen on all interfaces of the machine, whatever address is requested. Here
the socket is bound before the store gets it.
"""

from __future__ import annotations

import datetime
import os
import socket

from torch.distributed import TCPStore

_JOIN = datetime.timedelta(minutes=10)


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
