"""The flat buffers of one unit: full parameters, the shard at rest, gradients. Released storage is really freed.

Parameters are views of the flat buffer (``p.data = view``), which stay valid for autograd when the storage is
resized to nothing and back. The order of elements is that of the model; rank r owns the r-th part of every
*block*, so that a block is contiguous on the wire and a shard is the concatenation of its parts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mdcs.measure.memory import Meter
from mdcs.model.guard import Guard, Refuse
from mdcs.plan.messages import Plan
from mdcs.plan.strategy import Strategy


class UnitStorage:
    """``full``, ``shard`` and ``gradient`` are flat; all live on the parameters' device."""

    def __init__(
        self, plan: Plan, unit: int, parameters: list[tuple[str, nn.Parameter]], rank: int, meter: Meter,
        refuse: Refuse = lambda name, what: None,
    ) -> None:  # fmt: skip
        self.plan, self.unit, self.rank, self.meter = plan, unit, rank, meter
        self.name = plan.profile.units[unit].name
        self.names = [n for n, _ in parameters]
        self.parameters = [p for _, p in parameters]
        self.trainable = plan.profile.units[unit].trainable
        self.strategy = plan.strategies[unit]
        self.blocks, self.offsets = plan.blocks[unit], plan.offsets[unit]
        first, size = self.parameters[0], plan.padded(unit)
        self.gradient_dtype = dtype_of(plan.profile.grad_bytes, first.dtype)
        master = plan.profile.master_bytes if self.trainable else 0
        with meter.tag("full_parameters" if self.strategy.sharded else "parameters"):
            self.full = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.places: list[tuple[int, int, torch.Size]] = []  # offset, length, shape
        offset = 0
        with torch.no_grad():
            for p in self.parameters:
                n = p.numel()
                self.places.append((offset, n, p.shape))
                self.full[offset : offset + n].copy_(p.detach().reshape(-1))
                p.data = self.full[offset : offset + n].view(p.shape)
                offset += n
        self.used = offset
        self.shard: Tensor | None = None
        if self.strategy.sharded or master:
            part, dtype = size if self._is_whole else size // plan.world, dtype_of(master, first.dtype)
            with meter.tag("optimizer" if master else "parameters"):
                self.shard = torch.empty(part, dtype=dtype, device=first.device)
            self.reshard(self.full)
        if self.strategy.sharded:
            self.free_full()
        self.gradient: Tensor = torch.empty(0, dtype=self.gradient_dtype, device=first.device)
        self.guard = Guard(parameters, refuse)

    # -- parameters ---------------------------------------------------------------------------------------------

    @property
    def _is_whole(self) -> bool:
        """Whether every rank updates all of it."""
        return self.strategy is Strategy.dp

    @property
    def is_plain(self) -> bool:
        """Whether the parameters, between updates, are all there is of the unit: it can be read and changed through them."""
        return not self.strategy.sharded and (self.shard is None or not self.trainable)

    def detached(self) -> str | None:
        """The name of a parameter that was given other memory than the runtime's, as ``model.half()`` does."""
        for name, p, (offset, _, _) in zip(self.names, self.parameters, self.places, strict=True):
            if p.data_ptr() != self.full.data_ptr() + offset * self.full.element_size():
                return name
        return None

    def own(self, block: int) -> slice:
        """What this rank updates of a block, in the full buffer."""
        if self._is_whole:
            return self.region(block)
        part = self.blocks[block] // self.plan.world
        start = self.offsets[block] + self.rank * part
        return slice(start, start + part)

    def in_shard(self, block: int) -> slice:
        """The same part in the shard."""
        world = 1 if self._is_whole else self.plan.world
        return slice(self.offsets[block] // world, (self.offsets[block] + self.blocks[block]) // world)

    def region(self, block: int) -> slice:
        """A block in the full buffer."""
        return slice(self.offsets[block], self.offsets[block] + self.blocks[block])

    def at_rest(self, block: int) -> Tensor:
        """The parameters of a block that this rank updates."""
        return self.full[self.own(block)] if self.shard is None else self.shard[self.in_shard(block)]

    def allocate_full(self) -> None:
        """Take memory for the full parameters; what is in it is not defined."""
        with self.meter.tag("full_parameters"):
            self.full.untyped_storage().resize_(self.full_bytes)

    def free_full(self) -> None:
        """Give the memory of the full parameters back."""
        self.full.untyped_storage().resize_(0)

    @property
    def full_bytes(self) -> int:
        """Of the full parameters, with padding."""
        return self.full.numel() * self.full.element_size()

    @property
    def is_full(self) -> bool:
        """Whether the full parameters have memory."""
        return self.full.untyped_storage().nbytes() > 0

    def place_own(self, block: int) -> None:
        """Put what this rank has updated of a block where compute, or the gather, expects it."""
        if self.shard is not None:
            self.full[self.own(block)].copy_(self.shard[self.in_shard(block)])

    def reshard(self, whole: Tensor) -> None:
        """Take the shard from all of the unit's elements."""
        if self.shard is not None:
            for b in range(len(self.blocks)):
                self.shard[self.in_shard(b)].copy_(whole[self.own(b)])

    def adopt(self) -> None:
        """Take from the full buffer what was changed there. Where masters have more digits, what was not changed keeps them."""
        if self.shard is not None:
            for b in range(len(self.blocks)):
                mine, now = self.shard[self.in_shard(b)], self.full[self.own(b)]
                mine.copy_(torch.where(mine.to(now.dtype) == now, mine, now.to(mine.dtype)))

    def move(self, device: torch.device) -> None:
        """Give the parameters memory of their own, with what they hold."""
        with self.meter.tag("parameters"):
            for p in self.parameters:
                p.data = p.detach().to(device, copy=True)

    def move_back(self, keep_changes: bool) -> None:
        """Make the parameters views of the full buffer again, and put there what they hold if ``keep_changes``."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for p, (offset, n, shape) in zip(self.parameters, self.places, strict=True):
                view = self.full[offset : offset + n].view(shape)
                if keep_changes:
                    view.copy_(p)
                p.data = view
            if keep_changes:
                self.full[self.used :].zero_()

    def let_go(self) -> None:
        """Make the parameters plain ones that have memory of their own. They must be whole."""
        self.guard.open()
        self.move(self.full.device)
        for p in self.parameters:
            p.grad = None
        self.free_full()

    # -- gradients ----------------------------------------------------------------------------------------------

    def allocate_gradient(self) -> None:
        """Take memory for the full gradient."""
        with self.meter.tag("gradients"):
            self.gradient = torch.empty(self.full.shape, dtype=self.gradient_dtype, device=self.full.device)
        self.gradient[self.used :].zero_()

    def free_gradient(self) -> None:
        """Give the memory of the full gradient back."""
        # Now, and not when the last reference goes: a backend's thread may hold one a little longer.
        self.gradient.untyped_storage().resize_(0)
        self.gradient = self.gradient.new_empty(0)

    def forget(self) -> None:
        """Free the gradients, and what is gathered: the parts at rest are left."""
        if self.strategy.sharded:
            self.free_full()
        if self.gradient.numel():
            self.free_gradient()
        with torch._C.DisableTorchFunctionSubclass():
            for p in self.parameters:
                p.grad = None
        if self.trainable or self.strategy.sharded:
            self.guard.close()

    def take_gradient(self, index: int, first: bool, scale: float | None) -> None:
        """Move ``parameter.grad`` into the flat buffer: set by the first micro-step, added by later ones.

        ``scale`` (1/world, on the last micro-step) averages over ranks before the reduction, as DDP does.
        """
        p = self.parameters[index]
        offset, n, shape = self.places[index]
        view = self.gradient[offset : offset + n].view(shape)
        assert p.grad is not None
        if first and scale is not None and view.dtype == p.dtype:
            torch.mul(p.grad, scale, out=view)
        else:
            view.copy_(p.grad) if first else view.add_(p.grad)
            if scale is not None:
                view.mul_(scale)
        p.grad = None


def dtype_of(width: int, like: torch.dtype) -> torch.dtype:
    """That of parameters if it has their width in bytes (or 0), else the IEEE one of this width."""
    return like if width in (0, like.itemsize) else {2: torch.float16, 4: torch.float32, 8: torch.float64}[width]
