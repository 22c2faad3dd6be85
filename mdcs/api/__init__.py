"""The short ways: `autoplan` profiles and plans in one call, `in_loop` runs what the loop's first step planned.

The top of mdcs: imports planners, the profiler and the runtime; nothing in mdcs imports it.
"""
