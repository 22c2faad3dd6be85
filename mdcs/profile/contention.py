"""Costs of messages that share cores with compute."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Contention:
    """The cost of communication where compute, copies and the runtime share the same cores: of the CPU backend only.

    All values are 0 on a GPU. :func:`mdcs.profiler.cost_fit.fit_costs` fits them.

    - ``compute_per_message`` (s): compute time lost per message that completes while computing.
    - ``compute_per_byte`` (s/byte): compute time lost per byte that the message sends.
    - ``compute_per_work`` (fraction): compute time lost per second of copying, summing and updating that the message
      causes.
    - ``message_seconds`` (s), ``seconds_per_byte`` (s/byte): lower bound on link occupancy while computing. The link's
      gap and β are measured while nothing computes. The longer of the two counts, never their sum.
    - ``skew_seconds`` (s): wait of a message that finds the link idle, for the rank that comes last. A message that
      finds it idle for a shorter time waits as long as it was idle: the message before has brought the ranks together.
    - ``dispatch_seconds`` (s): delay between the end of a message and the start of the compute that waits for it.
    - ``turn_seconds`` (s): time of the training loop between backward and the next forward.

    Raises ValueError for a negative number.
    """

    compute_per_message: float = 0.0
    compute_per_byte: float = 0.0
    compute_per_work: float = 0.0
    message_seconds: float = 0.0
    seconds_per_byte: float = 0.0
    skew_seconds: float = 0.0
    dispatch_seconds: float = 0.0
    turn_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 0:
                raise ValueError(f"contention {name} must be >= 0, got {value}")
