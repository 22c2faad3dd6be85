"""The strategy mix of least communication and update time whose sequential schedule fits the budget: an exact ILP.

Binary z[u,k]: unit u uses strategy k, Σ_k z[u,k] = 1. With the schedule fixed to the sequential one nothing
overlaps, so a step is compute plus Σ seconds[u,k]·z[u,k], and units share nothing but bytes: at every stage of the
period (a message of the sequential schedule, or a slot) each unit holds bytes[stage,u,k] of its own::

    minimize    Σ seconds[u,k] z[u,k]
    subject to  Σ_k z[u,k] = 1                                  every unit has one strategy
                Σ_u,k bytes[stage,u,k] z[u,k] <= budget - rest  memory, for every stage

The solver (HiGHS or CBC through python-mip) runs in a child process with a hard deadline: solvers overrun their
own. Its answer is judged like any other mix and compared with greedy's; ``outcome`` says which one is returned, and why.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from mdcs.ledger import Ledger, SlotLimits
from mdcs.plan import Strategy
from mdcs.profile import Profile, Unit
from mdcs.schedulers.mix import Mix
from mdcs.schedulers.sequential import Sequential
from mdcs.strategies.base import Judge
from mdcs.strategies.greedy import Greedy, seconds

_GRACE_S = 5.0  # on top of the solver's own limit, before it is killed

Stage = tuple[int, bool, bool, int]
"""Order of what happens: slot, whether it runs (or compute still waits), whether a gather, unit."""


@dataclass(frozen=True)
class Ilp:
    """``solver`` is HIGHS or CBC; ``seconds`` bounds the solve."""

    solver: str = "HIGHS"
    seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.solver not in ("HIGHS", "CBC"):  # python-mip takes another one in silence
            raise ValueError(f"solver must be HIGHS or CBC, got {self.solver!r}")

    def choose(self, profile: Profile, judge: Judge) -> tuple[Strategy, ...]:
        """The better of the solver's mix and greedy's. Raises InfeasibleBudget."""
        return self.solve(profile, judge)[0]

    def solve(self, profile: Profile, judge: Judge) -> tuple[tuple[Strategy, ...], str]:
        """(mix, outcome): ``optimal``, ``feasible``, or ``greedy: <why the solver's was not taken>``."""
        greedy = Greedy().choose(profile, judge)
        answer = self._ask(problem(profile, judge))
        if answer["mix"] is None:
            return greedy, f"greedy: {answer['status']}"
        mix = tuple(Strategy(k) for k in answer["mix"])
        if not judge.fits(mix):
            return greedy, "greedy: the solver's mix does not fit"
        if _time(judge, greedy) < _time(judge, mix):
            return greedy, f"greedy: faster than the solver's ({answer['status']})"
        return mix, answer["status"]

    def _ask(self, data: dict[str, Any]) -> dict[str, Any]:
        data |= {"solver": self.solver, "limit": self.seconds}
        try:
            child = subprocess.run(
                [sys.executable, "-m", "mdcs.strategies.ilp"],
                input=json.dumps(data), capture_output=True, text=True, timeout=self.seconds + _GRACE_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"status": f"no answer within {self.seconds + _GRACE_S:g} s", "mix": None}
        if child.returncode != 0:
            lines = child.stderr.strip().splitlines() or ["no message"]
            return {"status": f"the solver failed: {lines[-1]}", "mix": None}
        answer: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
        return answer


def _time(judge: Judge, mix: tuple[Strategy, ...]) -> float:
    return sum(seconds(judge.profile, u, k, judge.micro_steps) for u, k in enumerate(mix))


# ---- the problem, in numbers


def problem(profile: Profile, judge: Judge) -> dict[str, Any]:
    """Costs per unit and strategy, and rows (bytes per unit and strategy, bytes left) of the memory constraints."""
    kinds = list(Strategy)
    units = range(len(profile.units))
    costs = [[seconds(profile, u, k, judge.micro_steps) for k in kinds] for u in units]
    if judge.budget is None:
        return {"costs": costs, "rows": []}
    cap = judge.budget - judge.reserve
    walks = [[_walk(profile, judge, u, k) for k in kinds] for u in units]
    stages: set[Stage] = set().union(*(walk for unit in walks for walk in unit))
    period = Mix(profile, (Strategy.dp,) * len(profile.units), judge.micro_steps, judge.cross_iteration).period
    rows = []
    for stage in sorted(stages):
        slot = profile.slots[period.slots[stage[0]].place]
        held = [[_at(walk, stage, u) for walk in unit] for u, unit in enumerate(walks)]
        rows.append([held, cap - (slot.peak if stage[1] else slot.live)])
    return {"costs": costs, "rows": rows}


