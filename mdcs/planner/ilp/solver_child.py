"""The process that solves one problem (:mod:`mdcs.planner.ilp.solver`): JSON in, JSON out.

A script; nothing imports it.
"""

import json
import sys
import time

import highspy
import numpy as np

_GAP = 1e-6  # relative gap between solution and bound that counts as optimal


def main() -> None:
    """Read a problem, solve it, print (status, values, bound), for an integer program after those of its relaxation."""
    data = json.load(sys.stdin)
    highs = highspy.Highs()
    highs.silent()
    highs.setOptionValue("mip_rel_gap", _GAP)
    highs.passModel(_program(data))
    status, values, relaxed = _relaxed(highs, data["until"])
    print(json.dumps([status, values if data["relax"] else None, relaxed]), flush=True)
    if data["relax"]:
        return
    whole = np.flatnonzero(data["integer"]).astype(np.int32)
    highs.clearSolver()
    highs.changeColsIntegrality(len(whole), whole, np.full(len(whole), highspy.HighsVarType.kInteger))
    if data["start"] is not None:
        start = highspy.HighsSolution()
        start.col_value = data["start"]
        highs.setSolution(start)
    highs.setOptionValue("solver", "choose")
    status, values = _run(highs, data["until"])
    bound = highs.getInfo().mip_dual_bound
    is_proven = status != "infeasible" and abs(bound) < 1e20
    print(json.dumps([status, values, bound if is_proven else relaxed]))


def _program(data: dict) -> highspy.HighsLp:
    """Return the linear program of the problem."""
    begin, columns, coefficients = [0], list[int](), list[float]()
    for terms, _, _ in data["rows"]:
        merged: dict[int, float] = {}
        for x, c in terms:
            merged[x] = merged.get(x, 0.0) + c
        columns += merged
        coefficients += merged.values()
        begin.append(len(columns))
    right = np.array([right for _, _, right in data["rows"]], float)
    program, n = highspy.HighsLp(), len(data["costs"])
    program.num_col_, program.num_row_ = n, len(right)
    program.col_cost_, program.col_lower_, program.col_upper_ = np.array(data["costs"]), np.zeros(n), np.ones(n)
    program.row_lower_ = np.where([equal for _, equal, _ in data["rows"]], right, -np.inf)
    program.row_upper_ = right
    matrix = program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_, matrix.index_, matrix.value_ = np.array(begin), np.array(columns), np.array(coefficients)
    return program


def _relaxed(highs: highspy.Highs, until: float) -> tuple[str, list[float] | None, float | None]:
    """Return (status, values, bound) of the linear relaxation. Its bound is its optimum, less the method's tolerance.
    """
    # An interior point method is fast, but may end without a proof of optimality: then the default method follows.
    highs.setOptionValue("run_crossover", "off")
    for method in ("ipm", "choose"):
        highs.setOptionValue("solver", method)
        status, values = _run(highs, until)
        if status in ("optimal", "infeasible") or time.time() > until:
            break
    return status, values, highs.getObjectiveValue() * (1 - 1e-6) if status == "optimal" else None


def _run(highs: highspy.Highs, until: float) -> tuple[str, list[float] | None]:
    """Solve the program until the time ``until``. Return (status, values)."""
    highs.setOptionValue("time_limit", highs.getRunTime() + max(1.0, until - time.time()))
    highs.run()
    status = highs.getModelStatus()
    known = highs.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = list(highs.getSolution().col_value) if known else None
    if status in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible):
        return highs.modelStatusToString(status).lower(), values
    return "no solution found" if values is None else "feasible", values


if __name__ == "__main__":
    main()
