"""The short ways: `autoplan` profiles and plans, `start` has `parallelize`, `in_loop` runs what the first step planned.

The top of mdcs: imports planners, the profiler and the runtime; nothing in mdcs imports it.
"""
