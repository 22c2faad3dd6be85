"""The groups of a run: made connected, and ended without a wait for ranks that are gone."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mdcs.runtime import communicator
from mdcs.runtime.communicator import ProcessGroups, why_ranks_cannot_continue


@pytest.mark.parametrize("aborts", [True, False])
def test_a_run_that_has_failed_waits_for_none_of_nccl_s_groups(monkeypatch: pytest.MonkeyPatch, aborts: bool):
    """To destroy one waits for the messages that are in flight, in which ranks may be missing."""
    released, aborted = threading.Event(), []

    def destroy(group: str) -> None:
        assert released.wait(60)

    def abort(group: str) -> None:
        aborted.append(group)
        assert aborts or released.wait(60)

    for owner, name, value in (
        (dist, "is_initialized", lambda: True),
        (dist, "get_backend", str),
        (dist, "destroy_process_group", destroy),
        (dist.distributed_c10d, "_abort_process_group", abort),
        (communicator, "_ABORT_SECONDS", 60.0 if aborts else 0.01),
    ):
        monkeypatch.setattr(owner, name, value)
    own = ProcessGroups.__new__(ProcessGroups)
    own._own = ["nccl", "nccl"]  # type: ignore[list-item]
    own.destroy(failed=True)
    released.set()
    assert aborted == ["nccl", "nccl"]

    own._own = ["nccl", "gloo"]  # type: ignore[list-item]
    own.destroy()
    assert len(aborted) == 2


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_groups_of_messages_are_connected_when_they_are_made(monkeypatch: pytest.MonkeyPatch, backend: str):
    """Else they are inside of a forward pass. NCCL's watchdog waits longer than the error that names the step."""
    made: list[tuple[str, float]] = []
    connected: list[int] = []

    def new_group(ranks: object = None, *, timeout: timedelta, backend: str, **options: bool) -> int:
        made.append((backend, timeout.total_seconds()))
        return len(made)

    for owner, name, value in (
        (dist, "is_initialized", lambda: True),
        (dist, "get_world_size", lambda group=None: 4),
        (dist, "get_process_group_ranks", lambda group: [0, 1, 2, 3]),
        (dist, "get_rank", lambda group: 1),
        (dist, "new_group", new_group),
        (dist, "all_reduce", lambda tensor, group: connected.append(group)),
        (communicator, "backend_of", lambda group, device: backend),
    ):
        monkeypatch.setattr(owner, name, value)
    own = ProcessGroups(None, torch.device("cpu"), 20.0, needs_control=True)
    for _ in range(2):
        own.connect_nodes(2)
    if backend == "nccl":
        assert made[:2] == [("nccl", 80.0), ("gloo", 20.0)] and set(made[2:]) == {("nccl", 80.0)}
    assert len({own.message_group, own.node_group, own.replica_group, own.host_group}) == 4
    assert connected == [own.message_group, own.node_group, own.replica_group]


def test_ranks_in_different_steps_are_named_with_their_steps() -> None:
    assert why_ranks_cannot_continue([(3,), (3,)]) is None
    reason = why_ranks_cannot_continue([(3,), (5,), (4,)])
    assert reason is not None and reason.startswith("rank 0 is in step 3, and rank 1 in step 5")
