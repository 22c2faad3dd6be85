"""Profiles measured on real ranks.

- ``slots``, ``uses``, ``update_timing``: slots, uses of parameters' memory, and updates of the model.
- ``link_timing``: the link.
- ``interference``, then ``rehearsal`` of a few plans: the contention of compute and messages.
- ``agreement``: one profile of all ranks.
- ``autoplan``: all of this in one call.
- ``trials``: the fastest of some plans, by running them.
- ``regression``, ``clock``: fits and timing.

The top of mdcs: imports planners and the runtime; nothing in mdcs imports it.
"""
