"""The cost model: seconds of messages, sums and updates. The ledger is its counterpart for bytes.

A message of B wire bytes that is alone on the link takes α + β·B. With other messages in flight it occupies the link
for gap + β·B (:mod:`mdcs.profile.link`). While something computes it occupies the link at least as long as measured
there, gap included (:class:`mdcs.profile.contention.Contention`). Two costs on the rank follow:

- copies and sums: packing and unpacking a fused message takes two passes over its payload; the sum after an all-to-all
  takes one.
- the update after a reduction: all elements after an all-reduce, the rank's part after a reduce-scatter.

The simulator, planners, bounds and calibration read seconds only from this module. Delays that depend on when a message
comes (the contention's skew, dispatch and turn) are no part of a message's cost: the replay adds them, and planners that
do not replay, and bounds, leave them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mdcs.plan.strategy import Strategy
from mdcs.profile.layout import Section
from mdcs.profile.link import Kind
from mdcs.profile.schema import Profile


class Cost(NamedTuple):
    """Seconds of a message, in the order in which they are spent.

    - ``alpha``: latency on the link.
    - ``gap``: pause after the previous message.
    - ``transfer``: time of its bytes on the link.
    - ``copy``: summing and unpacking.
    - ``update``: the update.
    - ``idle``: ``transfer`` while nothing computes.
    - ``lost``: compute time lost when the message completes while something computes, without that lost to copying and
      updating.
    """

    alpha: float
    gap: float
    transfer: float
    copy: float
    update: float
    idle: float
    lost: float


class CostModel:
    """Seconds for one profile.

    Costs of messages are cached, because the plans that a planner compares share most of their messages.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._known: dict[tuple[Kind, int, int, bool, int | None, float | None], Cost] = {}

    def payload(self, kind: Kind, elements: int, width: int | None = None) -> int:
        """Return the payload bytes of a message with this many elements of ``width`` bytes.

        ``width`` None: the profile's width of parameters (gathers) or gradients (reductions).
        """
        return elements * (width or (self.profile.param_bytes if kind.is_gather else self.profile.grad_bytes))

    def link_s(self, kind: Kind, wire: int) -> float:
        """Return α + β·wire: seconds of a message of ``wire`` bytes that is alone on the link."""
        return self.profile.link.alpha_of(kind) + self.profile.link.beta_of(kind) * wire

    def transfer_s(self, kind: Kind, wire: int) -> float:
        """Return the seconds for which the link serves a message, after its gap, while something computes.

        max(β·wire, message_seconds + seconds_per_byte·wire - gap). message_seconds and seconds_per_byte come from the
        profile's contention. They were measured with back-to-back messages over all ranks, so they include the gap.
        Within nodes, the excess of seconds_per_byte over β stays the same.
        """
        link, contention = self.profile.link, self.profile.contention
        per_byte = contention.seconds_per_byte
        if kind.in_node:
            world = (link.beta_of(Kind.RS) + link.beta_of(Kind.AG_F)) / 2  # contention was measured with these kinds
            per_byte = max(0.0, per_byte - world) + link.beta_of(kind)
        least = contention.message_seconds + per_byte * wire
        return max(link.beta_of(kind) * wire, least - link.gap_of(kind))

    def copy_s(self, payload: int, parts: int) -> float:
        """Return the seconds of packing and unpacking a message of several parts: 2·copy_seconds_per_byte·payload."""
        return 2 * self.profile.copy_seconds_per_byte * payload if parts > 1 else 0.0

    def update_s(self, kind: Kind, elements: int, runs: int = 1) -> float:
        """Return the seconds of the update after a message. 0 for a gather.

        elements/ranks·seconds_per_element + runs·seconds_per_run. ``runs``: runs of one parameter group. ``ranks`` is 1
        for an all-reduce, the ranks of a node for RS_N, and the world otherwise.
        """
        if kind.is_gather:
            return 0.0
        optimizer = self.profile.optimizer
        return elements / self._sharers(kind) * optimizer.seconds_per_element + runs * optimizer.seconds_per_run

    def _sharers(self, kind: Kind) -> int:
        """Return the number of ranks that share the update after a reduction."""
        return 1 if kind is Kind.AR else self.profile.group(kind)

    def section_update_s(self, kind: Kind, section: Section, elements: int) -> float:
        """Return the seconds of the update of a block of a section, by the section's optimizer; 0 for a gather.

        Ranks have unequal shares of whole parameters: the slowest rank counts.
        """
        if kind.is_gather:
            return 0.0
        if section.is_whole:
            return max(sum([p.seconds for p in own]) for own in section.owned(self.profile.world, self._sharers(kind)))
        optimizer = self.profile.optimizers[section.optimizer]
        return elements / self._sharers(kind) * optimizer.seconds_per_element + optimizer.seconds_per_run

    def updates_s(
        self, kind: Kind, blocks: Sequence[tuple[int, ...]], parts: Sequence[tuple[int, int]]
    ) -> float | None:
        """Return the seconds of the updates after a message, for :meth:`message`; None where all elements are alike."""
        if not self.profile.has_several_updates:
            return None
        return sum([self.section_update_s(kind, self.profile.section(blocks, part), blocks[part[0]][part[1]]) for part in parts])

    def lost_s(self, wire: int, work: float) -> float:
        """Return the compute seconds lost to a message of ``wire`` bytes.

        - ``work``: seconds of copies and updates that the message causes.

        """
        c = self.profile.contention
        return c.compute_per_message + c.compute_per_byte * wire + c.compute_per_work * work

    def message(
        self, kind: Kind, elements: int, parts: int = 1, blocking: bool = False, width: int | None = None,
        update: float | None = None,
    ) -> Cost:  # fmt: skip
        """Return the cost of a message. ``elements``, ``width``: as in :meth:`payload`.

        - ``blocking``: compute waits for the message, so compute does not slow it down.
        - ``update``: seconds of its updates (:meth:`updates_s`); None: those of the profile's one optimizer.
        """
        key = kind, elements, parts, blocking, width, update
        if key in self._known:
            return self._known[key]
        payload, link = self.payload(kind, elements, width), self.profile.link
        wire = self.profile.wire(kind, payload)
        idle = link.beta_of(kind) * wire
        copy = self.copy_s(payload, parts)
        update = self.update_s(kind, elements, parts) if update is None else update
        transfer = idle if blocking else self.transfer_s(kind, wire)
        lost = self.lost_s(wire, 0.0)
        cost = self._known[key] = Cost(link.alpha_of(kind), link.gap_of(kind), transfer, copy, update, idle, lost)
        return cost

    def unit_s(self, unit: int, strategy: Strategy, micro_steps: int = 1) -> float:
        """Return the seconds of communication, sums and updates of a unit in one iteration.

        Messages carry whole units, and nothing overlaps. A sharded unit is gathered in every micro-step.
        """
        u, layout = self.profile.units[unit], self.profile.layouts[unit]
        seconds = 0.0
        for kind in strategy.kinds(u.trainable, u.backward is not None):
            times = micro_steps if kind.is_gather and strategy.sharded else 1
            parts: dict[tuple[int, bool], list[int]] = {}  # elements of the sections that go together (Profile.by_width)
            for section, elements in zip(layout.sections, layout.sizes, strict=True):
                parts.setdefault((section.width(kind.is_gather), section.is_whole), []).append(elements)
                seconds += self.section_update_s(kind, section, elements)
            for (width, _), together in parts.items():
                size = width * sum(together)
                seconds += times * (self.link_s(kind, self.profile.wire(kind, size)) + self.copy_s(size, len(together)))
        return seconds

    def extra_communication_s(self, sent: dict[str, int]) -> float:
        """Return the seconds per iteration of traffic beyond that of all-dp: β·bytes sent - β·bytes of all-dp, at least 0.

        - ``sent``: wire bytes by kind (:meth:`Plan.sent_bytes`).
        """
        profile = self.profile
        all_dp = sum(
            profile.wire(Kind.AR, layout.grad_bytes)
            for unit, layout in zip(profile.units, profile.layouts, strict=True)
            if unit.trainable
        )
        seconds = sum(profile.link.beta_of(Kind(kind)) * size for kind, size in sent.items())
        return max(0.0, seconds - profile.link.beta_of(Kind.AR) * all_dp)  # an all-reduce may be slower than its two halves
