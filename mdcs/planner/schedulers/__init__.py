"""Communication schedulers without a solver: from a strategy mix to an ordered list of messages.

A scheduler proposes a plan. :func:`mdcs.planner.budget_repair.repair` then delays or splits messages that do not fit
the budget. Imports `mdcs.plan.strategy_assignment` and the simulator, and no strategy planners.
"""
