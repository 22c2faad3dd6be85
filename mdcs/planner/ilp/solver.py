"""Mixed-integer problems, solved by HiGHS through python-mip in a child process with a hard deadline.

Solvers exceed their time limits and may crash: the child is killed at the deadline, and :class:`Answer` always has the
status. The bound of the relaxation comes first: it is there if the solver of the integer program is killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mdcs.options import Checked, option

_CHILD = Path(__file__).with_name("solver_child.py")
_OWN = 0.9  # fraction of the time that the solver gets: it exceeds its limit, and reading and answering take time

Terms = list[tuple[int, float]]
"""A linear expression: (column, coefficient) pairs. A column may appear more than once."""


@dataclass
class IntegerProgram:
    """Minimize Σ cost·x subject to rows ``Σ coefficient·x <= or == right side``. Every x is in [0, 1]; some are
    integer.
    """

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


@dataclass(frozen=True)
class Solving(Checked):
    """Options of planners that use a solver."""

    seconds: float = option(20.0, "limit of the solver, seconds", above=0)


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
            [sys.executable, str(_CHILD)],
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
