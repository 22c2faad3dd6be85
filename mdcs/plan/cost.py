"""The cost model: seconds of messages, sums and updates, and names for the parts of a step. The ledger counts bytes.

A message of B wire bytes that is alone on the link takes α + β·B. With other messages in flight it occupies the link
for gap + β·B (:mod:`mdcs.profile.link`). While something computes it occupies the link at least as long as measured
there, gap included (:class:`mdcs.profile.link.Contention`). Packing and unpacking a fused message takes two passes over
its payload. The update is of all elements after an all-reduce, of the rank's part after a reduce-scatter.

Simulator, planners, bounds and calibration read seconds only from here. Delays that depend on when a message comes (the
contention's skew, dispatch and turn) are left out: the replay adds them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Self

from mdcs.plan.period import Strategy
from mdcs.plan.schedule import MessageSeconds
from mdcs.profile.link import Kind
from mdcs.profile.schema import Profile


class CostModel:
    """Seconds for one profile. Costs of messages are cached: the plans that a planner compares share most of them."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._known: dict[tuple[Kind, tuple[tuple[int, int], ...], bool], MessageSeconds] = {}

    def transfer_s(self, kind: Kind, wire: int) -> float:
        """Return the seconds for which the link serves a message, after its gap, while something computes.

        max(β·wire, message_seconds + seconds_per_byte·wire - gap), with the contention's seconds. These were measured
        with back-to-back messages over all ranks, gap included. Within nodes seconds_per_byte exceeds β by as much.
        """
        link, contention = self.profile.link, self.profile.contention
        per_byte = contention.seconds_per_byte
        if kind.in_node:
            world = (link.beta_of(Kind.RS) + link.beta_of(Kind.AG_F)) / 2  # contention was measured with these kinds
            per_byte = max(0.0, per_byte - world) + link.beta_of(kind)
        least = contention.message_seconds + per_byte * wire
        return max(link.beta_of(kind) * wire, least - link.gap_of(kind))

    def update_s(self, kind: Kind, pieces: Iterable[tuple[int, int]]) -> float:
        """Return the seconds of the updates after a message of these (unit, elements) pairs. 0 for a gather.

        For each elementwise optimizer elements/ranks·seconds_per_element + pieces·seconds_per_run, for the ranks that
        share the update. Of whole parameters ranks have unequal shares: the slowest counts.
        """
        if kind.is_gather:
            return 0.0
        sharers, seconds = 1 if kind is Kind.AR else self.profile.group(kind), 0.0
        sums: dict[int, tuple[int, int]] = {}  # optimizer -> elements, runs
        for u, elements in pieces:
            layout, optimizer = self.profile.layouts[u], self.profile.units[u].optimizer
            if layout.is_whole:
                seconds += max(sum([p.seconds for p in own]) for own in layout.owned(sharers))
            else:
                before, runs = sums.get(optimizer, (0, 0))
                sums[optimizer] = before + elements, runs + 1
        for optimizer, (elements, runs) in sums.items():
            of = self.profile.optimizers[optimizer]
            seconds += elements / sharers * of.seconds_per_element + runs * of.seconds_per_run
        return seconds

    def lost_s(self, wire: int, work: float) -> float:
        """Return the compute seconds lost to a message of ``wire`` bytes whose copies and updates take ``work`` s."""
        c = self.profile.contention
        return c.compute_per_message + c.compute_per_byte * wire + c.compute_per_work * work

    def message(self, kind: Kind, pieces: tuple[tuple[int, int], ...], blocking: bool = False) -> MessageSeconds:
        """Return the cost of a message of ``pieces``: (unit, elements) of each block, all of one type. ``blocking``:
        compute waits for the message, so compute does not slow it down.
        """
        key = kind, pieces, blocking
        if key in self._known:
            return self._known[key]
        payload = sum([elements for _, elements in pieces]) * self.profile.layouts[pieces[0][0]].width(kind.is_gather)
        link, wire = self.profile.link, self.profile.wire(kind, payload)
        idle = link.beta_of(kind) * wire
        copy = 2 * self.profile.copy_seconds_per_byte * payload if len(pieces) > 1 else 0.0  # to pack and to unpack
        update = self.update_s(kind, pieces)
        transfer = idle if blocking else self.transfer_s(kind, wire)
        alpha, gap, lost = link.alpha_of(kind), link.gap_of(kind), self.lost_s(wire, 0.0)
        return self._known.setdefault(key, MessageSeconds(alpha, gap, transfer, copy, update, idle, lost))

    def unit_s(self, unit: int, strategy: Strategy, micro_steps: int = 1) -> float:
        """Return the seconds of messages, sums and updates of a unit in one iteration, sent whole, without overlap."""
        u, layout, link, seconds = self.profile.units[unit], self.profile.layouts[unit], self.profile.link, 0.0
        for kind in strategy.kinds(u.trainable, u.backward is not None):
            times = micro_steps if kind.is_gather and strategy.sharded else 1
            wire = self.profile.wire(kind, layout.elements * layout.width(kind.is_gather))
            seconds += self.update_s(kind, [(unit, layout.elements)])
            seconds += times * (link.alpha_of(kind) + link.beta_of(kind) * wire)  # alone on the link
        return seconds

    def extra_communication_s(self, sent: dict[str, int]) -> float:
        """Return the seconds per iteration by which traffic takes longer than that of all-dp: Σ β·bytes, at least 0.
        ``sent``: wire bytes by kind (:meth:`Plan.sent_bytes`).
        """
        profile, beta_of = self.profile, self.profile.link.beta_of
        trained = [layout for u, layout in zip(profile.units, profile.layouts, strict=True) if u.trainable]
        all_dp = sum(profile.wire(Kind.AR, layout.grad_bytes) for layout in trained)
        seconds = sum(beta_of(Kind(kind)) * size for kind, size in sent.items())
        return max(0.0, seconds - beta_of(Kind.AR) * all_dp)  # an all-reduce may be slower than its two halves


