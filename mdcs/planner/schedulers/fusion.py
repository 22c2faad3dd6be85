"""Tensor fusion: several units in one message, which then pays α once.

``Fusion`` fills buckets of a fixed size, as Horovod and DDP do. ``MgWfbp`` merges optimally for the α–β model (MG-WFBP,
Shi et al., INFOCOM 2019), here by dynamic programming over the ready times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from mdcs.options import Checked, option
from mdcs.plan.period import Op
from mdcs.plan.plan import Plan
from mdcs.plan.schedule import Message
from mdcs.plan.strategy_assignment import StrategyAssignment
from mdcs.planner.schedulers.wfbp import in_ready_order, ready_slot
from mdcs.profile.link import Kind
from mdcs.simulator.simulate import undelayed
from mdcs.sizes import MIB

Grouping = Callable[[list[Op]], list[list[Op]]]


def fuse(mix: StrategyAssignment, name: str, grouping: Grouping) -> Plan:
    """Group each stream of operations (kind, micro-step) in its order of use. Return the plan with fused groups.

    A fused reduction is issued when its last member is ready, a fused gather in time for its first member. Such a slot
    always exists: a stream lies at one boundary between two passes, and all its windows contain this boundary.
    """
    streams: dict[tuple[Kind, int], list[Op]] = {}
    for op in in_ready_order(mix):
        streams.setdefault((op.kind, op.micro), []).append(op)
    drafts = []
    reduced: dict[int, int] = {}  # unit -> issue slot of its reduction
    for (kind, micro), stream in sorted(streams.items(), key=lambda item: item[0][0].is_gather):
        if kind.is_gather:
            stream = sorted(stream, key=lambda op: mix.period.window(op)[1])
        for group in grouping(stream):
            slot = max(mix.period.window(op)[0] for op in group)
            if kind.is_gather:
                slot = max(slot, min(ready_slot(mix, op) for op in group))
                if kind.plain is Kind.AG_F and micro == 0:
                    slot = max([slot, *(reduced.get(op.unit, 0) for op in group)])
            else:
                reduced |= {op.unit: slot for op in group}
            drafts.append(Message(kind, tuple((op.unit, 0) for op in group), slot, micro=micro))
    drafts.sort(key=lambda d: (d.kind.is_gather, d.slot))
    return mix.plan(name, mix.unpartitioned_blocks(), drafts)


_TINY = 16  # a message this many times smaller than its neighbour costs nearly nothing when fused with it


def fuse_neighbours(plan: Plan, most: int) -> Plan:
    """Return the plan with consecutive messages of one kind fused, if a slot lies in the windows of both.

    Two messages are fused if together they have at most ``most`` bytes of payload, or if one is tiny compared with the
    other. Small units then do not pay for their own messages.
    """
    length = plan.period.length
    out: list[tuple[Message, tuple[int, int]]] = []
    for message, first, last in zip(plan.messages, plan.table.first, plan.table.last, strict=True):
        if out:
            before, window = out[-1]
            both = dataclasses.replace(message, parts=before.parts + message.parts)
            first_of_both, last_of_both = max(first, window[0]), min(last, window[1])
            slot = message.slot if message.slot >= first_of_both else message.slot + length
            alike = [
                (m.kind, m.micro, m.blocking, plan.profile.units[m.parts[0][0]].dtype_on_wire(m.kind.is_gather))
                for m in (before, message)
            ]
            payloads = sorted((plan.payload(before), plan.payload(message)))
            is_small = sum(payloads) <= most or _TINY * payloads[0] <= payloads[1]
            if alike[0] == alike[1] and not message.blocking and is_small and first_of_both <= slot <= last_of_both:
                out[-1] = both, (first_of_both, last_of_both)
                continue
        out.append((message, (first, last)))
    return dataclasses.replace(plan, messages=tuple(message for message, _ in out))


@dataclass(frozen=True)
class Fusion(Checked):
    """Buckets of a fixed size. The default is that of DDP."""

    name: ClassVar[str] = "fusion"

    bucket_mib: float = option(25.0, "fused messages hold about so much, MiB", above=0)

    def schedule(self, mix: StrategyAssignment) -> Plan:
        """Return the messages of WFBP with neighbours fused."""
        return fuse(mix, self.name, lambda stream: buckets(mix, stream, self.bucket_mib))


def buckets(mix: StrategyAssignment, stream: list[Op], bucket_mib: float) -> list[list[Op]]:
    """Return the stream in groups of at least ``bucket_mib`` of payload, except for the last group."""
    bucket_bytes = max(1, int(bucket_mib * MIB))
    groups: list[list[Op]] = []
    size = bucket_bytes
    for op in stream:
        if size >= bucket_bytes:
            groups.append([])
            size = 0
        groups[-1].append(op)
        size += mix.payload(op)
    return groups


@dataclass(frozen=True)
class MgWfbp:
    """Merges so that the last message of a stream ends as early as possible (gathers: starts as late as possible)."""

    name: ClassVar[str] = "mg_wfbp"

    def schedule(self, mix: StrategyAssignment) -> Plan:
        """Return the messages of WFBP with neighbours merged by :func:`optimal_merge`."""
        return fuse(mix, self.name, lambda stream: optimal_merge(mix, stream))


def optimal_merge(mix: StrategyAssignment, stream: list[Op]) -> list[list[Op]]:
    """Return the groups that minimize the end of the last message.

    end[j] = min over i of max(ready, end[i]) + α + β·bytes(i..j). A gather stream is the same problem in reversed time:
    deadlines become ready times, and the first message becomes the last.
    """
    if not stream:
        return []
    kind, link, times = stream[0].kind, mix.profile.link, undelayed(mix.period)
    ops = stream[::-1] if kind.is_gather else stream
    windows = map(mix.period.window, ops)
    ready = [-times.arrival(last) if kind.is_gather else times.arrival(first) for first, last in windows]
    wire = [mix.profile.wire(kind, mix.payload(op)) for op in ops]
    best: list[tuple[float, int]] = [(min(ready), 0)]
    for j in range(1, len(ops) + 1):
        choices = []
        size, last_ready = 0, -float("inf")
        for i in range(j - 1, -1, -1):
            size += wire[i]
            last_ready = max(last_ready, ready[i])
            choices.append((max(last_ready, best[i][0]) + link.alpha_of(kind) + link.beta_of(kind) * size, i))
        best.append(min(choices))
    groups, j = [], len(ops)
    while j:
        i = best[j][1]
        groups.append(ops[i:j])
        j = i
    if kind.is_gather:
        return [group[::-1] for group in groups]
    return groups[::-1]
