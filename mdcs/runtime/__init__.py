"""The runtime executes a plan on real ranks. It imports plans, never planners.

``api`` is the public seam; ``walker`` goes through the slots, ``dispatcher`` puts the messages on the ``wire``, a
``communicator`` carries them in process ``groups``, ``storage`` holds parameters and gradients, ``updates`` runs the optimizer
on shards, ``account`` is the byte account behind admission. CPU and CUDA differ in ``executor``, and in that a
``stream_dispatcher`` only enqueues. Between iterations ``gathering`` makes units whole, for ``evaluation`` and for ``state``
dicts; ``checkpointing`` writes and reads them in parts. ``refusals`` and ``misuse`` are what is not let happen, before step 1
and after.
"""
