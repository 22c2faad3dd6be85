"""Measurements of a run while it trains.

- ``measurement``: the stages of a few steps under one plan each, up to a profile; bytes that are known before.
- ``stages``: what a stage is, and plans that take turns.
- ``first_passes``, ``running_steps``, ``slot_recorder``, ``step_tensors``: what listens to steps; the key of a kept
  profile, and what recomputation costs.
- ``model_profile``, ``cost_fit``, ``link_fit``: what updates, compute beside messages, and messages cost.
- ``consensus``, ``merging``: one profile and one error of all ranks, what they do, and several example batches.
- ``model_snapshot``: the model as it was before an offline profile.

Imports planners and the runtime; only :mod:`mdcs.api` imports it.
"""
