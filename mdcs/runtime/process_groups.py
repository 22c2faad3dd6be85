"""The process groups of a run: messages must not mix with other communication of the ranks."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mdcs.profile.link import Collectives
from mdcs.runtime.communicator import Communicator, NodeCommunicator, backend_of
from mdcs.torch_compat import abort, nccl_keeps_buffers, without_autograd

SIDE_PASS = "a pass without gradients (no_grad), torch.autograd.grad, or a pass in no_sync()"
CALLS = (
    "a change of plans", "abandon()", "checkpoint()", "close()", "drain()", "evaluate()",
    "a forward pass in evaluate()", "full_parameters()", "full_parameters(writeback=True)",
    "load_optimizer_state_dict()", "load_state_dict()", "optimizer_state_dict()", "resume()", "state_dict()",
    "the broadcast of buffers", SIDE_PASS,
)  # fmt: skip
"""The collective calls of the training threads that :meth:`ProcessGroups.agree_on_call` can compare."""

_RANK_ZERO = {
    "optimizer_state_dict()": "optimizer.state_dict() gathers from all ranks, so never under `if rank == 0:` alone; "
}
"""By call, what a loop may have written instead of it."""

_WORDS = 4
_STEPS_AHEAD = timedelta(seconds=60)
"""Extra timeout: more than the host runs ahead of its device."""
_ABORT_SECONDS = 3.0
"""Seconds for which the end of a failed run waits for the abort of an NCCL group."""


class ProcessGroups:
    """New process groups of the ranks of ``group``; all None where there is one process.

    - ``message_group``: the plan's messages.
    - ``norm_group``: the finisher thread's collectives, if ``needs_control``. On NCCL it is ``message_group``: the
      collectives are on the device, between messages.
    - ``host_group``: the training thread's collectives, on gloo.
    - ``node_group``, ``replica_group``: this rank's node, and the ranks with its place in all nodes, once
      :meth:`connect_nodes` has made them.

    Collectives time out after ``timeout_s``.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, timeout_s: float, needs_control: bool
    ) -> None:
        self.world = dist.get_world_size(group) if dist.is_initialized() else 1
        self._own: list[dist.ProcessGroup] = []
        self._group, self._timeout, self._device = group, timedelta(seconds=timeout_s), device
        self.message_group = self.norm_group = self.host_group = None
        self.node_group: dist.ProcessGroup | None = None
        self.replica_group: dist.ProcessGroup | None = None
        if self.world == 1:
            return
        backend = backend_of(group, device)
        if backend == "nccl" and nccl_keeps_buffers():
            os.environ.setdefault("TORCH_NCCL_AVOID_RECORD_STREAMS", "1")  # read when a group is made
        self.message_group = self._new_for_messages()
        if needs_control:
            self.norm_group = self.message_group if backend == "nccl" else self._new(self._timeout)
        self.host_group = self._new(self._timeout)

    def connect_nodes(self, per_node: int) -> None:
        """Make the groups for ``per_node`` ranks per node, once. Collective."""
        if self.world > 1 and self.node_group is None:
            nodes = [list(range(first, first + per_node)) for first in range(0, self.world, per_node)]
            self.node_group = self._new_for_messages(nodes)
            self.replica_group = self._new_for_messages(list(zip(*nodes, strict=True)))

    def _new_for_messages(self, parts: Sequence[Sequence[int]] | None = None) -> dist.ProcessGroup:
        backend = backend_of(self._group, self._device)
        # NCCL's watchdog counts from the enqueue, some steps ahead of the device, and kills the process. With more time
        # for it, our own error, which names the step, comes first.
        made = self._new(self._timeout + _STEPS_AHEAD if backend == "nccl" else self._timeout, backend, parts)
        # Connect now: otherwise the first messages would, on NCCL for seconds, inside of a forward pass.
        dist.all_reduce(torch.zeros(1, device=self._device), group=made)
        return made

    def _new(
        self, timeout: timedelta, backend: str = "gloo", parts: Sequence[Sequence[int]] | None = None
    ) -> dist.ProcessGroup:
        """Make a group of each part of the ranks (None: of all); return the group of the part that has this rank."""
        ranks, mine = dist.get_process_group_ranks(self._group), dist.get_rank(self._group)
        everyone, chosen = self.world == dist.get_world_size(), list[dist.ProcessGroup]()
        for part in [range(self.world)] if parts is None else parts:
            if mine in part or everyone:
                group = dist.new_group(
                    [ranks[r] for r in part], timeout=timeout, backend=backend, use_local_synchronization=not everyone
                )
                chosen += [group] if mine in part else []
        # Where other ranks do not take part, torch names a group after its ranks: if it were destroyed, the next one
        # would find its old addresses in the store and connect to nobody. So it is never destroyed.
        self._own += chosen if everyone else []
        return chosen[0]

    def communicator(
        self, collectives: Collectives, in_node: bool, synchronous: bool
    ) -> Communicator | NodeCommunicator:
        """Return the collectives of messages, of the world or of this rank's node."""
        of = functools.partial(Communicator, collectives, synchronous=synchronous)
        return NodeCommunicator(of(self.node_group), of(self.replica_group)) if in_node else of(self.message_group)

    def new_group(self) -> dist.ProcessGroup | None:
        """Return one more group, on gloo, for a thread of its own; None without torch.distributed. Collective."""
        return self._new(self._timeout) if dist.is_initialized() else None

    @without_autograd()
    def agree_on_call(self, call: str, *numbers: int) -> list[tuple[int, ...]]:
        """Return every rank's (at most three) numbers for the same call, by rank. Collective.

        Every collective of the training threads begins with it, with the same number of bytes. Ranks that make
        different calls therefore get an error; mismatched collectives would end the process. Raises RuntimeError then,
        and when a rank is gone or does not call in time.
        """
        if self.world == 1:
            return [numbers]
        words = torch.zeros(self.world, _WORDS, dtype=torch.int64, device="cpu")
        padding = [0] * (_WORDS - 1 - len(numbers))
        words[dist.get_rank(self.host_group)] = torch.tensor([CALLS.index(call), *numbers, *padding], device="cpu")
        try:
            dist.all_reduce(words, group=self.host_group)  # a gather would allocate in the backend's threads
        except RuntimeError as e:
            late = f"did not within {self._timeout.total_seconds():g} s, or is gone"
            if call == SIDE_PASS:
                advice = f"this rank ran one, and another {late}: evaluate on every rank, not under `if rank == 0:`"
            else:
                advice = f"{_RANK_ZERO.get(call, '')}call it on every rank: one {late}"
            raise RuntimeError(f"{advice} ({e})") from e
        answers = [tuple(map(int, w)) for w in words.tolist()]
        for rank, (other, *_) in enumerate(answers):
            if CALLS[other] != call:
                raise RuntimeError(f"rank {rank} is in {CALLS[other]}: call the same on every rank")
        return [w[1 : 1 + len(numbers)] for w in answers]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank. Collective, after :meth:`agree_on_call`; same errors."""
        answers: list[Any] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(answers, value, group=self.host_group)
        return answers

    def destroy(self, *, failed: bool = False) -> None:
        """Close the groups made here, unless the loop has closed them. ``failed``: do not wait for other ranks."""
        while self._own:
            group = self._own.pop()
            if not dist.is_initialized():
                continue
            if failed and dist.get_backend(group) == "nccl":
                _abort(group)
            else:
                dist.destroy_process_group(group)


def _abort(group: dist.ProcessGroup) -> None:
    """Abort an NCCL group with messages in flight; destroying it would wait for missing ranks."""

    def end() -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # the run has failed already
            abort(group)

    thread = threading.Thread(target=end, name="mdcs-abort", daemon=True)
    thread.start()
    thread.join(_ABORT_SECONDS)


def why_ranks_cannot_continue(states: Sequence[tuple[int, ...]]) -> str | None:
    """Return why ranks with these states cannot continue together; None if they can.

    ``states``: by rank (step, progress, whether updates have begun), or (step,).
    """
    for rank, (step, *more) in enumerate(states):
        if any(more[1:]):
            return f"updates of step {step} have begun, or failed, on rank {rank}"
    steps = [step for step, *_ in states]
    if len(set(steps)) > 1:
        least, most = min(steps), max(steps)
        return (
            f"rank {steps.index(least)} is in step {least}, and rank {steps.index(most)} in step {most}: run equally "
            "many steps on every rank"
        )
    return None
