"""The plan of one period: a strategy per unit, and messages.

- ``validity``: rules that a plan keeps.
- ``lifetimes``: the buffers of units and messages, and when each is allocated and freed.
- ``ledger``: bytes of slots and messages. ``worst_case``: bytes that must be free. ``admission``: bytes that may be
  taken.
- ``schedule``: what waits for what, as arrays that ledger, worst case, queue, replay and search read.
- ``cost``: seconds of messages and updates.
- ``times``: names for the parts of a step's time.

Imports `mdcs.profile` only. Everything else of mdcs may import it.
"""
