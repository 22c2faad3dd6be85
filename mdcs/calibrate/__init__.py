"""Profiles measured on real ranks.

- ``slots``, ``slot_recorder``, ``uses``, ``update_timing``: slots, uses of parameters' memory, and updates of the model.
- ``link_timing``: the link.
- ``interference``: a GPU's compute beside messages.
- ``contention``: what compute and messages cost each other on a CPU, fitted to a few plans that run.
- ``agreement``, ``progress``: one profile and one error of all ranks, and what they do.
- ``autoprofile``, ``autoplan``: all of this in one call, within a time budget.
- ``trials``: the fastest of some plans, by running them.
- ``put_back``, ``room``, ``regression``, ``clock``: the model as it was, bytes known before, fits and timing.

The top of mdcs: imports planners and the runtime; nothing in mdcs imports it.
"""
