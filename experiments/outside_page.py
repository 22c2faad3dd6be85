"""The page docs/outside.md: published runs beside their predictions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from statistics import median

from experiments.markdown import head, percent, row
from experiments.outside_cases import INTERFERENCE, Case, Group, Predicted, read, read_collectives, read_layers
from mdcs.sizes import GIB, MIB

MEMORY_MARK = 0.08
"""Wanted error of a difference of memory."""

_HEAD = f"""# Published runs, predicted

<!-- Written by `mdcs outside` from experiments/published.yaml. Change these, not this page. -->

Steps and memory that others have measured on clusters of 1 to 256 GPUs, beside what mdcs predicts of them. mdcs measured
nothing here. All runs that were collected are shown.

**How.** A profile is calculated from a model, layer by layer: parameters, operations, bytes that are kept. A link is calculated
from a cluster. One strategy for all units and the schedule `wfbp` stand for the published loop: `dp` for Horovod, `fsdp` and
`hsdp` for FSDP, which gathers one unit ahead. The simulator replays the plan, as it replays every plan.

**What is taken from a table.** The first run of each group, the smallest, says how many operations per second the device
reaches. It is not judged. All others of the group are predicted with this one number. Where a publication does not tell its
network, the text says what is assumed. YaFSDP's is fitted to one more run, which is not judged either.

