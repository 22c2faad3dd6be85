"""A run's checkpoints: every rank writes and reads its part of each tensor, under the plain model's names.

- ``model.NAME``: parameters (masters where there are some) and buffers.
- ``optimizer.state.NAME.KEY``: the optimizer's state of a parameter.
- ``run.pt``: step, world, options of the parameter groups, loss scale.
- ``rank-R.pt``: a rank's random states, the loop's extra, and buffers where each rank has its own.

All of it is read with ``weights_only``.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.checkpoint import folder, numbers, pieces
from mdcs.checkpoint.folder import CheckpointError
from mdcs.checkpoint.numbers import RUN
from mdcs.checkpoint.pieces import Pieces, Tree, leaves, planted
from mdcs.measure.memory import Meter
from mdcs.model.optimizers import parameter_groups
from mdcs.runtime import optimizer_state
from mdcs.runtime.buffers import Buffers, write
from mdcs.runtime.errors import Place, RunError
from mdcs.runtime.groups import Groups
from mdcs.runtime.optimizer_state import STEP, OptimizerState
from mdcs.runtime.scaling import LossScale
from mdcs.runtime.storage import UnitStorage

_LEAVING_S = 5.0
MODEL, STATE = "model", ("optimizer", "state")


@dataclass(frozen=True)
class Resumed:
    """The place where a run resumes: after ``step`` steps, with this rank's ``extra``.

    If another number of ranks than ``world`` resumes, ``extra`` is rank 0's, and random states are not restored.
    """

    folder: Path
    step: int
    world: int
    extra: Any


@dataclass
class Saving:
    """A checkpoint that is being written, or was. ``staged_bytes``: size of this rank's copy in host memory."""

    folder: Path
    step: int
    staged_bytes: int = 0
    blocked_s: float = 0.0
    """Seconds for which training stood still, after the drain."""
    written_s: float | None = None
    """Seconds from the call until the checkpoint was complete; None before."""
    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Raises RunError, on every rank, if it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error


