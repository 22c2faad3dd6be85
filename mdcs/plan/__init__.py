"""The plan of one period: a strategy per unit, and messages.

- ``period``: slots, windows, and when gradients become ready. ``schedule``: what waits for what, as arrays that ledger,
  queue, replay and search read.
- ``lifetimes``: the buffers of units and messages, and when each is allocated and freed.
- ``ledger``: bytes of slots and messages, and bytes that must be free. ``lifetimes`` has admission, too.
- ``cost``: seconds of messages and updates, and names for the parts of a step's time.

Imports `mdcs.profile` only. Everything else of mdcs may import it.
"""
