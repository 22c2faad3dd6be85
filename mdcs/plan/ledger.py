"""The memory ledger: integer bytes per rank that each slot and message of a plan holds.

Sizes and lifetimes by strategy are in docs/glossary.md. The runtime's byte account, the simulator and the planners all
read this module, so admission, prediction and measurement count the same bytes.

Two views of one plan:

* effects: bytes that a message or slot allocates, and bytes that it frees when it ends (:class:`MessageBytes`,
  :class:`SlotBytes`). The simulator and the runtime apply the effects in the order of events.
* :func:`smallest_budget`: bytes that must be free for the plan to run *with any timing*. Compute may wait for messages
  issued so far, never for later ones. A plan that needs no more than its budget cannot deadlock.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from mdcs.plan.message import Message
from mdcs.plan.messages import Plan
from mdcs.plan.period import Op, Period
from mdcs.plan.strategy import Strategy
from mdcs.plan.validity import PlanError
from mdcs.plan.widths import sections_of
from mdcs.profile.contents import Profile
from mdcs.profile.link import Kind

CATEGORIES = (
    "parameters",  # at rest: whole (dp, zero1) or a shard (sdp, fsdp)
    "full_parameters",  # gathered for use (sdp, fsdp)
    "optimizer",
    "gradients",  # full
    "gradient_shards",
    "staging",  # buffers of messages in flight whose collective is not zero-copy
    "update_scratch",
    "activations",  # and workspace, batch, module buffers: everything that is not a registered buffer
)
"""Categories of bytes in every measurement and prediction."""

Effects = tuple[tuple[str, int], ...]
"""(category, bytes) pairs: positive bytes are allocated, negative bytes are freed."""


@dataclass(frozen=True)
class MessageBytes:
    """Bytes that one message allocates and frees.

    - ``full``: (unit, bytes) of full parameters, for units that this message is the first to gather. Allocated at its
      start.
    - ``staging``: buffers of the collective. Allocated at its start, freed when the collective ends.
    - ``shards``: gradient shards. Allocated at its start.
    - ``scratch``: temporary memory of the update. Allocated when the collective ends, freed after the update.
    - ``shards_freed``: gradient shards that are freed after the update. In barrier mode the last reduction frees the
      shards of all reductions.
    - ``gradients_after_link``: (unit, bytes) of full gradients that are freed when the collective ends (RS).
    - ``gradients_after_update``: (unit, bytes) of full gradients that are freed after the update (AR).
    """

    full: tuple[tuple[int, int], ...]
    staging: int
    shards: int
    scratch: int
    shards_freed: int
    gradients_after_link: tuple[tuple[int, int], ...]  # freed once reduced (RS)
    gradients_after_update: tuple[tuple[int, int], ...]  # freed once updated (AR)
    # Derived from the fields above. Computed once, because they are read very often.
    at_start: Effects = field(init=False)
    when_landed: Effects = field(init=False)
    when_done: Effects = field(init=False)
    shards_held: int = field(init=False)  # its gradient shards that stay until the barrier
    shards_of_others: int = field(init=False)  # gradient shards of earlier messages that it frees
    held: int = field(init=False)  # bytes that it allocates and that stay after it
    freed: int = field(init=False)  # bytes of slots and earlier messages that it frees when it ends
    transient: int = field(init=False)  # peak of bytes that live only in flight, without the gradients that it frees

    def __post_init__(self) -> None:
        reduced, updated = _total(self.gradients_after_link), _total(self.gradients_after_update)
        own = min(self.shards, self.shards_freed)
        vars(self).update(
            at_start=_effects(full_parameters=_total(self.full), staging=self.staging, gradient_shards=self.shards),
            when_landed=_effects(staging=-self.staging, gradients=-reduced, update_scratch=self.scratch),
            when_done=_effects(update_scratch=-self.scratch, gradient_shards=-self.shards_freed, gradients=-updated),
            shards_held=self.shards - own,
            shards_of_others=self.shards_freed - own,
            held=_total(self.full) + self.shards - own,
            freed=self.shards_freed - own + reduced + updated,
            # Staging and reduced gradients are freed before the update: scratch takes their place.
            transient=own + max(self.staging, self.scratch - reduced),
        )


@dataclass(frozen=True)
class SlotBytes:
    """Bytes that one slot allocates and frees.

    - ``gradients``: (unit, bytes) of full gradients, allocated when the slot starts.
    - ``released``: (unit, bytes) of full parameters, freed when the slot ends.
    - ``live``, ``peak``: bytes of activations and workspace, as in :class:`mdcs.profile.contents.Slot`.
    - ``allocated``, ``freed``: sums of ``gradients`` and of ``released``.
    """

    gradients: tuple[tuple[int, int], ...]
    released: tuple[tuple[int, int], ...]
    live: int
    peak: int

    allocated: int = field(init=False)
    freed: int = field(init=False)

    def __post_init__(self) -> None:
        vars(self).update(allocated=_total(self.gradients), freed=_total(self.released))


def _effects(**sizes: int) -> Effects:
    return tuple([(category, size) for category, size in sizes.items() if size])


# Cached, because the plans that a planner compares share most of their messages.
_message_bytes = lru_cache(maxsize=1 << 14)(MessageBytes)


def _total(pairs: tuple[tuple[int, int], ...]) -> int:
    return sum([size for _, size in pairs]) if pairs else 0


def runs(plan: Plan, unit: int, block: int, rank: int) -> list[tuple[int, int, int]]:
    """Return (start, length, segment) of each piece of a block that ``rank`` updates, in flat elements.

    With dp every rank updates the whole block, otherwise its share. Padding belongs to the last segment of its section.
    """
    return _runs(plan.profile, unit, plan.strategies[unit], plan.blocks[unit], block, rank)


def _runs(
    profile: Profile, unit: int, strategy: Strategy, blocks: tuple[int, ...], block: int, rank: int
) -> list[tuple[int, int, int]]:
    parts = strategy.parts(profile)
    size = blocks[block] // parts
    start = sum(blocks[:block]) + rank % parts * size
    pieces, end = [], 0
    for s, ends in enumerate(profile.layouts[unit].segment_ends(profile.units[unit].segments)):
        begin, end = end, ends
        low, high = max(begin, start), min(end, start + size)
        if low < high:
            pieces.append((low, high - low, s))
    return pieces


class _Cuts(NamedTuple):
    """Extra runs of a unit's updates, where segment boundaries cut the part of a rank. A block without cuts is one run.

    - ``everywhere``: cuts that every rank has.
    - ``on_rank``: (rank, further cuts) of the ranks that have some.
    - ``largest``: for each block, the longest run of any rank (elements).
    """

    everywhere: int
    on_rank: tuple[tuple[int, int], ...]
    largest: tuple[int, ...]


@lru_cache(maxsize=4096)
def _cuts(ends: tuple[int, ...], blocks: tuple[int, ...], parts: int) -> _Cuts:
    """Return the cuts of a unit.

    - ``ends``: ends of its segments (elements).
    - ``parts``: number of ranks that share an update (:meth:`Strategy.parts`). Ranks in the result are modulo
      ``parts``.
    """
    counts: Counter[int] = Counter()
    largest = []
    start = 0
    for size in blocks:
        part = size // parts
        inside = {end - start for end in ends if start < end < start + size and (end - start) % part}
        counts.update(offset // part for offset in inside)
        cut_ranks = {offset // part for offset in inside}
        if len(cut_ranks) < parts:
            largest.append(part)
        else:
            edges = sorted({*inside, *range(0, size + 1, part)})
            largest.append(max(b - a for a, b in itertools.pairwise(edges)))
        start += size
    if parts == 1:
        return _Cuts(counts[0], (), tuple(largest))
    return _Cuts(0, tuple(sorted(counts.items())), tuple(largest))


@lru_cache(maxsize=256)
def _slots(period: Period, strategies: tuple[Strategy, ...]) -> list[SlotBytes]:
    """Return the bytes of each slot. They depend only on the strategies."""
    profile = period.profile
    allocated: dict[int, list[tuple[int, int]]] = {}
    released: dict[int, list[tuple[int, int]]] = {}
    for u, (unit, strategy) in enumerate(zip(profile.units, strategies, strict=True)):
        layout = profile.layouts[u]
        if unit.trainable:
            span = period.backward(u, 0)
            assert span is not None
            allocated.setdefault(span[0] % period.length, []).append((u, layout.grad_bytes))
        if strategy.sharded:
            for kind in strategy.kinds(False, unit.backward is not None):
                for micro in range(period.micro_steps):
                    end = period.release(Op(kind, u, micro), strategy)
                    released.setdefault(end % period.length, []).append((u, layout.param_bytes))
    slots = []
    for q, s in enumerate(period.slots):
        slot = profile.slots[s.place]
        slots.append(SlotBytes(tuple(allocated.get(q, ())), tuple(released.get(q, ())), slot.live, slot.peak))
    return slots


def rest_of(profile: Profile, unit: int, strategy: Strategy) -> dict[str, int]:
    """Return the bytes by category that a unit holds between steps: its parameters, and masters under "optimizer".

    Optimizer state is not included.
    """
    layout, parts = profile.layouts[unit], strategy.parts(profile)
    rest = {"parameters": 0, "optimizer": 0}
    for section, size in zip(layout.sections, layout.sizes, strict=True):
        if not (strategy.sharded and section.master_bytes):  # else only the master shard is kept at rest
            rest["parameters"] += size * section.param_bytes // (parts if strategy.sharded else 1)
        rest["optimizer"] += size // parts * section.master_bytes
    return rest


class MixBytes:
    """Bytes that depend only on strategies and blocks, not on the order of messages.

    - ``at_rest``: bytes by category between steps.
    - ``scratch``: temporary bytes of the update of each (unit, block).
    - ``slots``: bytes of each slot.

    ``blocks`` are in elements. Segment boundaries cut the shards of the ranks differently, which changes optimizer
    state and scratch. The result is that of ``rank``, or with None (for planning) the most that any rank needs.
    """

    def __init__(
        self, period: Period, strategies: tuple[Strategy, ...], blocks: Sequence[tuple[int, ...]], rank: int | None = None
    ) -> None:
        profile, opt = period.profile, period.profile.optimizer
        self.at_rest = {"parameters": 0, "optimizer": 0}
        self.scratch: dict[tuple[int, int], int] = {}
        pieces, more = 0, Counter[int]()
        for u, (unit, strategy, layout) in enumerate(zip(profile.units, strategies, profile.layouts, strict=True)):
            parts = strategy.parts(profile)
            for category, size in rest_of(profile, u, strategy).items():
                self.at_rest[category] += size
            if not unit.trainable:
                continue
            for section, total in zip(layout.sections, layout.sizes, strict=True):
                self.at_rest["optimizer"] += int(total // parts * (section.updated_bytes * opt.state_tensors))
            cuts = _cuts(layout.segment_ends(unit.segments), blocks[u], parts)
            pieces += len(blocks[u]) + cuts.everywhere
            for part, count in cuts.on_rank:
                more.update(dict.fromkeys(range(part, profile.world, parts), count))
            for b, s in enumerate(sections_of(layout, blocks[u])):
                updated, largest = layout.sections[s].updated_bytes, cuts.largest[b]
                if rank is not None:
                    largest = max(n for _, n, _ in _runs(profile, u, strategy, blocks[u], b, rank))
                # A copy of the gradient in the optimizer's precision.
                cast = blocks[u][b] // parts * updated if updated != layout.sections[s].grad_bytes else 0
                self.scratch[u, b] = opt.scratch(largest, updated) + cast
        pieces += max(more.values(), default=0) if rank is None else more[rank]
        self.at_rest["optimizer"] += pieces * opt.state_fixed
        self.rest_bytes = sum(self.at_rest.values())
        self.slots = _slots(period, strategies)


def staging_bytes(profile: Profile, kind: Kind, payload: int, parts: int) -> int:
    """Return the bytes of the buffers of a message whose collective is not zero-copy.

    A fused message is packed into one buffer. The algorithm may need a further buffer (:mod:`mdcs.profile.algorithms`).
    """
    packed = payload if profile.world > 1 and parts > 1 else 0
    return packed + profile.buffer(kind, payload)


class Ledger(MixBytes):
    """Effects of all slots and messages of a plan, and its bytes at rest by category."""

    def __init__(self, plan: Plan, rank: int | None = None) -> None:
        super().__init__(plan.period, plan.strategies, plan.blocks, rank)
        self.plan, self.rank = plan, rank
        self.full = [layout.param_bytes for layout in plan.profile.layouts]
        self.gradients = [layout.grad_bytes for layout in plan.profile.layouts]
        self.messages = self._messages()

    def staging(self, message: Message) -> int:
        """:func:`staging_bytes` of a message."""
        return staging_bytes(self.plan.profile, message.kind, self.plan.payload(message), len(message.parts))

    def _messages(self) -> list[MessageBytes]:
        plan = self.plan
        first_of = self._first_gathers()
        reductions = [i for i, m in enumerate(plan.messages) if not m.kind.is_gather]
        last_reduction = reductions[-1] if reductions else None
        last_of: dict[int, int] = {u: i for i in reductions for u, _ in plan.messages[i].parts}
        held_shards = 0
        all_scratch = max(self.scratch.values(), default=0)
        effects = []
        for i, m in enumerate(plan.messages):
            if m.kind.is_gather:
                full = tuple([(u, self.full[u]) for u in first_of.get(i, ())])
                effects.append(_message_bytes(full, self.staging(m), 0, 0, 0, (), ()))
                continue
            units = dict.fromkeys([u for u, _ in m.parts])
            shards = plan.payload(m) // plan.profile.group(m.kind) if m.kind.plain is Kind.RS else 0
            held_shards += shards
            grads = tuple([(u, self.gradients[u]) for u in units if last_of[u] == i])
            if plan.cross_iteration:
                scratch, freed = max([self.scratch[p] for p in m.parts]), shards
                after_update = grads if m.kind is Kind.AR else ()
            elif i == last_reduction:
                scratch, freed = all_scratch, held_shards
                after_update = tuple((u, self.gradients[u]) for u in last_of if plan.strategies[u] is Strategy.dp)
            else:
                scratch, freed, after_update = 0, 0, ()
            after_link = grads if m.kind.plain is Kind.RS else ()
            effects.append(_message_bytes((), self.staging(m), shards, scratch, freed, after_link, after_update))
        return effects

    def _first_gathers(self) -> dict[int, list[int]]:
        """Return for each message the sharded units that it is the first in time to gather: it allocates their buffers.

        Blocks of one AG_B may be sent before and after the end of the period, so the order of time differs from the
        order of the list.
        """
        plan, length = self.plan, self.plan.period.length
        first: dict[tuple[Kind, int, int], tuple[int, int]] = {}
        for i, (m, (opens, _)) in enumerate(zip(plan.messages, plan.windows, strict=True)):
            if m.kind.is_gather:
                order = m.slot if m.slot >= opens else m.slot + length, i
                for u, _ in m.parts:
                    op = m.kind, u, m.micro
                    if plan.strategies[u].sharded and (op not in first or order < first[op]):
                        first[op] = order
        out: dict[int, list[int]] = {}
        for (_, u, _), (_, i) in first.items():
            out.setdefault(i, []).append(u)
        return out


class Need(NamedTuple):
    """Bytes that must fit at a slot.

    - ``arrival``: when compute arrives, while it waits for messages.
    - ``running``: while the slot runs.
    """

    arrival: int
    running: int

    @property
    def bytes(self) -> int:
        """The larger of the two."""
        return max(self.arrival, self.running)


class SlotLimits:
    """For each slot, the number of messages issued (``issued``) and surely done (``done``) when it begins.

    Counts are unrolled: a ``done`` of 0 or less refers to messages of the previous period. Messages end in FIFO order,
    so a slot that waits for one message waits for all before it.
    """

    def __init__(self, plan: Plan) -> None:
        n, length = len(plan.messages), plan.period.length
        issues = [0] * length
        for m in plan.messages:
            issues[m.slot] += 1
        self.issued = list(itertools.accumulate(issues))
        done_at = [-n] * length
        for i, (m, (first, last)) in enumerate(zip(plan.messages, plan.windows, strict=True)):
            if not m.blocking and m.kind.plain is Kind.RS:
                continue  # no slot needs it: its gather follows and is needed instead
            # The slot that needs the message, counted from the period in which the message is issued.
            waits = m.slot if m.blocking else last if m.slot >= first else last - length
            periods, at = divmod(waits, length)
            if i + 1 - periods * n > done_at[at]:
                done_at[at] = i + 1 - periods * n
        if not plan.cross_iteration:
            # The last reduction updates every unit, so forward of a dp unit waits for it.
            last = max((i for i, m in enumerate(plan.messages) if not m.kind.is_gather), default=-1)
            for u, unit in enumerate(plan.profile.units):
                if unit.trainable and plan.strategies[u] is Strategy.dp:
                    first = plan.period.forward(u, 0)[0]
                    done_at[first] = max(done_at[first], last + 1)
        best = max((d - n for d in done_at), default=-n)
        self.done: list[int] = []
        for d in done_at:
            best = max(best, d)
            self.done.append(best)


def most_in_flight(transient: Sequence[int], depth: int) -> int:
    """Return the most bytes that ``depth`` consecutive messages can hold in flight."""
    if len(transient) <= depth:
        return sum(transient)
    return max(sum(transient[i : i + depth]) for i in range(len(transient) - depth + 1))


def walk(plan: Plan) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (period, slot, messages issued there) in the order in which compute arrives.

    Period 0 is the prologue: it starts at the turn and only gathers. Period 1 is the first, period 2 the steady one.
    """
    issued = SlotLimits(plan).issued
    for period in range(3):
        sent = 0
        for q in range(plan.period.turn if period == 0 else 0, plan.period.length):
            yield period, q, [i for i in range(sent, issued[q]) if period or plan.in_prologue(plan.messages[i])]
            sent = issued[q]


