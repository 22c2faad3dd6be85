"""The runtime executes a plan on real ranks. It imports plans, never planners.

- ``engine``: the parts of a run, and what they do between passes.
- ``context``: what every part of a run has; bytes that are held, and what ran when.
- ``storage``, ``sharded_optimizer``: the flat buffers of a unit; the optimizer on shards.
- ``wire``: the queue of messages. ``thread_transport``, ``stream_transport``: send them, with threads on CPU, on
  streams on CUDA. ``messages``: pack one, send it, update by it. ``gradient_scaling``: the factor on gradients.
- ``communicator``: runs a message's collective, owns the process groups.
- ``slot_sequencer``, ``slots``: follow the slots with the training thread; activations beyond the profiled ones.
- ``departures``: units used otherwise than planned, and passes of the loop for which the plan waits.
- ``executor``: all device code (CPU, CUDA).
- ``unshard``: whole units between iterations, for evaluation and state dicts. ``optimizer_state``: that of shards.
- ``checkpointing``: writes and reads a run's shards. ``initialization``: rank 0's values for all.
- ``validation``: checks before step 1. ``loop_access``: what a loop may do. ``errors``: failures, told to all ranks.
"""
