"""Instruments: `memory_meter` meters the tensor bytes of one process, `timeline` holds intervals of work on one clock.

Imports `mdcs.plan` for memory categories and step times; knows neither ranks nor planners.
"""
