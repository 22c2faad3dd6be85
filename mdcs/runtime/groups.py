"""The process groups of a run: messages must not meet what else the ranks tell each other, on any rank."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mdcs.runtime.communicator import backend_of

CALLS = (
    "abandon()", "checkpoint()", "close()", "drain()", "evaluate()", "a forward pass in evaluate()", "full_parameters()",
    "full_parameters(writeback=True)", "gradients()", "load_optimizer_state_dict()", "load_state_dict()",
    "optimizer_state_dict()", "resume()", "sharded_state_dict()", "state_dict()", "the broadcast of buffers",
)  # fmt: skip
"""What the training threads may tell each other of: calls for all ranks."""

_WORDS = 4
_STEPS_AHEAD = timedelta(seconds=60)
"""More than the host is ahead of its device."""
_ABORT_SECONDS = 3.0
"""For which the end of a run that has failed waits for a group of NCCL's."""
_LOOP = "gloo_tcp_loop"
"""The name of the thread that a gloo group has for its connections."""


class Groups:
    """Of the ranks of ``group``: ``messages`` are the plan's, ``control`` the finisher thread's, ``talk`` the training thread's.

    Each is a new group, whose collectives give up after ``timeout_s``. On NCCL what control says is on the device, between
    messages, and so in their group. None for all where there is one process. ``needs_control``: there is something to say.
    With ``per_node`` ranks to a node messages have two groups more: ``node``, this rank's, and ``across``, the ranks of all nodes
    that have its place in theirs.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, timeout_s: float, needs_control: bool, per_node: int = 0
    ) -> None:
        self.world = dist.get_world_size(group) if dist.is_initialized() else 1
        self._own: list[dist.ProcessGroup] = []
        self._group, self._timeout = group, timedelta(seconds=timeout_s)
        self.messages = self.control = self.talk = self.node = self.across = None
        if self.world == 1:
            return
        timeout = timedelta(seconds=timeout_s)
        backend = backend_of(group, device)
        # NCCL's watchdog counts from when a message is enqueued, some steps ahead, and ends the process: the error that names the
        # step comes first.
        of_messages = timeout + _STEPS_AHEAD if backend == "nccl" else timeout
        if backend == "nccl" and _keeps_buffers_for_streams():
            os.environ.setdefault("TORCH_NCCL_AVOID_RECORD_STREAMS", "1")  # read when a group is made
        with _loops_that_wait():
            self.messages = self._new(group, of_messages, backend)
        self.control = None
        if needs_control:
            self.control = self.messages if backend == "nccl" else self._new(group, timeout)
        self.talk = self._new(group, timeout)
        if per_node:
            nodes = [list(range(first, first + per_node)) for first in range(0, self.world, per_node)]
            with _loops_that_wait():
                self.node = self._one_of(nodes, of_messages, backend)
                self.across = self._one_of([list(ranks) for ranks in zip(*nodes, strict=True)], of_messages, backend)

        if backend == "nccl":
            self._connect(device)

    def _connect(self, device: torch.device) -> None:
        """Have NCCL connect its groups now: else their first messages would, for seconds, inside of a forward pass."""
        for group in (self.messages, self.node, self.across):
            if group is not None:
                dist.all_reduce(torch.zeros(1, device=device), group=group)

    def _one_of(self, parts: list[list[int]], timeout: timedelta, backend: str) -> dist.ProcessGroup | None:
        """The part of the ranks that has this one."""
        ranks = dist.get_process_group_ranks(self._group)
        mine, own = dist.get_rank(self._group), None
        everyone = self.world == dist.get_world_size()  # see _new
        for part in parts:
            if mine in part or everyone:
                group = dist.new_group(
                    [ranks[r] for r in part], timeout=timeout, backend=backend, use_local_synchronization=not everyone
                )
                own = group if mine in part else own
        if everyone and own is not None:
            self._own.append(own)
        return own

    def _new(self, group: dist.ProcessGroup | None, timeout: timedelta, backend: str = "gloo") -> dist.ProcessGroup:
        if self.world == dist.get_world_size():
            new = dist.new_group(timeout=timeout, backend=backend)
            self._own.append(new)
        else:
            # Other ranks do not take part. Such a group is named after its ranks: once destroyed, the next one would
            # find its addresses in the store and connect to nobody. So it is left.
            ranks = dist.get_process_group_ranks(group)
            new = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
        return new

    def another(self) -> dist.ProcessGroup | None:
        """A group more, for a thread of its own; all ranks must call it."""
        return None if self.world == 1 else self._new(self._group, self._timeout)

    @torch.inference_mode(False)
    def tell(self, call: str, *numbers: int) -> list[tuple[int, ...]]:
        """Every rank's (at most three) numbers at the same call, by rank; all ranks must make it.

        Whatever the training threads do together begins so, with as many bytes at every call: ranks that are in different
        ones hear of it, where collectives that do not match end the process. Raises RuntimeError then, and when a rank is
        gone or does not come.
        """
        if self.world == 1:
            return [numbers]
        words = torch.zeros(self.world, _WORDS, dtype=torch.int64, device="cpu")
        own = [CALLS.index(call), *numbers, *[0] * (_WORDS - 1 - len(numbers))]
        words[dist.get_rank(self.talk)] = torch.tensor(own, device="cpu")
        try:
            dist.all_reduce(words, group=self.talk)  # a gather would take memory in the backend's threads
        except RuntimeError as e:
            raise RuntimeError(f"call it on every rank: one did not, or is gone ({e})") from e
        told = [tuple(map(int, w)) for w in words.tolist()]
        for rank, (other, *_) in enumerate(told):
            if CALLS[other] != call:
                raise RuntimeError(f"rank {rank} is in {CALLS[other]}: call the same on every rank")
        return [w[1 : 1 + len(numbers)] for w in told]

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, inside of a call that they have told each other of. Raises RuntimeError as it does."""
        answers: list[Any] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(answers, value, group=self.talk)
        return answers

    def destroy(self, *, failed: bool = False) -> None:
        """Close the groups that were made here, unless the loop has closed all. ``failed``: no other rank need take part."""
        while self._own:
            group = self._own.pop()
            if not dist.is_initialized():
                continue
            if failed and dist.get_backend(group) == "nccl":
                _abort(group)
            else:
                dist.destroy_process_group(group)


def _abort(group: dist.ProcessGroup) -> None:
    """Close an NCCL group that has messages in flight, in which other ranks may be missing: to destroy it would wait for them."""
    abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)

    def end() -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # there is an error already
            abort(group)

    thread = threading.Thread(target=end, name="mdcs-abort", daemon=True)
    thread.start()
    thread.join(_ABORT_SECONDS)


@contextlib.contextmanager
def _loops_that_wait() -> Iterator[None]:
    """Loops of the gloo groups that are made meanwhile take no core from a thread that runs: see SCHED_BATCH in sched(7).

    A loop passes over a connection that a sender is inside of, and is woken for it at once: with the sender's core taken, and
    none free, it turns in vain until the scheduler's next tick, for 4 ms.
    """
    before = _loops()
    yield
    for thread in _loops() - before:
        with contextlib.suppress(OSError):  # it is slower then, and that is all
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _loops() -> set[int]:
    """This process's threads that are gloo's loops, by the kernel's number; none where the kernel tells of none."""
    loops = set()
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            if (task / "comm").read_text().strip() == _LOOP:
                loops.add(int(task.name))
    return loops


def _keeps_buffers_for_streams() -> bool:
    """Whether this torch's NCCL group has the allocator keep what it sends until a stream has come by: before 2.8 it did."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return (major, minor) < (2, 8)