def needs(plan: Plan, ledger: Ledger | None = None) -> list[Need]:
    """Return the bytes needed at each slot: the larger of prologue and steady period, with all earlier messages done.

    Compute can always wait for messages that are issued. Therefore admission cannot deadlock if these bytes fit.
    - ``ledger``: the plan's ledger, if the caller has it.
    """
    ledger = ledger or Ledger(plan)
    issued: list[list[tuple[bool, int, int]]] = [[] for _ in ledger.slots]  # in the prologue?, peak bytes, net bytes
    for m, e in zip(plan.messages, ledger.messages, strict=True):
        issued[m.slot].append((plan.in_prologue(m), e.held + e.transient, e.held - e.freed))
    slots = [(own, s.live, s.allocated, s.peak, s.freed) for own, s in zip(issued, ledger.slots, strict=True)]
    turn, held = plan.period.turn, ledger.rest_bytes
    by_turn = [each for own in issued[: turn + 1] for each in own]
    begun = [(by_turn, *slots[turn][1:]), *slots[turn + 1 :]]
    out: list[Need] = []
    prologue: list[Need] = []
    for period in range(3):  # in the order of :func:`walk`
        out = []
        for messages, live, allocated, peak, freed in slots if period else begun:
            arrival = 0
            for in_prologue, most, left in messages:
                if period or in_prologue:
                    if held + most + live > arrival:
                        arrival = held + most + live
                    held += left
            held += allocated
            out.append(Need(arrival, held + peak))
            held -= freed
        prologue = prologue or out
    for q, other in enumerate(prologue, turn):  # at the turn it issues the gathers that later periods issue before
        out[q] = Need(max(out[q].arrival, other.arrival), max(out[q].running, other.running))
    return out


