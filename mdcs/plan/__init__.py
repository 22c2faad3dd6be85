"""The plan of one period: a strategy per unit, and messages.

- ``validity``: rules that a plan keeps.
- ``ledger``: bytes of slots and messages.
- ``cost``: seconds of messages and updates.
- ``times``: names for the parts of a step's time.

Imports `mdcs.profile` only. Everything else of mdcs may import it.
"""
