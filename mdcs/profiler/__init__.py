"""Profiles measured on real ranks.

- ``model_profile``, ``slot_recorder``, ``alias_tracker``, ``update_timing``: slots, uses of parameters' memory, and
  updates of the model.
- ``link_timing``: the link.
- ``interference``: a GPU's compute beside messages.
- ``calibration``, ``cost_fit``: plans that tell the costs of messages apart, and the costs fitted to what ran when.
- ``consensus``, ``progress``: one profile and one error of all ranks, and what they do.
- ``autoprofile``: all of this in one call, within a time budget.
- ``autotune``: the fastest of some plans, by running them.
- ``first_passes``, ``running_steps``: the steps of a loop that trains.
- ``model_snapshot``, ``memory_bounds``, ``regression``, ``timing``: the model as it was, bytes known before, fits and
  timing.

Imports planners and the runtime; only :mod:`mdcs.api` imports it.
"""
