"""Shards that a rank reads from the others when it needs a unit whole outside of the plan.

A collective would need all ranks at the same place, and ranks may take different branches. So the rank asks through the
store of the process group, and the presence thread of each other rank answers, whatever its training thread does. A
shard cannot change meanwhile: the unit's next update needs a reduction that the asking rank has not taken part in.
Slow (a quarter of a second, and the store's bandwidth), and needed once per unit: it stays whole from then on.
"""

from __future__ import annotations

import itertools
import time

import torch
import torch.distributed as dist

from mdcs.runtime.context import RunContext
from mdcs.runtime.failure_channel import FailureChannel
from mdcs.runtime.storage import UnitStorage
from mdcs.sizes import MIB

_CHUNK = 4 * MIB  # bytes of a value: stores refuse long ones
_POLL_S = 0.01


class Lending:
    """Both sides: :meth:`borrow` in the training thread, :meth:`answer` in the presence thread of ``words``."""

    def __init__(self, context: RunContext, storages: list[UnitStorage], words: FailureChannel) -> None:
        self._context, self._storages, self._words = context, storages, words
        self._rank, self._borrowed, self._answered = context.rank, 0, 0

    def borrow(self, unit: int) -> None:
        """Fill the full parameters of a unit with this rank's part and those of the other ranks.

        Raises RunError if a rank does not answer in time, or has left.
        """
        storage, store, place = self._storages[unit], self._words.store, self._context.place
        for b in range(len(storage.blocks)):
            storage.copy_shard_into_flat(b)
        first = self._rank - self._rank % storage.parts  # of the ranks that have the unit together
        others = [r for r in range(first, first + storage.parts) if r != self._rank]
        if store is None or not others:
            return
        self._borrowed += 1
        for peer in others:
            number = store.add(f"asks/{peer}", 1)
            store.set(f"ask/{peer}/{number}", f"{self._rank} {unit} {self._borrowed}")
        deadline = time.monotonic() + self._context.timeout_s
        for peer in others:
            keys = _keys(self._rank, self._borrowed, peer, self._part_bytes(storage))
            while not store.check(keys):
                heard = self._words.peer_failure()
                if heard or time.monotonic() >= deadline:
                    raise place.error(
                        f"{heard}. This rank waited for its part of {storage.name}" if heard else
                        f"{storage.name} is used once more than in the measured step, and rank {peer} did not send its part "
                        f"in {self._context.timeout_s:g} s: look at the log of rank {peer}"
                    )  # fmt: skip
                time.sleep(_POLL_S)
            self._unpack(storage, peer, b"".join(store.get(key) for key in keys))
            for key in keys:
                store.delete_key(key)

    def answer(self, store: dist.Store) -> None:
        """Send the parts that other ranks have asked for. ``store``: the presence thread's connection."""
        while store.check([key := f"ask/{self._rank}/{self._answered + 1}"]):
            self._answered += 1
            asking, unit, number = map(int, store.get(key).split())
            storage = self._storages[unit]
            with torch.no_grad(), self._context.executor.on_comm_stream():  # behind the gather that followed the last update
                # Copies: memory that numpy has seen cannot be freed by resizing.
                own = ((storage.owned_shard(b), storage.flat_param(b).dtype) for b in range(len(storage.blocks)))
                parts = [shard.to("cpu", dtype, copy=True) for shard, dtype in own]
            data = b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)
            for key, at in zip(_keys(asking, number, self._rank, len(data)), itertools.count(0, _CHUNK)):
                store.set(key, data[at : at + _CHUNK])  # type: ignore[arg-type]  # bytes are as good as text

    @staticmethod
    def _part_bytes(storage: UnitStorage) -> int:
        return storage.full_bytes // storage.parts

    @staticmethod
    def _unpack(storage: UnitStorage, peer: int, data: bytes) -> None:
        at = 0
        with torch.no_grad():
            for b, size in enumerate(storage.blocks):
                full, part = storage.flat_param(b), size // storage.parts
                values = torch.frombuffer(bytearray(data[at : at + part * full.element_size()]), dtype=full.dtype)
                begin = storage.offsets[b] + peer % storage.parts * part
                full[begin : begin + part].copy_(values)
                at += part * full.element_size()


def _keys(asking: int, number: int, peer: int, size: int) -> list[str]:
    return [f"part/{asking}/{number}/{peer}/{at}" for at in range(0, size, _CHUNK)]
