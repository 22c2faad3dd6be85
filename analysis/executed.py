"""The notebooks of `analysis/notebooks/`, run on somebody's runs.

Each is a Python file with cells (jupytext's percent format), whose cell `parameters` is papermill's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
NOTEBOOKS, EXAMPLE = HERE / "notebooks", HERE.parent / "tests/analysis/sweep/plans"
TIMEOUT_S = 600  # of a cell


def run_notebooks(source: str | None, out: Path) -> Iterator[tuple[Path, str]]:
    """Run each notebook on `source` (:func:`analysis.runs`; None: a small sweep of the tests) and write it into `out`
    with its output.

    Yields each path with an empty string, or with the reason why these runs are not for that notebook (a ValueError in
    it). Raises ModuleNotFoundError without the packages of the extra `notebooks`, RuntimeError for a notebook that
    fails otherwise.
    """
    try:
        import jupytext
        from jupyter_client.manager import AsyncKernelManager
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError
        from nbformat.v4 import new_code_cell
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}: notebooks need pip install jupytext nbclient ipykernel") from error

    out.mkdir(parents=True, exist_ok=True)
    found = (str(HERE.parent), os.environ.get("PYTHONPATH"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, found))}
    given = new_code_cell(f"RUNS = {(source or str(EXAMPLE))!r}", metadata={"tags": ["injected-parameters"]})
    with TemporaryDirectory() as sockets:  # which others on the machine cannot reach
        for notebook in sorted(NOTEBOOKS.glob("*.py")):
            document, path = jupytext.read(notebook, fmt="py:percent"), out / f"{notebook.stem}.ipynb"
            tags = [cell.metadata.get("tags", []) for cell in document.cells]
            document.cells.insert(next(i for i, tag in enumerate(tags) if "parameters" in tag) + 1, given)
            kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/{notebook.stem}")
            here = {"metadata": {"path": os.getcwd()}}
            client = NotebookClient(document, km=kernel, timeout=TIMEOUT_S, startup_timeout=TIMEOUT_S, resources=here)
            try:
                client.execute(env=environment)
            except CellExecutionError as error:
                if error.ename != "ValueError":
                    raise RuntimeError(f"{notebook.name}: {error.ename}: {error.evalue}") from error
                yield path, error.evalue
                continue
            jupytext.write(document, path)
            yield path, ""
