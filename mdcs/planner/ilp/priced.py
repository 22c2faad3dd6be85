"""A profile that costs the same in blocks as another one, but has no costs per message: what the slot model plans with.

The slot model sends operations in fractions, so it knows seconds per byte alone. Here a block's gap (its latency, where one
message is in flight at a time), what keeps its message on the link beside computing and what computing loses to it are
spread over its bytes.
"""

from __future__ import annotations

import dataclasses

from mdcs.plan.cost import CostModel
from mdcs.profile.contents import Contention, Profile


def priced(profile: Profile) -> Profile:
    """The profile with β of a kind as seconds of a block over its bytes, and what computing loses as interference; the profile
    itself if its link has no gaps and nothing contends.
    """
    link, cost = profile.link, CostModel(profile)
    if not any(link.gap) and profile.contention == Contention():
        return profile
    elements = max(profile.world, profile.block // profile.grad_bytes)
    beta, lost = [], 0.0
    for kind in link.kinds:
        block = cost.message(kind, elements)
        wire = profile.wire(kind, cost.payload(kind, elements))
        each = (max(block.alpha, block.gap) if link.depth == 1 else block.gap) + block.transfer
        beta.append(each / wire if wire else link.beta_of(kind))
        lost = max(lost, block.lost / each if each else 0.0)
    lost = 1 - (1 - min(0.9, lost)) / (1 + profile.interference)  # of the seconds of sending, those that computing loses
    none = (0.0,) * len(beta)
    return dataclasses.replace(
        profile,
        link=dataclasses.replace(link, alpha=none, beta=tuple(beta), gap=none),
        contention=Contention(),
        interference=lost / (1 - lost),
    )
