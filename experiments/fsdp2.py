"""A plan run by FSDP2: its predicted step and memory, how far ahead to prefetch, and the exported file with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mdcs.export.document import Group, PrefetchLists, document, groups_of, in_order, prefetch_lists
from mdcs.plan.job import Job
from mdcs.plan.lifetimes import CATEGORIES, extra_bytes_vs_fsdp
from mdcs.plan.period import Op
from mdcs.plan.plan import Plan
from mdcs.plan.schedule import Message
from mdcs.plan.strategy import Strategy
from mdcs.plan.strategy_assignment import StrategyAssignment
from mdcs.plan.times import Prediction
from mdcs.profile.link import Collectives, Kind
from mdcs.profile.schema import Profile
from mdcs.simulator.simulate import replay

_FARTHEST = 4  # groups of prefetch


@dataclass(frozen=True)
class Steps:
    """The prefetch lists of all groups, and the predicted step with them."""

    forward: PrefetchLists
    backward: PrefetchLists
    prediction: Prediction

    def fit(self, plan: Plan) -> bool:
        """Whether the predicted peak is within the plan's budget."""
        return plan.budget is None or self.prediction.peak_bytes + plan.job.reserve <= plan.budget


def best_steps(plan: Plan, groups: tuple[Group, ...]) -> Steps:
    """Return the fastest step within the plan's budget among the prefetch limits; if none fits, the smallest peak.

    No group is prefetched further ahead than in the plan (in backward at least by one group, FSDP2's default).
    """
    made = [
        predict_step(
            plan, groups, prefetch_lists(plan, groups, Kind.AG_F, limit), prefetch_lists(plan, groups, Kind.AG_B, limit)
        )
        for limit in range(_FARTHEST + 1)
    ]
    fit = [s for s in made if s.fit(plan)]
    if not fit:
        return min(made, key=lambda s: s.prediction.peak_bytes)
    return min(fit, key=lambda s: (round(s.prediction.step_s, 6), s.prediction.peak_bytes))


def fit_to_budget(plan: Plan, groups: tuple[Group, ...]) -> tuple[list[str], Steps]:
    """Return names of units that must become fsdp (hsdp within nodes) for the plan's budget, and the step with them.

    None if the calls keep the budget, all if nothing does. The groups that hold most bytes beyond fsdp change first,
    one after the other, until the budget is kept.
    """

    def beyond(group: Group) -> int:
        return sum(extra_bytes_vs_fsdp(plan.period, u, group.strategy) for u in group.units)

    changed: list[str] = []
    made = best_steps(plan, groups)
    for each in sorted((g for g in groups if g.units and not g.strategy.regathers), key=beyond, reverse=True):
        if made.fit(plan):
            break
        resharded = Strategy.hsdp if each.strategy.in_node else Strategy.fsdp
        groups = tuple(dataclasses.replace(g, strategy=resharded) if g.name == each.name else g for g in groups)
        changed += [plan.profile.units[u].name for u in each.units]
        made = best_steps(plan, groups)
    return changed, made


def predict_step(plan: Plan, groups: tuple[Group, ...], forward: PrefetchLists, backward: PrefetchLists) -> Steps:
    """Predict a step: its time by a replay of :func:`fsdp2_plan`, its memory by a :class:`MemoryWalk`."""
    run = fsdp2_plan(plan, groups, forward, backward)
    times = replay(run).times
    peak = MemoryWalk(plan.job, groups, forward, backward, run.profile.collectives).peak
    return Steps(
        forward, backward,
        Prediction.of(
            times.step_s, times.compute_s, times.communication_s, times.overlap_s, peak_bytes=peak["total"], memory=peak
        ),
    )  # fmt: skip


def fsdp2_plan(plan: Plan, groups: tuple[Group, ...], forward: PrefetchLists, backward: PrefetchLists) -> Plan:
    """Return the plan that FSDP2 follows.

    A group's units are one message: gathered where the prefetch lists say, reduced when the group's backward has ended.
    All updates come after a barrier. With gloo compute waits for a reduction at once.
    """
    backend = plan.profile.collectives.backend
    native = Collectives("native", backend)
    profile = dataclasses.replace(_with_copies(plan, groups), collectives=native)
    job = dataclasses.replace(plan.job, profile=profile, cross_iteration=False, recompute=())
    chosen = {u: g.strategy for g in groups for u in g.units}
    mix = StrategyAssignment(job, tuple(chosen[u] for u in range(len(profile.units))))
    gatherers = {Kind.AG_F: _gatherers(groups, Kind.AG_F, forward), Kind.AG_B: _gatherers(groups, Kind.AG_B, backward)}
    messages = []
    for g in groups:
        own: dict[tuple[Kind, int], list[Op]] = {}
        for op in mix.ops:
            if op.unit in g.units:
                own.setdefault((op.kind, op.micro), []).append(op)
        for (kind, micro), ops in own.items():
            if kind.is_gather:
                slot = _gathered_at(mix, gatherers[kind.plain].get(g.name, g), kind, micro)
            else:
                slot = mix.period.turn if g.backward is None else g.backward[1] + 1
            first, last = max(mix.period.window(op)[0] for op in ops), min(mix.period.window(op)[1] for op in ops)
            parts = tuple((op.unit, 0) for op in ops)
            waited = backend == "gloo" and not kind.is_gather
            messages.append(Message(kind, parts, max(first, min(slot, last)), waited, micro))
    messages.sort(key=lambda m: m.kind.is_gather)  # at one boundary the reduction comes first
    return mix.plan("fsdp2", mix.unpartitioned_blocks(), messages)


