"""Communication schedulers that ask no solver: a strategy mix in, an ordered list of messages out.

A scheduler proposes; :func:`mdcs.planner.fit.fit` then delays or splits what does not fit the bytes that the schedule may use.
Imports `mdcs.plan.mix` and the simulator; knows no strategy planners.
"""
