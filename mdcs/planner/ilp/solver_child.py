"""The process that solves one problem (:mod:`mdcs.planner.ilp.solver`): JSON in, JSON out.

A script; nothing imports it.
"""

import json
import sys
import time

import mip

_GAP = 1e-6  # relative gap between solution and bound that counts as optimal


def main() -> None:
    """Read a problem, solve it, print (status, values, bound)."""
    began = time.monotonic()
    data = json.load(sys.stdin)
    relax = data["relax"]
    model = mip.Model(solver_name="HIGHS")
    model.verbose = 0
    model.max_mip_gap = _GAP
    columns = [
        model.add_var(lb=0.0, ub=1.0, obj=cost, var_type=mip.INTEGER if integer and not relax else mip.CONTINUOUS)
        for cost, integer in zip(data["costs"], data["integer"], strict=True)
    ]
    for terms, equal, right in data["rows"]:
        merged: dict[int, float] = {}
        for x, c in terms:
            merged[x] = merged.get(x, 0.0) + c
        model.add_constr(mip.LinExpr([columns[x] for x in merged], list(merged.values()), -right, "=" if equal else "<"))
    if data["start"] is not None:
        model.start = list(zip(columns, data["start"], strict=True))
    # An interior point method is fast, but may end without a proof of optimality: then the default method follows.
    for method in [mip.LP_Method.BARRIERNOCROSS] * relax + [mip.LP_Method.AUTO]:
        model.lp_method = method
        status = model.optimize(max_seconds=max(1.0, data["seconds"] - (time.monotonic() - began)))
        if status.name == "OPTIMAL" or time.monotonic() - began > data["seconds"]:
            break
    bound = model.objective_bound if status.name in ("OPTIMAL", "FEASIBLE", "NO_SOLUTION_FOUND") else None
    if relax:  # the bound of a linear program is its optimum, less the tolerance of an interior point method
        bound = model.objective_value * (1 - 1e-6) if status.name == "OPTIMAL" else None
    if bound is not None and not abs(bound) < 1e20:
        bound = None
    values = [column.x for column in columns] if model.num_solutions > 0 else None
    print(json.dumps([status.name.lower().replace("_", " "), values, bound]))


if __name__ == "__main__":
    main()
