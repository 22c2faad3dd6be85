"""Values that all ranks have: those that a run begins with, and the model's buffers while it trains.

The start takes the model over unit by unit, so that at most one more unit is whole at a time. Parameters on the meta
device get memory then, and values from their modules' own initialisation: every rank initialises, so that random states
stay alike, and rank 0's values are broadcast. Units with parameters of one module (tied ones, frozen ones) are taken
over together, because the module initialises all of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.model.guard import leave_meta
from mdcs.model.optimizers import dense_order
from mdcs.model.units import ModelUnit, UnsupportedModel
from mdcs.runtime.communicator import ProcessGroups
from mdcs.runtime.errors import ErrorContext
from mdcs.runtime.storage import UnitStorage
from mdcs.sizes import MIB
from mdcs.torch_compat import broadcast_coalesced, has_batch_statistics, version_of, without_autograd

InitFunction = Callable[[nn.Module], object]
"""Initialises a module's own parameters and buffers, not those of its children."""

_LEFT = 0x5A  # every byte of a buffer that is not initialised yet; parameters are filled with NaN


class Initializer:
    """Initialises what a model has on the meta device, with ``init`` or, if it is None, ``reset_parameters()``.

    ``together``: lists of indices into ``units`` that are initialised at once, in order. Raises UnsupportedModel for a
    module that has something on the meta device and no initialisation.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[ModelUnit], init: InitFunction | None, device: torch.device
    ) -> None:
        self._init, self._device = init, device
        self._names = {m: name for name, m in model.named_modules() if any(t.is_meta for _, t in _own(m))}
        for module, name in self._names.items() if init is None else ():
            if not callable(getattr(module, "reset_parameters", None)):
                local = next(local for local, t in _own(module) if t.is_meta)
                raise UnsupportedModel(
                    f"{_path(name, local)}: is on the meta device, and {type(module).__name__} has no "
                    "reset_parameters(): pass init=, a function that initialises a module"
                )
        unit_of = {p: u for u, unit in enumerate(units) for _, p in unit.parameters if p.is_meta}
        first = list(range(len(units)))
        self._modules: dict[int, list[nn.Module]] = {}
        for module in self._names:
            met = {first[unit_of[p]] for p in module._parameters.values() if p in unit_of}
            first = [min(met) if f in met else f for f in first]
        for module in self._names:
            mine = [unit_of[p] for p in module._parameters.values() if p in unit_of]
            self._modules.setdefault(first[mine[0]] if mine else -1, []).append(module)
        self.together = [[u for u, f in enumerate(first) if f == leader] for leader in sorted(set(first))]

    def units(self, members: Sequence[int]) -> bool:
        """Initialise one list of ``together``, whose parameters have memory. Return whether there was any work."""
        return self._run(self._modules.get(members[0], ()))

    def the_rest(self) -> None:
        """Initialise buffers of modules that have no parameters."""
        self._run(self._modules.get(-1, ()))

    @torch.no_grad()
    def _run(self, modules: Sequence[nn.Module]) -> bool:
        made: dict[int, tuple[Tensor, int]] = {}
        for module in modules:
            for local, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[local] = real = torch.empty_like(buffer, device=self._device)
                    real.reshape(-1).view(torch.uint8).fill_(_LEFT)
                    made[id(real)] = real, version_of(real)
            for p in module._parameters.values():
                if p is not None and p.is_meta and not p.numel():  # such a parameter is in no unit
                    leave_meta(p, torch.empty_like(p, device=self._device))
            if self._init is None:
                module.reset_parameters()  # type: ignore[operator]
            else:
                self._init(module)
        for module in modules:
            for local, tensor in _own(module):
                if _is_left(tensor, made.get(id(tensor))):
                    raise UnsupportedModel(
                        f"{_path(self._names[module], local)}: was on the meta device, and the initialisation of "
                        f"{type(module).__name__} has left it without values"
                    )
        return bool(modules)


def shard_units(
    model: nn.Module, initialisation: Initializer, make: Callable[[int], UnitStorage],
    group: dist.ProcessGroup | None, place: ErrorContext,
) -> list[UnitStorage]:
    """Return the units' storages, settled, with rank 0's values; buffers have rank 0's, too. Raises UnsupportedModel
    for what the initialisation of its module does not set.
    """
    storages: dict[int, UnitStorage] = {}
    for members in initialisation.together:
        made = {u: make(u) for u in members}
        is_new = initialisation.units(members)
        for storage in made.values():
            if group is not None:
                with place.during(f"broadcast of {storage.name}"), torch.no_grad():
                    broadcast(storage.flat_param, group)
            storage.init_shards()
            if is_new:
                storage.guard.close()  # initialisations of other modules must not use it
        storages |= made
    initialisation.the_rest()
    for storage in storages.values():
        storage.guard.open()
    for name, buffer in model.named_buffers() if group is not None else ():
        with place.during(f"broadcast of buffer {name}"), torch.no_grad():
            broadcast(buffer, group)
    return [storages[u] for u in range(len(storages))]


def leave_units(storages: Iterable[UnitStorage]) -> None:
    """Give back the units of a run that could not start: plain where they are whole on this rank, else closed."""
    for storage in storages:
        if storage.is_full:
            storage.detach_plain_params()
        else:
            storage.guard.close()


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for local, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield local, tensor


def _is_left(tensor: Tensor, made: tuple[Tensor, int] | None) -> bool:
    """Return whether a parameter has elements without values, or nothing was written into a ``made`` buffer."""
    if isinstance(tensor, nn.Parameter):  # sums and extremes need no memory of the tensor's size
        return bool(tensor.detach().sum().isnan())
    if made is None or version_of(tensor) != made[1] or not tensor.numel():
        return False
    left = tensor.reshape(-1).view(torch.uint8)  # writes through .data have no version
    return left.amin().item() == left.amax().item() == _LEFT


def _path(module: str, local: str) -> str:
    return f"{module}.{local}" if module else local


# ---- buffers: rank 0's values count, as with DistributedDataParallel

_TOGETHER = MIB  # bytes packed into one broadcast: one message per buffer would dominate the step of a model with many


def check_buffers(model: nn.Module) -> None:
    """Raise UnsupportedModel for a buffer that no message can carry."""
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided or buffer.is_quantized or buffer.is_nested:
            raise UnsupportedModel(f"{name}: {buffer.layout} buffers are not supported: make it dense")


class Buffers:
    """Buffers of a model, broadcast from rank 0 as ``option`` says: True, after every step, as DDP does; False, never:
    each rank has its own; None, when training pauses: correct if forward does not read buffers that it changes.
    """

    def __init__(self, model: nn.Module, option: bool | None) -> None:
        self._model, self.option = model, option
        self._watch()

    def _watch(self) -> None:
        self._held = [(f"{name}." if name else "", module._buffers) for name, module in self._model.named_modules()]
        # BatchNorm and the like write their buffers in training and read them in evaluation: no step depends on them.
        self._watched = [
            (_path(name, local), module._buffers, local)
            for name, module in self._model.named_modules()
            for local, buffer in module._buffers.items()
            if buffer is not None and not has_batch_statistics(module)
        ]
        self.register()
        self.record_values()

    def register(self) -> None:
        """Register the present buffers by name: a training step did not create them."""
        self._known = {path + local for path, held in self._held for local, b in held.items() if b is not None}

    def record_values(self) -> None:
        """Register the present values: they are the same on all ranks."""
        self._seen = [_version(held[local]) for _, held, local in self._watched]

    def changed(self) -> str | None:
        """Return a buffer's name that changed or appeared since :meth:`record_values`, and that a forward may read."""
        for (name, held, local), version in zip(self._watched, self._seen, strict=True):
            if local in held and _version(held[local]) != version:
                return name
        return next((name for name, _ in self._made()), None)

    def _made(self) -> list[tuple[str, Tensor]]:
        """Return the buffers that forward has created since :meth:`register`."""
        return [
            (path + local, b)
            for path, held in self._held  # runs at every step, where named_buffers() would be too slow
            for local, b in held.items()
            if b is not None and path + local not in self._known
        ]

    def broadcast_created(self, groups: ProcessGroups, place: ErrorContext) -> None:
        """Broadcast rank 0's values of buffers that the first forward created, as DDP does before its second one.

        A rank that created none does not take part. Raises RunError where the ranks' new buffers differ.
        """
        made = self._made()
        if made and groups.world > 1:
            _send(made, groups, groups.host_group, place)
            self._watch()

    def broadcast(self, groups: ProcessGroups, group: dist.ProcessGroup | None, place: ErrorContext) -> None:
        """Broadcast rank 0's values over ``group``. Collective. Raises RunError where the ranks' buffers differ."""
        if groups.world > 1:
            _send([*self._model.named_buffers()], groups, group, place)
            self.record_values()
            self.register()


