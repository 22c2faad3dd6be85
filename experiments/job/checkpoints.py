"""Checkpoints of a job in `checkpoints/` of its folder, written and resumed by `run.save_every` and `run.resume`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.config.schema import Config, ConfigError
from experiments.job.tracking import JsonLines
from launch import status

if TYPE_CHECKING:  # which import torch: a launcher need not wait for it
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from experiments.engines.base import Engine
    from mdcs.runtime.checkpointing import SaveHandle

FOLDER = "checkpoints"


def require(config: Config, folder: Path) -> None:
    """Raise ConfigError if the run would mix its checkpoints with another run's, or if `run.resume` is no folder."""
    run = config.run
    if run.resume not in (None, "auto") and not Path(run.resume).is_dir():
        raise ConfigError("run.resume", f"no such folder: {run.resume}")
    if run.resume is None and run.save_every is not None and any_in(folder):
        problem = "has checkpoints of a former run: go on with auto, or delete them; got null"
        raise ConfigError("run.resume", f"{folder / FOLDER} {problem}")


def require_same_model(config: Config, folder: Path, model: nn.Module) -> None:
    """Raise ValueError, before anything is measured, if the checkpoint to resume is of a model with other shapes."""
    if config.run.resume is None or config.cluster.name == "joined" and config.run.resume == "auto":
        return
    from mdcs.checkpoint import dcp_shards, directory
    for saved in directory.candidates(folder / FOLDER if config.run.resume == "auto" else Path(config.run.resume))[:1]:
        told = dcp_shards.read_shapes(saved).items()
        shapes = {path[-1]: tuple(each.size) for path, each in told if path[0] == "model"}
        for name, p in model.named_parameters():
            if (there := shapes.get(name, "not")) != (here := tuple(p.shape)):
                raise ValueError(f"run.resume: {saved} is of another model: {name} is {there} there, {here} here")


def any_in(folder: Path) -> bool:
    return any((folder / FOLDER).glob("step-*"))


def resumes(config: Config, folder: Path) -> bool:
    """Return whether a run goes on from a checkpoint. Collective."""
    from mdcs.profiler.consensus import on_rank_zero  # the folders of other ranks may be temporary
    return config.run.resume is not None and on_rank_zero(lambda: config.run.resume != "auto" or any_in(folder))


class Checkpoints:
    """Checkpoints of one rank of a job. Rank 0 has `metrics` and records every checkpoint there."""

    def __init__(
        self, config: Config, folder: Path, engine: Engine, schedule: LRScheduler, metrics: JsonLines | None
    ) -> None:
        if config.cluster.name == "joined":  # the folders of the other ranks are temporary
            from mdcs.profiler.consensus import on_rank_zero

            folder = Path(on_rank_zero(lambda: str(folder)))
        self._run, self._own, self._metrics = config.run, folder / FOLDER, metrics
        self._engine, self._schedule = engine, schedule
        self._last: SaveHandle | None = None

    def resume(self) -> int:
        """Load the checkpoint of the config into engine, optimizer and schedule. Return the number of steps done.
        Raises ValueError if there is no checkpoint at a path that the config names, or if all steps are already
        done."""
        if self._run.resume is None:
            return 0
        status.set(phase="resuming")
        resumed = self._engine.resume(self._own if self._run.resume == "auto" else Path(self._run.resume))
        if resumed is None:
            if self._run.resume == "auto":
                return 0
            raise ValueError(f"run.resume: {self._run.resume} has no checkpoint")
        if resumed.step >= self._run.steps:
            there = f"{resumed.folder} is at step {resumed.step} already"
            raise ValueError(f"run.steps: {there}: raise it, or resume another")
        self._schedule.load_state_dict(resumed.extra["schedule"])
        self._tell("resumed", step=resumed.step, world=resumed.world, folder=str(resumed.folder))
        return int(resumed.step)

    def due(self, step: int) -> bool:
        """Return whether to write a checkpoint after this step: every `run.save_every` steps, and after the last."""
        every = self._run.save_every
        return every is not None and (step % every == 0 or step == self._run.steps)

    def save(self, step: int) -> None:
        self._save(step, wait=not self._run.save_beside)

    def leave(self, step: int) -> None:
        """Write a checkpoint from which a later run continues, unless this step has one, and record the preemption."""
        if self._run.save_every is None or step % self._run.save_every:
            self._save(step, wait=True)
        self.finish()
        self._tell("preempted", step=step)

    def _save(self, step: int, wait: bool) -> None:
        status.set(phase="saving")
        self.finish()
        extra = {"schedule": self._schedule.state_dict()}
        self._last = self._engine.checkpoint(self._own, extra, keep=self._run.keep, wait=wait)

    def finish(self) -> None:
        if self._last is not None:
            saving, self._last = self._last, None
            saving.wait()
            told = {key: value for key, value in dataclasses.asdict(saving).items() if key.endswith(("_s", "_bytes"))}
            self._tell("checkpoint", step=saving.step, folder=str(saving.folder), **told)

    def _tell(self, event: str, **values: Any) -> None:
        if self._metrics:
            self._metrics.write({"event": event, **values})
