"""The runtime executes a plan on real ranks. It imports plans, never planners.

``api`` is the public seam; ``walker`` goes through the slots, ``dispatcher`` puts the messages on the ``wire``, a
``communicator`` carries them in process ``groups``, ``storage`` holds parameters and gradients, ``updates`` runs the optimizer
on shards, ``executor`` is all that differs between CPU and CUDA, ``account`` is the byte account behind admission. Between
iterations ``gathering`` makes units whole, for ``evaluation`` and for ``state`` dicts; ``checkpointing`` writes and reads them in
parts. ``refusals`` and ``misuse`` are what is not let happen, before step 1 and after.
"""
