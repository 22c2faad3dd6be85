"""Strategy planners without a solver: from a planning problem to a strategy per unit.

Imports `mdcs.planner.feasibility` and the layers below it, and no schedulers.
"""