def _gatherers(groups: tuple[Group, ...], kind: Kind, lists: PrefetchLists) -> dict[str, Group]:
    """Return name of a group -> the group that prefetches it, where there is one."""
    named = {g.name: g for g in in_order(groups, kind)}
    return {target: named[by] for by, targets in lists.items() for target in targets}


def _gathered_at(mix: StrategyAssignment, by: Group, kind: Kind, micro: int) -> int:
    start = mix.period.forward_start(micro)
    if kind.plain is Kind.AG_F:
        return start + by.forward[0]
    assert by.backward is not None
    return start + mix.profile.forward_slots + by.backward[0]


def _with_copies(plan: Plan, groups: tuple[Group, ...]) -> Profile:
    """Return the profile with FSDP2's copies added to its slots: out of gathers, and into reductions."""
    profile, per_byte = plan.profile, plan.profile.copy_seconds_per_byte
    slots = list(profile.slots)

    def longer(slot: int, size: int) -> None:
        slots[slot] = dataclasses.replace(slots[slot], seconds=slots[slot].seconds + size * per_byte)

    for g in groups:
        size = GroupBytes.of(g, Job(profile))
        longer(g.forward[0], size.full)
        if g.backward is not None:
            if g.reshard_after_forward:
                longer(profile.forward_slots + g.backward[0], size.full)
            longer(profile.forward_slots + g.backward[1], size.reduced)
    return dataclasses.replace(profile, slots=tuple(slots))


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
    """One iteration of a job in steady state: ``peak`` has the peak bytes of each category and of the "total".

    Follows ``torch.distributed.fsdp._fully_shard`` of torch 2.13. Buffers of a group:

    * At rest: its shards (of the world, or of a node). From their reduction until ``zero_grad`` also the shards'
      gradients. A replicated group holds both whole.
    * Gather: the message's buffer and the parameters that it is copied to. In forward the buffer is freed when the next
      group's gather has arrived; where the host waits for gathers (CPU), at once. A replicated group has a second copy
      while it is in use.
    * Reduction: gradients are copied into the message's buffer and freed; the buffer is freed when the next group
      reduces. gloo reduces a copy of the buffer, and the shards are taken from this copy.

    The bytes follow from the order of the host's calls, not from timing, with one exception: a thread frees gloo's
    copy, and on busy cores it does so after the next slot has begun. The walk counts the copy until the next message is
    issued.

    Each buffer is allocated by :meth:`_hold` and freed by :meth:`_free`, under a key: (group, what it is), or a name if
    there is one at a time.
    """

    def __init__(
        self, job: Job, groups: tuple[Group, ...], forward: PrefetchLists, backward: PrefetchLists,
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


KEYS = {
    "predicted": "seconds of a step and bytes per rank: of the plan run by mdcs, and of these calls run by FSDP2",
    "budget": "bytes per rank that the plan keeps with mdcs, its reserve included; null: it has none",
    "budget.fits": "whether these calls are predicted to keep it with FSDP2, which enforces nothing",
    "budget.would_fit": "units to be fsdp (reshard_after_forward) instead so that it is kept, with that step; "
    "null: none needed, or too little",
    "budget.least": "the step with all units fsdp, where not even that keeps it; else null",
}


def predicted_document(plan: Plan) -> dict[str, Any]:
    """Return :func:`mdcs.export.document.document` with the fastest prefetch that is predicted, and the predictions."""
    groups = groups_of(plan)
    chosen = best_steps(plan, groups)
    made = document(plan, chosen.forward, chosen.backward)
    return made | {
        "predicted": {
            "mdcs": None if plan.prediction is None else dataclasses.asdict(plan.prediction),
            "fsdp2": dataclasses.asdict(chosen.prediction),
        },
        "budget": _budget(plan, groups),
        "keys": made["keys"] | KEYS,
    }


def _budget(plan: Plan, groups: tuple[Group, ...]) -> dict[str, Any] | None:
    if plan.budget is None:
        return None
    units, steps = fit_to_budget(plan, groups)
    other = {"units": units, **dataclasses.asdict(steps.prediction)} if units else None
    fits = steps.fit(plan)
    return {
        "bytes": plan.budget, "reserve": plan.reserve, "fits": fits and not units,
        "would_fit": other if fits else None, "least": None if fits else other,
    }  # fmt: skip
