"""Tables of ``experiments/compare.py``: one for each budget, one over all budgets, and whether losses are equal."""

from __future__ import annotations

import statistics
from typing import Any

from rich.table import Table

from analysis.table import milliseconds, new_console, new_table
from mdcs.sizes import MIB

WIDTH = 150  # columns of tables where there is no terminal


def show(document: dict[str, Any]) -> None:
    console = new_console(WIDTH, highlight=False, markup=False)
    for part in document["budgets"]:
        console.print(table(document, part))
        console.print()
    if len(document["budgets"]) > 1:
        console.print(overview(document))
    if errors := [abs(e) for part in document["budgets"] for line in part["lines"] if (e := _error(line)) is not None]:
        middle = statistics.median(errors)
        console.print(f"{len(errors)} predictions: median error {middle:.1%}, worst {max(errors):.1%}")
    losses = document["losses"]
    for engine, difference in losses["differences"].items():
        if difference is None or difference > losses["tolerance"]:
            words = "cannot be compared with" if difference is None else f"differ by {difference:.2g} of"
            console.print(f"losses of {engine} {words} those of {losses['base']}")
    if losses["differences"] and losses["equal"]:
        said, greatest = f"all losses are equal within {losses['tolerance']:g}", max(losses["differences"].values())
        console.print(f"{said}; the greatest relative difference is {greatest:.1g}")
    for what, of in (("left out", document["left_out"]), ("failed", document["failed"])):
        for name, reason in of.items():
            console.print(f"{what}: {name}: {reason}", soft_wrap=True)


def table(document: dict[str, Any], part: dict[str, Any]) -> Table:
    """A row per candidate, the fastest first; those that do not fit the budget last, with the bytes that they need."""
    limit = "no limit" if part["budget_bytes"] is None else f"budget {part['budget_bytes'] / MIB:.1f} MiB"
    if part["budget_bytes"] is not None and "%" in (part["budget"] or ""):
        limit += f" ({part['budget']})"
    bounds = ", ".join(f"{name} bound {seconds * 1e3:.1f} ms" for name, seconds in part["bounds"].items())
    link = f" behind {document['shaped_link']}" if document["shaped_link"] else ""
    several = document["rounds"] > 1
    rounds, spread = (f"medians of {document['rounds']} rounds", "\n[range]") if several else ("one round", "")
    title = f"{document['model']}, {document['world']} ranks{link}, {rounds}; {limit}"
    over = f"× {document['base']}{spread}"
    headings = ("candidate", f"step ms{spread}", "predicted\nms", "error", "bound\nms", "×\nbound", over, "stalled\nms",
                "exposed\nms", "overlap\nratio", "messages", "CPU\nms", "peak\nMiB")  # fmt: skip
    made = new_table(f"{title}\n{bounds}", headings, left=("candidate",), no_wrap=True)
    for line in part["lines"]:
        if line["fits"] is not False:
            step, ratio, bound = line["step_s"], line["ratio"], line["bound_s"]
            error = _error(line)
            made.add_row(
                line["engine"], _ranged({name: seconds * 1e3 for name, seconds in step.items()}, 1, several),
                milliseconds(line["predicted_s"]), "–" if error is None else f"{error:+.1%}",
                milliseconds(bound), f"{step['median'] / bound:.3f}" if bound else "–",
                "–" if ratio is None else _ranged(ratio, 2, several),
                milliseconds(line["stalled_s"]), milliseconds(line["exposed_s"]),
                "–" if line["overlap_ratio"] is None else f"{line['overlap_ratio']:.2f}",
                "–" if line["messages"] is None else f"{line['messages']:.0f}",
                milliseconds(line["processor_s"]), _mib(line["peak_bytes"]),
            )  # fmt: skip
    above = {line["engine"]: line["peak_bytes"] for line in part["lines"] if line["fits"] is False}
    for name, needs in {**above, **part["infeasible"]}.items():
        made.add_row(name, "does not fit", *[""] * (len(headings) - 3), f"{_mib(needs)}")
    return made


def _ranged(of: dict[str, float], digits: int, several: bool) -> str:
    spread = f" [{of['low']:.{digits}f}–{of['high']:.{digits}f}]" if several else ""
    return f"{of['median']:.{digits}f}{spread}"


def _error(line: dict[str, Any]) -> float | None:
    """The prediction's error as a share of the measured step."""
    return None if line["predicted_s"] is None else line["predicted_s"] / line["step_s"]["median"] - 1


def overview(document: dict[str, Any]) -> Table:
    """A row per budget: the best peer, other plan and base that fit, with the base's prediction and bound."""
    base, rows = document["base"], []
    for part in document["budgets"]:
        fitting = {line["engine"]: line for line in part["lines"] if line["fits"] is not False}
        steps = {name: line["step_s"]["median"] for name, line in fitting.items()}
        peers = {name: step for name, step in steps.items() if fitting[name]["predicted_s"] is None}
        others = {name: step for name, step in steps.items() if name not in peers and name != base}
        own = steps.get(base)
        rows.append([
            _budget(part), _best(peers), _best(others), milliseconds(own),
            milliseconds(fitting[base]["predicted_s"] if base in fitting else None),
            milliseconds(part["bounds"].get("structural")),
            f"{min(peers.values()) / own:.2f}" if peers and own else "–",
        ])  # fmt: skip
    headings = ("budget", "other engines", f"other plans\nof {base}", base, "predicted", "structural\nbound",
                "best engine\n× mdcs")  # fmt: skip
    return new_table("the best of each that fits, step ms", headings, left=("budget",), rows=rows)


def _budget(part: dict[str, Any]) -> str:
    if part["budget_bytes"] is None:
        return "none"
    return str(part["budget"]) if "%" in (part["budget"] or "") else f"{_mib(part['budget_bytes'])} MiB"


def _best(steps: dict[str, float]) -> str:
    name = min(steps, key=steps.__getitem__, default=None)
    return "–" if name is None else f"{steps[name] * 1e3:.1f}\n{name}"


def _mib(size: float | None) -> str:
    return "–" if size is None else f"{size / MIB:.1f}"
