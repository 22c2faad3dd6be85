"""A run's checkpoints: every rank writes and reads its part of each tensor, under the plain model's names.

- ``model.NAME``: parameters (masters where there are some) and buffers.
- ``optimizer.state.NAME.KEY``: the optimizer's state of a parameter.
- ``run.pt``: step, world, options of the parameter groups, loss scale.
- ``rank-R.pt``: a rank's random states, the loop's extra, and buffers where each rank has its own.

All of it is read with ``weights_only``.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mdcs.checkpoint import dcp_shards, directory
from mdcs.checkpoint.dcp_shards import MODEL, STATE, FlatState, Key, TensorShards
from mdcs.checkpoint.directory import RUN, CheckpointError
from mdcs.model.flat_optimizer import options_of
from mdcs.runtime import optimizer_state
from mdcs.runtime.engine import Engine
from mdcs.runtime.errors import RunError
from mdcs.runtime.initialization import write
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.unshard import Fragment, fragments, fragments_in_memory

_LEAVING_S = 5.0


@dataclass(frozen=True)
class ResumeInfo:
    """The place where a run resumes: after ``step`` steps, with this rank's ``extra``. If another number of ranks than
    ``world`` resumes, ``extra`` is rank 0's, and random states are not restored.
    """

    folder: Path
    step: int
    world: int
    extra: Any


@dataclass
class SaveHandle:
    """A checkpoint that is being written, or was. ``staged_bytes``: size of this rank's copy in host memory."""

    folder: Path
    step: int
    staged_bytes: int = 0
    blocked_s: float = 0.0
    """Seconds for which training stood still, after the drain."""
    written_s: float | None = None
    """Seconds from the call until the checkpoint was complete; None before."""
    _finish: Callable[[], None] | None = None

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Raises RunError, on every rank, if it could not be written."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Checkpoints:
    """Writer and reader of a run's checkpoints; one is written at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._rank, self._device = engine, engine.rank, engine.storages[0].device
        self._model, self._optimizers, self._storages = engine.model, engine.optimizers, engine.storages
        self._state, self._groups = engine.optimizer_state, engine.groups
        self._names = self._names_by_parameter()
        self._files: dist.ProcessGroup | None = None
        self._last: SaveHandle | None = None
        self._saving: Future[Any] | None = None

    # -- writing ------------------------------------------------------------------------------------------------

    def save(self, root: Path, step: int, extra: Any, *, keep: int | None, wait: bool) -> SaveHandle:
        """Write a checkpoint. Collective; nothing may be in flight. Without ``wait`` this rank's part is copied to the
        host and written while training goes on, if the budget has room for the copy.
        """
        begin = time.monotonic()
        self.finish()
        if self._files is None:
            self._files = self._groups.new_group()
        leaves, folder = self._to_write(), directory.folder_of(root, step)
        staged = sum(leaf.nbytes for leaf in leaves.values())
        is_beside = not wait and self._has_room(staged)
        writer = dcp_shards.Writer(
            folder, self._encode(step, extra), world=self._groups.world, keep=keep, is_beside=is_beside
        )
        handle = SaveHandle(folder, step, staged if is_beside else 0)
        with self._engine.meter.tag("staging"):
            self._saving = saving = dcp_shards.save(leaves, writer, self._files)

        def finish() -> None:
            try:
                dcp_shards.wait_for(saving)
            except Exception as error:
                raise RunError(self._engine.place.explain(f"checkpoint of step {step}: {error}")) from error
            note_end()

        def note_end(_: object = None) -> None:
            handle.written_s = handle.written_s or time.monotonic() - begin

        saving.add_done_callback(note_end)
        handle._finish = finish
        if is_beside:
            self._last = handle
        else:
            handle.wait()
        handle.blocked_s = time.monotonic() - begin
        return handle

    def _has_room(self, size: int) -> bool:
        """Return whether the budget has room for a copy of ``size`` bytes: on a CPU the copy counts in it."""
        plan = self._engine.plan
        if plan.admissible is None or self._device.type != "cpu":
            return True
        return plan.prediction is not None and plan.prediction.peak_bytes + size <= plan.admissible

    def finish(self) -> None:
        """Wait for the checkpoint that is being written. Raises RunError if it could not be written."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def leave(self) -> None:
        """Wait a few seconds for the checkpoint that is being written: after an error it may still become complete."""
        if self._saving is not None:
            concurrent.futures.wait([self._saving], _LEAVING_S)

    def _encode(self, step: int, extra: Any) -> dict[str, bytes] | Exception:
        """Return this rank's own files as they are now, or the error of a value that cannot be saved."""
        try:
            files = {directory.rank_file(self._rank): directory.encode(self._own(extra), "what the loop gave as extra")}
            if self._rank == 0:
                files[RUN] = directory.encode(self._run(step), "the options of the optimizer")
        except ValueError as error:
            return error
        return files

    def _to_write(self) -> FlatState:
        """Return what this rank writes. Replicas of a block write an equal share each."""
        names, leaves = self._names, _Leaves()
        for storage in self._storages:
            for b in range(len(storage.blocks)):
                start, values, share = storage.owned[b].start, storage.owned_shard(b), _share(storage, b)
                for fragment in fragments(storage, start, values, share):
                    for name in names[fragment.parameter]:
                        leaves.add((MODEL, name), fragment)
        for key, fragment in self._state.fragments(_share):
            leaves.add((*STATE, names[fragment.parameter][0], key), fragment)
        started = self._state.started()
        if self._rank == 0:
            leaves |= {(MODEL, name): value.detach() for name, value in self._buffers().items()}
            for p, (replicated, _) in started.items():
                for key, value in replicated.items():  # Python's floats keep their 64 bits
                    dtype = torch.float64 if isinstance(value, float) else None
                    leaves[(*STATE, names[p][0], key)] = torch.as_tensor(value, dtype=dtype)
            for p, state in self._state.kept.items():
                tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
                leaves |= {(*STATE, names[p][0], key): value for key, value in tensors.items()}
        return leaves

    def _names_by_parameter(self) -> dict[nn.Parameter, list[str]]:
        """Return the names of each parameter in the plain state dict (several for tied ones), the unit's name first."""
        names = {p: [name] for s in self._storages for name, p in zip(s.names, s.parameters, strict=True)}
        for name, value in self._model.state_dict(keep_vars=True).items():
            if name not in names.get(value, [name]):
                names[value].append(name)
        return names

    def _buffers(self) -> dict[str, Tensor]:
        """Return buffers, and parameters without elements, which no unit has."""
        values = self._model.state_dict(keep_vars=True)
        return {name: value for name, value in values.items() if value not in self._names}

    def _group_names(self) -> list[list[str]]:
        named = {p: name for name, p in self._model.named_parameters()}
        named |= {p: names[0] for p, names in self._names.items()}
        return [[named[p] for p in group["params"]] for group in self._optimizers.param_groups]

    def _run(self, step: int) -> dict[str, Any]:
        """Return the values that all ranks have in common."""
        groups = [
            {**options_of(group), "params": names}
            for group, names in zip(self._optimizers.param_groups, self._group_names(), strict=True)
        ]
        scale = self._engine.options.loss_scale
        return {
            "step": step, "world": self._groups.world, "param_groups": groups,
            "groups_by_optimizer": [len(optimizer.param_groups) for optimizer in self._optimizers.members],
            "loss_scale": None if scale is None else dataclasses.asdict(scale),
        }  # fmt: skip

    def _own(self, extra: Any) -> dict[str, Any]:
        """Return the values of this rank alone: random states, extra, and buffers where each rank has its own."""
        named = self._model.named_buffers() if self._engine.buffers.option is False else ()
        buffers = {name: buffer.detach().clone() for name, buffer in named}
        return {"random": directory.random_state(self._device), "extra": extra, "buffers": buffers}

    # -- reading ------------------------------------------------------------------------------------------------

    def resume(self, path: Path) -> ResumeInfo | None:
        """Read a checkpoint. Collective; nothing may be in flight. Returns None where there is no checkpoint."""
        self.finish()
        exchange = self._groups.all_gather_object

        def problem(candidate: Path) -> str | None:
            return next((found for found in exchange(directory.find_problem(candidate)) if found is not None), None)

        chosen = directory.choose(exchange(directory.candidates(path))[0], problem, warns=self._rank == 0)
        if chosen is None:
            return None
        refused, resumed = "", None
        try:
            resumed = self._read(chosen)
        except Exception as error:
            refused = f"{chosen}: {error}"
        if problem_of_a_rank := next(filter(None, exchange(refused)), ""):
            raise CheckpointError(problem_of_a_rank)
        return resumed

    def _read(self, chosen: Path) -> ResumeInfo:
        run, saved, names = directory.load(chosen / RUN), dcp_shards.read_shapes(chosen), self._names
        self._compare(run, saved)
        self._begin_optimizer(chosen, run, saved)
        leaves = _Leaves()
        for storage in self._storages:
            for fragment in fragments_in_memory(storage):
                leaves.add((MODEL, names[fragment.parameter][0]), fragment)
        for key, fragment in self._state.fragments():
            leaves.add((*STATE, names[fragment.parameter][0], key), fragment)
        for p, state in self._state.kept.items():
            leaves |= {(*STATE, names[p][0], key): value for key, value in state.items()}
        buffers = self._buffers()
        # DCP cannot read into an expanded tensor
        read = {name: value.detach().contiguous() for name, value in buffers.items()}
        dcp_shards.load(chosen, leaves | {(MODEL, name): value for name, value in read.items()})
        for name, value in read.items():
            if value.data_ptr() != buffers[name].data_ptr():
                write(buffers[name], value)
        scale = self._engine.options.loss_scale
        for name, value in (run["loss_scale"] or {}).items() if scale is not None else ():
            setattr(scale, name, value)
        extra = self._restore_own(chosen, run["world"])
        self._engine.buffers.record_values()
        return ResumeInfo(chosen, run["step"], run["world"], extra)

    def _restore_own(self, chosen: Path, world: int) -> Any:
        """Restore this rank's buffers and random states, if as many ranks resume as have saved; return the extra."""
        is_same_world = world == self._groups.world
        saved = directory.load(chosen / directory.rank_file(self._rank if is_same_world else 0))
        if is_same_world:
            for name, buffer in self._model.named_buffers():
                if name in saved["buffers"]:
                    write(buffer, saved["buffers"][name])
            directory.set_random_state(saved["random"], self._device)
        return saved["extra"]

    def _compare(self, run: dict[str, Any], saved: Mapping[Key, TensorStorageMetadata]) -> None:
        """Raise ValueError, by name, for a checkpoint of another model or optimizer."""
        for p, (name, *_) in self._names.items():
            if (described := saved.get((MODEL, name))) is None:
                raise ValueError(f"it was saved from another model: it has no {name}")
            if described.size != p.shape:
                raise ValueError(
                    f"it was saved from another model: {name} is {tuple(described.size)} there, {tuple(p.shape)} here"
                )
        here, there = self._group_names(), [group["params"] for group in run["param_groups"]]
        if here != there:
            raise ValueError(
                f"it was saved with other parameter groups: {_in_words(there)} there, {_in_words(here)} here; use the "
                "same"
            )

    def _begin_optimizer(self, chosen: Path, run: dict[str, Any], saved: Mapping[Key, TensorStorageMetadata]) -> None:
        """Load options and replicated state, allocate the state per element. Raises ValueError for another shape."""
        named = {names[0]: p for p, names in self._names.items()}
        paths = [path for path in saved if path[: len(STATE)] == STATE and path[-2] in named]
        numbers: FlatState = {
            path: torch.zeros(saved[path].size, dtype=saved[path].properties.dtype)
            for path in paths
            if path[-1] in self._state.layout_of(named[path[-2]]).replicated
        }
        dcp_shards.load(chosen, numbers)
        state: dict[Any, dict[str, Any]] = {}
        for path in paths:
            p, key = named[path[-2]], path[-1]
            empty = torch.empty(saved[path].size, dtype=p.dtype, device="meta")
            state.setdefault(p, {})[key] = numbers.get(path, empty)
        self._state.begin(state)
        optimizer_state.load_options(self._optimizers.param_groups, run)


class _Leaves(dict[Key, Any]):
    """Leaves, of which :meth:`add` makes TensorShards."""

    def add(self, path: Key, fragment: Fragment) -> None:
        """Add a fragment to the tensor of this name."""
        if path not in self:
            self[path] = TensorShards(fragment.parameter.shape, fragment.values.dtype, fragment.order)
        self[path].add(fragment.start, fragment.values)


def _share(storage: UnitStorage, block: int) -> slice:
    """Return the slice of a block that this rank writes, in the flat buffer of the block's unit."""
    owned, (number, replicas) = storage.owned[block], storage.replica
    n = owned.stop - owned.start
    return slice(owned.start + number * n // replicas, owned.start + (number + 1) * n // replicas)


def _in_words(groups: list[list[str]]) -> str:
    return " and ".join(f"{len(names)} parameters from {names[0]} on" for names in groups if names)
