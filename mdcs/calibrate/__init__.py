"""Profiles measured on real ranks: slots, link, interference, and rehearsals of a few plans; `autoplan` is the short way.

The top of mdcs: imports planners and the runtime, and nothing in mdcs imports it.
"""
