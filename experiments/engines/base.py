"""The interface between training loop and engine, and the base class of peers of mdcs.

No engine imports torch or its package before `prepare`, so the process that starts ranks does not wait for them.

Times of a peer are measured from outside. Its compute is forward and backward without the time in which either waits
for messages. Where the engine does not show its waits or its messages, the times are None.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from experiments.config.schema import Config
from mdcs.plan.cost import StepTimes
from mdcs.plan.plan import Plan
from mdcs.profile.link import Collectives, Kind
from mdcs.telemetry.memory_meter import TOTAL, current_meter, unmeasured
from mdcs.telemetry.timeline import Span, intersection, length, union

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from mdcs.api.loop_plan import Choice
    from mdcs.emulation import Emulation
    from mdcs.model.units import ModelUnit
    from mdcs.runtime.checkpointing import ResumeInfo, SaveHandle

    Batch = dict[str, Tensor]


class Trained(Protocol):
    """The workload that an engine trains.

    - units, optimizer: made at the first access. A peer that replaces parameters must not access them before.
    - optimizer_of: a new optimizer with the config's options.
    - loss: of the model, or of `model`, which wraps it.
    - blocks: the modules that the wrap policy names, in the model's order. Where they nest, inner modules come first.
    """

    rank: int  # of the plan, as the world: in emulation they differ from the real processes
    world: int
    processes: int
    writes: bool  # whether this process writes the run's files; one process does
    emulate: Emulation | None
    device: torch.device
    model: nn.Module
    plan: Plan | None  # once it is chosen; a peer has none
    choice: Choice | None  # the steps of training that choose it

    @property
    def units(self) -> list[ModelUnit]: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer: ...
    def loss(self, batch: Batch, model: nn.Module | None = None) -> Tensor: ...
    def blocks(self) -> list[nn.Module]: ...


@dataclass(frozen=True)
class Record:
    """Measurements of one step. Bytes on the wire and messages are by kind; None where they are not known."""

    step: int
    times: StepTimes
    bytes: Mapping[str, int] | None = None
    messages: Mapping[str, int] | None = None
    plan: str = ""  # words for the plan under which a step was measured to choose another; empty for other steps
    handover_s: float = 0.0  # of the change to the step's plan, before the step
    departures: Mapping[str, int] = field(default_factory=dict)  # from its plan, in words, and how often
    departed_s: float = 0.0  # what they took on this rank
    grad_norm: float | None = None  # where it is clipped


class Engine(Protocol):
    """A model in training. Every rank drives its own engine with the same calls. Leaving the `with` block ends it.

    A step calls `loss` and `backward` inside `micro_step` for every micro-step, and then `step`.

    - backward: the loss is already divided by the number of micro-steps.
    - drain: finish all messages in flight.
    - pause: context of work between two steps that is not training: its seconds belong to no step.
    - evaluate: context for forward passes of the job's model without gradients.
    - checkpoint: write a checkpoint. Configs that request checkpoints from a peer are refused before.
    - resume: load the newest checkpoint; None where there is none. The steps of `records` continue its count.
    - records: steps that have ended and were not returned before. The last step is included only with `flush`.
    - allocator_retries: allocations that had to free cached memory first; None where they are not counted.
    - peak_bytes: the allocator's highest total since the start or `reset_memory`; None where it is not measured.
    - summary: values of this engine alone for the summary. `sent` has the bytes of a whole step.
    - write: write files of this engine alone. Called by all ranks.
    """

    optimizer: torch.optim.Optimizer

    def __enter__(self) -> Engine: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None: ...
    def micro_step(self, last: bool) -> AbstractContextManager[Any]: ...
    def loss(self, batch: Batch) -> Tensor: ...
    def backward(self, loss: Tensor) -> None: ...
    def step(self) -> None: ...
    def drain(self) -> None: ...
    def pause(self) -> AbstractContextManager[None]: ...
    def evaluate(self) -> AbstractContextManager[Any]: ...
    def checkpoint(self, root: Path, extra: Any, *, keep: int, wait: bool) -> SaveHandle: ...
    def resume(self, path: Path) -> ResumeInfo | None: ...
    def records(self, *, flush: bool = False) -> list[Record]: ...
    def reset_memory(self) -> None: ...
    def allocator_retries(self) -> int | None: ...
    def peak_bytes(self) -> int | None: ...
    def summary(self, sent: Mapping[str, int] | None) -> dict[str, Any]: ...
    def write(self, folder: Path) -> None: ...


@dataclass
class Seen:
    """Observations of a step under way: time stamps of its phases and pauses, and messages on the host's clock (s)."""

    phases: list[tuple[Any, Any]] = field(default_factory=list)
    pauses: list[tuple[Any, Any]] = field(default_factory=list)
    messages: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    count: Counter[str] = field(default_factory=Counter)
    grad_norm: Any = None  # a number, or a tensor that is copied to the host when the step has ended


