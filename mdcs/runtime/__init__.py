"""The runtime executes a plan on real ranks. It imports plans, never planners.

- ``engine``: the parts of a run, and what they do between passes. ``loop_calls``: what the loop asks for there.
- ``slot_sequencer``, ``slot_position``: follow the slots with the training thread.
- ``departures``, ``side_passes``: units used otherwise than planned, and passes of the loop for which the plan waits.
- ``message_queue``: the order of messages and their bytes, without torch or threads.
- ``thread_transport``, ``stream_transport``, ``message_runner``: send messages, with threads on CPU, on streams on CUDA.
- ``collective_ops``, ``communicator``, ``process_groups``: pack a message, run its collective, own the process groups.
- ``storage``, ``sharded_optimizer``: flat buffers of a unit, the optimizer on shards.
- ``byte_account``: live and peak bytes.
- ``executor``: all device code (CPU, CUDA).
- ``unshard``, ``evaluation``, ``state_dict``: whole units between iterations, for evaluation and state dicts.
- ``checkpointing``: writes and reads a run's shards.
- ``validation``: checks before step 1, and during the loop.
"""
