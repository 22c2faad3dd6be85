"""Strategy planners that ask no solver: a judge in, a strategy per unit out.

Imports `mdcs.planner.judge` and what is below it; knows no schedulers.
"""