def layout(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Return a checksum of names, shapes, types and parameters' strides: the same on ranks that can exchange these."""
    facts = [(n, tuple(t.shape), t.dtype, dense_order(t) if isinstance(t, nn.Parameter) else ()) for n, t in tensors]
    return zlib.crc32(repr(facts).encode())


def broadcast(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Broadcast rank 0's values to all ranks, in place: a tensor of any shape and memory layout."""
    tensor = unexpanded(tensor)
    if tensor.is_inference():
        tensor = tensor.clone()  # made in an evaluation: cannot be written here, and training does not read it
    whole = tensor.data.contiguous()  # the tensor itself if it is contiguous
    dist.broadcast(whole, group_src=0, group=group)
    if whole.data_ptr() != tensor.data_ptr():
        tensor.copy_(whole)


def _send(
    buffers: list[tuple[str, Tensor]], groups: ProcessGroups, group: dist.ProcessGroup | None, place: ErrorContext
) -> None:
    """Broadcast rank 0's values of these buffers, whose :func:`layout` must be the same on all ranks."""
    with place.during("broadcast of buffers"):
        layouts = groups.agree_on_call("the broadcast of buffers", layout(buffers))
    if len(set(layouts)) > 1:
        raise place.error(
            "the ranks' buffers differ in name, shape or type, as forward has left them: parallelize(…, "
            "broadcast_buffers=False) leaves each rank its own"
        )
    with without_autograd(), place.during("broadcast of buffers"):
        # made in an evaluation: cannot be written here, and training does not read it
        # squeezed: strides of a side of length 1, which may be anything, would count as an overlap
        written = [b.clone() if b.is_inference() else unexpanded(b).squeeze() for _, b in buffers if b.numel()]
        if written and group is not None:
            broadcast_coalesced(written, group, _TOGETHER)


def unexpanded(tensor: Tensor) -> Tensor:
    """Return an expanded tensor [any shape] with length 1 in expanded dimensions: this view can be written."""
    for dim, stride in enumerate(tensor.stride() if tensor.layout is torch.strided else ()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def write(tensor: Tensor, value: Tensor) -> None:
    """Copy values of the same shape into a buffer, in place, expanded or not."""
    place = unexpanded(tensor)
    place.copy_(value[tuple(slice(n) for n in place.shape)])


def _version(buffer: Tensor | None) -> tuple[int, int] | None:
    if buffer is None or buffer.is_inference():
        return None
    return id(buffer), version_of(buffer)
