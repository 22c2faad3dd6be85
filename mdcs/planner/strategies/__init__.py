"""Strategy planners without a solver: from a judge to a strategy per unit.

Imports `mdcs.planner.judge` and the layers below it, and no schedulers.
"""
