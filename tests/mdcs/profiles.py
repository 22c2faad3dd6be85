"""Profiles and plans for the tests of the planning half: chains written by hand, and random jobs for hypothesis.

``MDCS_EXAMPLES`` multiplies the number of random examples, and of random models (``tests/mdcs/runtime/test_random_aliases.py``).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from mdcs.plan import job
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.pipeline import Scheduler, StrategyPlanner, make_plan
from mdcs.planner.priority import Priority
from mdcs.planner.schedulers import Dear, Fusion, MgWfbp, Partitioning, RandomOrder, Sequential, StrategyAssignment, Wfbp
from mdcs.planner.strategies import Greedy, RandomMix, Uniform
from mdcs.profile.link import ALGORITHMS, Collectives, Kind, Link
from mdcs.profile.recompute import RecomputeOption, RecomputeUse
from mdcs.profile.schema import Optimizer, Profile, Slot, Unit
from mdcs.sizes import MIB

TIMES = float(os.environ.get("MDCS_EXAMPLES", "1"))

FREE = Link((0.0,) * 4, (0.0,) * 4, depth=1, block=64)
COLLECTIVES = Collectives()
ADAM = Optimizer("adam", state_tensors=2, state_fixed=4, scratch_tensors=2)


def examples(count: int) -> settings:
    return settings(
        max_examples=max(1, round(count * TIMES)),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def few(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """The cases (tuples: of several arguments) as parameters, those after the first ``count`` slow: more of the same."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=[pytest.mark.slow] if n >= count else []) for n, row in enumerate(rows)]


def link(seconds_per_byte: float = 0.0, alpha: float = 0.0, depth: int = 1, block: int = 64, gap: float = 0.0) -> Link:
    """The same α, β and gap for all kinds."""
    return Link((alpha,) * 4, (seconds_per_byte,) * 4, depth, block, gap=(gap,) * 4)


