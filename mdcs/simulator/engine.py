"""The replay of one plan: input and output of the loops in :mod:`mdcs.simulator.kernel`."""

from __future__ import annotations

from collections.abc import Sequence

from mdcs.plan.job import Job
from mdcs.plan.ledger import AssignmentBytes, Ledger
from mdcs.plan.plan import Plan
from mdcs.plan.schedule import Folded
from mdcs.plan.validity import PlanError
from mdcs.profile.contention import Contention
from mdcs.simulator import kernel
from mdcs.simulator.kernel import PeriodArrays, ReplayArrays
from mdcs.simulator.machine_code import for_loops
from mdcs.telemetry.timeline import Span

_NOTHING = Contention()


class Trace:
    """Times of all messages and slots, in seconds since the prologue began.

    Messages are counted in FIFO order and slots in executed order, both from the prologue. The last ``slots`` slots and
    the last ``messages`` messages are the last period.

    - ``issued``: number of messages issued by each slot of a period.
    - ``spans``: (start, end) of each message on the link.
    - ``landed``: when each message is summed or unpacked. ``processed``: when it and all before are updated.
    - ``arrivals``: when compute arrives at each slot. The last entry is the end of the replay.
    - ``begins``: when compute begins to run each slot.
    - ``settled``: whether the last period repeats the one before.
    """

    def __init__(self, messages: int, issued: Sequence[int], track: ReplayArrays, settled: bool) -> None:
        self.issued, self.settled = issued, settled
        self.slots, self.messages = len(issued), messages
        sent, arrivals = track.count[kernel.SENT], track.count[kernel.ARRIVALS]
        written = ReplayArrays(*(column if isinstance(column, list) else column.tolist() for column in track))
        self.spans: list[Span] = list(zip(written.start[:sent], written.finish[:sent], strict=True))
        self.landed: list[float] = written.landed[:sent]
        self.processed: list[float] = written.done[:sent]
        self.arrivals: list[float] = written.arrival[:arrivals]
        self.begins: list[float] = written.begin[: arrivals - 1]

    @property
    def began(self) -> float:
        """Start of the last period."""
        return self.arrivals[-self.slots - 1]

    @property
    def ended(self) -> float:
        """End of the last period."""
        return self.arrivals[-1]

    def compute(self) -> list[Span]:
        """Return (start, end) of each slot of the last period, relative to its start."""
        began, last = self.began, self.slots
        return [(a - began, b - began) for a, b in zip(self.begins[-last:], self.arrivals[-last:], strict=True)]

    def seen(self, spans: list[Span]) -> dict[int, Span]:
        """Return the spans of messages in the last period, by message index.

        Spans are relative to the start of the period and cut off at its ends.
        """
        began, ended = self.began, self.ended
        oldest = max(0, len(spans) - 2 * self.messages)  # messages of the period before may still be in flight
        return {
            g: ((start if start > began else began) - began, (end if end < ended else ended) - began)
            for g, (start, end) in enumerate(spans[oldest:], oldest)
            if end > began and start < ended
        }


def run(plan: Plan, ledger: Ledger | None) -> Trace:
    """Replay a plan until its period repeats. Admit messages by the ledger if there is one, and a budget.

    Raises PlanError for a deadlock.
    """
    slots, n = for_loops(period_arrays(plan.job, plan.admissible, ledger)), len(plan.messages)
    sizes = Folded([0] * n, [0] * n, [0] * n) if ledger is None else ledger.folded
    track = for_loops(empty_replay(n, plan.period.length))
    how = kernel.run(slots, for_loops(plan.schedule), for_loops(plan.seconds), for_loops(sizes), track)
    if how == kernel.DEADLOCK:
        q, need = track.count[kernel.STUCK], track.count[kernel.NEEDED]
        raise PlanError(f"deadlock at slot {q} ({plan.period.name(q)}): needs {need} of {slots.cap} bytes")
    return Trace(n, plan.schedule.issued, track, how == kernel.SETTLED)


def period_arrays(job: Job, admissible: int | None, held: AssignmentBytes | None) -> PeriodArrays:
    """Return the slots of a job's period. ``held``: bytes of the mix; None: bytes are not counted."""
    contention, execution, none = job.profile.contention, job.profile.execution, [0] * job.period.length
    slots = [] if held is None else held.slots
    # One type per field: processes that compile loops for other types at a time may mix up numba's cached code.
    return PeriodArrays(
        seconds=job.period.seconds,
        live=[s.live for s in slots] or none,
        peak=[s.peak for s in slots] or none,
        allocated=[s.allocated for s in slots] or none,
        freed=[s.freed for s in slots] or none,
        turn=job.period.turn,
        depth=execution.in_flight(job.profile.link.depth),
        apart=execution.has_own_updates,
        host_message_s=float(execution.host_seconds_per_message),
        host_slot_s=float(execution.host_seconds_per_slot),
        slowdown=1.0 + job.profile.interference,
        contended=contention != _NOTHING,
        dispatch_s=float(contention.dispatch_seconds),
        turn_s=float(contention.turn_seconds),
        skew_s=float(contention.skew_seconds),
        rest=0 if held is None else held.rest_bytes,
        cap=-1 if admissible is None or held is None else admissible,
    )


def empty_replay(messages: int, slots: int) -> ReplayArrays:
    """Return an empty track for a plan with this many messages and slots."""
    n, length = kernel.MAX_PERIODS * messages, kernel.MAX_PERIODS * slots
    return ReplayArrays(
        [0.0] * n, [0.0] * n, [0.0] * n, [0.0] * n, [0.0] * (length + 1), [0.0] * length, [0.0] * (6 * messages),
        [0] * (kernel.NEEDED + 1),
    )  # fmt: skip
