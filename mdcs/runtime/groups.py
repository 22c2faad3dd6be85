"""The process groups of a run: messages must not meet what else the ranks tell each other, on any rank."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mdcs.runtime.communicator import backend_of


class Groups:
    """Of the ranks of ``group``: ``messages`` are the plan's, ``control`` the finisher thread's, ``talk`` the training thread's.

    On gloo each is a new group, whose collectives give up after ``timeout_s``; on NCCL messages take ``group`` itself. None
    for all where there is one process. ``needs_control``: the finisher has something to say.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout_s: float, needs_control: bool) -> None:
        self.world = dist.get_world_size(group) if dist.is_initialized() else 1
        self._own: list[dist.ProcessGroup] = []
        self._group, self._timeout = group, timedelta(seconds=timeout_s)
        self.messages = self.control = self.talk = None
        if self.world == 1:
            return
        timeout = timedelta(seconds=timeout_s)
        self.messages = self._new(group, timeout) if backend_of(group, device) == "gloo" else group
        self.control = self._new(group, timeout) if needs_control else None
        self.talk = self._new(group, timeout)

    def _new(self, group: dist.ProcessGroup | None, timeout: timedelta) -> dist.ProcessGroup:
        if self.world == dist.get_world_size():
            new = dist.new_group(timeout=timeout, backend="gloo")
            self._own.append(new)
        else:
            # Other ranks do not take part. Such a group is named after its ranks: once destroyed, the next one would
            # find its addresses in the store and connect to nobody. So it is left.
            ranks = dist.get_process_group_ranks(group)
            new = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
        return new

    def another(self) -> dist.ProcessGroup | None:
        """A group more, for a thread of its own; all ranks must call it."""
        return None if self.world == 1 else self._new(self._group, self._timeout)

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, by rank; all ranks must call it. Raises RuntimeError when one is gone or does not."""
        if self.world == 1:
            return [value]
        answers: list[Any] = [None] * self.world
        dist.all_gather_object(answers, value, group=self.talk)
        return answers

    def destroy(self) -> None:
        """Close the groups that were made here."""
        while self._own:
            dist.destroy_process_group(self._own.pop())
