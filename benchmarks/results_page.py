"""The page docs/results.md, with its pictures, of the measurements that are kept."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

import benchmarks
from analysis import pictures, table_of
from analysis.comparison import Spread
from analysis.pictures.comparisons import SHARES, three_shares
from analysis.questions import count
from analysis.table import markdown as table
from benchmarks import percent
from benchmarks.pictures import time_over_memory
from mdcs.sizes import MIB

TITLES = {
    "ablation": "What each decision wins", "budgets": "What a larger budget wins",
    "plane": "One budget, divided in three",
}  # fmt: skip
DECIDED = {
    "neither": "all `fsdp`, no overlap", "strategy": "a strategy per unit, no overlap",
    "schedule": "all `fsdp`, scheduled", "both": "both, one after the other", "joint": "both at once",
    "recompute": "both at once, with recomputation",
}  # fmt: skip

Result = dict[str, Any]


def newest(folder: Path) -> list[Result]:
    """The newest measurement of each name, by name."""
    files = {path.stem: path for path in sorted(folder.glob("*/*.json"))}
    return [json.loads(path.read_text(encoding="utf-8")) for _, path in sorted(files.items())]


def write_page(results: Sequence[Result], docs: Path) -> Path:
    """Write the page and its pictures into the folder. Return the page's file."""
    found = docs / "results.md"
    found.write_text(page(results), encoding="utf-8")
    if over := [each for each in results if not has_plans_alone(each) or each["name"] == "budgets"]:
        pictures.save(time_over_memory([(_heading(each), runs(each)) for each in over]), docs / "results.png")
    for plane in [each for each in results if each["name"] == "plane"]:
        points = divisions(plane)
        points["is_stop"] = points["predicted_step_s"] == points["predicted_step_s"].min()
        pictures.save(three_shares(points, _heading(plane)), docs / "results-plane.png")
    points = pd.DataFrame(predictions(results), columns=["series", "predicted", "measured"])
    points[["predicted", "measured"]] *= 1e3
    figure = pictures.predictions("Step time, predicted and measured", "ms", points)
    pictures.save(figure, docs / "results-predictions.png")
    return found


def page(results: Sequence[Result]) -> str:
    compared = [each for each in results if not has_plans_alone(each)]
    sections = [
        _plane(each) if each["name"] == "plane" else _plans(each) if has_plans_alone(each) else _engines(each)
        for each in results
    ]
    if compared:
        picture = "![Step time over peak memory](results.png)"
        sections.insert(0, f"## Where mdcs wins, and where not\n\n{_verdicts(compared)}\n\n{picture}")
    properties = list(_properties(results))
    same = "; ".join(f"{name} {values[0]}" for name, values in properties if len(set(values)) == 1)
    differing = [[name, *values] for name, values in properties if len(set(values)) > 1]
    setup = f"In all measurements: {same}." if same else ""
    if differing:
        setup += "\n\n" + table(["", *(each["name"] for each in results)], differing)
    return benchmarks.page(
        "results", results="\n\n".join(sections), predictions=_predictions(results), setup=setup,
        engines=_flags(results), left_out=_left_out(results),
    )  # fmt: skip


def has_plans_alone(result: Result) -> bool:
    return all(each["plans"] for each in result["comparison"]["candidates"])


def steps(candidate: Result) -> list[float]:
    """Seconds per step of each round."""
    return [each["step_s"] for each in candidate["rounds"]]


def peak(candidate: Result) -> float:
    """The most bytes that any rank held in any round; NaN where that was not measured."""
    sizes = [each["peak_bytes"] for each in candidate["rounds"]]
    return math.nan if None in sizes else float(max(sizes))


def predicted(candidate: Result) -> str:
    """The median of the predicted steps in ms. Empty without a plan."""
    told = [each["predicted_step_s"] for each in candidate["rounds"] if each["predicted_step_s"] is not None]
    return f"{statistics.median(told) * 1e3:,.0f}" if told else ""


def under(result: Result, part: Result) -> list[Result]:
    """The candidates of a budget that fit, or whose bytes are not known, the fastest first."""
    # An engine without a plan has one run for all budgets; of a part of a floor, each plan has its own bytes.
    some = [each for each in result["comparison"]["candidates"] if each["budget"] in (None, part["budget"])]
    limits = {each["name"]: each["budget_bytes"] or part["budget_bytes"] for each in some}
    fits = [each for each in some if (limit := limits[each["name"]]) is None or not peak(each) > limit]
    return sorted(fits, key=lambda each: statistics.median(steps(each)))


def of_mdcs(fitting: Sequence[Result]) -> Result | None:
    return next((each for each in fitting if each["name"] == "mdcs"), None)


def ratios(own: Result, other: Result) -> list[float]:
    """Steps of another candidate as multiples of this one's, round by round."""
    return [b / a for a, b in zip(steps(own), steps(other), strict=False)]


def predictions(results: Sequence[Result]) -> list[tuple[str, float, float]]:
    """Name of the result, predicted and measured seconds of every run with a plan."""
    return [
        (result["name"], each["predicted_step_s"], each["step_s"])
        for result in results for candidate in result["comparison"]["candidates"] for each in candidate["rounds"]
        if each["predicted_step_s"] is not None
    ]  # fmt: skip


