"""TensorBoard: event files in the job's folder, for `tensorboard --logdir`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.table import markdown
from experiments.trackers.tracker import Event, Mirror, Shown, Tracker, flat, predicted_values, train_values

FOLDER = "tensorboard"


@dataclass(frozen=True)
class TensorBoard(Tracker):
    """TensorBoard."""

    name = "tensorboard"
    title = "TensorBoard"

    def mirror(self, run: Shown) -> Mirror:
        """A mirror that writes event files in the run's folder."""
        return TensorBoardMirror(run)


class TensorBoardMirror(Mirror):
    """The event files of one run. A resumed run writes them anew."""

    def __init__(self, run: Shown) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        self._predicted: dict[str, Any] = {}
        self._writer: Any = SummaryWriter(str(folder))
        self._text("config", run.config)
        self._text("run", {"id": run.id, "name": run.name, "group": run.group, "kind": run.kind})

    def event(self, event: Event) -> None:
        """Write numbers of steps and evaluations as curves, other events as text."""
        name = event["event"]
        if name == "step":
            self._scalars(train_values(event) | self._predicted, int(event["step"]))
        elif name == "eval":
            values = {key: value for key, value in event.items() if key not in ("event", "step")}
            self._scalars(flat(values, "eval/"), int(event["step"]))
        else:
            self._predicted = predicted_values(event) or self._predicted
            self._text(name, event)
        self._writer.flush()

    def pictures(self, files: Sequence[Path]) -> None:
        """Add the pictures under the names of their files."""
        import numpy as np
        from PIL import Image

        for file in files:
            self._writer.add_image(file.stem, np.asarray(Image.open(file).convert("RGB")), dataformats="HWC")

    def document(self, kind: str, file: Path, used: bool) -> None:
        """Add the path of the file, which is in the same folder as the event files."""
        self._writer.add_text(kind, str(file))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Add the table as Markdown."""
        self._writer.add_text("runs", markdown(columns, rows))

    def finish(self, ok: bool) -> None:
        """Close the event file."""
        self._writer.close()

    def _scalars(self, values: dict[str, Any], step: int) -> None:
        for key, value in values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, step)

    def _text(self, name: str, value: Any) -> None:
        self._writer.add_text(name, f"```json\n{json.dumps(value, indent=1, default=str)}\n```")