def smallest_budget(plan: Plan) -> int:
    """Return the smallest budget (bytes, reserve included) under which the plan runs with any timing."""
    return max(need.bytes for need in needs(plan)) + plan.reserve


def start_bytes(plan: Plan, together: Sequence[Sequence[int]] | None = None) -> int:
    """Return the peak bytes of parameters and masters while a model from the meta device is initialized.

    :func:`mdcs.parallelize` initializes it. The peak counts the bytes at rest of units that are initialized, and the
    whole units that are being initialized. ``together``: groups of units that share a module and are initialized
    together. None: each unit alone.
    """
    held = most = 0
    layouts = plan.profile.layouts
    for members in together or [[u] for u in range(len(layouts))]:
        held += sum(layouts[u].param_bytes for u in members)
        for u in members:
            strategy, whole = plan.strategies[u], layouts[u].param_bytes
            held += sum(rest_of(plan.profile, u, strategy).values()) - (0 if strategy.sharded else whole)
            most = max(most, held)
            held -= whole if strategy.sharded else 0
    return most


def bytes_beyond_fsdp(profile: Profile, unit: int, strategy: Strategy) -> int:
    """Return the bytes that a unit holds at the end of forward in excess of fsdp. The peak is usually there."""
    layout, is_updated = profile.layouts[unit], profile.units[unit].trainable
    state = sum(
        int(total * (profile.optimizer.state_tensors * section.updated_bytes + section.master_bytes)) if is_updated else 0
        for section, total in zip(layout.sections, layout.sizes, strict=True)
    )
    at_rest = rest_of(profile, unit, strategy)["parameters"] - rest_of(profile, unit, Strategy.fsdp)["parameters"]
    gathered = layout.param_bytes if strategy.sharded and not strategy.regathers else 0
    return gathered + at_rest + state // strategy.parts(profile) - state // profile.world


def check(plan: Plan) -> None:
    """Raise PlanError, naming the cycle, if admission under the plan's budget could deadlock."""
    if plan.budget is None:
        return
    for q, need in enumerate(needs(plan)):
        if need.bytes + plan.reserve > plan.budget:
            blocking = [
                f"{m.kind} of {', '.join(plan.profile.units[u].name for u, _ in m.parts)}"
                for m in plan.messages
                if m.slot <= q and (plan.need(m) or 0) > q
            ]
            raise PlanError(
                f"cycle: slot {q} ({plan.period.name(q)}) needs {need.bytes + plan.reserve} of {plan.budget} bytes, "
                f"and what holds them is freed only after it"
                + (f" (gathered ahead: {'; '.join(blocking[:4])})" if blocking else "")
            )
