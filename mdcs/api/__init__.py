"""The short ways. The top of mdcs: imports planners, the profiler and the runtime; nothing in mdcs imports it.

- ``start``: ``parallelize``, which returns a ``session``; ``model_state``: a session's weights and state.
- ``loop_plan``: plans from a profile, and the plan that is made in the loop.
- ``offline``: profiles and plans before the loop.
"""
