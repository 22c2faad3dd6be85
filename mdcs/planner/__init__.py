"""From a profile and a byte budget to a plan: `strategies`, `schedulers`, and what asks a solver (`ilp`), judged by replays.

`make` puts them together; `bounds`, `curve` and `explain` ask about the result. Imports `mdcs.simulator` and what is below it;
the runtime does not import planners.
"""
