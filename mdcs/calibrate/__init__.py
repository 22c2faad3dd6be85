"""Profiles measured on real ranks: `slots`, updates (`update_timing`) and link (`link_timing`), then `interference` and the
`rehearsal` of a few plans. `agreement` makes one of all ranks' profiles; `autoplan` is the short way. `regression` and
`clock` are what they are made with.

The top of mdcs: imports planners and the runtime, and nothing in mdcs imports it.
"""
