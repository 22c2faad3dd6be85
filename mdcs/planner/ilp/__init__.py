"""Planners that use a solver: the strategy ILP, the memory-aware schedule, and both in one program (`joint`).

They start from the heuristics (`mdcs.planner.strategies`, `mdcs.planner.schedulers`) and import them. The heuristics do
not import this package.
"""
