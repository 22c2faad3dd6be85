"""The runtime executes a plan on real ranks. It imports plans, never planners.

- ``engine``: the parts of a run, and what they do between passes.
- ``context``: what every part of a run has, and the byte account.
- ``storage``, ``sharded_optimizer``: the flat buffers of a unit; the optimizer on shards.
- ``wire``: the queue of messages. ``thread_transport``, ``stream_transport``: send them, with threads on CPU, on
  streams on CUDA. ``messages``: pack one, send it, update by it.
- ``communicator``, ``process_groups``: run a message's collective, own the process groups.
- ``slot_sequencer``, ``slots``: follow the slots with the training thread.
- ``departures``: units used otherwise than planned, and passes of the loop for which the plan waits.
- ``executor``: all device code (CPU, CUDA).
- ``unshard``, ``state_dict``: whole units between iterations, for evaluation and state dicts.
- ``checkpointing``: writes and reads a run's shards.
- ``validation``: checks before step 1, and during the loop.
"""
