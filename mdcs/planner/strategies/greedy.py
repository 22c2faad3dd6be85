"""Greedy: from all fsdp, take again and again the change that saves most time per byte, while it fits."""

from __future__ import annotations

from dataclasses import dataclass

from mdcs.plan.messages import Strategy, pad
from mdcs.planner.judge import Judge
from mdcs.profile.contents import Profile
from mdcs.profile.link import Kind


@dataclass(frozen=True)
class Greedy:
    def choose(self, profile: Profile, judge: Judge) -> tuple[Strategy, ...]:
        """Time is communication plus update, unit by unit; bytes are the growth of the sequential peak.

        A change that costs no bytes is free and taken first. Ties go to the strategy named first.
        """
        fsdp = (Strategy.fsdp,) * len(profile.units)
        judge.require_floor()
        mix = list(judge.mix(fsdp).strategies)  # units that gain nothing from a second gather are sdp
        cost = [{k: seconds(profile, u, k, judge.micro_steps) for k in Strategy} for u in range(len(mix))]
        changes = sorted(
            (
                (-saved / max(1, extra_bytes(profile, u, k)), u, k)
                for u in range(len(mix))
                for k in (Strategy.sdp, Strategy.zero1, Strategy.dp)
                if (saved := cost[u][mix[u]] - cost[u][k]) > 0
            ),
            key=lambda c: c[:2],
        )
        # One ranking serves all rounds (costs are per unit); a unit may later improve on an earlier choice.
        for _, u, k in changes:
            if cost[u][k] >= cost[u][mix[u]]:
                continue
            before, mix[u] = mix[u], k
            if not judge.fits(mix):
                mix[u] = before
        return tuple(mix)


def seconds(profile: Profile, unit: int, strategy: Strategy, micro_steps: int = 1) -> float:
    """Communication and update time of a unit in one period, none of it hidden.

    A sharded unit is gathered in every micro-step; it is reduced and updated once, as zero1 is gathered once.
    """
    u, link, opt = profile.units[unit], profile.link, profile.optimizer
    total = pad(u.numel, profile.world)
    time = 0.0
    for kind in strategy.kinds(u.trainable, u.backward is not None):
        size = total * (profile.param_bytes if kind.is_gather else profile.grad_bytes)
        wire = profile.wire(kind, size)
        times = micro_steps if kind.is_gather and strategy.sharded else 1
        time += times * (link.alpha_of(kind) + link.beta_of(kind) * wire)
        if kind is Kind.RS and profile.collectives.reduce_scatter == "all_to_all":
            time += profile.copy_seconds_per_byte * size  # the local sum
        if not kind.is_gather:
            share = 1 if kind is Kind.AR else profile.world
            time += total / share * opt.seconds_per_element + opt.seconds_per_run
    return time


def extra_bytes(profile: Profile, unit: int, strategy: Strategy) -> int:
    """Bytes a unit holds at the end of the forward pass beyond fsdp: the usual place of the peak."""
    total = pad(profile.units[unit].numel, profile.world)
    world, is_updated = profile.world, profile.units[unit].trainable
    master = profile.master_bytes if is_updated else 0
    whole = total * profile.param_bytes
    shard = 0 if master else whole // world
    state = int(total * (profile.optimizer.state_tensors * profile.updated_bytes + master)) if is_updated else 0
    more = {Strategy.sdp: whole, Strategy.zero1: whole - shard, Strategy.dp: whole - shard + state - state // world}
    return more.get(strategy, 0)
