"""The flat buffers of one unit: full parameters, the shard at rest, gradients. Released storage is really freed.

Each section of the unit has its own: the elements of a buffer are of one type. Parameters are views of the full one
(``p.data = view``), which stay valid for autograd when the storage is resized to nothing and back. The order of elements is
that of the model; rank r, of the world or of a node, owns the r-th part of every *block*, so that a block is contiguous on the
wire and a shard is the concatenation of its parts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mdcs.measure.memory import Meter
from mdcs.model.guard import Guard, Refuse
from mdcs.plan.messages import Plan
from mdcs.plan.widths import sections_of


class UnitStorage:
    """``fulls``, ``shards`` and ``gradients`` have a flat tensor per section; all live on one device.

    At first the unit is whole, its parameters views of it with the values they had; those on the meta device get memory on
    ``device``, full of NaN. :meth:`settle` then leaves of it what the strategy keeps at rest.
    """

    def __init__(
        self, plan: Plan, unit: int, parameters: list[tuple[str, nn.Parameter]], rank: int, meter: Meter,
        refuse: Refuse = lambda name, what: None, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.unit, self.rank, self.meter = plan, unit, rank, meter
        self.name = plan.profile.units[unit].name
        self.names = [n for n, _ in parameters]
        self.parameters = [p for _, p in parameters]
        self.trainable = plan.profile.units[unit].trainable
        self.is_aliased = plan.profile.units[unit].aliased
        self.strategy = plan.strategies[unit]
        self.layout, self.blocks = plan.profile.layouts[unit], plan.blocks[unit]
        self.sections = sections_of(self.layout, self.blocks)  # of the blocks
        begins = (0, *self.layout.ends)
        self.offsets = [o - begins[s] for o, s in zip(plan.offsets[unit], self.sections, strict=True)]  # in their sections
        first = self.parameters[0]
        self.device = device if device is not None and first.is_meta else first.device
        self.places: list[tuple[int, int, int, torch.Size]] = []  # section, offset in it, length, shape
        section, offset = 0, 0
        for p in self.parameters:
            n = p.numel()
            if offset + n > self.layout.sections[section].numel:
                section, offset = section + 1, 0
            self.places.append((section, offset, n, p.shape))
            offset += n
        dtypes = {place[0]: p.dtype for place, p in zip(self.places, self.parameters, strict=True)}
        self.gradient_dtypes = [dtype_of(s.grad_bytes, dtypes[i]) for i, s in enumerate(self.layout.sections)]
        with meter.tag("full_parameters" if self.strategy.sharded else "parameters"):
            self.fulls = [torch.zeros(n, dtype=dtypes[i], device=self.device) for i, n in enumerate(self.layout.sizes)]
        with torch.no_grad():
            for p, (section, offset, n, shape) in zip(self.parameters, self.places, strict=True):
                view = self.fulls[section][offset : offset + n].view(shape)
                if p.is_meta:
                    leave_meta(p, view.fill_(torch.nan))
                else:
                    view.copy_(p.detach())
                    p.data = view
        self.shards: list[Tensor | None] = [None] * len(self.fulls)
        self.gradients: list[Tensor] = []
        self.guard = Guard(parameters, refuse)

    def settle(self) -> None:
        """Keep what the strategy keeps between steps."""
        for s, section in enumerate(self.layout.sections):
            if self.strategy.sharded or section.master_bytes:
                size = self.layout.sizes[s] // self.parts
                with self.meter.tag("optimizer" if section.master_bytes else "parameters"):
                    dtype = dtype_of(section.master_bytes, self.fulls[s].dtype)
                    self.shards[s] = torch.empty(size, dtype=dtype, device=self.device)
        self.reshard(self.fulls)
        if self.strategy.sharded:
            self.free_full()

    # -- parameters ---------------------------------------------------------------------------------------------

    @property
    def parts(self) -> int:
        """Into how many parts updates are divided; the ranks that have the same one are replicas."""
        return self.strategy.parts(self.plan.profile)

    @property
    def replica(self) -> tuple[int, int]:
        """The number of this rank among those that have the same part, and how many these are."""
        return self.rank // self.parts, self.plan.world // self.parts

    @property
    def is_plain(self) -> bool:
        """Whether the parameters, between updates, are all there is of the unit: it can be read and changed through them."""
        return not self.strategy.sharded and all(shard is None for shard in self.shards)

    def detached(self) -> str | None:
        """The name of a parameter that was given other memory than the runtime's, as ``model.half()`` does."""
        for name, p, (section, offset, _, _) in zip(self.names, self.parameters, self.places, strict=True):
            full = self.fulls[section]
            if p.data_ptr() != full.data_ptr() + offset * full.element_size():
                return name
        return None

    def region(self, block: int) -> slice:
        """A block in the flat buffers of its section."""
        return slice(self.offsets[block], self.offsets[block] + self.blocks[block])

    def own(self, block: int) -> slice:
        """What this rank updates of a block, there."""
        size = self.blocks[block] // self.parts
        start = self.offsets[block] + self.rank % self.parts * size
        return slice(start, start + size)

    def in_shard(self, block: int) -> slice:
        """The same part in the shard."""
        return slice(self.offsets[block] // self.parts, (self.offsets[block] + self.blocks[block]) // self.parts)

    def full(self, block: int) -> Tensor:
        """The full parameters of the block's section."""
        return self.fulls[self.sections[block]]

    def shard(self, block: int) -> Tensor | None:
        """This rank's part of a block, if it is kept apart from the full parameters."""
        shard = self.shards[self.sections[block]]
        return None if shard is None else shard[self.in_shard(block)]

    def at_rest(self, block: int) -> Tensor:
        """The parameters of a block that this rank updates."""
        shard = self.shard(block)
        return self.full(block)[self.own(block)] if shard is None else shard

    def allocate_full(self) -> None:
        """Take memory for the full parameters; what is in it is not defined."""
        with self.meter.tag("full_parameters"):
            for full in self.fulls:
                full.untyped_storage().resize_(full.numel() * full.element_size())

    def free_full(self) -> None:
        """Give the memory of the full parameters back."""
        for full in self.fulls:
            full.untyped_storage().resize_(0)

    @property
    def full_bytes(self) -> int:
        """Of the full parameters, with padding."""
        return self.layout.param_bytes

    @property
    def is_full(self) -> bool:
        """Whether the full parameters have memory."""
        return self.fulls[0].untyped_storage().nbytes() > 0

    def place_own(self, block: int) -> None:
        """Put what this rank has updated of a block where compute, or the gather, expects it."""
        shard = self.shard(block)
        if shard is not None:
            self.full(block)[self.own(block)].copy_(shard)

    def reshard(self, wholes: list[Tensor]) -> None:
        """Take the shards from all of the unit's elements, by section."""
        for b, section in enumerate(self.sections):
            shard = self.shard(b)
            if shard is not None:
                shard.copy_(wholes[section][self.own(b)])

    def adopt(self) -> None:
        """Take from the full buffers what was changed there. Where masters have more digits, what was not changed keeps them."""
        for b in range(len(self.blocks)):
            mine = self.shard(b)
            if mine is not None:
                now = self.full(b)[self.own(b)]
                mine.copy_(torch.where(mine.to(now.dtype) == now, mine, now.to(mine.dtype)))

    def move(self, device: torch.device) -> None:
        """Give the parameters memory of their own, with what they hold."""
        with self.meter.tag("parameters"):
            for p in self.parameters:
                p.data = p.detach().to(device, copy=True)

    def move_back(self, keep_changes: bool) -> None:
        """Make the parameters views of the full buffers again, and put there what they hold if ``keep_changes``."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for p, (section, offset, n, shape) in zip(self.parameters, self.places, strict=True):
                view = self.fulls[section][offset : offset + n].view(shape)
                if keep_changes:
                    view.copy_(p)
                p.data = view
            if keep_changes:
                self.zero_padding(self.fulls)

    def zero_padding(self, flats: list[Tensor]) -> None:
        """Of flat tensors by section."""
        for flat, section in zip(flats, self.layout.sections, strict=True):
            flat[section.numel :].zero_()

    def let_go(self) -> None:
        """Make the parameters plain ones that have memory of their own. They must be whole."""
        self.guard.open()
        self.move(self.device)
        for p in self.parameters:
            p.grad = None
        self.free_full()

    # -- gradients ----------------------------------------------------------------------------------------------

    def gradient(self, block: int) -> Tensor:
        """The full gradient of the block's section."""
        return self.gradients[self.sections[block]]

    def allocate_gradient(self) -> None:
        """Take memory for the full gradient."""
        with self.meter.tag("gradients"):
            self.gradients = [
                torch.empty(size, dtype=dtype, device=self.device)
                for size, dtype in zip(self.layout.sizes, self.gradient_dtypes, strict=True)
            ]
        self.zero_padding(self.gradients)

    def free_gradient(self) -> None:
        """Give the memory of the full gradient back."""
        # Now, and not when the last reference goes: a backend's thread may hold one a little longer.
        for gradient in self.gradients:
            gradient.untyped_storage().resize_(0)
        self.gradients = []

    def forget(self) -> None:
        """Free the gradients, and what is gathered: the parts at rest are left."""
        if self.strategy.sharded:
            self.free_full()
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
        section, offset, n, shape = self.places[index]
        view = self.gradients[section][offset : offset + n].view(shape)
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


def leave_meta(parameter: nn.Parameter, values: Tensor) -> None:
    """Give it these values on their device: it stays the object that optimizers hold, with what else it has been given."""
    real = nn.Parameter(values.new_empty(0), parameter.requires_grad)
    vars(real).update(vars(parameter))
    torch.utils.swap_tensors(parameter, real)
    parameter.data = values
