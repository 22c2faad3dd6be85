"""Measurements of a run while it trains.

- ``measurement``: the stages of a few steps under one plan each, up to a profile.
- ``first_passes``, ``running_steps``, ``slot_recorder``, ``alias_tracker``, ``unit_tensors``: what listens to them.
- ``recompute_profile``, ``calibration``, ``cost_fit``, ``regression``, ``update_timing``, ``model_profile``: what
  recomputation, messages and updates cost; the profile.
- ``autotune``: plans that take turns.
- ``consensus``, ``progress``: one profile and one error of all ranks, and what they do.
- ``job_identity``, ``memory_bounds``, ``batch_mix``, ``model_snapshot``, ``timing``: the key of a kept profile, bytes
  known before, several example batches, the model as it was before an offline profile, clocks.

Imports planners and the runtime; only :mod:`mdcs.api` imports it.
"""
