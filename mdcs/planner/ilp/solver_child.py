"""The process that solves one problem (:mod:`mdcs.planner.ilp.solver`): JSON in, JSON out.

A script; nothing imports it.
"""

import json
import sys
import time

import mip

_GAP = 1e-6  # relative gap between solution and bound that counts as optimal


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
        model.add_constr(
            mip.LinExpr([columns[x] for x in merged], list(merged.values()), -right, "=" if equal else "<")
        )
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
    """Return (status, values, bound) of the linear relaxation. Its bound is its optimum, less the method's tolerance.
    """
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