Walk = dict[Stage, tuple[int, int]]
"""Per stage at which the unit does something: bytes while it does, bytes after."""


def _walk(profile: Profile, judge: Judge, unit: int, strategy: Strategy) -> Walk:
    """What one unit holds through the steady period of the sequential schedule, by the ledger of a plan for it alone.

    Exact, but for the barrier: there the last reduction of all units updates all, which is put at the turn.
    """
    alone: Unit = profile.units[unit]
    slots = tuple(dataclasses.replace(s, unit=0, live=0, peak=0) for s in profile.slots)
    sub = dataclasses.replace(profile, units=(alone,), slots=slots)
    plan = Sequential().schedule(Mix(sub, (strategy,), judge.micro_steps, judge.cross_iteration))
    ledger, issued = Ledger(plan), SlotLimits(plan).issued
    barrier = not judge.cross_iteration
    turn, held, waiting = plan.period.turn, ledger.rest_bytes, 0
    gradients: dict[int, int] = {}
    walk: Walk = {}
    for round_ in range(3):
        walk, sent = {}, 0
        for q in range(turn if round_ == 0 else 0, plan.period.length):
            for i in range(sent, issued[q]):
                message = plan.messages[i]
                if round_ == 0 and not plan.in_prologue(message):
                    continue
                if message.kind.is_gather and q == turn:
                    held, waiting = held - waiting, 0
                e = ledger.messages[i]
                during = held + sum(b for _, b in e.full) + e.transient + e.shards_held
                held += e.held - e.shards_of_others
                after_link = sum(gradients.pop(u, 0) for u, _ in e.gradients_after_link)
                after_update = sum(gradients.pop(u, 0) for u, _ in e.gradients_after_update)
                held -= after_link + after_update
                if barrier and not message.kind.is_gather:  # its update waits for the last reduction of all units
                    kept = after_update + (e.shards if message.kind.value == "RS" else 0)
                    held, waiting = held + kept, waiting + kept
                walk[q, False, message.kind.is_gather, unit] = during, held
            sent = issued[q]
            slot = ledger.slots[q]
            for u, b in slot.gradients:
                gradients[u] = b
                held += b
            if q == turn:
                held, waiting = held - waiting, 0
                if barrier:
                    walk[q, False, True, -1] = held, held
            walk[q, True, False, -1] = held, held - sum(b for _, b in slot.released)
            held = walk[q, True, False, -1][1]
    return walk


def _at(walk: Walk, stage: Stage, unit: int) -> int:
    """Bytes that the unit holds at a stage, its own or another unit's."""
    if stage in walk:
        return walk[stage][0]
    before = [s for s in walk if s < stage]
    return walk[max(before)][1] if before else walk[max(walk)][1]


# ---- the child process


def main() -> None:
    """Read the problem as JSON, solve it, print the answer as JSON."""
    import mip

    data = json.load(sys.stdin)
    kinds = list(Strategy)
    model = mip.Model(solver_name=data["solver"])
    model.verbose = 0
    z = [[model.add_var(var_type=mip.BINARY) for _ in kinds] for _ in data["costs"]]
    scale = max((c for costs in data["costs"] for c in costs), default=1.0) or 1.0
    model.objective = mip.minimize(
        mip.xsum(c / scale * v for costs, row in zip(data["costs"], z, strict=True)
                 for c, v in zip(costs, row, strict=True))
    )  # fmt: skip
    for row in z:  # every unit has one strategy
        model += mip.xsum(row) == 1
    for held, left in data["rows"]:  # memory, for every stage; in units of the budget, for the solver's tolerances
        unit = max(1, left)
        model += mip.xsum(b / unit * v for bytes_, row in zip(held, z, strict=True)
                          for b, v in zip(bytes_, row, strict=True)) <= left / unit  # fmt: skip
    status = model.optimize(max_seconds=data["limit"])
    found = model.num_solutions > 0
    mix = [str(kinds[max(range(len(kinds)), key=lambda k: row[k].x)]) for row in z] if found else None
    print(json.dumps({"status": status.name.lower(), "mix": mix}))


if __name__ == "__main__":
    main()
