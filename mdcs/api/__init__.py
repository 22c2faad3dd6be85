"""The short ways. The top of mdcs: imports planners, the profiler and the runtime; nothing in mdcs imports it.

- ``autoplan``: profiles and plans before the loop. ``start``: ``parallelize``, which returns a ``session``.
- ``loop_plan``: the plan that is made in the loop. ``model_state``: a session's weights and state.
"""
