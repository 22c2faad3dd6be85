"""Planners: from a profile and a byte budget to a plan.

- ``strategies``, ``schedulers``: heuristics.
- ``ilp``: planners that use a solver.
- ``pipeline``: what planners are, and plans made by them. ``trials``: a few plans, and the choice among them.
- ``search``: moves, judged by replays. ``feasibility``, ``budget_repair``: what fits.

Planners are judged by replays. Imports `mdcs.simulator` and the layers below it. The runtime does not import planners.
"""
