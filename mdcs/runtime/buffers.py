"""The model's buffers: rank 0's are the model's, as with DistributedDataParallel."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mdcs.model.units import UnsupportedModel
from mdcs.runtime.errors import Place
from mdcs.runtime.groups import Groups
from mdcs.sizes import MIB

_TOGETHER = MIB  # bytes of buffers that are packed: a message each would cost a model of many small ones its step


def check_buffers(model: nn.Module) -> None:
    """Raise UnsupportedModel for a buffer that no message can carry."""
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided or buffer.is_quantized or buffer.is_nested:
            raise UnsupportedModel(f"{name}: {buffer.layout} buffers are not supported: make it dense")


class Buffers:
    """``option`` True: rank 0's go to all ranks after every step, as DDP's broadcast_buffers does; False: each rank has its
    own; None: rank 0's go to all when training pauses, which will do as long as forward does not read what it changes.
    """

    def __init__(self, model: nn.Module, option: bool | None) -> None:
        self._model, self.option = model, option
        self._described: list[tuple[str, torch.Size, torch.dtype]] | None = None
        self._checksum = 0
        self._watch()

    def _watch(self) -> None:
        """Know those that there are by now, and what is in them."""
        self._held = [(f"{name}." if name else "", module._buffers) for name, module in self._model.named_modules()]
        # Those of BatchNorm and its like are written in training and read in evaluation: no step depends on them.
        self._watched = [
            (f"{name}.{local}" if name else local, module._buffers, local)
            for name, module in self._model.named_modules()
            for local, buffer in module._buffers.items()
            if buffer is not None and not isinstance(module, _NormBase)
        ]
        self.know()
        self.note()

    def know(self) -> None:
        """Those that there are now are not made by a training step."""
        self._known: set[str] = set()
        self._known = {name for name, _ in self._made()}

    def note(self) -> None:
        """What is in them now is the same on all ranks."""
        self._seen = [_version(held[local]) for _, held, local in self._watched]

    def changed(self) -> str | None:
        """The name of a buffer that has changed since, and that a forward pass may read."""
        for (name, held, local), seen in zip(self._watched, self._seen, strict=True):
            if local in held and _version(held[local]) != seen:
                return name
        return next((name for name, _ in self._made()), None)

    def _made(self) -> list[tuple[str, Tensor]]:
        """Those that forward has made since."""
        return [
            (path + local, b)
            for path, held in self._held  # at every step, which named_buffers() would be too slow for
            for local, b in held.items()
            if b is not None and path + local not in self._known
        ]

    def adopt(self, groups: Groups, place: Place) -> None:
        """Rank 0's of those that the first forward has made, to all ranks, as with DDP before its second one.

        A rank that has made none does not take part: nothing is sent for models that make none.
        """
        made = self._made()
        if not made or groups.world == 1:
            return
        with place.during(f"broadcast of buffer {made[0][0]}, which the first forward has made"):
            layouts = groups.tell("the broadcast of buffers", layout(made))
        if len(set(layouts)) > 1:
            raise place.error(
                "the buffers that the first forward has made differ between the ranks in name, shape or type: parallelize(…, "
                "broadcast_buffers=False) leaves each rank its own"
            )
        with torch.no_grad(), torch.inference_mode(False):
            for name, buffer in made:
                with place.during(f"broadcast of buffer {name}"):
                    broadcast(buffer, groups.talk)
        self._watch()

    def broadcast(self, groups: Groups, group: dist.ProcessGroup | None, place: Place) -> None:
        """Rank 0's to all, over ``group``; every rank must call it. Raises RunError where ranks do not have the same buffers."""
        if groups.world == 1:
            return
        with place.during("broadcast of buffers"):
            layouts = groups.tell("the broadcast of buffers", self._layout())
        if len(set(layouts)) > 1:
            raise place.error(
                "the ranks' buffers differ in name, shape or type, as forward has left them: parallelize(…, "
                "broadcast_buffers=False) leaves each rank its own"
            )
        with torch.no_grad(), torch.inference_mode(False):
            for members in _together(self._model.named_buffers()):
                (name, first), others = members[0], len(members) - 1
                with place.during(f"broadcast of buffer {name}{f' and {others} more' if others else ''}"):
                    if others:
                        _broadcast_together([unexpanded(buffer) for _, buffer in members], group)
                    else:
                        broadcast(first, group)
        self.note()
        self.know()

    def _layout(self) -> int:
        """The checksum of what there is now: worked out again only if that is something else than before."""
        described = [(name, b.shape, b.dtype) for name, b in self._model.named_buffers()]
        if described != self._described:
            self._described, self._checksum = described, layout(self._model.named_buffers())
        return self._checksum


def layout(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """A checksum of names, shapes and types: ranks where it differs cannot send each other these tensors."""
    return zlib.crc32(repr([(name, tuple(t.shape), t.dtype) for name, t in tensors]).encode())


def broadcast(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Rank 0's values to all ranks, in place, whatever the layout in memory."""
    tensor = unexpanded(tensor)
    if tensor.is_inference():
        tensor = tensor.clone()  # made in an evaluation, and of no use in training
    whole = tensor.data.contiguous()  # the tensor itself unless its layout is another one
    dist.broadcast(whole, group_src=0, group=group)
    if whole.data_ptr() != tensor.data_ptr():
        tensor.copy_(whole)


def _together(buffers: Iterable[tuple[str, Tensor]]) -> list[list[tuple[str, Tensor]]]:
    """Names and buffers that go in one broadcast each: of one type, in order, as many as have no more than so many bytes."""
    out: list[list[tuple[str, Tensor]]] = []
    latest: dict[torch.dtype, tuple[list[tuple[str, Tensor]], int]] = {}
    for name, buffer in buffers:
        size = buffer.numel() * buffer.element_size()
        members, before = latest.get(buffer.dtype, ([], _TOGETHER))
        if before + size > _TOGETHER:
            members, before = [], 0
            out.append(members)
        members.append((name, buffer))
        latest[buffer.dtype] = members, before + size
    return out


def _broadcast_together(buffers: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """As :func:`broadcast` of each."""
    whole = torch.cat([b.clone().reshape(-1) if b.is_inference() else b.data.reshape(-1) for b in buffers])
    dist.broadcast(whole, group_src=0, group=group)
    parts = whole.split([b.numel() for b in buffers])
    ours = [(b, part.view(b.shape)) for b, part in zip(buffers, parts, strict=True) if not b.is_inference()]
    torch._foreach_copy_([b for b, _ in ours], [part for _, part in ours])


def unexpanded(tensor: Tensor) -> Tensor:
    """A view of all that an expanded tensor holds, which can be written to where the tensor itself cannot."""
    for dim, stride in enumerate(tensor.stride() if tensor.layout is torch.strided else ()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def write(tensor: Tensor, value: Tensor) -> None:
    """Copy values of the same shape into a buffer, in place, be it expanded or not."""
    place = unexpanded(tensor)
    place.copy_(value[tuple(slice(n) for n in place.shape)])


def _version(buffer: Tensor | None) -> tuple[int, int] | None:
    if buffer is None or buffer.is_inference():
        return None
    return id(buffer), buffer._version
