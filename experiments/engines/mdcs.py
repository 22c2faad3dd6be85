"""mdcs itself: runs the job's plan, and the steps that choose it, through `mdcs.parallelize`."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mdcs
from experiments.config.schema import Config, EngineOptions
from experiments.engines.base import Engine, Record, Trained
from mdcs.telemetry.memory_meter import TOTAL
from mdcs.telemetry.timeline import RankTimeline, Timeline

if TYPE_CHECKING:
    from torch import Tensor

    from experiments.engines.base import Batch
    from mdcs.runtime.checkpointing import ResumeInfo, SaveHandle


@dataclass(frozen=True)
class Mdcs(EngineOptions):
    name = "mdcs"
    plans = True

    def prepare(self, config: Config, workload: Trained) -> Engine:
        return MdcsEngine(config, workload)


class MdcsEngine:
    """The job's model, under the plan that is chosen in its first steps, or before."""

    def __init__(self, config: Config, workload: Trained) -> None:
        assert workload.choice is not None
        self.workload, self.optimizer = workload, workload.optimizer
        self._done = 0  # steps before the first of this run
        self._measured: dict[int, str] = {}  # plans of the steps that were measured
        self._over_budget = 0  # steps
        self._parallel = mdcs.parallelize(
            workload.model, workload.optimizer, workload.choice, workload.units, clip_norm=config.optimizer.clip_norm,
            loss_scale=mdcs.LossScale() if config.run.precision == "fp16" else None,
            timeout_s=config.cluster.timeout_s, emulate=workload.emulate, over_budget=config.budget.exceeded,
        )  # fmt: skip
        self._parallel.records()  # from here on they have times
        self.drain, self.pause = self._parallel.drain, self._parallel.pause
        self.evaluate, self.reset_memory = self._parallel.evaluate, self._parallel.reset_memory

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
        if error is not None:
            self._parallel.__exit__(kind, error, *trace)  # tells the other ranks
            return
        self._parallel.drain()
        self._parallel.close(whole=False)  # the whole model is not needed, and might exceed the memory

    def micro_step(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def loss(self, batch: Batch) -> Tensor:
        return self.workload.loss(batch)

    def backward(self, loss: Tensor) -> None:
        self._parallel.scaled(loss).backward()

    def step(self) -> None:
        plan = self._parallel.plan
        if self._parallel.is_choosing:
            from mdcs.profiler.cost_fit import run_name

            self._measured[self._parallel.steps + 1] = run_name(plan)
        self._parallel.step()
        if self._parallel.plan is not plan:
            gc.collect()  # the parts of the run before hold each other, and buffers

    def checkpoint(self, root: Path, extra: Any, *, keep: int, wait: bool) -> SaveHandle:
        return self._parallel.checkpoint(root, extra=extra, keep=keep, wait=wait)

    def resume(self, path: Path) -> ResumeInfo | None:
        resumed = mdcs.resume(self._parallel, path)
        self._done = 0 if resumed is None else resumed.step
        return resumed

    def records(self, *, flush: bool = False) -> list[Record]:
        found = self._parallel.records(flush=flush)
        records = [
            Record(self._done + r.step, r.times, r.bytes, r.messages, self._measured.get(self._done + r.step, ""),
                   r.handover_s, r.departures, r.departed_s, r.grad_norm)
            for r in found
        ]  # fmt: skip
        self._over_budget += sum(r.over_budget > 0 and not its.plan for r, its in zip(found, records, strict=True))
        return records

    def allocator_retries(self) -> int | None:
        return self._parallel.memory()["retries"]

    def peak_bytes(self) -> int | None:
        measured = self._parallel.memory()["measured"]
        return measured[TOTAL] if measured else None

    def summary(self, sent: Mapping[str, int] | None) -> dict[str, Any]:
        memory, plan = self._parallel.memory(), self._parallel.plan
        assert plan.prediction is not None
        return {
            "extra_communication_s": plan.job.cost.extra_communication_s(dict(sent or {})),
            **({} if memory["retries"] is None else {"allocator_retries": memory["retries"]}),
            **({"steps_over_budget": self._over_budget} if plan.budget is not None else {}),
            "memory": {"predicted": plan.prediction.memory, "ledger": memory["predicted"],
                       "measured": memory["measured"]},
        }  # fmt: skip

    def write(self, folder: Path) -> None:
        """Write timeline.json: the last whole period of every rank. Called by all ranks. The clock of each machine
        starts with the period of the machine's first rank."""
        import torch.distributed as dist

        from mdcs.profiler.consensus import machine_id

        begin, end, intervals = self._parallel.last_period()
        own = (self.workload.rank, intervals, self._parallel.memory_by_slot(), (machine_id(), begin))
        gathered: list[Any] = [None] * self.workload.processes
        dist.all_gather_object(gathered, own)
        if not self.workload.writes or not intervals:
            return
        zero = dict(clock for *_, clock in reversed(gathered))  # reversed: the first rank of each machine wins
        ranks = tuple(
            RankTimeline(r, tuple(dataclasses.replace(i, start=i.start - zero[m], end=i.end - zero[m]) for i in theirs))
            for r, theirs, _, (m, _) in gathered
        )
        period = self._parallel.plan.period
        names = tuple(period.name(q) for q in range(period.length))
        timeline = Timeline(end - begin, names, ranks, tuple(gathered[0][2]))
        (folder / "timeline.json").write_text(timeline.to_json(), encoding="utf-8")