class Peer:
    """An engine around `self.model`, which wraps or is the job's model. Subclasses override what differs. shows_waits:
    `Seen.waits` has all waits of forward and backward. shows_messages: `Seen.messages` has every message."""

    shows_waits = shows_messages = False

    def __init__(self, config: Config, workload: Trained, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from mdcs.runtime.executor import executor_for
        self.workload, self.model, self.optimizer = workload, model, optimizer
        self.collectives = Collectives.default(config.cluster.resolved_backend())
        self._clip = config.optimizer.clip_norm
        self._executor, self._meter = executor_for(workload.device), current_meter(workload.device)
        if why := unmeasured(workload.device):
            warnings.warn(f"memory is not measured: {why}", stacklevel=2)
        self.seen, self._steps = Seen(), 0
        self._unread: list[tuple[int, Any, Any, Seen]] = []
        self.reset_memory()
        self._begin = self._executor.record_timestamp()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close()

    def close(self) -> None: ...

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        begin = self._executor.record_timestamp()
        with self.synchronizing(last):
            yield
        self.seen.phases.append((begin, self._executor.record_timestamp()))

    def synchronizing(self, last: bool) -> AbstractContextManager[Any]:
        """Context of a micro-step. Gradients are reduced in the last micro-step of a step."""
        return nullcontext()

    def loss(self, batch: Batch) -> Tensor:
        return self.workload.loss(batch, self.model)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.reduce()
        if self._clip is not None:
            self.seen.grad_norm = self.clip(self._clip).to("cpu", non_blocking=True)
        self.update()
        self._steps += 1
        end = self._executor.record_timestamp()
        self._unread.append((self._steps, self._begin, end, self.seen))
        self._begin, self.seen = end, Seen()

    def sent(self, kind: Kind, size: int, begin: float, end: float, *, waited: bool) -> None:
        """Record a message of ``size`` bytes in all, and whether it was waited for."""
        span, sent = (begin, end), self.collectives.sent(kind, size, self.workload.world)
        self.seen.messages.append(span)
        self.seen.sent[str(kind)] += sent
        self.seen.count[str(kind)] += 1
        if waited:
            self.seen.waits.append(span)

    def reduce(self) -> None:
        """Reduce the gradients that backward has not reduced."""

    def clip(self, norm: float) -> Tensor:
        import torch
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drain(self) -> None:
        """Broadcast rank 0's buffers (BatchNorm's statistics). A peer has no messages in flight between steps."""
        import torch.distributed as dist
        if self.workload.world > 1:
            with self.pause():
                for buffer in self.workload.model.buffers():
                    dist.broadcast(buffer, 0)

    @contextmanager
    def pause(self) -> Iterator[None]:
        begin = self._executor.record_timestamp()
        try:
            yield
        finally:
            self.seen.pauses.append((begin, self._executor.record_timestamp()))

    @contextmanager
    def evaluate(self) -> Iterator[None]:
        self.drain()
        training, self.seen = self.seen, Seen()  # messages of an evaluation belong to no step
        try:
            yield
        finally:
            self.seen = training

    def checkpoint(self, root: Path, extra: Any, *, keep: int, wait: bool) -> SaveHandle:
        raise NotImplementedError("experiments.config.checks refuses run.save_every with a peer")

    def resume(self, path: Path) -> ResumeInfo | None:
        raise NotImplementedError("experiments.config.checks refuses run.resume with a peer")

    def records(self, *, flush: bool = False) -> list[Record]:
        ready, self._unread = (self._unread, []) if flush else (self._unread[:-1], self._unread[-1:])
        return [self._record(*each) for each in ready]

    def _record(self, step: int, begin: Any, end: Any, seen: Seen) -> Record:
        seconds = self._executor.seconds
        whole: Span = (seconds(begin), seconds(end))
        phases = [(seconds(a), seconds(b)) for a, b in seen.phases]
        paused = length((seconds(a), seconds(b)) for a, b in seen.pauses)
        sent, count = (dict(of) if of or self.shows_messages else None for of in (seen.sent, seen.count))
        norm = None if seen.grad_norm is None else float(seen.grad_norm)
        times = self.times(whole, phases, seen)
        trained = StepTimes.of(times.step_s - paused, times.compute_s, times.communication_s, times.overlap_s)
        return Record(step, trained, sent, count, grad_norm=norm)

    def times(self, whole: Span, phases: Sequence[Span], seen: Seen) -> StepTimes:
        computed = length(phases) - length(intersection(phases, seen.waits)) if self.shows_waits else None
        communicated = overlapped = None
        if self.shows_messages:
            messages = intersection(seen.messages, [whole])
            communicated = length(messages)
            if computed is not None:
                hidden = intersection(messages, phases)
                overlapped = length(hidden) - length(intersection(hidden, union(seen.waits)))
        return StepTimes.of(whole[1] - whole[0], computed, communicated, overlapped)

    def reset_memory(self) -> None:
        self._meter.reset()

    def allocator_retries(self) -> int | None:
        return self._executor.retries()

    def peak_bytes(self) -> int | None:
        return (self._meter.peaks() or {}).get(TOTAL)

    def summary(self, sent: Mapping[str, int] | None) -> dict[str, Any]:
        peak = self.peak_bytes()
        return {"memory": {"measured": None if peak is None else {TOTAL: peak}}}

    def write(self, folder: Path) -> None:
        """Write nothing: a peer has only metrics."""
