"""The process groups of a run, and the collectives of messages on them: neither mixes with others of the ranks.

The native family is the backend's own collectives; the other is rings of sends to the next rank, on gloo, under the
message's own tag: ranks may interleave the later steps of one message with the first step of the next in any order, as
collectives of a process group may not. A collective is a generator, resumed when the works that it yields are done.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mdcs.profile.link import Collectives, Kind
from mdcs.runtime.executor import Waitable
from mdcs.torch_compat import abort, cpu_backend, is_profiled, nccl_keeps_buffers, unrecorded, without_autograd

# torch 2.13 renamed both; the old names warn at every call there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_TAGS = 1 << 16  # more than messages are ever in flight


class PendingCollective:
    """A collective in flight, of ``count`` steps: its first step has started, :meth:`wait` runs the others."""

    def __init__(self, steps: Iterator[Sequence[Waitable]], count: int = 1) -> None:
        self._steps, self._left = steps, count - 1
        self._works = next(steps, [])

    @property
    def is_in_last_step(self) -> bool:
        """Return whether all its steps have started."""
        return self._left <= 0

    def wait(self, begun: Callable[[], None] = lambda: None) -> None:
        """Wait until it is done; call ``begun`` when its last step has started, unless that was its first. Raises the
        backend's RuntimeError when a peer is gone or a step times out.
        """
        while self._works:
            for work in self._works:
                work.wait()
            self._works = next(self._steps, [])
            self._left -= 1
            if self._left == 0:
                begun()


class Communicator:
    """The collectives of one process group (None: the default one). Every rank must call them in the same order.

    Buffers are flat [world · part]; rank r's part is the r-th. ``synchronous``: NCCL's run on the caller's stream.
    """

    def __init__(self, collectives: Collectives, group: dist.ProcessGroup | None, synchronous: bool = False) -> None:
        self.group = group
        self.world, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._is_gloo = collectives.backend == "gloo"
        self._async = not synchronous or self._is_gloo  # what is synchronous is on the caller's stream since torch 2.8
        # Call the backend directly: torch.distributed's wrappers cost more than gloo needs for a small message.
        self._backend: Any = cpu_backend(group) if collectives.algorithm == "ring" else None
        self._tags = itertools.count()

    def launch(
        self, kind: Kind, buffer: Tensor, scratch: Tensor | None = None, out: Tensor | None = None
    ) -> PendingCollective:
        """Start the collective of a message of this kind. A ring alone needs ``scratch`` [part] for sums.

        - AR: sum ``buffer`` over ranks, in place.
        - RS: write the sum over ranks of this rank's part to ``out`` [part], which may be a part of ``buffer``;
          overwrites that.
        - AG_F, AG_B: send every rank's part of ``buffer`` to all, in place.
        """
        parts = buffer.chunk(self.world)
        result = parts[self._rank] if kind is not Kind.RS or out is None else out
        is_ring = self._backend is not None
        steps = self._ring(kind, parts, scratch, result) if is_ring else self._native(kind, buffer, result)
        count = (self.world - 1) * (1 + (kind is Kind.AR)) if is_ring else 1
        # A message may be in flight when the profiler stops: gloo's ranges must not be open then.
        with unrecorded() if self._is_gloo and is_profiled() else contextlib.nullcontext():
            return PendingCollective(steps, count)

    def _native(self, kind: Kind, buffer: Tensor, part: Tensor) -> Iterator[Sequence[Waitable]]:
        """Run the backend's own collective, of which ``part`` is this rank's input or output."""
        if kind.is_gather:
            yield _works(_all_gather(buffer, part, group=self.group, async_op=self._async))
        elif kind is Kind.RS and not self._is_gloo:
            yield _works(_reduce_scatter(part, buffer, group=self.group, async_op=self._async))
        else:
            yield _works(dist.all_reduce(buffer, group=self.group, async_op=self._async))
            if kind is Kind.RS:  # gloo's own reduce-scatter makes a copy that outlives the call
                part.copy_(buffer.chunk(self.world)[self._rank])

    # A ring posts a receive before the send. gloo announces a posted receive on the same connection as its own data:
    # behind a send the announcement would wait, and two ranks would send to each other one after the other.

    def _ring(
        self, kind: Kind, parts: Sequence[Tensor], scratch: Tensor | None, out: Tensor
    ) -> Iterator[Sequence[Waitable]]:
        """Send each part once around the ring and sum on the way, from the rank behind its owner to the owner, which
        writes it to ``out``; then send each from its owner to all. RS is the first half, a gather the second."""
        tag, world = next(self._tags) % _TAGS, self.world
        for k in range(1, 1 if kind.is_gather else world):
            assert scratch is not None, "a ring needs scratch for a part"
            arriving = parts[(self._rank - k - 1) % world]
            yield self._exchange(parts[(self._rank - k) % world], scratch, tag)
            torch.add(arriving, scratch, out=arriving if k < world - 1 else out)
        for k in range(0 if kind is Kind.RS else world - 1):
            yield self._exchange(parts[(self._rank - k) % world], parts[(self._rank - k - 1) % world], tag)

    def _exchange(self, sent: Tensor, received: Tensor, tag: int) -> list[Waitable]:
        after, before = (self._rank + 1) % self.world, (self._rank - 1) % self.world
        return [self._backend.recv([received], before, tag), self._backend.send([sent], after, tag)]


class NodeCommunicator:
    """Collectives of strategies that shard within a node, ``inside`` it; ``across``: the same shard of all nodes."""

    def __init__(self, inside: Communicator, across: Communicator) -> None:
        self._inside, self._across = inside, across

    def launch(
        self, kind: Kind, buffer: Tensor, scratch: Tensor | None = None, out: Tensor | None = None
    ) -> PendingCollective:
        """Start the collective of a message of this kind, with tensors as in :meth:`Communicator.launch` [flat]: an
        all-gather within the node, or (RS_N) a reduce-scatter within it, then an all-reduce of ``out`` across nodes.
        """
        if kind.is_gather:
            return self._inside.launch(kind.plain, buffer)
        assert out is not None, "a reduce-scatter needs a place for its result"
        return PendingCollective(self._reduce(buffer, scratch, out), count=2)

    def _reduce(self, buffer: Tensor, scratch: Tensor | None, out: Tensor) -> Iterator[Sequence[Waitable]]:
        for communicator, kind, tensor in (self._inside, Kind.RS, buffer), (self._across, Kind.AR, out):
            part = None if scratch is None else scratch[: tensor.numel() // communicator.world]
            yield [communicator.launch(kind, tensor, part, out)]


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Return gloo or nccl, whichever carries tensors of ``device``; gloo for a single process without a group."""
    if not dist.is_initialized():
        return "gloo"
    by_device = dict(pair.split(":") for pair in dist.get_backend_config(group).split(",") if ":" in pair)
    return "gloo" if by_device.get(device.type, dist.get_backend(group)) == "gloo" else "nccl"


