"""Instruments: tensor `memory` of one process, and `timeline`, what ran when.

Imports `mdcs.plan` for its categories of memory and its words for time; knows neither ranks nor planners.
"""
