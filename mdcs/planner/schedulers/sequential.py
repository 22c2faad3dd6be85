"""No overlap: compute waits for every message, each at the moment it is ready (reductions) or needed (gathers)."""

from __future__ import annotations

from dataclasses import dataclass

from mdcs.plan.messages import Plan
from mdcs.plan.mix import Draft, Mix


@dataclass(frozen=True)
class Sequential:
    def schedule(self, mix: Mix) -> Plan:
        drafts = []
        for op in mix.ops:
            first, last = mix.window(op)
            drafts.append(Draft(op.kind, ((op.unit, 0),), last if op.kind.is_gather else first, op.micro, True))
        # At one boundary the reduction comes first: its gradients are freed before the next unit is gathered.
        drafts.sort(key=lambda d: d.kind.is_gather)
        return mix.plan("sequential", mix.whole(), drafts)
