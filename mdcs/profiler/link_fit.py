"""Fit the costs of messages on the link to their times: latency α or gap, β, and what compute adds.

A message alone on an idle link has the latency α, and waits for the last rank; one behind another has the gap.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mdcs.plan.plan import Plan
from mdcs.profile.link import Kind, Link, operation_name
from mdcs.profile.schema import Profile
from mdcs.profiler.regression import Estimates, Term, estimate
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import PeriodTrace, Span, union

_IDLE_S = 1e-3  # a link that was idle for longer has let the ranks drift apart
_TOGETHER = 4  # messages in flight share the link in any way, so the times of at least so many are added
_ALIKE = 2  # two messages that differ in bytes by less than this factor gain alike from what they share
_LARGEST_BLOCK, _SATURATED = 16 * MIB, 0.97
_MANY = 24  # messages on an idle link that determine its latency: the waits of a few for other ranks look like it


def link_costs(profile: Profile, alone: Sequence[Row], behind: Sequence[Row]) -> Estimates:
    """Return gap, β and α of each operation, what compute adds to a message, and the skew.

    Messages ``behind`` others give all but α and the skew, which are what messages ``alone`` on the link take beyond.
    """
    link = profile.link
    kinds = {name: kind for row in (*alone, *behind) for name, kind in row.kinds.items()}
    never_behind = kinds.keys() - {name for row in behind for name in row.kinds}
    terms = [] if link.emulated else [Term(f"gap of {name}", link.gap_of(kind)) for name, kind in kinds.items()]
    terms += [Term("message_seconds"), Term("seconds_per_byte")]
    if not link.emulated:
        terms += [Term(f"beta of {name}", link.beta_of(kind), is_effect=False) for name, kind in kinds.items()]
    known = {f"gap of {name}": link.gap_of(kind) for name, kind in kinds.items()}
    known |= {f"beta of {name}": link.beta_of(kind) for name, kind in kinds.items()}
    rates = _estimate(terms, [*behind, *(row for row in alone if row.kinds.keys() & never_behind)], known)
    known |= rates.values
    known = {key: value for key, value in known.items() if not key.startswith("gap")}
    known |= {f"alpha of {name}": link.alpha_of(kind) for name, kind in kinds.items()}
    often = [] if link.emulated else [n for n in kinds if sum(n in row.kinds for row in alone) >= _MANY]
    terms = [Term(f"alpha of {name}", known[f"alpha of {name}"]) for name in often]
    terms.append(Term("skew_seconds", profile.contention.skew_seconds))
    waits = _estimate(terms, alone, known)
    return Estimates(rates.values | waits.values, rates.errors | waits.errors)


class Row(NamedTuple):
    """Messages that the link serves one behind the other, and the seconds of all: how often each cost counts."""

    seconds: float
    kinds: dict[str, Kind]
    costs: dict[str, float]

    @classmethod
    def of(cls, served: Sequence[Service]) -> Row:
        """Return the row of these messages."""
        costs, kinds = defaultdict[str, float](float), {operation_name(each.kind): each.kind for each in served}
        for each in served:
            name = operation_name(each.kind)
            costs[f"gap of {name}"] += 1
            costs[f"alpha of {name}"] += 1
            costs[f"beta of {name}"] += each.wire
            costs["message_seconds"] += each.computing
            costs["seconds_per_byte"] += each.computing * each.wire
            costs["skew_seconds"] += each.idle > _IDLE_S
        return cls(sum(each.seconds for each in served), kinds, costs)


def _estimate(terms: Sequence[Term], rows: Sequence[Row], known: dict[str, float]) -> Estimates:
    """Return the estimates of these terms; other costs are ``known``."""
    if not rows:
        return Estimates({term.name: term.prior for term in terms}, {})
    named = {term.name for term in terms}
    x = np.array([[row.costs[term.name] for term in terms] for row in rows])
    fixed = [sum(row.costs[name] * value for name, value in known.items() if name not in named) for row in rows]
    y = np.array([row.seconds for row in rows]) - fixed
    size = np.array([sum(value for name, value in row.costs.items() if name.startswith("beta")) for row in rows])
    scale = np.sqrt(size / size.mean() + 0.1)  # longer ones vary more
    return estimate(terms, x / scale[:, None], y / scale)


class Service(NamedTuple):
    """The time of a message on the link.

    - ``wire``: bytes. ``seconds``: from its start, or the end of the message before, to its end.
    - ``idle``: seconds for which the link was idle before; 0: the message before was still in flight.
    - ``computing``: fraction of the time in which compute ran.
    """

    kind: Kind
    wire: int
    seconds: float
    idle: float
    computing: float


def served(plan: Plan, trace: PeriodTrace, sizes: Sequence[int]) -> Iterator[list[Service]]:
    """Yield the messages of a period as the link serves them, a few consecutive ones together.

    ``sizes``: wire bytes of each message.
    """
    if not trace.messages:
        return
    starts, ends = np.array(trace.messages).T
    begins = np.maximum(starts[1:], ends[:-1])
    following = [(begin + trace.period_s, end + trace.period_s) for begin, end in trace.slots]
    computing = np.diff(covered([*trace.slots, *following], np.array([begins, ends[1:]])), axis=0)[0]
    together: list[Service] = []
    rows = zip(begins.tolist(), ends[1:].tolist(), (starts[1:] - ends[:-1]).tolist(), computing.tolist(), strict=True)
    for message, size, (begin, end, idle, beside) in zip(plan.messages[1:], sizes[1:], rows, strict=True):
        if end <= begin:
            continue
        ends_alike = together and max(size, together[-1].wire) < _ALIKE * min(size, together[-1].wire)
        if together and (idle > 0 or len(together) >= (_TOGETHER if ends_alike else 2 * _TOGETHER)):
            yield together
            together = []
        together.append(Service(message.kind, size, end - begin, max(0.0, idle), beside / (end - begin)))
    if together:
        yield together


def occupancy(profile: Profile, found: Estimates) -> dict[str, float]:
    """Return how long messages occupy the link at least while something computes, of what compute adds to them."""
    added = {name: found.values[name] for name in ("message_seconds", "seconds_per_byte") if name in found.errors}
    if not any(added.values()):
        return dict.fromkeys(added, 0.0)
    link = profile.link
    kinds = [kind for kind in link.kinds if f"beta of {operation_name(kind)}" in found.values] or [*link.kinds]
    return {
        "message_seconds": statistics.mean(map(link.gap_of, kinds)) + added.get("message_seconds", 0.0),
        "seconds_per_byte": statistics.mean(map(link.beta_of, kinds)) + added.get("seconds_per_byte", 0.0),
    }


def with_costs(profile: Profile, found: Estimates) -> Link:
    """Return the link with these costs of each operation, and the block that follows from them."""
    link = profile.link
    if link.emulated:
        return link

    def column(name: str, before: tuple[float, ...]) -> tuple[float, ...]:
        keys = [f"{name} of {operation_name(kind)}" for kind in link.kinds]
        return tuple(found.values.get(key, value) for key, value in zip(keys, before, strict=True))

    known = [f"beta of {operation_name(kind)}" in found.errors for kind in link.kinds]
    gap, beta = column("gap", link.gap), column("beta", link.beta)
    if ratios := [b / a for a, b, is_known in zip(link.beta, beta, known, strict=True) if is_known and a]:
        rate = statistics.median(ratios)  # of operations that no plan has: assumed as far off as the others were
        beta = tuple(b if is_known else rate * b for b, is_known in zip(beta, known, strict=True))
    blocks = [float(link.block)]
    if any(key.startswith("gap") for key in found.errors):
        sent = [profile.wire(kind, MIB) / MIB for kind in link.kinds]
        blocks = [g / (b * s) * _SATURATED / (1 - _SATURATED) for g, b, s in zip(gap, beta, sent, strict=True) if b * s]
    block = min(max(MIB, int(max(blocks, default=0))), _LARGEST_BLOCK)
    return dataclasses.replace(link, alpha=column("alpha", link.alpha), beta=beta, gap=gap, block=block)


def covered(spans: Sequence[Span], at: np.ndarray) -> np.ndarray:
    """Return how many seconds of the spans lie before each time."""
    edges = np.array(union(spans)).reshape(-1, 2)
    if not len(edges):
        return np.zeros_like(at)
    until = np.cumsum(np.diff(edges, axis=1))
    return np.interp(at, edges.ravel(), np.array([np.roll(until, 1) * (np.arange(len(until)) > 0), until]).T.ravel())
