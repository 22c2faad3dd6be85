"""The cost model: what messages, their sums and their updates take, in seconds. Beside the ledger, which has the bytes.

A message of B wire bytes takes α + β·B on the link if it is alone, and keeps it for gap + β·B if others are in flight
(:mod:`mdcs.profile.link`); beside computing for at least what was measured there, which has the gap in it
(:class:`mdcs.profile.contents.Contention`). Then follow, on its rank, what it is copied and summed by
(packing and unpacking of a fused message: two passes over its payload; a sum of what an all-to-all has brought: one) and, after a
reduction, the update of its elements: all of them after an all-reduce, this rank's part after a reduce-scatter.

Simulator, planners, bounds and calibration read seconds from here and nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple

from mdcs.plan.strategy import Strategy
from mdcs.profile.contents import Profile
from mdcs.profile.link import Kind


class Cost(NamedTuple):
    """Seconds of a message: latency, gap and bytes on the link, then summing and unpacking, then the update.

    ``idle`` is ``transfer`` while nothing computes, ``lost`` what computing loses when the message is done beside it.
    """

    alpha: float
    gap: float
    transfer: float
    copy: float
    update: float
    idle: float
    lost: float


class CostModel:
    """Seconds for one profile. Costs of messages are kept: the plans that a planner compares have most of them in common."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._known: dict[tuple[Kind, int, int, bool, int | None], Cost] = {}

    def payload(self, kind: Kind, elements: int, width: int | None = None) -> int:
        """Bytes of a message of so many elements of ``width`` bytes; None: the profile's, of what is gathered or reduced."""
        return elements * (width or (self.profile.param_bytes if kind.is_gather else self.profile.grad_bytes))

    def link_s(self, kind: Kind, wire: int) -> float:
        """α + β·wire: a message of ``wire`` bytes that is alone on the link."""
        return self.profile.link.alpha_of(kind) + self.profile.link.beta_of(kind) * wire

    def transfer_s(self, kind: Kind, wire: int) -> float:
        """Seconds for which the link serves a message, after its gap, while something computes.

        max(β·wire, message_seconds + seconds_per_byte·wire - gap), with message_seconds and seconds_per_byte of the profile's
        contention: they are of messages in a train over all ranks, gap included. Within nodes a byte takes as much longer than
        its β as it does over all ranks.
        """
        link, contention = self.profile.link, self.profile.contention
        per_byte = contention.seconds_per_byte
        if kind.in_node:
            world = (link.beta_of(Kind.RS) + link.beta_of(Kind.AG_F)) / 2  # what the contention was measured with
            per_byte = max(0.0, per_byte - world) + link.beta_of(kind)
        least = contention.message_seconds + per_byte * wire
        return max(link.beta_of(kind) * wire, least - link.gap_of(kind))

    def copy_s(self, kind: Kind, payload: int, parts: int = 1) -> float:
        """Seconds of packing, summing and unpacking a message of so many bytes with so many parts.

        copy_seconds_per_byte·payload: twice if there are several parts, once more if the algorithm leaves the sum to do.
        """
        passes = int(self.profile.collectives.sums_afterwards(kind)) + 2 * int(parts > 1)
        return self.profile.copy_seconds_per_byte * payload * passes if passes else 0.0

    def update_s(self, kind: Kind, elements: int, runs: int = 1) -> float:
        """Seconds of the update that a message of so many elements ends with, in so many runs of one parameter group.

        elements/ranks·seconds_per_element + runs·seconds_per_run, with 1 for ranks after an all-reduce, those of a node where
        it is sharded within one; 0 for a gather.
        """
        if kind.is_gather:
            return 0.0
        ranks = 1 if kind is Kind.AR else self.profile.group(kind)
        optimizer = self.profile.optimizer
        return elements / ranks * optimizer.seconds_per_element + runs * optimizer.seconds_per_run

    def lost_s(self, kind: Kind, wire: int, work: float) -> float:
        """Seconds that computing loses to a message of ``wire`` bytes, with ``work`` seconds of copies and updates, beside it.

        compute_per_message + compute_per_byte·wire + compute_per_work·work; times ``all_reduce`` for an all-reduce.
        """
        c = self.profile.contention
        lost = c.compute_per_message + c.compute_per_byte * wire + c.compute_per_work * work
        return c.all_reduce * lost if kind is Kind.AR else lost

    def message(
        self, kind: Kind, elements: int, parts: int = 1, blocking: bool = False, width: int | None = None
    ) -> Cost:
        """All of a message whose :meth:`payload` this is; with ``blocking`` compute waits for it, and does not slow it down."""
        key = kind, elements, parts, blocking, width
        cost = self._known.get(key)
        if cost is None:
            cost = self._known[key] = self._message(*key)
        return cost

    def _message(self, kind: Kind, elements: int, parts: int, blocking: bool, width: int | None) -> Cost:
        payload, link = self.payload(kind, elements, width), self.profile.link
        wire = self.profile.wire(kind, payload)
        idle = link.beta_of(kind) * wire
        copy, update = self.copy_s(kind, payload, parts), self.update_s(kind, elements, parts)
        transfer = idle if blocking else self.transfer_s(kind, wire)
        lost = self.lost_s(kind, wire, copy + update)
        return Cost(link.alpha_of(kind), link.gap_of(kind), transfer, copy, update, idle, lost)

    def unit_s(self, unit: int, strategy: Strategy, micro_steps: int = 1) -> float:
        """Seconds of communication, sums and update of a unit in one iteration, in whole messages and none of it hidden.

        A sharded unit is gathered in every micro-step; it is reduced and updated once, as zero1 is gathered once.
        """
        u, layout = self.profile.units[unit], self.profile.layouts[unit]
        seconds = 0.0
        for kind in strategy.kinds(u.trainable, u.backward is not None):
            times = micro_steps if kind.is_gather and strategy.sharded else 1
            parts: dict[int, list[int]] = {}  # of the messages: elements of one width go together
            for section, elements in zip(layout.sections, layout.sizes, strict=True):
                parts.setdefault(section.width(kind.is_gather), []).append(elements)
            for width, together in parts.items():
                size = width * sum(together)
                seconds += times * (self.link_s(kind, self.profile.wire(kind, size)) + self.copy_s(kind, size, len(together)))
                seconds += sum(self.update_s(kind, elements) for elements in together)
        return seconds

    def extra_communication_s(self, sent: dict[str, int]) -> float:
        """Seconds, (bytes sent - bytes of all-dp) · β per iteration; ``sent`` is wire bytes by kind (:meth:`Plan.sent_bytes`)."""
        profile = self.profile
        all_dp = sum(
            profile.wire(Kind.AR, layout.grad_bytes)
            for unit, layout in zip(profile.units, profile.layouts, strict=True)
            if unit.trainable
        )
        seconds = sum(profile.link.beta_of(Kind(kind)) * size for kind, size in sent.items())
        return seconds - profile.link.beta_of(Kind.AR) * all_dp
