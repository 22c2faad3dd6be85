"""Bytes per rank that FSDP2 holds in an iteration: a walk over the slots that allocates and frees as its hooks do.

Follows ``torch.distributed.fsdp._fully_shard`` of torch 2.13. Buffers of a group:

* At rest: its shards (of the world, or of a node). From their reduction until ``zero_grad`` also the shards'
  gradients. A replicated group holds both whole.
* Gather: the message's buffer and the parameters that it is copied to. In forward the buffer is freed when the next
  group's gather has arrived; where the host waits for gathers (CPU), at once. A replicated group has a second copy
  while it is in use.
* Reduction: gradients are copied into the message's buffer and freed; the buffer is freed when the next group
  reduces. gloo reduces a copy of the buffer, and the shards are taken from this copy.

The bytes follow from the order of the host's calls, not from timing, with one exception: a thread frees gloo's copy,
and on busy cores it does so after the next slot has begun. The walk counts the copy until the next message is issued.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mdcs.export.document import Group, PrefetchLists, in_order
from mdcs.plan.job import Job
from mdcs.plan.lifetimes import CATEGORIES
from mdcs.profile.link import Collectives, Kind

_Key = str | tuple[str, str]


@dataclass(frozen=True)
class GroupBytes:
    """Bytes of one group on one rank.

    - ``parts``: number of shards (not bytes).
    - ``shards``: this rank's shard of what is updated.
    - ``full``: whole parameters.
    - ``optimizer``: optimizer state.
    - ``scratch``: temporaries of an update.
    - ``gradients``: gradients that autograd makes.
    - ``reduced``: message buffer that the gradients are copied to.
    - ``kept``: this rank's shard of the gradients after the reduction.
    """

    parts: int
    shards: int
    full: int
    optimizer: int
    scratch: int
    gradients: int
    reduced: int
    kept: int

    @classmethod
    def of(cls, group: Group, job: Job) -> GroupBytes:
        """Compute from the units' layouts. torch pads every parameter by itself; a plan does not know this padding."""
        profile = job.profile
        parts = group.strategy.parts(profile)
        sizes = dict.fromkeys(("shards", "full", "optimizer", "scratch", "gradients", "reduced", "kept"), 0)
        for u in group.units:
            unit, layout = profile.units[u], profile.layouts[u]
            own = layout.elements // parts
            sizes["shards"] += own * layout.updated_width
            sizes["full"] += layout.param_bytes
            if unit.trainable:
                opt = profile.optimizers[unit.optimizer]
                sizes["optimizer"] += int(own * layout.updated_width * opt.state_tensors) + opt.state_fixed * len(
                    unit.segments
                )
                sizes["scratch"] = max(sizes["scratch"], opt.scratch(own, layout.updated_width))
                sizes["gradients"] += layout.param_bytes
                sizes["reduced"] += layout.grad_bytes
                sizes["kept"] += own * layout.updated_width
        return cls(parts, **sizes)


