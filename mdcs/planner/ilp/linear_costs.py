"""A profile without costs per message, in which a block costs the same as in another profile.

The slot model plans with it.

The slot model sends operations in fractions, so it knows only seconds per byte. Three costs of a block are spread over
its bytes: the gap (or the latency, with one message in flight at a time), the link occupancy while computing, and the
lost compute time. Delays of contention that depend on when a message comes (skew, dispatch, turn) are left out: the
replay of the plan includes them.
"""

from __future__ import annotations

import dataclasses

from mdcs.plan.cost import CostModel
from mdcs.profile.contention import Contention
from mdcs.profile.schema import Profile


def linearize_costs(profile: Profile) -> Profile:
    """Return the profile with all costs of a block in β, and lost compute time as interference.

    β of a kind is the seconds of a block divided by its bytes. The profile itself is returned if its link has no gaps
    and there is no contention.
    """
    link, cost = profile.link, CostModel(profile)
    if not any(link.gap) and profile.contention == Contention():
        return profile
    largest = max(range(len(profile.units)), key=lambda u: profile.layouts[u].grad_bytes)
    elements = max(profile.world, profile.block // profile.layouts[largest].grad_width)
    beta, lost = [], 0.0
    for kind in link.kinds:
        block = cost.message(kind, ((largest, elements),))
        wire = profile.wire(kind, elements * profile.layouts[largest].width(kind.is_gather))
        each = (max(block.alpha, block.gap) if link.depth == 1 else block.gap) + block.transfer
        beta.append(each / wire if wire else link.beta_of(kind))
        lost = max(lost, cost.lost_s(wire, block.copy + block.update) / each if each else 0.0)
    lost = 1 - (1 - min(0.9, lost)) / (1 + profile.interference)  # lost compute time, as a fraction of sending time
    none = (0.0,) * len(beta)
    return dataclasses.replace(
        profile,
        link=dataclasses.replace(link, alpha=none, beta=tuple(beta), gap=none),
        contention=Contention(),
        interference=lost / (1 - lost),
    )
