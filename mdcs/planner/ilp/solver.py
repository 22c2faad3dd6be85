"""Mixed-integer problems through python-mip, solved in a child process with a hard deadline.

A :class:`Problem` is numbers only: columns with a cost, and sparse rows. Solvers overrun the limits they are given and
may crash: the child is killed when its time is over, and what became of it is always said in :class:`Answer`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

SOLVERS = ("HIGHS", "CBC")
_GAP = 1e-6  # between the best solution and the bound: what counts as optimal
_GRACE_S = 5.0  # on top of the solver's own limit, before it is killed

Terms = list[tuple[int, float]]
"""A linear expression: (column, coefficient) pairs; a column may appear more than once."""


@dataclass
class Problem:
    """Minimize Σ cost·x subject to rows ``Σ coefficient·x <= or == right side``, every x in [0, 1], some x integer."""

    costs: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[tuple[Terms, bool, float]] = field(default_factory=list)  # terms, whether ==, right side

    def column(self, cost: float = 0.0, *, integer: bool = False) -> int:
        """A new variable; its index."""
        self.costs.append(cost)
        self.integer.append(integer)
        return len(self.costs) - 1

    def at_most(self, terms: Terms, right: float) -> None:
        self.rows.append((terms, False, right))

    def equal(self, terms: Terms, right: float) -> None:
        self.rows.append((terms, True, right))

    def cost(self, values: Sequence[float]) -> float:
        return sum(c * x for c, x in zip(self.costs, values, strict=True))

    def broken(self, values: Sequence[float], tolerance: float = 1e-6) -> list[int]:
        """Rows that ``values`` do not satisfy."""
        out = []
        for i, (terms, equal, right) in enumerate(self.rows):
            left = sum(c * values[x] for x, c in terms)
            slack = tolerance * (1 + abs(right) + max((abs(c) for _, c in terms), default=0.0))
            if left - right > slack or (equal and right - left > slack):
                out.append(i)
        return out


@dataclass(frozen=True)
class Answer:
    """``status`` is ``optimal``, ``feasible``, ``infeasible``, or says why there is no solution.

    ``bound`` is proven: no solution costs less (None when the solver proved nothing).
    """

    status: str
    values: tuple[float, ...] | None = None
    bound: float | None = None


@dataclass(frozen=True)
class Solving:
    """What planners that ask a solver have: ``solver`` is HIGHS or CBC, ``seconds`` bounds the solve."""

    solver: str = "HIGHS"
    seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.solver not in SOLVERS:  # python-mip takes another one in silence
            raise ValueError(f"solver must be {' or '.join(SOLVERS)}, got {self.solver!r}")
        if not self.seconds > 0:
            raise ValueError(f"seconds must be > 0, got {self.seconds}")


def solve(
    problem: Problem,
    *,
    solver: str = "HIGHS",
    seconds: float = 20.0,
    start: Sequence[float] | None = None,
    relax: bool = False,
) -> Answer:
    """Solve within about ``seconds``. ``start`` is a solution to begin with: a value for every column.

    ``relax`` drops integrality and solves the linear program, by an interior point method where the solver has one.
    """
    data = json.dumps(
        {
            "costs": problem.costs, "integer": problem.integer, "rows": problem.rows,
            "start": None if start is None else list(start), "solver": solver, "seconds": seconds, "relax": relax,
        }
    )  # fmt: skip
    try:
        child = subprocess.run(
            [sys.executable, __file__],
            input=data, capture_output=True, text=True, timeout=seconds + _GRACE_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Answer(f"no answer within {seconds + _GRACE_S:g} s")
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines() or ["no message"]
        return Answer(f"the solver failed: {lines[-1]}")
    answer = json.loads(child.stdout.splitlines()[-1])
    values = answer["values"]
    return Answer(answer["status"], None if values is None else tuple(values), answer["bound"])


def main() -> None:
    """The child: read the problem as JSON, solve it, print the answer as JSON."""
    import mip

    began = time.monotonic()
    data = json.load(sys.stdin)
    model = mip.Model(solver_name=data["solver"])
    model.verbose = 0
    model.max_mip_gap = _GAP
    kinds = {True: mip.CONTINUOUS if data["relax"] else mip.INTEGER, False: mip.CONTINUOUS}
    columns = [
        model.add_var(lb=0.0, ub=1.0, obj=cost, var_type=kinds[integer])
        for cost, integer in zip(data["costs"], data["integer"], strict=True)
    ]
    for terms, equal, right in data["rows"]:
        merged: dict[int, float] = {}
        for x, c in terms:
            merged[x] = merged.get(x, 0.0) + c
        expression = mip.LinExpr([columns[x] for x in merged], list(merged.values()), -right, "=" if equal else "<")
        model.add_constr(expression)
    if data["start"] is not None:
        model.start = [(column, value) for column, value in zip(columns, data["start"], strict=True)]
    # An interior point method is fast, but may end with a solution of which it cannot say that it is optimal.
    interior = [mip.LP_Method.BARRIERNOCROSS] if data["relax"] and data["solver"] == "HIGHS" else []
    for method in (*interior, mip.LP_Method.AUTO):
        model.lp_method = method
        status = model.optimize(max_seconds=max(1.0, data["seconds"] - (time.monotonic() - began)))
        if status.name == "OPTIMAL" or time.monotonic() - began > data["seconds"]:
            break
    found = model.num_solutions > 0
    bound = model.objective_bound if status.name in ("OPTIMAL", "FEASIBLE", "NO_SOLUTION_FOUND") else None
    if data["relax"]:  # a linear program has no bound but its optimum, which is as exact as an interior point method is
        bound = model.objective_value * (1 - 1e-6) if status.name == "OPTIMAL" else None
    if bound is not None and not abs(bound) < 1e20:
        bound = None
    values = [column.x for column in columns] if found else None
    print(json.dumps({"status": status.name.lower().replace("_", " "), "values": values, "bound": bound}))


if __name__ == "__main__":
    main()