class MemoryWalk:
    """One iteration of a job in steady state; ``peak`` has the peak bytes of each category and of the "total".

    Each buffer is allocated by :meth:`_hold` and freed by :meth:`_free`, under a key: (group, what it is), or a name if
    there is one at a time.
    """

    def __init__(
        self,
        job: Job,
        groups: tuple[Group, ...],
        forward: PrefetchLists,
        backward: PrefetchLists,
        collectives: Collectives,
    ) -> None:
        self._profile, self._groups, self._collectives = job.planned_profile, groups, collectives
        self._waits = collectives.backend == "gloo"  # on the host
        self._bytes = {g.name: GroupBytes.of(g, job) for g in groups}
        self._buffers: dict[_Key, tuple[str, int]] = {}  # category, bytes
        self._live = dict.fromkeys(CATEGORIES, 0)
        self.peak = dict.fromkeys((*CATEGORIES, "total"), 0)
        for name, size in self._bytes.items():
            self._hold((name, "parameters"), "parameters", size.shards)
            self._hold((name, "optimizer"), "optimizer", size.optimizer)
        for micro in range(job.micro_steps):
            self._forward(forward)
            self._backward(backward, first=micro == 0, last=micro == job.micro_steps - 1)
        self._hold("scratch", "update_scratch", max((size.scratch for size in self._bytes.values()), default=0))

    def _hold(self, key: _Key, category: str, size: int) -> None:
        self._free(key)
        self._buffers[key] = category, size
        self._live[category] += size
        self.peak[category] = max(self.peak[category], self._live[category])
        self.peak["total"] = max(self.peak["total"], sum(self._live.values()))

    def _free(self, key: _Key) -> None:
        """Free a buffer, if it is there."""
        category, size = self._buffers.pop(key, ("staging", 0))
        self._live[category] -= size

    def _forward(self, ahead: PrefetchLists) -> None:
        slots = self._profile.slots[: self._profile.forward_slots]
        order = in_order(self._groups, Kind.AG_F)
        for q, slot in enumerate(slots):
            self._hold("activations", "activations", slot.live)
            for g in order:
                if g.forward[0] == q:
                    self._gather(g.name, in_forward=True)
                    self._issue(ahead.get(g.name, ()))
            self._hold("activations", "activations", slot.peak)
            for g in reversed(order):
                if g.forward[1] == q and g.reshard_after_forward:
                    self._free((g.name, "full"))
        self._free("last gather")

    def _backward(self, ahead: PrefetchLists, *, first: bool, last: bool) -> None:
        slots = self._profile.slots[self._profile.forward_slots :]
        after = [slot.live for slot in slots[1:]] + [self._profile.slots[0].live]
        order = in_order(self._groups, Kind.AG_B)
        for q, slot in enumerate(slots):
            self._hold("activations", "activations", slot.live)
            made = 0
            for g in order:
                if g.backward is not None and g.backward[0] == q:
                    self._gather(g.name, in_forward=False)
                    self._issue(ahead.get(g.name, ()))
                    if first:
                        made += self._bytes[g.name].gradients
                        self._hold((g.name, "gradients"), "gradients", self._bytes[g.name].gradients)
            # A profile's peak counts each gradient as a temporary. FSDP2 keeps it: it is in "gradients" here.
            self._hold("activations", "activations", max(slot.live, after[q], slot.peak - made))
            self._hold("activations", "activations", after[q])
            for g in reversed(order):
                if g.backward is not None and g.backward[1] == q:
                    self._free((g.name, "full"))
                    if last:
                        self._reduce(g.name)
        for g in self._groups:  # those whose backward hooks did not run
            self._free((g.name, "full"))
        self._free("last reduction")
        self._free("copy")

    def _issue(self, names: Iterable[str]) -> None:
        for name in names:
            if (name, "full") not in self._buffers and (name, "message") not in self._buffers:
                size = self._bytes[name]
                message = 0 if size.parts == 1 else size.full
                if message:
                    self._free("copy")
                self._hold((name, "message"), "staging", message)
                self._hold((name, "of backend"), "staging", self._collectives.buffer(Kind.AG_F, message, size.parts))

    def _gather(self, name: str, *, in_forward: bool) -> None:
        if (name, "full") in self._buffers:
            return
        self._issue([name])
        if in_forward:
            self._free("last gather")
        self._free((name, "of backend"))  # the host has waited for the gather
        self._hold((name, "full"), "full_parameters", self._bytes[name].full)
        if in_forward and not self._waits:
            self._buffers["last gather"] = self._buffers.pop((name, "message"))  # until the next gather has arrived
        self._free((name, "message"))

    def _reduce(self, name: str) -> None:
        size = self._bytes[name]
        if not size.gradients:
            return
        self._hold("last reduction", "staging", size.reduced)  # instead of the one before
        self._free((name, "gradients"))
        self._free("copy")
        self._hold((name, "shards"), "gradient_shards", size.kept)
        if self._waits and size.parts > 1:
            self._hold("copy", "staging", size.reduced)  # gloo's, until the next message is issued
