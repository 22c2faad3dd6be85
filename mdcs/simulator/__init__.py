"""The replay of a plan in virtual time: step time, overlap, and memory by category and slot.

Imports plans and timelines, never planners; it is what planners are judged by.
"""
