"""The flat buffers of one unit: full parameters, the shard at rest, gradients. Memory is given, taken and booked here.

A sharded unit's full parameters come with the plan's first gather of it, and go at the end of the slot that the plan
says. A unit is *outside* of the plan while its full parameters are held although the plan has freed them: it was used
again, or may be (:mod:`mdcs.runtime.departures`). Gradients come with the unit's first backward slot, or before it with
the first gradient, and go with the message that has reduced them.

Parameters are views of the full buffer (``p.data = view``), which stay valid for autograd while the storage is resized
to nothing and back. They are in flat order (:func:`mdcs.model.optimizers.in_flat_order`), or by owner where they are
updated as wholes, begin at 16 bytes (:func:`mdcs.sizes.aligned`), and keep their strides. Rank r, of the world or of a
node, owns the r-th part of every *block*: a block is contiguous on the wire, a shard is the concatenation of its parts.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from mdcs.model.guard import Guard, Refuse, leave_meta
from mdcs.model.optimizers import ParameterPlace, dense_order
from mdcs.model.units import UnsupportedModel
from mdcs.plan.lifetimes import at_rest, unit_rows
from mdcs.profile.layout import owned_part
from mdcs.runtime.context import RunContext
from mdcs.sizes import aligned
from mdcs.torch_compat import without_torch_function


class UnitStorage:
    """Flat tensors: ``flat_param`` [elements with padding], ``shard`` [elements / parts] and ``gradient`` as
    ``flat_param``, both None where there is none. All are on one device.

    At first the unit is whole and its parameters are views with their values; parameters from the meta device get
    memory on the device of ``context``, filled with NaN. :meth:`init_shards` then keeps only what the strategy keeps at
    rest. ``before``: another plan's storage of the unit. Its full buffer is used on; :meth:`take_over` follows.

    - ``parts``: ranks among which updates are divided. Ranks with the same part are replicas.
    - ``replica``: (number of this rank among the replicas of its part, number of replicas).
    - ``full_bytes``: bytes of the full parameters, with padding. ``bytes_at_rest``: of the ledger.
    - ``block_slices``, ``owned``: slices of the blocks in the flat buffers, and of the parts that this rank updates.
    """

    def __init__(
        self, context: RunContext, unit: int, parameters: list[tuple[str, nn.Parameter]],
        refuse: Refuse = lambda name, what: None, before: UnitStorage | None = None,
    ) -> None:  # fmt: skip
        plan, meter, planned = context.plan, context.meter, context.plan.profile.units[unit]
        self.unit, self.rank, self.meter, self._account = unit, context.rank, meter, context.account
        self.name, self.names = planned.name, [n for n, _ in parameters]
        self.parameters = [p for _, p in parameters]
        self.trainable, self.is_aliased = planned.trainable, planned.aliased
        self.strategy, self.is_outside = plan.strategies[unit], False
        self.parts = self.strategy.parts(plan.profile)
        self.replica = self.rank // self.parts, plan.world // self.parts
        self.layout, self.blocks = plan.profile.layouts[unit], plan.blocks[unit]
        self.offsets, self.full_bytes = plan.offsets[unit], self.layout.param_bytes
        self.bytes_at_rest = sum(at_rest(unit_rows(plan.period, unit, self.strategy)).values())
        self.device = context.device if self.parameters[0].is_meta else self.parameters[0].device
        starts = (0, *itertools.accumulate([aligned(p.numel()) for p in self.parameters[:-1]]))
        self.places = [
            ParameterPlace(offset, p.numel(), p.shape, dense_order(p))
            for p, offset in zip(self.parameters, self.layout.offsets if self.layout.is_whole else starts, strict=True)
        ]
        bounds = [at for place in sorted(self.places) for at in (place.offset, place.offset + place.numel)]
        gaps = zip([0, *bounds[1::2]], [*bounds[::2], self.layout.elements], strict=True)
        self._padding = [slice(begin, end) for begin, end in gaps if begin < end]
        self.block_slices = [slice(o, o + size) for o, size in zip(self.offsets, self.blocks, strict=True)]
        self.owned = self.owned_slices(self.rank)
        self.gradient_dtype: torch.dtype = getattr(torch, planned.dtype_on_wire(is_gather=False))
        self.master_dtype: torch.dtype | None = getattr(torch, planned.master_dtype) if planned.master_dtype else None
        self._has_shard = self.strategy.sharded or self.master_dtype is not None
        if before is None:
            with meter.tag("full_parameters" if self.strategy.sharded else "parameters"):
                self.flat_param = torch.zeros(self.layout.elements, dtype=self.parameters[0].dtype, device=self.device)
            self.move_back(keep_changes=True)
        else:
            self.flat_param = before.flat_param
        self.shard: Tensor | None = None
        self.gradient: Tensor | None = None
        self._all = set(range(len(parameters)))
        self.come: set[int] = set()  # parameters whose gradient has come in this micro-step
        self.had: set[int] = set()  # so far in the iteration
        self.unused: tuple[int, ...] = ()  # parameters without a gradient on this rank in the iteration that is reduced
        self.guard = Guard(parameters, refuse)

    def init_shards(self) -> None:
        """Keep the buffers that the strategy keeps between steps: make shards, free full parameters."""
        if self._has_shard:
            with self.meter.tag("parameters" if self.master_dtype is None else "optimizer"):
                size, dtype = self.layout.elements // self.parts, self.master_dtype or self.flat_param.dtype
                self.shard = torch.empty(size, dtype=dtype, device=self.device)
            for b, part in enumerate(self.owned):
                self.owned_shard(b).copy_(self.flat_param[part])
        if self.strategy.sharded:
            self._resize(0)

    def stays_in_parts(self, before: UnitStorage) -> bool:
        """Return whether this rank needs nothing of others to :meth:`take_over`: it updates what it has updated."""
        if not (self.trainable or before.strategy.sharded):
            return True  # every rank has all of it
        return (self.trainable or self.strategy.sharded) and (self.parts, self.blocks) == (before.parts, before.blocks)

    def take_over(self, before: UnitStorage) -> None:
        """Keep what the strategy keeps between steps of what another plan's storage has, which has no memory then.

        ``before`` is whole, or the unit :meth:`stays_in_parts`, or the full buffer has this rank's parts. It is closed
        where others have parts, which may be out of date before the plan's first gather.
        """
        stays, shard = self.stays_in_parts(before), before.shard
        if not self.strategy.sharded:
            with self.meter.tag("parameters"):
                self._resize(self.full_bytes)
            self.meter.retag(self.flat_param, "parameters")
            if stays:
                before.copy_shard_into_flat()
        if stays and self._has_shard and shard is not None:
            self.shard, before.shard = shard, None
        else:
            self.init_shards()
            before.release_shard()
        if self.trainable and self.parts > 1:
            self.guard.close()

    # -- parameters ---------------------------------------------------------------------------------------------

    @property
    def is_open_between_steps(self) -> bool:
        """Return whether the loop may read and change the unit's parameters between updates: there is no other copy of
        them, and no use of them begins a slot, which only a closed guard would notice.
        """
        return not (self.strategy.sharded or self.is_aliased) and self.shard is None

    def find_rebound_param(self) -> str | None:
        """Return the name of a parameter that left the flat buffer, as after ``model.half()``; None: none did."""
        full = self.flat_param
        for name, p, place in zip(self.names, self.parameters, self.places, strict=True):
            if p.data_ptr() != full.data_ptr() + place.offset * full.element_size():
                return name
        return None

    def owned_slices(self, rank: int) -> list[slice]:
        """Return the slices of the blocks' parts that ``rank`` updates, in the flat buffers."""
        return [owned_part(o, size, self.parts, rank) for o, size in zip(self.offsets, self.blocks, strict=True)]

    def owned_shard(self, block: int) -> Tensor:
        """Return the part of a block that this rank updates [flat]: of the shard, or else of the full parameters."""
        if self.shard is None:
            return self.flat_param[self.owned[block]]
        return self.shard[self.offsets[block] // self.parts : (self.offsets[block] + self.blocks[block]) // self.parts]

    def allocate(self) -> None:
        """Allocate the full parameters, if they have no memory. Their values are undefined."""
        with self._account.lock:
            if not self.is_full:
                with self.meter.tag("full_parameters"):
                    self._resize(self.full_bytes)
                self._account.record("full_parameters", self.full_bytes)

    def free(self) -> None:
        """Free the full parameters of a sharded unit, if they have memory: after a failed allocation they have none."""
        with self._account.lock:
            if self.is_full:
                self._resize(0)
                self._account.record("full_parameters", -self.full_bytes)

    def begin_gather(self) -> None:
        """Allocate for the plan's gather. A unit that is outside has its bytes, which are the plan's again."""
        with self._account.lock:
            self._set_outside(False)
            self.allocate()

    def take_outside(self) -> None:
        """Hold full parameters outside of the plan from now on; allocate them if the plan does not hold them."""
        with self._account.lock:
            self.allocate()
            self._set_outside(True)

    def free_outside(self) -> None:
        """Free and close the unit, if it is outside of the plan."""
        if self.is_outside:
            with self._account.lock:
                self._set_outside(False)
                self.free()
            self.guard.close()

    def _set_outside(self, is_outside: bool) -> None:
        self._account.outside += (is_outside - self.is_outside) * self.full_bytes
        self.is_outside = is_outside

    def _resize(self, size: int) -> None:
        """Free the full buffer, or allocate it. Raises UnsupportedModel where another library may use its memory."""
        storage = self.flat_param.untyped_storage()
        if not storage.resizable():
            raise UnsupportedModel(
                f"{self.name}: its memory is handed to numpy, or another library, which would keep it when the "
                "parameters are in pieces: hand over a copy (.clone())"
            )
        storage.resize_(size)

    def release_shard(self) -> None:
        """Free the shard for good."""
        if self.shard is not None:
            self.shard.untyped_storage().resize_(0)

    @property
    def is_full(self) -> bool:
        """Return whether the full parameters have memory."""
        return self.flat_param.untyped_storage().nbytes() > 0

    def copy_shard_into_flat(self, *blocks: int) -> None:
        """Copy this rank's updated parts of blocks (none: of all) into the full parameters."""
        for b in (blocks or range(len(self.blocks))) if self.shard is not None else ():
            self.flat_param[self.owned[b]].copy_(self.owned_shard(b))

    def update_shard_from_flat(self) -> None:
        """Update the shard from changed full parameters. Masters keep their precision where nothing changed."""
        for b, part in enumerate(self.owned if self.shard is not None else ()):
            mine, now = self.owned_shard(b), self.flat_param[part]
            mine.copy_(torch.where(mine.to(now.dtype) == now, mine, now.to(mine.dtype)))

    def move(self, device: torch.device) -> None:
        """Give the parameters memory of their own on ``device``, with their values."""
        with self.meter.tag("parameters"):
            for p in self.parameters:
                p.data = p.detach().to(device, copy=True)

    def move_back(self, keep_changes: bool) -> None:
        """Make the parameters views of the full buffer; copy their values there if ``keep_changes``."""
        with without_torch_function(), torch.no_grad():
            for p, place in zip(self.parameters, self.places, strict=True):
                view = place.view(self.flat_param)
                if p.is_meta:
                    leave_meta(p, view.fill_(torch.nan))
                    continue
                if keep_changes:
                    view.copy_(p)
                p.data = view
            if keep_changes:
                self.zero_padding(self.flat_param)

    def zero_padding(self, flat: Tensor) -> None:
        """Zero the padding of a flat tensor."""
        for gap in self._padding:
            flat[gap].zero_()

    def detach_plain_params(self) -> None:
        """Make the parameters plain ones with memory of their own. They must be whole."""
        self.guard.open()
        self.move(self.device)
        for p in self.parameters:
            p.grad = None
        self._resize(0)
        self.release_shard()

    # -- gradients ----------------------------------------------------------------------------------------------

    def allocate_gradient(self) -> None:
        """Allocate the full gradient, if it has no memory; only the padding is set, to zero."""
        with self._account.lock:
            if self.gradient is None:
                with self.meter.tag("gradients"):
                    self.gradient = torch.empty(self.layout.elements, dtype=self.gradient_dtype, device=self.device)
                self.zero_padding(self.gradient)
                self._account.record("gradients", self.layout.grad_bytes)

    def free_gradient(self) -> None:
        """Free the memory of the full gradient."""
        # Resize instead of dropping references: a backend's thread may hold one a little longer.
        with self._account.lock:
            if self.gradient is not None:
                self.gradient.untyped_storage().resize_(0)
                self._account.record("gradients", -self.layout.grad_bytes)
            self.gradient = None

    def reset_iteration(self) -> None:
        """Free gradients and gathered parameters; only the parts at rest stay."""
        self._set_outside(False)
        if self.strategy.sharded:
            self.free()
        self.free_gradient()
        with without_torch_function():
            for p in self.parameters:
                p.grad = None
        if self.trainable or self.strategy.sharded:
            self.guard.close()

    def take_gradient(self, index: int, scale: float | None) -> None:
        """Move ``parameter.grad`` into the flat buffer: set by the iteration's first gradient, added by later ones.

        ``scale`` (1/world, in the last micro-step) averages over ranks before the reduction, as DDP does.
        """
        p, view = self.parameters[index], self._gradient_of(index)
        assert p.grad is not None
        if scale is not None and index in self.come:
            p.grad.mul_(scale)  # alone: the one that it adds to is averaged already
            scale = None
        if index in self.had:
            _accumulate(view, p.grad)
        elif scale is not None and view.dtype == p.dtype:
            _average(p.grad, scale, view)
            scale = None
        else:
            view.copy_(p.grad)
        if scale is not None:
            _average(view, scale, view)
        p.grad = None
        self.come.add(index)
        self.had.add(index)

    # A rank that has not used a parameter sends negative zeros for it, and the sum over ranks is a negative zero only
    # where all ranks send one: so the reduction itself tells whether any rank has used the parameter. A gradient that
    # is used has no negative zero (:func:`_average`). Only ranks that did not use a parameter look at what has arrived.

    def complete_gradients(self, scale: float | None) -> None:
        """Complete the gradients of a micro-step that brings no more. ``scale``: as in :meth:`take_gradient`."""
        for i in self.without_gradient:
            with without_torch_function(), torch.no_grad():
                if self.parameters[i].grad is not None:  # side passes have left it
                    self.take_gradient(i, scale)
                elif scale is not None and i in self.had:
                    _average(view := self._gradient_of(i), scale, view)
                elif scale is not None:
                    self._gradient_of(i).fill_(-0.0)
        if scale is not None:
            self.unused = tuple(self._all - self.had) if len(self.had) < len(self._all) else ()

    @property
    def without_gradient(self) -> set[int]:
        """The parameters whose gradient has not come in this micro-step."""
        return self._all - self.come if len(self.come) < len(self._all) else set()

    @property
    def full_gradient(self) -> Tensor:
        """The full gradient [elements with padding], which is allocated."""
        assert self.gradient is not None
        return self.gradient

    def _gradient_of(self, index: int) -> Tensor:
        return self.places[index].view(self.full_gradient)

    def unused_on_this_rank(self, block: int, reduced: Tensor) -> list[tuple[slice, Tensor]]:
        """Return slices of this rank's part of a block, by parameter that this rank has not used, and on the device
        whether no rank has. ``reduced``: the part's gradient.
        """
        out, part = [], self.owned[block]
        for place in (self.places[i] for i in self.unused):
            begin = max(place.offset, part.start) - part.start
            end = min(place.offset + place.numel, part.stop) - part.start
            if begin < end:
                piece = reduced[begin:end]
                out.append((slice(begin, end), (torch.signbit(piece) & (piece == 0)).all()))
        return out


_PIECE = 4096  # elements that are added at once where the processor copies them first


def _accumulate(total: Tensor, gradient: Tensor) -> None:
    """Add a gradient, in pieces where the processor would first copy all of it in the wider type of the total."""
    copies = gradient.dtype != total.dtype and gradient.device.type == "cpu" and gradient.dim() > 0
    rows = max(1, _PIECE * len(gradient) // max(1, gradient.numel())) if copies else 0
    pairs = zip(total.split(rows), gradient.split(rows), strict=True) if copies else [(total, gradient)]
    for into, piece in pairs:
        into.add_(piece)


_ZERO = torch.zeros(())


def _average(gradient: Tensor, scale: float, out: Tensor) -> None:
    """Write ``gradient`` times ``scale``, without negative zeros, which say that a parameter was not used."""
    if out.dtype.itemsize < _ZERO.dtype.itemsize:  # torch.add would round the factor to the narrow type
        torch.mul(gradient, scale, out=out)
        out.add_(0.0)
    else:
        torch.add(_ZERO, gradient, alpha=scale, out=out)  # as fast as the product, and as exact
