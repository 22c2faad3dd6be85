"""The runtime executes a plan on real ranks. It imports plans, never planners.

- ``api``: the public interface. ``engine``: its parts, and what they do between passes.
- ``walker``: follows the slots with the training thread.
- ``queue``: the order of messages and their bytes, without torch or threads.
- ``thread_transport``, ``stream_transport``, ``message_runner``: send messages, with threads on CPU, on streams on CUDA.
- ``wire``, ``communicator``, ``groups``: pack a message, run its collective, own the process groups.
- ``storage``, ``updates``: flat buffers of a unit, the optimizer on shards.
- ``account``: live and peak bytes.
- ``executor``: all device code (CPU, CUDA).
- ``gathering``, ``evaluation``, ``state``: whole units between iterations, for evaluation and state dicts.
- ``checkpointing``: writes and reads a run's shards.
- ``validation``: checks before step 1, and during the loop.
"""
