"""What asks a solver: the strategy ILP, the memory-aware schedule, and both in one program (`joint`).

Imports the heuristics (`mdcs.planner.strategies`, `mdcs.planner.schedulers`), which it starts from; they do not import it.
"""