@dataclass(frozen=True)
class StepTimes:
    """Parts of one rank's step, in seconds, named as HTA and NVIDIA's tools name them. None: unknown.

    - compute_s: computing runs. communication_s: at least one message runs. overlap_s: both run.
    - exposed_s = communication_s - overlap_s. stalled_s = step_s - compute_s: compute waits for messages, updates or
      the training loop. idle_s = stalled_s - exposed_s: neither runs.
    - overlap_ratio = overlap_s / communication_s, 0 without communication.
    """

    step_s: float
    compute_s: float | None = None
    communication_s: float | None = None
    overlap_s: float | None = None
    exposed_s: float | None = None
    stalled_s: float | None = None
    idle_s: float | None = None
    overlap_ratio: float | None = None

    @classmethod
    def of(
        cls, step_s: float, compute_s: float | None = None, communication_s: float | None = None,
        overlap_s: float | None = None, **more: Any,
    ) -> Self:  # fmt: skip
        """Return the times with the derived ones. ``more``: fields of a subclass."""
        exposed_s, stalled_s, ratio = _less(communication_s, overlap_s), _less(step_s, compute_s), None
        if communication_s is not None and overlap_s is not None:
            ratio = min(1.0, overlap_s / communication_s) if communication_s > 0 else 0.0
        derived = exposed_s, stalled_s, _less(stalled_s, exposed_s), ratio
        return cls(step_s, compute_s, communication_s, overlap_s, *derived, **more)


TIMES = tuple(f.name for f in fields(StepTimes))
"""Names of the times: columns of tables, keys of records."""


def _less(whole: float | None, part: float | None) -> float | None:
    """Return the difference, at least 0: rounding can make a sum of spans exceed the whole in the last bit."""
    return None if whole is None or part is None else max(0.0, whole - part)


@dataclass(frozen=True)
class Prediction(StepTimes):
    """Result of the replay of a plan: seconds per period, and bytes per rank.

    - ``peak_bytes``: peak of all categories together.
    - ``memory``: peak of each category (at its own time), and of all together as "total".
    """

    peak_bytes: int = field(kw_only=True)
    memory: dict[str, int] = field(kw_only=True)