**What is not taken from a table.** Latencies and efficiencies of rings are the constants of
[NCCL's own cost model](https://github.com/NVIDIA/nccl/blob/01afd20a77b5804e0ecf1042509dd9d20ebf9e93/src/graph/tuning.cc).
While a message is in flight, compute is {100 * INTERFERENCE:.1f} % slower, the average of
[a study](https://arxiv.org/abs/2507.03114) of other runs. One TCP stream carries 13.7 Gbit/s
([iperf](https://github.com/bytedance/byteps/issues/29)).

**Memory.** The allocator keeps a pool per stream, so what is reserved is the sum of each category's own peak. Whether a run fits
is judged by the peak of what is allocated, half a GiB of CUDA context and the buffers of NCCL.
"""

_STEPS = """## Steps

The last column is what a step takes beyond computing alone: exposed communication, slower computing and the update.
"""

_VERDICTS = """## What runs out of memory

Of {} runs, these are published or predicted to run out of memory. That MPT-1b does not fit with a batch of 10 is not said, but
its table has batches of 8 up to 16 devices, and of 10 from 32 on. On H100 the replay needs 2 % too much for its batch of 20.
"""

_LEFT_OUT = """## What is not predicted

- Runs without a smaller run to compare with: BytePS and Horovod on two V100, torchao and lightning-thunder on 8 H100,
  transformers on 8 B200.
- Runs whose model is not told exactly: DeepSpeed's RoBERTa-10B and 50B, the 3B of torch-xpu-ops.
- Horovod over an all-reduce of the CPU, DataParallel, sequence and tensor parallelism, and YaFSDP's own loop.
- Data loading, slow ranks and whatever else grows with the number of devices. mdcs knows nothing of them, and published steps
  grow by 1 to 7 % from 16 to 128 devices where it predicts that nearly all communication is hidden.
"""

Predictions = list[tuple[Group, list[Predicted]]]


def page() -> str:
    """The page as Markdown."""
    groups = [(group, group.predictions()) for group in read()]
    undisturbed = [(group, group.predictions()) for group in (each.without_interference() for each, _ in groups)]
    lines = [_HEAD, "## How many are right", "", *summary(groups, undisturbed), "", *_worst(groups), _STEPS]
    timed = [(group, told) for group, told in groups if group.runs[0].seconds]
    for title, members in itertools.groupby(timed, lambda pair: pair[0].title):
        lines += _steps(title, list(members))
    return "\n".join([*lines, *_memory(groups), *_verdicts(groups), *_collectives(), *_layers(), _LEFT_OUT])


def steps_of(groups: Predictions) -> Iterator[tuple[Predicted, float]]:
    """The judged steps, each with the error of predicting that computing is all."""
    for group, told in groups:
        first = told[0]
        for each in told[group.judged :]:
            if each.case.seconds and first.case.seconds:
                yield each, first.case.seconds * each.alone_s / first.alone_s / each.case.seconds - 1


def summary(groups: Predictions, undisturbed: Predictions) -> list[str]:
    """A table of how many predictions are within the marks, and of how many cruder ones would be."""
    crude = "within, if messages did not slow compute", "within, if communication cost nothing"
    lines = head("what", "wanted", "runs", "within", "median error", *crude)
    for name, mark, tcp in (("step, RDMA and NVLink", 0.1, False), ("step, TCP", 0.2, True)):
        some = [(abs(each.error), abs(hidden)) for each, hidden in steps_of(groups) if each.case.tcp == tcp]
        other = [abs(each.error) for each, _ in steps_of(undisturbed) if each.case.tcp == tcp]
        within, hidden = (sum(pair[i] <= mark for pair in some) for i in range(2))
        apart = sum(error <= mark for error in other)
        middle = median(error for error, _ in some)
        lines.append(row(name, f"± {mark * 100:.0f} %", len(some), within, f"{middle * 100:.1f} %", apart, hidden))
    errors = [abs(_difference(*pair)[2]) for pair in _pairs(groups)]
    within = sum(error <= MEMORY_MARK for error in errors)
    name, mark = "difference of memory", MEMORY_MARK
    lines.append(row(name, f"± {mark * 100:.0f} %", len(errors), within, f"{median(errors) * 100:.1f} %", "", ""))
    every = [each for _, told in groups for each in told]
    for name, fits in (("fits", True), ("runs out of memory", False)):
        alike = [each for each in every if each.case.fits == fits]
        lines.append(row(name, "all", len(alike), sum(each.fits == fits for each in alike), "", "", ""))
    return lines


def _worst(groups: Predictions) -> list[str]:
    beyond = sorted((each for each, _ in steps_of(groups) if abs(each.error) > each.case.mark), key=lambda each: -abs(each.error))
    lines = [f"The {len(beyond)} steps beyond the marks, the worst first:", ""]
    return [*lines, *(f"- {_name(each.case)}, {percent(each.error)}: {each.case.why}" for each in beyond), ""]


def _steps(title: str, members: Predictions) -> list[str]:
    group = members[0][0]
    lines = [f"### {title}", "", f"[Source]({group.url}). {group.network}.", ""]
    lines += head("model", "devices", "run", "published s", "predicted s", "error", "beyond computing: published, predicted ms")
    for each, told in members:
        for i, run in enumerate(told):
            case = run.case
            if case.seconds is None:
                continue
            error = "the smallest" if i == 0 else "fits the link" if i < each.judged else percent(run.error)
            beyond = f"{(case.seconds - run.alone_s) * 1e3:,.0f}, {(run.step_s - run.alone_s) * 1e3:,.0f}"
            lines.append(row(case.model, case.devices, _run(case), f"{case.seconds:.4g}", f"{run.step_s:.4g}", error, beyond))
    if group.fits_link:
        lines += ["", f"The fitted rate is {members[0][1][0].case.card_gbit:.0f} Gbit/s per device."]
    return [*lines, ""]


def _pairs(groups: Predictions) -> list[tuple[Predicted, Predicted]]:
    """The smallest run and each other one, where memory is published for both."""
    return [(told[0], each) for _, told in groups for each in told[1:] if told[0].case.gib and each.case.gib]


def _difference(few: Predicted, many: Predicted) -> tuple[float, float, float]:
    """GiB that a device needs less with many devices: published, predicted, error."""
    published, predicted = (few.case.gib or 0.0) - (many.case.gib or 0.0), (few.reserved - many.reserved) / GIB
    return published, predicted, predicted / published - 1


def _memory(groups: Predictions) -> list[str]:
    lines = ["## Memory", "", "GiB that are reserved on a device, and how many fewer they are on more devices:", ""]
    lines += head("model", "devices", "published", "predicted", "difference published", "predicted", "error")
    for few, many in _pairs(groups):
        published, predicted, error = _difference(few, many)
        both = f"{few.reserved / GIB:.1f}, {many.reserved / GIB:.1f}"
        name, devices = f"{few.case.model}, {few.case.note}", f"{few.case.devices}, {many.case.devices}"
        said = f"{few.case.gib:.1f}, {many.case.gib:.1f}"
        lines.append(row(name, devices, said, both, f"{published:.2f}", f"{predicted:.2f}", percent(error)))
    why = [many.case.why for few, many in _pairs(groups) if abs(_difference(few, many)[2]) > MEMORY_MARK]
    return [*lines, "", *why, ""]


def _verdicts(groups: Predictions) -> list[str]:
    every = [each for _, told in groups for each in told]
    lines = [_VERDICTS.format(len(every)), *head("model", "devices", "run", "predicted GiB", "of", "predicted", "published")]
    words = {True: "fits", False: "out of memory"}
    for each in every:
        case = each.case
        if not (case.fits and each.fits):
            needed, has = f"{each.needed / GIB:.1f}", f"{case.device.memory_gib:.0f}"
            lines.append(row(case.model, case.devices, _run(case), needed, has, words[each.fits], words[case.fits]))
    return [*lines, ""]


def _collectives() -> list[str]:
    about = "Single collectives on eight devices. Rings know no sums in the switch, as H200s do. Not judged:"
    lines = ["## Collectives", "", about, ""]
    lines += head("collective", "device", "MiB", "published µs", "predicted µs", "error")
    for each in read_collectives():
        of = f"[{each.what}]({each.url})"
        lines += [
            row(of, each.device, mib, f"{said * 1e6:.1f}", f"{told * 1e6:.1f}", percent(told / said - 1))
            for mib, said, told in each.compared()
        ]
    return [*lines, ""]


def _layers() -> list[str]:
    data, layers = read_layers()
    of = f"{data['model']} with {data['sequence']:,} tokens"
    lines = ["## Layers", "", f"Bytes of {of}, as [Galvatron]({data['url']}) measured them. Not judged:", ""]
    lines += head("what", "published MiB", "predicted MiB", "error")
    root, block, last = layers[0], layers[1], layers[-1]
    predicted = {
        "parameters": ("parameters of a block, 32 bit", 4 * block.parameters),
        "kept": ("what a block keeps", block.kept),
        "recomputed": ("what a block keeps if it recomputes", root.output),
        "ends": ("states of embedding and head", 16 * (root.parameters + last.parameters)),
        "logits": ("what embedding and head keep", root.output + last.kept),
    }
    for key, (what, size) in predicted.items():
        said, told = data["mib"][key], size / MIB
        lines.append(row(what, f"{said:,.0f}", f"{told:,.0f}", percent(told / said - 1)))
    why = "What is measured of the head is about the logits in 32 bit alone. The prediction keeps them in 16 bit, too."
    return [*lines, "", why, ""]


def _name(case: Case) -> str:
    return f"{case.model} on {case.devices}, {_run(case)}"


_RECOMPUTED = {"none": "", "half": ", half recomputed", "full": ", recomputed", "selective": ", selective"}


def _run(case: Case) -> str:
    """Return the run in words."""
    words = [case.strategy, f"batch {case.batch}"]
    words += [f"× {case.micro_steps}"] if case.micro_steps > 1 else []
    words += [f"of {case.sequence:,}"] if case.sequence else []
    text = " ".join(words) + _RECOMPUTED.get(str(case.recompute), f", {case.recompute} blocks recomputed")
    return text + (", TCP" if case.tcp else "") + (f", {case.note}" if case.note else "")