def runs(result: Result) -> pd.DataFrame:
    """A row per round of every candidate, as :func:`analysis.runs` has rows."""
    of = result["comparison"]
    about = {"status": "ok", "scheduler": "own", "model": of["model"], "world": of["world"], "emulated": False}
    return table_of([
        about | run | {"strategy": each["name"], "engine": "mdcs" if each["plans"] else each["name"],
                       "budget_bytes": each["budget_bytes"], "step_s_p10": run["step_s"], "step_s_p90": run["step_s"],
                       "peak_bytes": peak(each)}
        for each in of["candidates"] for run in each["rounds"]
    ])  # fmt: skip


def _verdicts(results: Sequence[Result]) -> str:
    rows: list[tuple[str, ...]] = []
    for result in results:
        for part in result["comparison"]["budgets"]:
            if (own := of_mdcs(fitting := under(result, part))) is None:
                continue
            other = next((each for each in fitting if each is not own), None)
            judged = "none", "", "is the only one that fits"
            if other is not None:
                ratio = Spread.of(ratios(own, other))
                low, high = round(ratio.low, 2), round(ratio.high, 2)  # as shown: 0.03 % is no win
                verdict = "wins" if low > 1 else "**loses**" if high < 1 else "cannot be told apart"
                judged = other["name"], _ratio(ratio), verdict
            rows.append((_title(result), _budget(part), _ms(Spread.of(steps(own))), *judged))
    return table(
        ["measurement", "budget", "mdcs ms", "the best other engine that fits", "its step over mdcs's", "mdcs"], rows
    )


def _engines(result: Result) -> str:
    """A row per candidate, the fastest first, with its step over that of mdcs within each budget that it fits."""
    of = result["comparison"]
    parts = [(part, under(result, part)) for part in of["budgets"]]
    rows = []
    for each in sorted(of["candidates"], key=lambda candidate: statistics.median(steps(candidate))):
        over = []
        for part, fitting in parts:
            if (own := of_mdcs(fitting)) is None or each["plans"] and each["budget"] != part["budget"]:
                over.append("")
            else:
                fits = any(one is each for one in fitting)
                over.append(f"{statistics.median(ratios(own, each)):.2f}" if fits else "–")
        name = f"{each['name']}, {_budget(each)}" if each["plans"] else each["name"]
        processor = f"{statistics.median(run['processor_s'] for run in each['rounds']) * 1e3:,.0f}"
        rows.append([name, _ms(Spread.of(steps(each))), processor, _mib(each), predicted(each), *over])
    headings = ["engine", "step ms", "processor ms", "peak MiB", "predicted ms"]
    headings += [f"over mdcs, {_budget(part)}" for part, _ in parts]
    return f"## {_title(result)}\n\n{_about(result)}\n\n{table(headings, rows)}"


def _plans(result: Result) -> str:
    """A row per candidate and budget, with the step of the first row over its own, round by round."""
    of, rows = result["comparison"], list[list[str]]()
    first: Result | None = None
    for part in of["budgets"]:
        for each in of["candidates"]:
            if each["budget"] in (None, part["budget"]):
                first = first or each
                ratio = _ratio(Spread.of(ratios(each, first)))
                name = each["name"] + (f": {DECIDED[each['name']]}" if each["name"] in DECIDED else "")
                rows.append([_budget(part), name, _ms(Spread.of(steps(each))), ratio, _mib(each), predicted(each)])
    headings = ["budget", "plan", "step ms", "speed-up", "peak MiB", "predicted ms"]
    heading = f"## {TITLES.get(result['name'], 'Plans')}: {_title(result)}"
    return f"{heading}\n\n{_about(result)}\n\n{table(headings, rows)}"


def divisions(result: Result) -> pd.DataFrame:
    """Return a row per division of the slack: the shares of :data:`SHARES`, which add up to 1, ``of_rest``, what
    activations have of that which the schedule leaves, and the medians of predicted and measured seconds.
    """
    rows = []
    for each in filter(_is_division, result["comparison"]["candidates"]):
        schedule, of_rest = map(float, each["name"].split()[1:])
        shares = schedule, (1 - schedule) * of_rest, (1 - schedule) * (1 - of_rest)
        told = statistics.median(run["predicted_step_s"] for run in each["rounds"])
        rows.append((*shares, of_rest, told, statistics.median(steps(each))))
    return pd.DataFrame(rows, columns=[*SHARES, "of_rest", "predicted_step_s", "step_s"])


def _is_division(candidate: Result) -> bool:
    return candidate["name"].startswith("shares ")


