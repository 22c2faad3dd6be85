"""Mixed-integer problems, solved by HiGHS through python-mip in a child process with a hard deadline.

Solvers exceed their time limits and may crash: the child is killed at the deadline, and :class:`Answer` always has the
status. The bound of the relaxation comes first: it is there if the solver of the integer program is killed.

The child runs this module as a script: JSON in, JSON out. So that it starts at once, nothing of mdcs is imported here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING or __name__ == "__main__":
    import mip

_OWN = 0.9  # fraction of the time that the solver gets: it exceeds its limit, and reading and answering take time
_GAP = 1e-6  # relative gap between solution and bound that counts as optimal

Terms = list[tuple[int, float]]
"""A linear expression: (column, coefficient) pairs. A column may appear more than once."""


@dataclass
class IntegerProgram:
    """Minimize Σ cost·x subject to rows ``Σ coefficient·x <= or == right side``. Any x is in [0, 1], some integer."""

    costs: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[tuple[Terms, bool, float]] = field(default_factory=list)  # terms, whether ==, right side

    def column(self, cost: float = 0.0, *, integer: bool = False) -> int:
        """Add a variable and return its index."""
        self.costs.append(cost)
        self.integer.append(integer)
        return len(self.costs) - 1

    def at_most(self, terms: Terms, right: float) -> None:
        """Add the row terms <= right."""
        self.rows.append((terms, False, right))

    def equal(self, terms: Terms, right: float) -> None:
        """Add the row terms == right."""
        self.rows.append((terms, True, right))

    def broken(self, values: Sequence[float], tolerance: float = 1e-6) -> list[int]:
        """Return the rows that ``values`` do not satisfy."""
        out = []
        for i, (terms, equal, right) in enumerate(self.rows):
            left = sum(c * values[x] for x, c in terms)
            slack = tolerance * (1 + abs(right) + max((abs(c) for _, c in terms), default=0.0))
            if left - right > slack or (equal and right - left > slack):
                out.append(i)
        return out


@dataclass(frozen=True)
class Answer:
    """The answer of the solver: ``values``, or None, and a proven lower ``bound`` of the cost, or None.

    - ``status``: ``optimal``, ``feasible``, ``infeasible``, or the reason why there is no solution.
    """

    status: str
    values: tuple[float, ...] | None = None
    bound: float | None = None


def solve(
    program: IntegerProgram, *, seconds: float = 20.0, start: Sequence[float] | None = None, relax: bool = False
) -> Answer:
    """Solve a problem within ``seconds``. After that the solver is killed.

    - ``start``: a solution to start from, with a value for every column.
    - ``relax``: drop integrality and solve the linear program by an interior point method.
    """
    data = {
        "costs": program.costs, "integer": program.integer, "rows": program.rows,
        "start": None if start is None else list(start), "until": time.time() + _OWN * seconds, "relax": relax,
    }  # fmt: skip
    try:
        child = subprocess.run(
            [sys.executable, __file__],
            input=json.dumps(data), capture_output=True, text=True, timeout=max(0.1, seconds), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        *said, _ = (e.stdout or b"").decode().split("\n")  # the last line is not whole
        return Answer(f"no answer within {seconds:.3g} s", bound=json.loads(said[-1])[2] if said else None)
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines() or ["no message"]
        return Answer(f"the solver failed: {lines[-1]}")
    status, values, bound = json.loads(child.stdout.splitlines()[-1])
    return Answer(status, None if values is None else tuple(values), bound)


# ---- the child


def main() -> None:
    """Read a problem, solve it, print (status, values, bound), for an integer program after those of its relaxation."""
    data = json.load(sys.stdin)
    model = mip.Model(solver_name="HIGHS")
    model.verbose = 0
    model.max_mip_gap = _GAP
    columns = [
        model.add_var(lb=0.0, ub=1.0, obj=cost, var_type=mip.INTEGER if integer else mip.CONTINUOUS)
        for cost, integer in zip(data["costs"], data["integer"], strict=True)
    ]
    for terms, equal, right in data["rows"]:
        merged: dict[int, float] = {}
        for x, c in terms:
            merged[x] = merged.get(x, 0.0) + c
        sense = "=" if equal else "<"
        model.add_constr(mip.LinExpr([columns[x] for x in merged], list(merged.values()), -right, sense))
    status, values, relaxed = _relaxed(model, data["until"])
    print(json.dumps([status, values if data["relax"] else None, relaxed]), flush=True)
    if data["relax"]:
        return
    if data["start"] is not None:
        model.start = list(zip(columns, data["start"], strict=True))
    model.lp_method = mip.LP_Method.AUTO
    status = model.optimize(max_seconds=max(1.0, data["until"] - time.time()))
    bound = model.objective_bound if status.name in ("OPTIMAL", "FEASIBLE", "NO_SOLUTION_FOUND") else relaxed
    if bound is not None and not abs(bound) < 1e20:
        bound = relaxed
    print(json.dumps([status.name.lower().replace("_", " "), _values(model), bound]))


def _relaxed(model: mip.Model, until: float) -> tuple[str, list[float] | None, float | None]:
    """Return (status, values, bound) of the linear relaxation: the optimum, less the method's tolerance."""
    # An interior point method is fast, but may end without a proof of optimality: then the default method follows.
    for method in (mip.LP_Method.BARRIERNOCROSS, mip.LP_Method.AUTO):
        model.lp_method = method
        status = model.optimize(max_seconds=max(1.0, until - time.time()), relax=True)
        if status.name in ("OPTIMAL", "INFEASIBLE") or time.time() > until:
            break
    bound = model.objective_value * (1 - 1e-6) if status.name == "OPTIMAL" else None
    return status.name.lower().replace("_", " "), _values(model), bound


def _values(model: mip.Model) -> list[float] | None:
    return [column.x for column in model.vars] if model.num_solutions > 0 else None


if __name__ == "__main__":
    main()
