"""Planners that use a solver: the strategy ILP, the memory-aware schedule, and both in one program (`joint`).

They start from the heuristics, which do not import this package.
"""
