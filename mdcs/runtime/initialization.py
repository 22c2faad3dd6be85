"""The start of a run: it takes the model over unit by unit, so that at most one more unit is whole at a time.

Parameters on the meta device get memory then, and values from their modules' own initialisation. Every rank
initialises, so that random states stay alike; then rank 0's values are broadcast. Units with parameters of one module
(tied ones, frozen ones) are taken over together, because the module initialises all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.model.units import ModelUnit, UnsupportedModel
from mdcs.runtime.buffers import broadcast
from mdcs.runtime.errors import ErrorContext
from mdcs.runtime.storage import UnitStorage, leave_meta
from mdcs.torch_compat import version_of

InitFunction = Callable[[nn.Module], object]
"""Initialises a module's own parameters and buffers, not those of its children."""

_LEFT = 0x5A  # every byte of a buffer that is not initialised yet; parameters are filled with NaN


class Initializer:
    """Initialises what a model has on the meta device, with ``init`` or, if it is None, ``reset_parameters()``.

    ``together``: lists of indices into ``units``, in the order of initialisation; a list is initialised at once. Raises
    UnsupportedModel for a module that has something on the meta device and no initialisation.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[ModelUnit], init: InitFunction | None, device: torch.device
    ) -> None:
        self._init, self._device = init, device
        self._names = {m: name for name, m in model.named_modules() if any(t.is_meta for _, t in _own(m))}
        for module, name in self._names.items():
            if init is None and not callable(getattr(module, "reset_parameters", None)):
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
        """Initialise the units of one list of ``together``, whose parameters have memory. Return whether there was any
        work.
        """
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
    """Return the units' storages, settled, with rank 0's values; buffers have rank 0's, too.

    Raises UnsupportedModel for parameters or buffers that the initialisation of their module does not set.
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


def materialize(
    model: nn.Module,
    units: Sequence[ModelUnit],
    *,
    device: torch.device | str = "cpu",
    init: InitFunction | None = None,
) -> None:
    """Initialise on ``device`` what the model has on the meta device, for a profile, for example.

    The values are those that :func:`mdcs.parallelize` would give from this state of the random generators. ``init``
    initialises a module; None: its ``reset_parameters()``. Raises UnsupportedModel as parallelize does.
    """
    initialisation = Initializer(model, units, init, torch.device(device))
    for members in initialisation.together:
        for _, p in (pair for u in members for pair in units[u].parameters):
            if p.is_meta:
                leave_meta(p, torch.full(p.shape, torch.nan, dtype=p.dtype, device=device))
        initialisation.units(members)
    initialisation.the_rest()


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for local, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield local, tensor


def _is_left(tensor: Tensor, made: tuple[Tensor, int] | None) -> bool:
    """Return whether a parameter has elements without values, or nothing was written into a buffer that was ``made``.

    Sums and extremes need no memory of the tensor's size.
    """
    if isinstance(tensor, nn.Parameter):
        return bool(tensor.detach().sum().isnan())
    if made is None or version_of(tensor) != made[1] or not tensor.numel():
        return False
    left = tensor.reshape(-1).view(torch.uint8)  # writes through .data have no version
    return left.amin().item() == left.amax().item() == _LEFT


def _path(module: str, local: str) -> str:
    return f"{module}.{local}" if module else local