def _plane(result: Result) -> str:
    """Measured steps, and predicted ones, by the shares of the slack; and the steps of other plans."""
    points = divisions(result)
    points["words"] = [f"{told.step_s * 1e3:,.0f} ({told.predicted_step_s * 1e3:,.0f})" for told in points.itertuples()]
    cells = points.pivot(index="schedule", columns="of_rest", values="words").fillna("–")
    headings = ["share for the schedule", *(f"{share:g} of the rest for activations" for share in cells.columns)]
    rows = [[f"{share:g}", *row] for share, row in zip(cells.index, cells.to_numpy().tolist(), strict=True)]
    others = [
        f"`{each['name']}`: {_ms(Spread.of(steps(each)))} ms, {predicted(each)} predicted."
        for each in result["comparison"]["candidates"] if not _is_division(each)
    ]  # fmt: skip
    picture = "![Measured steps over the shares of one budget](results-plane.png)"
    words = (
        f"{_title(result)}: measured ms (predicted ms) of `strategy=greedy scheduler=priority`, by "
        "`budget.schedule_share` and `budget.activation_share`; strategies have what is left."
    )
    about = f"## {TITLES['plane']}\n\n{_about(result)} {words}"
    return "\n\n".join([about, table(headings, rows), *others, picture])


def _predictions(results: Sequence[Result]) -> str:
    rows = []
    names = {result["name"]: TITLES.get(result["name"], _title(result)) for result in results}
    for name, title in (*names.items(), (None, "all")):
        errors = [told / said - 1 for of, told, said in predictions(results) if name in (None, of)]
        if errors:
            middle = statistics.median(map(abs, errors))
            rows.append([title, len(errors), f"{middle:.1%}", percent(max(errors, key=abs))])
    return table(["measurement", "runs", "median error", "worst"], rows)


def _flags(results: Sequence[Result]) -> str:
    """The overrides of each engine, with the results that have it so where others differ."""
    flags: dict[str, dict[str, list[str]]] = {}
    for result in results:
        for each in result["comparison"]["candidates"]:
            if _is_division(each):  # its table says which
                continue
            where = flags.setdefault(each["name"], {}).setdefault(" ".join(each["overrides"]), [])
            where += [result["name"]] if result["name"] not in where else []
    return "\n".join(
        f"- {name}: `{words}`" + (f" ({', '.join(where)})" if len(ways) > 1 else "")
        for name, ways in flags.items() for words, where in ways.items()
    )  # fmt: skip


def _left_out(results: Sequence[Result]) -> str:
    left: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for name, why in result["comparison"]["left_out"].items():
            left.setdefault((name, why), []).append(result["name"])
    return "".join(f"\nNot measured in {', '.join(where)}: {name} ({why}).\n" for (name, why), where in left.items())


def _properties(results: Sequence[Result]) -> Iterator[tuple[str, list[str]]]:
    of = [each["comparison"] for each in results]
    measured = [len(each["candidates"][0]["rounds"][0]["steps_s"]) for each in of]
    losses = [max([0.0, *(value or 0.0 for value in each["losses"]["differences"].values())]) for each in of]
    yield "model", [each["model"] for each in of]
    yield "parameters", [f"{each['parameters'] / 1e6:.1f} M" if each["parameters"] else "–" for each in of]
    yield "ranks, batch of each", [f"{each['world']}, {each['batch_size']}" for each in of]
    yield "link", [each["shaped_link"] or "as it is" for each in of]
    yield "rounds, measured steps of each", [f"{a['rounds']}, {b}" for a, b in zip(of, measured, strict=True)]
    yield "greatest relative difference of losses", [f"{loss:.1g}" for loss in losses]
    yield "date", [each["date"] for each in results]
    yield "commit", [each["commit"] for each in results]
    yield "machine", [each["machine"]["processor"] for each in results]
    yield "load before and after", [", ".join(f"{load[0]:.1f}" for load in each["load"]) for each in results]
    for package in results[0]["versions"] if results else ():
        yield package, [each["versions"][package] or "–" for each in results]


def _title(result: Result) -> str:
    of = result["comparison"]
    return f"{of['model']}, {of['world']} ranks" + (f", {of['shaped_link']}" if of["shaped_link"] else "")


def _heading(result: Result) -> str:
    of = result["comparison"]
    size = f", {count(of['parameters'])} parameters" if of["parameters"] else ""
    link = f" · link of {of['shaped_link']}" if of["shaped_link"] else ""
    return f"{of['model']}{size} · {of['world']} ranks{link}"


def _about(result: Result) -> str:
    about = result["about"].removeprefix("For docs/results.md: ")
    return f"`python -m benchmarks.results {result['name']}`: {about}"


def _budget(part: Result) -> str:
    if part["budget_bytes"] is None:
        return "none"
    words = f"{part['budget_bytes'] / MIB:.0f} MiB"
    return f"{words} ({part['budget']})" if "%" in (part["budget"] or "") else words


def _mib(candidate: Result) -> str:
    return "not measured" if math.isnan(peak(candidate)) else f"{peak(candidate) / MIB:.0f}"


def _ms(step: Spread) -> str:
    return f"{step.median * 1e3:,.0f} [{step.low * 1e3:,.0f} to {step.high * 1e3:,.0f}]"


def _ratio(ratio: Spread) -> str:
    return f"{ratio.median:.2f} [{ratio.low:.2f} to {ratio.high:.2f}]"
