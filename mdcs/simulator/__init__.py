"""The replay of a plan in virtual time: step time, overlap, and memory by category and slot.

Imports plans and timelines, never planners. Planners are judged by replays.
"""
