"""The runtime executes a plan on real ranks. It imports plans, never planners.

``api`` is the public seam; ``scheduler`` walks the slots, ``dispatcher`` puts the messages on the ``wire``,
``collectives`` carry them, ``storage`` holds parameters and gradients, ``updates`` runs the optimizer on shards,
``executor`` is all that differs between CPU and CUDA, ``account`` is the byte account behind admission, ``state``
turns shards into state dicts.
"""
