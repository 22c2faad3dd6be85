"""What FSDP2 holds in an iteration, in bytes per rank: a walk over its slots, as its hooks allocate and free.

By torch 2.13's ``torch.distributed.fsdp._fully_shard``; a group's buffers, with P elements on N ranks:

* at rest its shards (of the world, or of a node) and, from their reduction until ``zero_grad``, their gradients; all of them if
  it is replicated;
* gathering: a message's buffer beside what it is copied to; in forward the buffer is freed when the next group's has come, or,
  where gathers are waited for on the host (CPU), at once. A replicated group has a second copy while it is in use;
* reducing: gradients are copied into a message's buffer and freed; the buffer goes when the next group reduces. gloo reduces
  a copy of it, from which shards are taken.

Which bytes are held follows from the order of the host's calls alone, not from timing, but for one: gloo's copy is freed by a
thread of its own, which on busy cores comes to it after the next slot has begun. It counts until the next message is issued.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mdcs.export.groups import Ahead, Group, in_order
from mdcs.plan.job import Job
from mdcs.plan.ledger import CATEGORIES
from mdcs.profile.algorithms import Collectives
from mdcs.profile.link import Kind


@dataclass(frozen=True)
class GroupBytes:
    """Of one group: into how many parts it is divided; its shards, its parameters whole, their optimizer's state and an update's
    temporaries; the gradients that autograd makes, the message that they are copied to, and what is left of it.
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
        """From the units' layouts; torch pads every parameter by itself, which a plan does not know."""
        profile, opt = job.profile, job.profile.optimizer
        parts = group.strategy.parts(profile)
        sizes = dict.fromkeys(("shards", "full", "optimizer", "scratch", "gradients", "reduced", "kept"), 0)
        for u in group.units:
            unit, layout = profile.units[u], profile.layouts[u]
            for section, total in zip(layout.sections, layout.sizes, strict=True):
                own = total // parts
                sizes["shards"] += own * section.updated_bytes
                sizes["full"] += total * section.param_bytes
                if unit.trainable:
                    sizes["optimizer"] += int(own * section.updated_bytes * opt.state_tensors)
                    sizes["scratch"] = max(sizes["scratch"], opt.scratch(own, section.updated_bytes))
                    sizes["gradients"] += total * section.param_bytes
                    sizes["reduced"] += total * section.grad_bytes
                    sizes["kept"] += own * section.updated_bytes
            sizes["optimizer"] += opt.state_fixed * len(unit.segments) if unit.trainable else 0
        return cls(parts, **sizes)


