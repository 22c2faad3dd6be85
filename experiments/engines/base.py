"""The interface between training loop and engine, and the base class of peers of mdcs.

An engine is a file here: its options (:class:`experiments.config.schema.EngineOptions`), a dataclass named by its YAML,
and the object that the options prepare.
No file imports torch or the engine's package before `prepare`, so the process that starts ranks does not wait for them.

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

    - rank, world: of the plan. In emulation they differ from the real processes.
    - processes: number of real processes.
    - writes: whether this process writes the run's files; one process does.
    - plan, choice: the plan once it is chosen, and the steps of training that choose it. A peer has neither.
    - units, optimizer: made at the first access. A peer that replaces parameters must not access them before.
    """

    rank: int
    world: int
    processes: int
    writes: bool
    emulate: Emulation | None
    device: torch.device
    model: nn.Module
    plan: Plan | None
    choice: Choice | None

    @property
    def units(self) -> list[ModelUnit]: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """A new optimizer with the config's options."""

    def loss(self, batch: Batch, model: nn.Module | None = None) -> Tensor:
        """Loss of the model, or of `model`, which wraps it."""

    def blocks(self) -> list[nn.Module]:
        """The modules that the wrap policy names, in the model's order. Where they nest, inner modules come first."""


@dataclass(frozen=True)
class Record:
    """Measurements of one step. Bytes on the wire and messages are by kind; None where they are not known.

    - plan: words for the plan under which a step was measured to choose another; empty for other steps.
    - handover_s (s): of the change to the step's plan, before the step.
    - departures: what the step did otherwise than its plan, in words, and how often.
    - departed_s (s): what that took on this rank.
    - grad_norm: norm of the gradient, where it is clipped.
    """

    step: int
    times: StepTimes
    bytes: Mapping[str, int] | None = None
    messages: Mapping[str, int] | None = None
    plan: str = ""
    handover_s: float = 0.0
    departures: Mapping[str, int] = field(default_factory=dict)
    departed_s: float = 0.0
    grad_norm: float | None = None


class Engine(Protocol):
    """A model in training. Every rank drives its own engine with the same calls. Leaving the `with` block ends it.

    A step calls `loss` and `backward` inside `micro_step` for every micro-step, and then `step`.
    """

    optimizer: torch.optim.Optimizer

    def __enter__(self) -> Engine: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None: ...

    def micro_step(self, last: bool) -> AbstractContextManager[Any]: ...

    def loss(self, batch: Batch) -> Tensor: ...

    def backward(self, loss: Tensor) -> None:
        """Run backward. `loss` is already divided by the number of micro-steps."""

    def step(self) -> None: ...

    def drain(self) -> None:
        """Finish all messages in flight."""

    def pause(self) -> AbstractContextManager[None]:
        """Context of work between two steps that is not training: its seconds belong to no step."""

    def evaluate(self) -> AbstractContextManager[Any]:
        """Context for forward passes of the job's model without gradients."""

    def checkpoint(self, root: Path, extra: Any, *, keep: int, wait: bool) -> SaveHandle:
        """Write a checkpoint. Configs that request checkpoints from a peer are refused before."""

    def resume(self, path: Path) -> ResumeInfo | None:
        """Load the newest checkpoint; None where there is none. The steps of `records` continue its count."""

    def records(self, *, flush: bool = False) -> list[Record]:
        """Steps that have ended and were not returned before. The last step is included only with `flush`."""

    def reset_memory(self) -> None: ...

    def allocator_retries(self) -> int | None:
        """Number of allocations that had to free cached memory first; None where it is not counted."""

    def peak_bytes(self) -> int | None:
        """The allocator's highest total in bytes since the start or `reset_memory`; None where it is not measured."""

    def summary(self, sent: Mapping[str, int] | None) -> dict[str, Any]:
        """Values of this engine alone for the summary. `sent` has the bytes of a whole step."""

    def write(self, folder: Path) -> None:
        """Write files of this engine alone. Called by all ranks."""


@dataclass
class Seen:
    """Observations of a step under way: time stamps of its phases and pauses, and messages on the host's clock (s)."""

    phases: list[tuple[Any, Any]] = field(default_factory=list)
    pauses: list[tuple[Any, Any]] = field(default_factory=list)
    messages: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    count: Counter[str] = field(default_factory=Counter)
    grad_norm: Any = None
    """A number, or a tensor that is copied to the host when the step has ended."""

    def message(self, kind: Kind, size: int, span: Span) -> None:
        self.messages.append(span)
        self.sent[str(kind)] += size
        self.count[str(kind)] += 1


class Peer:
    """An engine around `self.model`, which wraps or is the job's model. Subclasses override what differs.

    shows_waits: `Seen.waits` has all waits of forward and backward. shows_messages: `Seen.messages` has every message.
    """

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

    def close(self) -> None:
        """Release resources that would outlive the workload."""

    # ---- a step

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

    def reduce(self) -> None:
        """Reduce the gradients that backward has not reduced."""

    def clip(self, norm: float) -> Tensor:
        import torch

        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    # ---- between steps

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

    # ---- what was measured

    def records(self, *, flush: bool = False) -> list[Record]:
        ready, self._unread = (self._unread, []) if flush else (self._unread[:-1], self._unread[-1:])
        return [self._record(*each) for each in ready]

    def _record(self, step: int, begin: Any, end: Any, seen: Seen) -> Record:
        seconds = self._executor.seconds
        whole: Span = (seconds(begin), seconds(end))
        phases = [(seconds(a), seconds(b)) for a, b in seen.phases]
        paused = length((seconds(a), seconds(b)) for a, b in seen.pauses)
        sent = dict(seen.sent) if seen.sent or self.shows_messages else None
        count = dict(seen.count) if seen.count or self.shows_messages else None
        norm = None if seen.grad_norm is None else float(seen.grad_norm)
        times = self.times(whole, phases, seen)
        trained = StepTimes.of(times.step_s - paused, times.compute_s, times.communication_s, times.overlap_s)
        return Record(step, trained, sent, count, grad_norm=norm)

    def times(self, whole: Span, phases: Sequence[Span], seen: Seen) -> StepTimes:
        """Times of a step, from its observations."""
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
