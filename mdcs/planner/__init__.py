"""Planners: from a profile and a byte budget to a plan.

- ``strategies``, ``schedulers``: heuristics.
- ``ilp``: planners that use a solver.
- ``pipeline``: combines a strategy planner and a scheduler. ``trials``: the choice among a few plans.
- ``search``: moves, judged by replays. ``feasibility``, ``budget_repair``: what fits.

Planners are judged by replays. Imports `mdcs.simulator` and the layers below it. The runtime does not import planners.
"""