def in_nodes(link: Link, world: int, per_node: int, inside: float, collectives: Collectives = COLLECTIVES) -> Link:
    """The link between nodes of so many ranks, within which bytes take ``inside`` times as long."""
    size = 1 << 20
    shard = collectives.sent(Kind.AR, size // per_node, world // per_node)
    sent = shard + collectives.sent(Kind.RS, size, per_node)
    beta = link.beta_of(Kind.RS)
    reduced = beta * (shard + inside * (sent - shard)) / sent
    alpha, gap = ((*values, values[1] + values[0], *values[2:]) for values in (link.alpha, link.gap))
    betas = (*link.beta, reduced, inside * beta, inside * beta)
    return replace(link, alpha=alpha, beta=betas, gap=gap, per_node=per_node)


def chain(
    *sizes: int,
    world: int = 2,
    link: Link = FREE,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    live: int = 0,
    frozen: Sequence[int] = (),
    types: tuple[str, str, str] = ("float32", "", ""),
    **more: Any,
) -> Profile:
    """Units a, b, c … of ``sizes`` elements, one after the other; every slot holds ``live`` bytes.

    ``types``: of parameters, gradients and masters, which frozen units do not have.
    """
    count, (dtype, grad, master) = len(sizes), types
    units = tuple(
        Unit("abcdefgh"[i], (n,), i not in frozen, (i, i), (count - 1 - i,) * 2, dtype, grad, "" if i in frozen else master)
        for i, n in enumerate(sizes)
    )
    forward = [Slot(i, "F", forward_s, live, live) for i in range(count)]
    backward = [Slot(i, "B", backward_s, live, live) for i in reversed(range(count))]
    return Profile(units, (*forward, *backward), world, link, **more)


def tied(*sizes: int, **more: Any) -> Profile:
    """A chain whose first unit is used once more at the end, as tied embeddings are."""
    count = len(sizes)
    plain = chain(*sizes, **more)
    units = [replace(plain.units[0], forward=(0, count), backward=(0, count))]
    units += [replace(u, backward=(count - u.forward[0],) * 2) for u in plain.units[1:]]
    last = Slot(0, "F", 1.0, 0, 0)
    slots = (*plain.slots[:count], last, replace(last, phase="B"), *plain.slots[count:])
    return replace(plain, units=tuple(units), slots=slots)


def recomputable(profile: Profile, *units: int, freed: int, seconds: float = 1.0, peak: int = 0, choice: str = "full") -> Profile:
    """The profile with an option for each of these units, which are used once; without any, for all units."""
    options = tuple(
        RecomputeOption(u, choice, (RecomputeUse(unit.forward[0], unit.backward[0], freed, seconds, peak),))
        for u, unit in enumerate(profile.units)
        if unit.backward is not None and (u in units or not units)
    )
    return replace(profile, recompute=profile.recompute + options)


def with_options(profile: Profile, rng: random.Random, *, selective: bool = True) -> Profile:
    """The profile with random options of recomputation for units with a backward, one around each module."""
    options = []
    for u, unit in enumerate(profile.units):
        if unit.backward is None or unit.name != unit.modules:
            continue
        forward, backward = unit.forward[0], unit.backward[1]
        between = profile.slots[forward + 1 : profile.forward_slots + backward + 1]
        saved = min(slot.live for slot in between) // len(profile.units)
        seconds = profile.slots[forward].seconds
        for choice, part in [("full", 1.0), *([("selective", 0.5)] * selective)]:
            freed, peak = int(part * saved), rng.randint(saved // 2, 3 * saved)
            use = RecomputeUse(forward, backward, freed, part * seconds, peak, rng.choice([0, -rng.randint(0, freed)]))
            options.append(RecomputeOption(u, choice, (use,)))
    return replace(profile, recompute=tuple(options))


def planned(profile: Profile, strategies: str | Sequence[str], scheduler: Scheduler | None = None, **more: Any) -> Plan:
    """A plan without a budget; one strategy for all units or one for each."""
    names = [strategies] * len(profile.units) if isinstance(strategies, str) else strategies
    mix = StrategyAssignment(Job(profile, **more), tuple(map(Strategy, names)))
    return (scheduler or Sequential()).schedule(mix)


def of_job(plan: Plan, **settings: Any) -> Plan:
    """The plan for another job, in which these differ."""
    return replace(plan, job=replace(plan.job, **settings))


# ---- random


@st.composite
def profiles(draw: st.DrawFn, max_units: int = 5) -> Profile:
    """A chain with random bytes and times; the first unit may be tied to the last use, units may be frozen.

    There may be two types: then a module may have a second unit around it, of the wider one.
    """
    count = draw(st.integers(1, max_units))
    again = count > 1 and draw(st.booleans())
    uses = [*range(count), *([0] if again else [])]
    world = draw(st.sampled_from([1, 2, 2, 3, 4]))
    segments = st.lists(st.integers(1, 900), min_size=1, max_size=3).map(tuple)
    half, full, double = "bfloat16", "float32", "float64"
    narrow = draw(st.sampled_from([(full, "", ""), (full, half, ""), (half, full, full), (half, "", ""), (half, "", full)]))
    is_mixed, wider = draw(st.booleans()), (double if narrow[0] == full else full, "", "")
    frozen = st.booleans() if draw(st.booleans()) else st.just(False)
    trained_from = draw(st.integers(0, 1)) if count > 1 and not again else 0  # what is before gets no gradient
    used = [[i for i, u in enumerate(uses) if u == unit] for unit in range(count)]
    first_backward = trained_from
    comes = st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]) if draw(st.booleans()) else None
    units, around = [], []
    for u in range(count):
        spans = used[u]
        backward = None
        if u >= first_backward:
            backward = len(uses) - 1 - spans[-1], len(uses) - 1 - spans[0]
        trainable = backward is not None and not draw(frozen)
        lengths = draw(segments)
        wide = draw(st.integers(0, len(lengths))) if is_mixed else 0  # segments, from the first on
        gradients: list[list[tuple[int, float]]] = [[], []]
        for i, length in enumerate(lengths) if trainable and comes is not None else ():
            cut = draw(st.integers(0, length))
            gradients[i < wide] += [(n, draw(comes)) for n in (cut, length - cut) if n]
        for is_wide, own in ((False, lengths[wide:]), (True, lengths[:wide])):
            dtype, grad, master = wider if is_wide else narrow
            if own:
                first = is_wide is (wide == len(lengths))
                (units if first else around).append(
                    Unit(
                        f"u{u}" if first else f"u{u}[{dtype}]", own, trainable, (spans[0], spans[-1]), backward, dtype, grad,
                        master if trainable else "", gradients=tuple(gradients[is_wide]),
                    )
                )  # fmt: skip
    seconds = st.integers(0, 30).map(lambda n: n * 1e-4)
    sizes = st.integers(0, 4000)
    order = [(u, "F") for u in uses] + [(u, "B") for u in reversed(uses) if u >= first_backward]
    lives = [draw(sizes)]
    for _, phase in order[1:]:
        change = draw(sizes)
        lives.append(lives[-1] + change if phase == "F" else max(0, lives[-1] - change))
    after = [*lives[1:], lives[0]]
    slots = tuple(
        Slot(u, phase, draw(seconds), low, max(low, high) + draw(sizes))
        for (u, phase), low, high in zip(order, lives, after, strict=True)
    )
    alpha = st.sampled_from([0.0, 1e-4, 3e-4])
    beta = st.sampled_from([0.0, 1e-7, 5e-7, 2e-6])
    gap = st.sampled_from([0.0, 0.0, 5e-5, 2e-4])
    link_ = Link(
        draw(st.tuples(alpha, alpha, alpha, alpha)),
        draw(st.tuples(beta, beta, beta, beta)),
        depth=draw(st.integers(1, 3)),
        block=draw(st.sampled_from([400, 2000, 10**6])),
        gap=draw(st.tuples(gap, gap, gap, gap)),
    )
    if world == 4 and draw(st.booleans()):
        link_ = in_nodes(link_, world, 2, draw(st.sampled_from([0.1, 1.0])))
    timed = replace(ADAM, seconds_per_element=1e-8, seconds_per_run=1e-5)
    return Profile(
        (*units, *around),
        slots,
        world,
        link_,
        draw(st.sampled_from([Optimizer(), timed, replace(timed, scratch_fixed=64)])),
        collectives=Collectives(draw(st.sampled_from(ALGORITHMS["gloo"]))),
        interference=draw(st.sampled_from([0.0, 0.0, 0.3])),
        copy_seconds_per_byte=draw(st.sampled_from([0.0, 1e-8])),
    )