def _works(work: dist.Work | None) -> list[dist.Work]:
    return [] if work is None else [work]  # a synchronous collective has none


# ---- process groups

SIDE_PASS = "a pass without gradients (no_grad), torch.autograd.grad, or a pass in no_sync()"
CALLS = (
    "a change of plans", "abandon()", "checkpoint()", "close()", "drain()", "evaluate()",
    "a forward pass in evaluate()", "full_parameters()", "full_parameters(writeback=True)",
    "load_optimizer_state_dict()", "load_state_dict()", "optimizer_state_dict()", "resume()", "state_dict()",
    "the broadcast of buffers", SIDE_PASS,
)  # fmt: skip
"""The collective calls of the training threads that :meth:`ProcessGroups.agree_on_call` can compare."""

_STEPS_AHEAD = timedelta(seconds=60)
"""Extra timeout: more than the host runs ahead of its device."""
_ABORT_SECONDS = 3.0
"""Seconds for which the end of a failed run waits for the abort of an NCCL group."""


class ProcessGroups:
    """New process groups of the ranks of ``group``, which time out after ``timeout_s``; all None with one process.

    - ``message_group``: the plan's messages.
    - ``norm_group``: the finisher thread's, if ``needs_control``; on NCCL ``message_group``, between messages.
    - ``host_group``: the training thread's, on gloo.
    - ``node_group``, ``replica_group``: after :meth:`connect_nodes`, this rank's node and those with its place in all.
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

        Every collective of the training threads begins with it, with the same number of bytes: ranks that make
        different calls get an error, where mismatched collectives would end the process. Raises RuntimeError then, and
        when a rank is gone or does not call in time.
        """
        if self.world == 1:
            return [numbers]
        words = torch.zeros(self.world, 4, dtype=torch.int64, device="cpu")  # the call, and at most three numbers
        mine = torch.tensor([CALLS.index(call), *numbers], device="cpu")
        words[dist.get_rank(self.host_group), : len(mine)] = mine
        try:
            dist.all_reduce(words, group=self.host_group)  # a gather would allocate in the backend's threads
        except RuntimeError as e:
            late = f"did not within {self._timeout.total_seconds():g} s, or is gone"
            advice = f"call it on every rank: one {late}"
            if call == SIDE_PASS:
                advice = f"this rank ran one, and another {late}: evaluate on every rank, not under `if rank == 0:`"
            elif call == "optimizer_state_dict()":
                written = "optimizer.state_dict() gathers from all ranks, so never under `if rank == 0:` alone"
                advice = f"{written}; {advice}"
            raise RuntimeError(f"{advice} ({e})") from e
        for rank, (other, *_) in enumerate(answers := words.tolist()):
            if CALLS[other] != call:
                raise RuntimeError(f"rank {rank} is in {CALLS[other]}: call the same on every rank")
        return [tuple(answer[1 : len(mine)]) for answer in answers]

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
    """Return why ranks in states (step, progress, whether updates have begun) or (step,) cannot go on; None: they can.
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
