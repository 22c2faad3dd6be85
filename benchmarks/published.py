"""Predict runs that others have published, and write the pages that show both: a part of docs/predictions.md, and
docs/dev/published-runs.md.

    python -m benchmarks.published                  # make published
    python -m benchmarks.published --out FOLDER

Nothing is measured. A run is described by its model, batch, devices and network in benchmarks/published.yaml, and
planned and replayed as any job.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from statistics import median

import benchmarks
from analysis.table import markdown as table
from benchmarks import percent
from benchmarks.published_runs import INTERFERENCE, Case, Group, Predicted, read
from mdcs.sizes import GIB

MEMORY_MARK = 0.08  # wanted error of a difference of memory

Predictions = list[tuple[Group, list[Predicted]]]


def main() -> None:
    out, (part, runs) = benchmarks.parser(__doc__).parse_args().out, pages()
    benchmarks.write_part(out, "published", part)
    benchmarks.write(out / "dev/published-runs.md", runs)


def pages() -> tuple[str, str]:
    """Return the part of predictions.md, and the page of all runs, as Markdown."""
    groups = [(group, group.predictions()) for group in read()]
    undisturbed = [(group, group.predictions()) for group in (each.changed(interference=0.0) for each, _ in groups)]
    timed = [(group, told) for group, told in groups if group.runs[0].seconds]
    sections = (_steps(title, list(members)) for title, members in itertools.groupby(timed, lambda pair: pair[0].title))
    why = [many.case.why for few, many in _pairs(groups) if abs(_difference(few, many)[2]) > MEMORY_MARK]
    return (
        benchmarks.page(
            "published", interference=100 * INTERFERENCE, summary=summary(groups, undisturbed),
            beyond=len(_beyond(groups)),
        ),
        benchmarks.page(
            "published-runs", steps="\n\n".join(sections), worst=_worst(groups), memory=_memory(groups),
            why="\n".join(why), runs=sum(len(told) for _, told in groups), verdicts=_verdicts(groups),
        ),
    )  # fmt: skip


def steps_of(groups: Predictions) -> Iterator[tuple[Predicted, float]]:
    """The judged steps, each with the error of predicting that computing is all."""
    for group, told in groups:
        first = told[0]
        for each in told[group.judged :]:
            if each.case.seconds and first.case.seconds:
                yield each, first.case.seconds * each.alone_s / first.alone_s / each.case.seconds - 1


def summary(groups: Predictions, undisturbed: Predictions) -> str:
    """A table of how many predictions are within the marks, and of how many cruder ones would be."""
    rows = []
    for name, mark, tcp in (("step, RDMA and NVLink", 0.1, False), ("step, TCP", 0.2, True)):
        some = [(abs(each.error), abs(hidden)) for each, hidden in steps_of(groups) if each.case.tcp == tcp]
        other = [abs(each.error) for each, _ in steps_of(undisturbed) if each.case.tcp == tcp]
        within, hidden = (sum(pair[i] <= mark for pair in some) for i in range(2))
        apart = sum(error <= mark for error in other)
        middle = median(error for error, _ in some)
        rows.append([name, f"± {mark * 100:.0f} %", len(some), within, f"{middle * 100:.1f} %", apart, hidden])
    errors = [abs(_difference(*pair)[2]) for pair in _pairs(groups)]
    within, wanted = sum(error <= MEMORY_MARK for error in errors), f"± {MEMORY_MARK * 100:.0f} %"
    rows.append(["difference of memory", wanted, len(errors), within, f"{median(errors) * 100:.1f} %"])
    every = [each for _, told in groups for each in told]
    for name, fits in (("fits", True), ("runs out of memory", False)):
        alike = [each for each in every if each.case.fits == fits]
        rows.append([name, "all", len(alike), sum(each.fits == fits for each in alike)])
    crude = "within, if messages did not slow compute", "within, if communication cost nothing"
    return table(["what", "wanted", "runs", "within", "median error", *crude], rows)


def _beyond(groups: Predictions) -> list[Predicted]:
    """The steps whose predictions are beyond the marks, the worst first."""
    some = [each for each, _ in steps_of(groups) if abs(each.error) > each.case.mark]
    return sorted(some, key=lambda each: -abs(each.error))


def _worst(groups: Predictions) -> str:
    lines = [
        f"- {(case := each.case).model} on {case.devices}, {_run(case)}, {percent(each.error)}: {case.why}"
        for each in _beyond(groups)
    ]
    return "\n".join([f"The {len(lines)} steps beyond the marks, the worst first:", "", *lines])


def _steps(title: str, members: Predictions) -> str:
    group, rows = members[0][0], []
    for each, told in members:
        for i, run in enumerate(told):
            case = run.case
            if case.seconds is None:
                continue
            error = "the smallest" if i == 0 else "fits the link" if i < each.judged else percent(run.error)
            beyond = f"{(case.seconds - run.alone_s) * 1e3:,.0f}, {(run.step_s - run.alone_s) * 1e3:,.0f}"
            rows.append(
                [case.model, case.devices, _run(case), f"{case.seconds:.4g}", f"{run.step_s:.4g}", error, beyond]
            )
    beyond = "beyond computing: published, predicted ms"
    headings = "model", "devices", "run", "published s", "predicted s", "error", beyond
    text = f"### {title}\n\n[Source]({group.url}). {group.network}.\n\n{table(headings, rows)}"
    if group.fits_link:
        text += f"\n\nThe fitted rate is {members[0][1][0].case.card_gbit:.0f} Gbit/s per device."
    return text


def _pairs(groups: Predictions) -> list[tuple[Predicted, Predicted]]:
    """The smallest run and each other one, where memory is published for both."""
    return [(told[0], each) for _, told in groups for each in told[1:] if told[0].case.gib and each.case.gib]


def _difference(few: Predicted, many: Predicted) -> tuple[float, float, float]:
    """GiB that a device needs less with many devices: published, predicted, error."""
    published, predicted = (few.case.gib or 0.0) - (many.case.gib or 0.0), (few.reserved - many.reserved) / GIB
    return published, predicted, predicted / published - 1


def _memory(groups: Predictions) -> str:
    rows = []
    for few, many in _pairs(groups):
        one, other, (published, predicted, error) = few.case, many.case, _difference(few, many)
        rows.append([
            f"{one.model}, {one.note}", f"{one.devices}, {other.devices}", f"{one.gib:.1f}, {other.gib:.1f}",
            f"{few.reserved / GIB:.1f}, {many.reserved / GIB:.1f}", f"{published:.2f}", f"{predicted:.2f}",
            percent(error),
        ])  # fmt: skip
    return table(["model", "devices", "published", "predicted", "difference published", "predicted", "error"], rows)


def _verdicts(groups: Predictions) -> str:
    words = {True: "fits", False: "out of memory"}
    rows = [
        [case.model, case.devices, _run(case), f"{each.needed / GIB:.1f}", f"{case.device.memory_gib:.0f}",
         words[each.fits], words[case.fits]]
        for _, told in groups for each in told if not ((case := each.case).fits and each.fits)
    ]  # fmt: skip
    return table(["model", "devices", "run", "predicted GiB", "of", "predicted", "published"], rows)


_RECOMPUTED = {"none": "", "half": ", half recomputed", "full": ", recomputed", "selective": ", selective"}


def _run(case: Case) -> str:
    """Return the run in words."""
    words = [case.strategy, f"batch {case.batch}"]
    words += [f"× {case.micro_steps}"] if case.micro_steps > 1 else []
    words += [f"of {case.sequence:,}"] if case.sequence else []
    text = " ".join(words) + _RECOMPUTED.get(str(case.recompute), f", {case.recompute} blocks recomputed")
    return text + (", TCP" if case.tcp else "") + (f", {case.note}" if case.note else "")


if __name__ == "__main__":
    main()