class Checkpoints:
    """Writer and reader of a run's checkpoints; one is written at a time."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, storages: list[UnitStorage], state: OptimizerState,
        buffers: Buffers, loss_scale: LossScale | None, groups: Groups, meter: Meter, place: Place,
    ) -> None:  # fmt: skip
        self._model, self._optimizer, self._storages, self._state = model, optimizer, storages, state
        self._buffers, self._loss_scale, self._groups, self._meter, self._place = buffers, loss_scale, groups, meter, place
        self._rank, self._device = place.rank, storages[0].device
        self._files: dist.ProcessGroup | None = None
        self._last: Saving | None = None

    # -- writing ------------------------------------------------------------------------------------------------

    def save(self, root: Path, step: int, extra: Any, *, keep: int | None, spare: int | None, wait: bool) -> Saving:
        """Write a checkpoint. Collective; nothing may be in flight.

        Without ``wait`` this rank's part is copied to the host, and a thread writes it, if the copy takes at most
        ``spare`` bytes (None: no limit). Otherwise it is written here.
        """
        begin = time.monotonic()
        self.finish()
        if self._files is None:
            self._files = self._groups.another()
        tree, run, own = self._tree(), self._run(step), self._own(extra)
        saving = Saving(root / folder.name_of(step), step)
        staged = sum(leaf.bytes if isinstance(leaf, Pieces) else leaf.nbytes for _, leaf in leaves(tree))
        if not wait and (spare is None or staged <= spare):
            saving.staged_bytes = staged
            with self._meter.tag("staging"):
                tree = planted((path, _staged(leaf)) for path, leaf in leaves(tree))
            saving._thread = threading.Thread(
                target=self._write_beside, args=(saving, root, tree, run, own, keep, begin), daemon=True, name="mdcs-checkpoint"
            )
            saving._thread.start()
            self._last = saving
        else:
            self._write(saving, root, tree, run, own, keep)
            saving.written_s = time.monotonic() - begin
        saving.blocked_s = time.monotonic() - begin
        return saving

    def finish(self) -> None:
        """Wait for the checkpoint that is being written. Raises RunError if it could not be written."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def leave(self) -> None:
        """Wait a few seconds for the checkpoint that is being written: after an error it may still become complete."""
        if self._last is not None and self._last._thread is not None:
            self._last._thread.join(_LEAVING_S)

    def _write_beside(self, saving: Saving, root: Path, tree: Tree, run: Any, own: Any, keep: int | None, begin: float) -> None:
        try:
            self._write(saving, root, tree, run, own, keep)
            saving.written_s = time.monotonic() - begin
        except BaseException as error:
            saving._error = error
        finally:
            tree.clear()

    def _write(self, saving: Saving, root: Path, tree: Tree, run: Any, own: Any, keep: int | None) -> None:
        step, first = saving.step, self._rank == 0
        partial = folder.partial(root, step)

        def mine() -> folder.Sums:
            files = [*partial.glob(f"__{self._rank}_*"), partial / _file_of(self._rank)]
            numbers.save(files[-1], own, "what the loop gave as extra")
            if first:
                numbers.save(partial / RUN, run, "the options of the optimizer")
                files += [partial / ".metadata", partial / RUN]
            return folder.sums(files)

        self._stage(step, "made its folder", lambda: folder.begin(root, step) if first else None)
        self._stage(step, "written tensors", lambda: pieces.save(partial, tree, self._files))
        sums = {name: own for ranks in self._stage(step, "written its file", mine) for name, own in ranks.items()}
        world = self._groups.world
        self._stage(step, "written the manifest", lambda: folder.finish(root, step, sums, world=world) if first else None)
        if keep is not None:
            self._stage(step, "deleted older ones", lambda: folder.keep_last(root, keep) if first else None)

    def _stage(self, step: int, what: str, work: Callable[[], Any]) -> list[Any]:
        """Do this rank's ``work``; return every rank's result. Raises RunError on every rank if one rank fails."""
        answer, problem = None, ""
        try:
            answer = work()
        except pieces.RanksFailed as error:  # raised on all ranks, with the problems of all
            problem = error.problems.get(self._rank, "")
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        answers: list[Any] = [(answer, problem)]
        if self._files is not None:
            answers *= self._groups.world
            with self._place.during(f"checkpoint of step {step}: every rank has {what}"):
                dist.all_gather_object(answers, (answer, problem), group=self._files)
        for rank, (_, problem) in enumerate(answers):
            if problem:
                raise RunError(f"checkpoint of step {step}: rank {rank} has not {what}: {problem}")
        return [answer for answer, _ in answers]

    def _tree(self) -> Tree:
        """Return the tensors that this rank writes. Replicas of a block write an equal share each."""
        names, buffers = self._names()
        found = _Leaves()
        for u, storage in enumerate(self._storages):
            for b in range(len(storage.blocks)):
                values = storage.at_rest(b)
                for i, shape, start, piece in _cut(storage, b, storage.own(b).start, values, self._share(u, b)):
                    for name in names[storage.parameters[i]]:
                        found.of((MODEL, name), shape, values.dtype).add(start, piece)
        for u, b, part, key, values in self._state.parts():
            storage = self._storages[u]
            for i, shape, start, piece in _cut(storage, b, storage.own(b).start + part.start, values, self._share(u, b)):
                found.of((*STATE, storage.names[i], key), shape, values.dtype).add(start, piece)
        started = self._state.started()
        if self._rank == 0:
            found |= {(MODEL, name): value.detach() for name, value in buffers.items()}
            groups = parameter_groups(self._optimizer)
            for u, storage in enumerate(self._storages):
                for name, p in zip(storage.names, storage.parameters, strict=True):
                    step, _ = started.get((u, groups[p]), (None, None)) if p in groups else (None, None)
                    if storage.trainable and step is not None:
                        found |= {(*STATE, name, STEP): torch.as_tensor(step)}
                    kept = self._state.kept.get(p, {})
                    found |= {(*STATE, name, key): value for key, value in kept.items() if isinstance(value, Tensor)}
        return planted(found.items())

    def _share(self, u: int, b: int) -> slice:
        """Return the slice of a block that this rank writes, in the flat buffer of the block's section."""
        own, (number, replicas) = self._storages[u].own(b), self._storages[u].replica
        n = own.stop - own.start
        return slice(own.start + number * n // replicas, own.start + (number + 1) * n // replicas)

    def _names(self) -> tuple[dict[nn.Parameter, list[str]], dict[str, Tensor]]:
        """Return the names of each parameter in the plain state dict (several for tied ones), and the buffers by name.
        """
        names = {p: [name] for storage in self._storages for name, p in zip(storage.names, storage.parameters, strict=True)}
        buffers = {}
        for name, value in self._model.state_dict(keep_vars=True).items():
            if value not in names:
                buffers[name] = value
            elif name not in names[value]:
                names[value].append(name)
        return names, buffers

    def _group_names(self) -> list[list[str]]:
        named = {p: name for name, p in self._model.named_parameters()}  # includes empty parameters, which no unit has
        named |= {p: name for storage in self._storages for name, p in zip(storage.names, storage.parameters, strict=True)}
        return [[named[p] for p in group["params"]] for group in self._optimizer.param_groups]

    def _run(self, step: int) -> dict[str, Any]:
        groups = [
            {**{key: value for key, value in group.items() if key not in ("params", "param_names")}, "params": names}
            for group, names in zip(self._optimizer.param_groups, self._group_names(), strict=True)
        ]
        scale = None if self._loss_scale is None else dataclasses.asdict(self._loss_scale)
        return {"step": step, "world": self._groups.world, "param_groups": groups, "loss_scale": scale}

    def _own(self, extra: Any) -> dict[str, Any]:
        """Return the values of this rank alone: random states, extra, and buffers where each rank has its own."""
        buffers = {name: b.detach().clone() for name, b in self._model.named_buffers()} if self._buffers.option is False else {}
        return {"random": numbers.random_state(self._device), "extra": extra, "buffers": buffers}

    # -- reading ------------------------------------------------------------------------------------------------

    def resume(self, path: Path) -> Resumed | None:
        """Read a checkpoint. Collective; nothing may be in flight. Returns None where there is no checkpoint."""
        self.finish()
        chosen = self._choose(path)
        if chosen is None:
            return None
        problem, resumed = "", None
        try:
            resumed = self._read(chosen)
        except Exception as error:
            problem = f"{chosen}: {error}"
        told = next((problem for problem in self._groups.exchange(problem) if problem), "")
        if told:
            raise CheckpointError(told)
        return resumed

    def _choose(self, path: Path) -> Path | None:
        """Return the newest folder in which no rank finds a problem; rank 0 warns of every newer one."""
        is_one = folder.is_name(path.name)
        candidates = self._groups.exchange([path] if is_one else folder.found(path))[0]
        refused = []
        for candidate in candidates:
            answers = self._groups.exchange(folder.problem(candidate, self._rank, self._groups.world))
            problem = next((answer for answer in answers if answer is not None), None)
            if problem is None:
                return Path(candidate)
            refused.append(f"{candidate}: {problem}")
            if self._rank == 0 and not is_one:
                warnings.warn(f"not resumed from {refused[-1]}", stacklevel=2)
        if refused:
            raise CheckpointError("; ".join(refused))
        return None

    def _read(self, chosen: Path) -> Resumed:
        run = numbers.load(chosen / RUN)
        described = pieces.described(chosen)
        self._compare(run, described)
        self._read_optimizer(chosen, run, described)
        (_, buffers), kept = self._names(), self._state.kept
        rest, full = _Leaves(), _Leaves()
        for u, b, part, key, values in self._state.parts():
            storage = self._storages[u]
            for i, shape, start, piece in _cut(storage, b, storage.own(b).start + part.start, values):
                rest.of((*STATE, storage.names[i], key), shape, values.dtype).add(start, piece)
        for storage in self._storages:
            for b in range(len(storage.blocks)):
                region, shard, whole = storage.region(b), storage.shard(b), storage.full(b)
                if shard is not None:
                    for i, shape, start, piece in _cut(storage, b, storage.own(b).start, shard):
                        rest.of((MODEL, storage.names[i]), shape, shard.dtype).add(start, piece)
                if storage.is_full:  # includes units that the plan has gathered for the next forward
                    for i, shape, start, piece in _cut(storage, b, region.start, whole[region]):
                        full.of((MODEL, storage.names[i]), shape, whole.dtype).add(start, piece)
        for storage in self._storages:
            for name, p in zip(storage.names, storage.parameters, strict=True):
                rest |= {(*STATE, name, key): value for key, value in kept.get(p, {}).items()}
        pieces.load(chosen, planted(rest.items()))
        read = {name: value.detach().contiguous() for name, value in buffers.items()}  # DCP cannot read into an expanded tensor
        full |= {(MODEL, name): value for name, value in read.items()}
        pieces.load(chosen, planted(full.items()))
        for name, value in buffers.items():
            if read[name].data_ptr() != value.data_ptr():
                write(value, read[name])
        own = run["world"] == self._groups.world
        mine = numbers.load(chosen / _file_of(self._rank if own else 0))
        if own:
            for name, buffer in self._model.named_buffers():
                if name in mine["buffers"]:
                    write(buffer, mine["buffers"][name])
        self._buffers.note()
        if self._loss_scale is not None and run["loss_scale"] is not None:
            for name, value in run["loss_scale"].items():
                setattr(self._loss_scale, name, value)
        if own:
            numbers.set_random_state(mine["random"], self._device)
        return Resumed(chosen, run["step"], run["world"], mine["extra"])

    def _compare(self, run: dict[str, Any], described: Any) -> None:
        """Raise ValueError, by name, for a checkpoint of another model or optimizer."""
        for storage in self._storages:
            for name, (*_, shape) in zip(storage.names, storage.places, strict=True):
                saved = described.get(("model", name))
                if saved is None:
                    raise ValueError(f"it has no {name}")
                if saved.size != shape:
                    raise ValueError(f"{name} is {tuple(shape)}, there {tuple(saved.size)}")
        ours, theirs = self._group_names(), [group["params"] for group in run["param_groups"]]
        if ours != theirs:
            raise ValueError(f"the optimizer has groups of {_told(ours)}, there of {_told(theirs)}")

    def _read_optimizer(self, chosen: Path, run: dict[str, Any], described: Any) -> None:
        """Load options and step counts, and allocate the other state.

        Raises ValueError for neighbours with different histories.
        """
        keys: dict[str, list[str]] = {}
        for *first, name, key in described:
            if tuple(first) == STATE:
                keys.setdefault(name, []).append(key)
        steps = {name: torch.zeros(()) for name, own in keys.items() if STEP in own}
        pieces.load(chosen, planted(((*STATE, name, STEP), step) for name, step in steps.items()))
        groups, wanted, kept = parameter_groups(self._optimizer), {}, {}
        found: dict[Any, dict[str, Any]] = {}
        named = [list(zip(s.names, s.parameters, strict=True)) for s in self._storages]
        for u, storage in enumerate(self._storages):
            for name, p in named[u]:
                if name not in keys:
                    continue
                own = {key: torch.empty(p.shape, dtype=p.dtype, device="meta") for key in sorted(keys[name]) if key != STEP}
                found[p] = own | ({STEP: steps[name]} if name in steps else {})
                if storage.trainable:
                    wanted[u, groups[p]] = found[p].get(STEP), sorted(keys[name])
                else:
                    kept[p] = {key: value if key == STEP else torch.empty_like(value, device=self._device)
                               for key, value in found[p].items()}  # fmt: skip
        optimizer_state.together(named, groups, found)
        optimizer_state.take_options(self._optimizer, run)
        self._state.begin(wanted, kept)


class _Leaves(dict[tuple[str, ...], Any]):
    """Leaves by path in the tree; ``of`` makes missing Pieces."""

    def of(self, path: tuple[str, ...], shape: torch.Size, dtype: torch.dtype) -> Pieces:
        made: Pieces = self.setdefault(path, Pieces(shape, dtype))
        return made


def _told(groups: list[list[str]]) -> str:
    return " and ".join(f"{len(names)} parameters from {names[0]} on" for names in groups if names)


def _cut(
    storage: UnitStorage, block: int, start: int, values: Tensor, share: slice | None = None
) -> Iterator[tuple[int, torch.Size, int, Tensor]]:
    """Yield the parameters' parts of flat values that begin at ``start`` in the flat buffer of the block's section.

    Each is (parameter's index, its shape, offset in it, values). Padding is left out, and so is everything outside
    ``share``.
    """
    stop = start + values.numel()
    first, last = (start, stop) if share is None else (max(start, share.start), min(stop, share.stop))
    for i, (section, offset, n, shape) in enumerate(storage.places):
        a, b = max(first, offset), min(last, offset + n)
        if section == storage.sections[block] and a < b:
            yield i, shape, a - offset, values[a - start : b - start]


def _staged(leaf: Pieces | Tensor) -> Pieces | Tensor:
    return leaf.staged() if isinstance(leaf, Pieces) else leaf.to("cpu", copy=True)


def _file_of(rank: int) -> str:
    return f"rank-{rank:05}.pt"
