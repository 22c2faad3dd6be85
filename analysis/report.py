"""Everything that is written about a sweep: table, pictures, the trace of its fastest run, memory by layer, and the
notebooks of `analysis/notebooks/`, run on it.

Each notebook is a Python file with cells (jupytext's percent format), whose cell `parameters` is papermill's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
from matplotlib.figure import Figure

from analysis import questions as ask
from analysis.events import METRICS
from analysis.load import Run, load_run
from analysis.pictures import style
from analysis.pictures.period import chrome_trace, gantt, memory_over_period
from analysis.pictures.step_time import overview, step_time_over_memory, step_time_over_setting, tradeoff_curve
from analysis.sources import runs
from analysis.table import new_console, new_table, write_csv, write_latex
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import Timeline

FORMATS = {"png", "pdf", "svg", "tex"}
"""Suffixes of pictures, and of the table for LaTeX."""
_TIMEOUT_S = 600  # of a notebook's cell


def write_report(
    frame: pd.DataFrame, out: str | Path, formats: Sequence[str] = ("png",), columns: int = 0
) -> list[Path]:
    """Write table.csv and pictures as far as the runs have the data; return the paths.

    tradeoff is the overview, curve-* one picture per budget, step_time is over memory, step_time-KEY over a number that
    was swept, unless the overview shows it whole; memory, timeline and trace.json are of the fastest run. Of several
    workloads (model, ranks, kind of link) the files of all but the largest carry the workload's name.

    - formats: suffixes of the pictures; tex: the table, for LaTeX's booktabs.
    - columns: width of the pictures in columns of a journal, 1 or 2, without titles; 0: as wide as is good to read.
    """
    out, pictures = Path(out), list[tuple[str, Figure]]()
    written = [write_csv(frame, out / "table.csv")]
    with style.paper(columns) if columns else nullcontext():
        for number, (workload, rows) in enumerate(ask.workloads(frame)):
            suffix = "" if number == 0 else f"-{_slug(workload)}"
            of_rows = list(curves_of(rows))
            if of_rows:
                shown = () if columns else _in_overview(rows)
                of_rows = [each for each in of_rows if each[0] not in shown] + [("tradeoff", overview(rows))]
            best = ask.best_run(rows)
            if best is not None and (Path(best["folder"]) / METRICS).is_file():  # runs of W&B have no periods
                run = load_run(best["folder"])
                title = " · ".join([workload, ask.label(best), ask.budget_words(best["budget_bytes"])])
                of_rows += period_of(run, title, best["budget_bytes"])
                if timeline := _with_prediction(run):
                    written.append(out / f"trace{suffix}.json")
                    written[-1].write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")
            pictures += [(f"{name}{suffix}", figure) for name, figure in of_rows]
            if "tex" in formats:
                written.append(write_latex(rows, out / f"table{suffix}.tex"))
    suffixes = [each for each in formats if each != "tex"]
    return written + [style.save(figure, out / f"{name}.{each}") for name, figure in pictures for each in suffixes]


def _in_overview(rows: pd.DataFrame) -> set[str]:
    """Names of the pictures that the overview shows whole: those of its panels, unless series are grey in it."""
    curves, over_memory, key = ask.share_curves(rows), ask.has_memory_axis(rows), ask.setting_axis(rows)
    names = {f"curve-{_slug(ask.budget_words(curve['budget_bytes'].iloc[0]))}" for curve in curves[:1]}
    if over_memory or not curves:
        names.add("step_time" if over_memory or key is None else f"step_time-{key}")
    grey = over_memory and set(ask.labels(ask.drawn(rows))) - ask.named(rows)
    return set() if grey else names


def curves_of(rows: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Names and pictures of step time over memory, shares and swept numbers, as far as a workload's runs have them."""
    drawn = ask.drawn(rows)
    if ask.memory_of(drawn).notna().any():
        yield "step_time", step_time_over_memory(rows)
    for curve in ask.share_curves(rows):
        yield f"curve-{_slug(ask.budget_words(curve['budget_bytes'].iloc[0]))}", tradeoff_curve(rows, curve)
    for key in ask.swept(rows):
        if not ask.is_seed(key) and ask.numbers(drawn[key]).nunique() > 1:
            yield f"step_time-{key}", step_time_over_setting(rows, key)


def period_of(run: Run, title: str, budget_bytes: float) -> Iterator[tuple[str, Figure]]:
    """Names and pictures of a run's period: its timeline and its memory, as far as they were recorded."""
    measured, predicted = run.timeline(), run.predicted_timeline()
    if shown := measured or predicted:
        yield "timeline", gantt(shown, predicted if measured else None, title, recomputed=run.recomputed)
    if with_memory := next((t for t in (measured, predicted) if t is not None and t.memory), None):
        yield "memory", memory_over_period(with_memory, budget_bytes, title, run.recomputed)


def _with_prediction(run: Run) -> Timeline | None:
    """The run's period, with the prediction as one more rank; None if neither was recorded."""
    measured, predicted = run.timeline(), run.predicted_timeline()
    if measured is None or predicted is None:
        return measured or predicted
    return replace(measured, ranks=(*predicted.ranks, *measured.ranks), memory=measured.memory or predicted.memory)


