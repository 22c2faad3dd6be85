"""Tensors of which a rank has pieces, written and read by torch.distributed.checkpoint (DCP).

A piece is a run of elements, in the order of the plain tensor, at its true offset and without padding. DCP knows
only boxes of a tensor's own shape. A run is a few boxes, so any program can read the whole tensor under its plain name.
"""

from __future__ import annotations

import errno
import itertools
import math
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
    async_save,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mdcs.checkpoint import directory
from mdcs.checkpoint.directory import RUN, CheckpointError
from mdcs.torch_compat import load_checkpoint

Shape = tuple[int, ...]


def boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield (offsets, sizes) of the boxes that cover elements ``start`` to ``stop`` of a row-major tensor."""
    if not shape:
        yield (), ()
        return
    inside = math.prod(shape[1:])
    (first, begin), (last, end) = divmod(start, inside), divmod(stop, inside)
    if begin and (first < last):
        yield from _row(shape, first, begin, inside)
        first, begin = first + 1, 0
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if begin < end:
        yield from _row(shape, last, begin, end)


def _row(shape: Shape, row: int, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    return (((row, *offsets), (1, *sizes)) for offsets, sizes in boxes(shape[1:], start, stop))


class TensorShards:
    """Pieces of a tensor on this rank, as views that DCP reads from or writes into. ``order``: the tensor's dimensions
    by falling stride in memory; None: row-major.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, order: Shape | None = None) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype
        self._order = tuple(range(len(shape))) if order is None else order
        self._boxes: list[tuple[ChunkStorageMetadata, Tensor]] = []

    def add(self, start: int, values: Tensor) -> None:
        """Add the elements from ``start`` on in memory; ``values`` is flat."""
        at, back = 0, sorted(range(len(self._order)), key=self._order.__getitem__)
        for offsets, sizes in boxes(tuple(self.shape[dim] for dim in self._order), start, start + values.numel()):
            n = math.prod(sizes)
            box = ChunkStorageMetadata(torch.Size(offsets[i] for i in back), torch.Size(sizes[i] for i in back))
            self._boxes.append((box, values[at : at + n].view(sizes).permute(back)))
            at += n

    def to(self, device: str, *, copy: bool) -> TensorShards:
        """Return the pieces on this device, each as ``Tensor.to`` returns it."""
        copied = TensorShards(self.shape, self.dtype, self._order)
        copied._boxes = [(box, values.to(device, copy=copy)) for box, values in self._boxes]
        return copied

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces together."""
        return sum(values.nbytes for _, values in self._boxes)

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor, which DCP compares."""
        return self.shape

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(MetadataIndex(name, box.offsets), WriteItemType.SHARD,
                      tensor_data=TensorWriteData(chunk=box, properties=properties, size=self.shape))
            for box, _ in self._boxes
        ]  # fmt: skip

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [box for box, _ in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        # While loading, the index is that of __create_chunk_list__; pieces may overlap then, as a shard and a whole do.
        i = index.index
        if i is not None and i < len(self._boxes) and self._boxes[i][0].offsets == index.offset:
            return self._boxes[i][1]
        return next(values for box, values in self._boxes if box.offsets == index.offset)


Key = tuple[str, ...]
"""A tensor's place in nested state dicts. Joined by dots it is the name in DCP."""
FlatState = dict[Key, Any]
"""Key -> tensor or TensorShards."""
MODEL, STATE = "model", ("optimizer", "state")
"""Where keys of the model's tensors begin, and keys of the optimizer's: (*STATE, parameter, name of the state)."""


def unflatten(leaves: Mapping[Key, Any]) -> dict[str, Any]:
    """Return the nested state dicts of these leaves."""
    tree: dict[str, Any] = {}
    for (*path, last), leaf in leaves.items():
        at = tree
        for name in path:
            at = at.setdefault(name, {})
        at[last] = leaf
    return tree


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        leaf = self.state_dict[index.fqn]
        return leaf.__get_tensor_shard__(index) if isinstance(leaf, TensorShards) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({}, metadata, is_coordinator)  # given the state dict, it would drop TensorShards
        self.state_dict = state_dict

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        leaf = self.state_dict[index.fqn]
        return leaf.__get_tensor_shard__(index) if isinstance(leaf, TensorShards) else super().lookup_tensor(index)


class Writer(FileSystemWriter):
    """Writes the folder of a step, and renames it when all ranks have written. DCP tells every rank the error of each.

    - ``files``: this rank's other files, name -> bytes; or the error why it has none. ``world``: number of ranks.
    - ``keep``: number of the newest folders that stay; None: all.
    - ``is_beside``: the tensors are copied, and written while training goes on.
    """

    def __init__(
        self, folder: Path, files: Mapping[str, bytes] | Exception, *, world: int = 1, keep: int | None = None,
        is_beside: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(directory.partial(folder), single_file_per_rank=True, sync_files=True, thread_count=1)
        self._folder, self._files, self._world, self._keep, self._is_beside = folder, files, world, keep, is_beside

    def stage(self, state_dict: Any) -> Any:
        """Return the tensors in host memory."""
        return {
            key: self.stage(value) if isinstance(value, dict) else value.to("cpu", copy=self._is_beside)
            for key, value in state_dict.items()
        }

    def prepare_local_plan(self, plan: Any) -> Any:
        """Refuse to begin where this rank has nothing to write."""
        if isinstance(self._files, Exception):
            raise self._files
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        """Make the folder, on the first rank."""
        directory.begin(self._folder)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's files."""
        assert not isinstance(self._files, Exception)
        for name, data in self._files.items():
            directory.write(Path(self.path) / name, data)
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # torch's writer has other words for a full disk
            if shutil.disk_usage(self.path).free >= 1 << 16:
                raise
            raise OSError(errno.ENOSPC, f"no space left on device: {error}") from error

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Complete the folder, on the first rank."""
        super().finish(metadata, results)
        tensors = {info.relative_path for info in metadata.storage_data.values()}
        rank_files = {RUN, *map(directory.rank_file, range(self._world))}
        directory.finish(self._folder, {".metadata", *tensors, *rank_files})
        if self._keep is not None:
            directory.keep_last(self._folder.parent, self._keep)


def save(leaves: FlatState, writer: Writer, group: dist.ProcessGroup | None) -> Future[Any]:
    """Let a thread write every rank's leaves; :func:`wait_for` waits. Collective over the group; None: alone."""
    if group is None:  # DCP warns that this process is alone; from a thread, for which warnings cannot be caught
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
    saving = async_save(unflatten(leaves), storage_writer=writer, process_group=group, planner=_SavePlanner())
    assert isinstance(saving, Future)  # ``stage`` has staged by now
    return saving


def wait_for(saving: Future[Any]) -> None:
    """Wait until all ranks have written. Raises RanksFailed on all ranks."""
    with _translate_errors():
        saving.result()


def load(folder: Path, leaves: FlatState) -> None:
    """Read into tensors and TensorShards, on this rank alone. Raises RanksFailed, naming what is missing."""
    with _translate_errors():
        flat = {".".join(key): leaf for key, leaf in leaves.items()}
        load_checkpoint(flat, _Reader(folder), _LoadPlanner())


class RanksFailed(RuntimeError):
    """Ranks that could not write or read, and why."""


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Turn DCP's exception into RanksFailed: DCP's is no subclass of Exception, and its text has tracebacks."""
    try:
        yield
    except CheckpointException as error:
        problems = [f"rank {rank}: {type(why).__name__}: {why}" for rank, (why, _) in error.failures.items()]
        raise RanksFailed("; ".join(problems)) from error


def load_full(folder: Path) -> dict[str, Any]:
    """Return everything that was saved: nested dictionaries of plain tensors on the host."""
    leaves: FlatState = {key: torch.empty(t.size, dtype=t.properties.dtype) for key, t in read_shapes(folder).items()}
    load(folder, leaves)
    return unflatten(leaves)


def read_shapes(folder: Path) -> dict[Key, TensorStorageMetadata]:
    """Return shape and type of everything that was saved."""
    metadata = _Reader(folder).read_metadata()
    tensors = metadata.state_dict_metadata.items()
    return {metadata.planner_data[name]: t for name, t in tensors if isinstance(t, TensorStorageMetadata)}


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return a checkpoint on the host: ``model`` and ``optimizer`` for a plain ``load_state_dict``, and ``step``.

    Of several optimizers ``optimizer`` is a list. ``path`` is a step's folder, or the root: then the newest usable
    checkpoint is read, with a warning for every newer one. ``torch.save`` can write the result, and ``weights_only``
    can read it back. Raises CheckpointError if no checkpoint is usable.
    """
    chosen = directory.choose(directory.candidates(Path(path)), directory.find_problem)
    if chosen is None:
        raise CheckpointError(f"{path}: there is no checkpoint")
    run = directory.load(chosen / RUN)
    tree = load_full(chosen)
    state, groups = tree.get("optimizer", {}).get("state", {}), iter(run["param_groups"])
    counts = run.get("groups_by_optimizer", [len(run["param_groups"])])
    optimizers = [_packed(state, list(itertools.islice(groups, count))) for count in counts]
    optimizer = optimizers if len(optimizers) > 1 else optimizers[0]
    return {"model": tree["model"], "optimizer": optimizer, "step": run["step"]}


def _packed(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a state dict with numbers in the place of names."""
    places: dict[str, int] = {}
    numbered = [
        {**group, "params": [places.setdefault(name, len(places)) for name in group["params"]]} for group in groups
    ]
    return {"state": {place: state[name] for name, place in places.items() if name in state}, "param_groups": numbered}


class _Reader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    """Reads DCP's metadata, a pickle, and lets it name only DCP's records and torch's types."""

    def find_class(self, module: str, name: str) -> Any:
        records = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        known = (module in records and "." not in name) or (module, name) in {
            ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
        }  # fmt: skip
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"a checkpoint's metadata may not name {module}.{name}")