class Walk:
    """One iteration of a job in steady state; ``peak`` has bytes by category, each at its own peak, and the "total"."""

    def __init__(self, job: Job, groups: tuple[Group, ...], forward: Ahead, backward: Ahead, collectives: Collectives) -> None:
        self._profile, self._groups, self._collectives = job.profile, groups, collectives
        self._waits = collectives.backend == "gloo"  # on the host
        self._bytes = {g.name: GroupBytes.of(g, job) for g in groups}
        self._named = {g.name: g for g in groups}
        self._live = dict.fromkeys(CATEGORIES, 0)
        self.peak = dict.fromkeys((*CATEGORIES, "total"), 0)
        self._whole: set[str] = set()
        self._gathered: dict[str, int] = {}  # bytes of messages that nobody has waited for yet
        self._deferred = self._reduced = 0  # bytes of the last message that was gathered, reduced
        self._lingering = 0  # of the copy that the backend has reduced
        for size in self._bytes.values():
            self._hold("parameters", size.shards)
            self._hold("optimizer", size.optimizer)
        for micro in range(job.micro_steps):
            self._forward(forward)
            self._backward(backward, first=micro == 0, last=micro == job.micro_steps - 1)
        self._update()

    def _hold(self, category: str, size: int) -> None:
        self._live[category] += size
        self.peak[category] = max(self.peak[category], self._live[category])
        self.peak["total"] = max(self.peak["total"], sum(self._live.values()))

    def _computing(self, size: int) -> None:
        self._hold("activations", size - self._live["activations"])

    def _forward(self, ahead: Ahead) -> None:
        slots = self._profile.slots[: self._profile.forward_slots]
        order = in_order(self._groups, Kind.AG_F)
        for q, slot in enumerate(slots):
            self._computing(slot.live)
            for g in order:
                if g.forward[0] == q:
                    self._gather(g.name, in_forward=True)
                    self._issue(ahead.get(g.name, ()))
            self._computing(slot.peak)
            for g in reversed(order):
                if g.forward[1] == q and g.reshard_after_forward:
                    self._free(g.name)
        self._undefer()

    def _backward(self, ahead: Ahead, *, first: bool, last: bool) -> None:
        slots = self._profile.slots[self._profile.forward_slots :]
        after = [slot.live for slot in slots[1:]] + [self._profile.slots[0].live]
        order = in_order(self._groups, Kind.AG_B)
        for q, slot in enumerate(slots):
            self._computing(slot.live)
            made = 0
            for g in order:
                if g.backward is not None and g.backward[0] == q:
                    self._gather(g.name, in_forward=False)
                    self._issue(ahead.get(g.name, ()))
                    if first:
                        made += self._bytes[g.name].gradients
                        self._hold("gradients", self._bytes[g.name].gradients)
            # A profile's peak has each gradient as a temporary, which FSDP2 keeps as the gradient.
            self._computing(max(slot.live, after[q], slot.peak - made))
            self._computing(after[q])
            for g in reversed(order):
                if g.backward is not None and g.backward[1] == q:
                    self._free(g.name)
                    if last:
                        self._reduce(g)
        for name in list(self._whole):  # those that no gradient has come by
            self._free(name)
        self._hold("staging", -self._reduced)
        self._reduced = 0
        self._let_go()

    def _issue(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._whole and name not in self._gathered:
                message = 0 if self._bytes[name].parts == 1 else self._bytes[name].full
                self._gathered[name] = message
                if message:
                    self._let_go()
                self._hold("staging", message + self._copied(message, self._bytes[name].parts))

    def _gather(self, name: str, *, in_forward: bool) -> None:
        if name in self._whole:
            return
        self._issue([name])
        if in_forward:
            self._undefer()
        message = self._gathered.pop(name)
        self._hold("staging", -self._copied(message, self._bytes[name].parts))
        self._hold("full_parameters", self._bytes[name].full)
        self._whole.add(name)
        if in_forward and not self._waits:
            self._deferred = message
        else:
            self._hold("staging", -message)

    def _copied(self, message: int, parts: int) -> int:
        """What the backend's own algorithm holds beside a gather, for as long as nobody has waited for it."""
        return self._collectives.buffer(Kind.AG_F, message, parts)

    def _undefer(self) -> None:
        self._hold("staging", -self._deferred)
        self._deferred = 0

    def _free(self, name: str) -> None:
        if name in self._whole:
            self._whole.remove(name)
            self._hold("full_parameters", -self._bytes[name].full)

    def _reduce(self, group: Group) -> None:
        size = self._bytes[group.name]
        if not size.gradients:
            return
        self._hold("staging", -self._reduced)
        self._hold("staging", size.reduced)
        self._hold("gradients", -size.gradients)
        self._let_go()
        self._hold("gradient_shards", size.kept)
        self._reduced = size.reduced
        if self._waits and size.parts > 1:
            self._lingering = size.reduced
            self._hold("staging", self._lingering)

    def _let_go(self) -> None:
        self._hold("staging", -self._lingering)
        self._lingering = 0

    def _update(self) -> None:
        scratch = max((size.scratch for size in self._bytes.values()), default=0)
        self._hold("update_scratch", scratch)
        self._hold("update_scratch", -scratch)