def _slug(words: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")


def write_layers(folder: Path) -> list[Path]:
    """Print a row per unit with the peak of every run in MiB, as measured, else as predicted, and write it as CSV and
    as a picture. Return the files. Raises ValueError if no run has a plan."""
    found = sorted({path.parent for path in folder.rglob("predicted_timeline.json")}) if folder.is_dir() else []
    if not found:
        raise ValueError(f"{folder} has no run with a plan")
    frame, table = by_layer(found), folder / "memory_by_layer.csv"
    title = " · ".join(["memory by layer", *(workload for workload, _ in ask.workloads(runs(folder))[:1])])
    frame.to_csv(table)
    rows = [(str(unit), *map("{:.1f}".format, row)) for unit, row in [*frame.iterrows(), ("peak", frame.max())]]
    printed = new_table("memory by layer, MiB per rank", ("unit", *map(str, frame.columns)), ("unit",), rows=rows)
    new_console(highlight=False, markup=False).print(printed)
    return [table, style.save(picture(frame, title), table.with_suffix(".png"))]


def by_layer(folders: list[Path]) -> pd.DataFrame:
    """A row per unit, in the order of forward, and a column per run: peak MiB per rank over the unit's slots."""
    columns = {}
    for folder in folders:
        run = load_run(folder)
        timeline = run.timeline() or run.predicted_timeline()
        assert timeline is not None
        peaks: dict[str, float] = {}
        for slot in sorted(timeline.memory, key=lambda slot: slot.slot.startswith("B:")):  # forward first
            sizes, unit = slot.measured or slot.predicted, slot.slot.partition(":")[2]
            peaks[unit] = max(peaks.get(unit, 0.0), sizes.get("total", sum(sizes.values())) / MIB)
        said = "measured" if timeline.memory and timeline.memory[0].measured else "predicted"
        name = f"{run.start['strategy']} {run.settings.get('run.precision', 'fp32')}, {said}"
        columns[name if name not in columns else f"{name}, {folder.name}"] = pd.Series(peaks)
    return pd.DataFrame(columns).rename_axis("unit")


@style.styled
def picture(frame: pd.DataFrame, title: str = "memory by layer") -> Figure:
    """A line per run over the units."""
    figure = style.new_figure(8.2, 4.4, title)
    axes, looks = figure.subplots(), style.palette(map(str, frame.columns))
    short = style.shortened(map(str, frame.index))
    drawn = frame.rename(index=short).plot(
        ax=axes, drawstyle="steps-mid", color=[look["color"] for look in looks.values()], legend=False, rot=90,
        xlabel="units, in the order of forward", ylabel="MiB per rank",
        title="at most while the unit is computed, forward or backward",
    )  # fmt: skip
    ticks = range(0, len(frame), -(-len(frame) // 24))
    drawn.set_xticks(list(ticks), [short[str(frame.index[i])] for i in ticks])
    drawn.set_ylim(0, None)
    return style.legend_below(figure, axes.get_lines())


def run_notebooks(source: str | None, out: Path) -> Iterator[tuple[Path, str]]:
    """Run each notebook on `source` (:func:`analysis.runs`; None: a small sweep of the tests) and write it into `out`.

    Yields each path with an empty string, or with the reason why these runs are not for that notebook (a ValueError in
    it). Raises ModuleNotFoundError without the extra `notebooks`, RuntimeError for a notebook that fails otherwise.
    """
    here = Path(__file__).resolve().parent
    try:
        import jupytext
        from jupyter_client.manager import AsyncKernelManager
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError
        from nbformat.v4 import new_code_cell
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}: notebooks need pip install jupytext nbclient ipykernel") from error

    out.mkdir(parents=True, exist_ok=True)
    found = (str(here.parent), os.environ.get("PYTHONPATH"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, found))}
    source = source or str(here.parent / "tests/analysis/sweep/plans")
    given = new_code_cell(f"RUNS = {source!r}", metadata={"tags": ["injected-parameters"]})
    with TemporaryDirectory() as sockets:  # which others on the machine cannot reach
        for notebook in sorted((here / "notebooks").glob("*.py")):
            document, path = jupytext.read(notebook, fmt="py:percent"), out / f"{notebook.stem}.ipynb"
            tags = [cell.metadata.get("tags", []) for cell in document.cells]
            document.cells.insert(next(i for i, tag in enumerate(tags) if "parameters" in tag) + 1, given)
            kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/{notebook.stem}")
            limits = {"timeout": _TIMEOUT_S, "startup_timeout": _TIMEOUT_S}
            client = NotebookClient(document, km=kernel, resources={"metadata": {"path": os.getcwd()}}, **limits)
            try:
                client.execute(env=environment)
            except CellExecutionError as error:
                if error.ename != "ValueError":
                    raise RuntimeError(f"{notebook.name}: {error.ename}: {error.evalue}") from error
                yield path, error.evalue
                continue
            jupytext.write(document, path)
            yield path, ""
