"""The plan of one period: a strategy per unit, and messages.

- ``period``: slots, windows, and when gradients become ready. ``schedule``: what waits for what, as arrays.
- ``lifetimes``: when buffers of units and messages are allocated and freed, and admission.
- ``ledger``: bytes of slots and messages, and bytes that must be free.
- ``cost``: seconds of messages and updates, and names for the parts of a step's time.

Imports `mdcs.profile` only. Everything else of mdcs may import it.
"""