class Job(job.Job):
    """A job that plans for itself; its plans are of a plain one, which they are read back with."""

    @cached_property
    def plain(self) -> job.Job:
        return job.Job(self.profile, self.micro_steps, self.cross_iteration, self.reserve, self.recompute)

    @property
    def problem(self) -> PlanningProblem:
        return PlanningProblem(self.plain, None)

    def plan(self, strategy: StrategyPlanner, scheduler: Scheduler, **more: Any) -> Plan:
        return make_plan(self.plain, strategy, scheduler, **more)


@st.composite
def jobs(draw: st.DrawFn, max_units: int = 5) -> Job:
    return Job(
        draw(profiles(max_units)),
        draw(st.sampled_from([1, 1, 2, 3])),
        draw(st.booleans()),
        draw(st.sampled_from([0, 0, 1000])),
    )


seeds = st.integers(0, 10**6)

schedulers: st.SearchStrategy[Scheduler] = st.one_of(
    st.sampled_from([Sequential(), Wfbp(), MgWfbp(), Dear(), Partitioning(), Priority()]),
    st.sampled_from([200, 3000, 25 << 20]).map(lambda size: Fusion(size / MIB)),
    st.builds(Dear, st.sampled_from([None, 3000 / MIB]), st.integers(0, 3)),
    st.sampled_from([200, 1500]).map(lambda size: Partitioning(size / MIB)),
    st.sampled_from([200, 1500]).map(lambda size: Priority(size / MIB)),
    st.builds(RandomOrder, seeds, st.integers(1, 4), st.sampled_from([0.0, 0.3, 1.0])),
)

strategies: st.SearchStrategy[StrategyPlanner] = st.one_of(
    st.sampled_from([Uniform(str(s)) for s in Strategy if not s.in_node]), seeds.map(RandomMix), st.just(Greedy())
)

flexible: st.SearchStrategy[StrategyPlanner] = st.one_of(seeds.map(RandomMix), st.just(Greedy()))
"""Strategy planners that fit any budget from the floor on."""
