"""Profiles measured on real ranks: `slots`, updates (`update_timing`) and link (`link_timing`), then `interference` and the
`rehearsal` of a few plans. `agreement` makes one of those of all ranks, `regression` lines of points; `autoplan` is the short way.

The top of mdcs: imports planners and the runtime, and nothing in mdcs imports it.
"""
