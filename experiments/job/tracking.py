"""Where a run's metrics go: metrics.jsonl, the truth, which is always written, and W&B beside it if a config says so.

Rank 0 writes one JSON object per line, flushed per line, so a killed run can be read to its last step
(`JsonLines`). The parent process, which follows that file anyway to show progress (`analysis.events.Tail`), mirrors it to
W&B (`WandbMirror`). So W&B takes no time and no memory in a rank, sees failed runs too, and cannot stop a
run: its first failure is one warning, and then it is left alone.
"""

from __future__ import annotations

import json
import math
import netrc
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Protocol

from mdcs.options import Checked, option

Event = Mapping[str, Any]


class JsonLines:
    """Appends events to a file, each on a line of its own, at once; for one writer at a time.

    A number that is not finite becomes null, as JSON has no other word for it. A line that an earlier
    writer left unfinished, because it was killed, is removed; one that does not fit on the disk is not begun. Raises
    OSError, naming the file, when it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)
        self._path, self._file = path, path.open("ab", buffering=0)

    def write(self, event: Event) -> None:
        line = (json.dumps(_finite(event), allow_nan=False) + "\n").encode()
        before = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(before)
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


# ---- mirrors of the file


class Mirror(Protocol):
    """Something that is shown a run's events and pictures."""

    def event(self, event: Event) -> None: ...

    def pictures(self, files: Sequence[Path]) -> None: ...

    def finish(self, ok: bool) -> None: ...


class NoMirror:
    def event(self, event: Event) -> None:
        """Not shown anywhere else."""

    def pictures(self, files: Sequence[Path]) -> None:
        """Not shown anywhere else."""

    def finish(self, ok: bool) -> None:
        """Nothing to finish."""


class WandbMirror:
    """One W&B run that mirrors a run's events.

    config: the resolved config as plain containers. group: the name of the sweep, or None. load: imports
    wandb. Nothing here raises: the first failure is warned about, and ends the mirroring.
    """

    def __init__(
        self,
        tracker: Wandb,
        folder: Path,
        *,
        name: str,
        group: str | None,
        config: Mapping[str, Any],
        load: Callable[[], ModuleType] | None = None,
    ) -> None:
        self._run: Any = None
        self._wandb: Any = None
        self._guarded("start", self._start, tracker, folder, name, group, config, load or _import_wandb)

    def event(self, event: Event) -> None:
        self._guarded("log", self._event, event)

    def pictures(self, files: Sequence[Path]) -> None:
        self._guarded("log pictures", self._pictures, files)

    def finish(self, ok: bool) -> None:
        self._guarded("finish", lambda: self._run.finish(exit_code=0 if ok else 1))
        self._run = None

    def _guarded(self, what: str, do: Callable[..., None], *arguments: Any) -> None:
        if self._run is None and what != "start":
            return
        try:
            do(*arguments)
        except Exception as error:  # whatever a tracker does, training goes on
            self._run = None
            reason = " ".join(str(error).split()) or "no reason given"
            warnings.warn(
                f"W&B could not {what}, the run goes on without it: {type(error).__name__}: {reason}",
                stacklevel=2,
            )

    def _start(
        self,
        tracker: Wandb,
        folder: Path,
        name: str,
        group: str | None,
        config: Mapping[str, Any],
        load: Callable[[], ModuleType],
    ) -> None:
        wandb: Any = load()
        self._wandb = wandb
        self._run = wandb.init(
            project=tracker.project,
            entity=tracker.entity,
            group=tracker.group or group,
            name=name,
            dir=str(folder),
            mode=tracker.mode or default_mode(os.environ),
            config=dict(config),
            reinit="finish_previous",
            settings=wandb.Settings(console="off", silent=True, init_timeout=20.0, x_disable_stats=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _event(self, event: Event) -> None:
        values = {key: value for key, value in event.items() if key != "event"}
        if event["event"] == "step":
            self._run.log(flat(values))
        elif event["event"] in ("job", "start"):
            self._run.config.update({event["event"]: values}, allow_val_change=True)
        else:
            self._run.summary.update(flat(values))

    def _pictures(self, files: Sequence[Path]) -> None:
        if not files:
            return
        self._run.log({file.stem: self._wandb.Image(str(file)) for file in files})


def default_mode(env: Mapping[str, str]) -> str:
    """What W&B does when the config leaves it open: as $WANDB_MODE says, online with an account, else
    offline.

    Without an account W&B would ask for one on the terminal, or fail where there is none.
    """
    if mode := env.get("WANDB_MODE"):
        return mode
    if env.get("WANDB_API_KEY"):
        return "online"
    try:
        hosts = netrc.netrc(env.get("NETRC") or os.path.expanduser("~/.netrc")).hosts
    except (OSError, netrc.NetrcParseError):
        return "offline"
    return "online" if any("wandb" in host for host in hosts) else "offline"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by "/"; nulls are left out."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}/")
        elif value is not None:
            result[f"{prefix}{key}"] = value
    return result


def _import_wandb() -> ModuleType:
    import wandb

    return wandb


# ---- what a config chooses


@dataclass(frozen=True)
class Tracker(Checked, ABC):
    """What a config chooses. `name` is a class's own."""

    name: ClassVar[str] = "tracker"
    shows_pictures: ClassVar[bool] = True
    """Whether the pictures of a run are worth drawing for it."""

    @abstractmethod
    def mirror(self, folder: Path, *, name: str, group: str | None, config: Mapping[str, Any]) -> Mirror:
        """What is shown the events of the run in `folder`; it cannot stop the run."""


@dataclass(frozen=True)
class NoTracker(Tracker):
    """metrics.jsonl alone."""

    name = "none"
    shows_pictures = False

    def mirror(self, folder: Path, *, name: str, group: str | None, config: Mapping[str, Any]) -> Mirror:
        """Nothing."""
        return NoMirror()


@dataclass(frozen=True)
class Wandb(Tracker):
    """Weights & Biases."""

    name = "wandb"

    project: str = option("mdcs", "W&B project")
    entity: str | None = option(None, "W&B entity")
    group: str | None = option(None, "W&B group; null: the name of the sweep")
    mode: str | None = option(
        None, "null: online with a W&B account on this machine, else offline", choices=("offline", "online", "disabled")
    )

    def mirror(self, folder: Path, *, name: str, group: str | None, config: Mapping[str, Any]) -> Mirror:
        """A run of W&B, its files in the folder."""
        return WandbMirror(self, folder, name=name, group=group, config=config)
