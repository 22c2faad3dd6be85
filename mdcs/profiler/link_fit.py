"""Fit the costs of messages on the link to their times: latency α or gap, β, and what compute adds.

A message alone on an idle link has the latency α, and waits for the last rank; one behind another has the gap. Fits are
robust least squares with standard errors (:func:`estimate`).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from mdcs.plan.plan import Plan
from mdcs.profile.link import Kind, Link, operation_name
from mdcs.profile.schema import Profile
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import PeriodTrace, Span, union

_IDLE_S = 1e-3  # a link that was idle for longer has let the ranks drift apart
_TOGETHER = 4  # messages in flight share the link in any way, so the times of at least so many are added
_ALIKE = 2  # two messages that differ in bytes by less than this factor gain alike from what they share
_LARGEST_BLOCK, _SATURATED = 16 * MIB, 0.97
_MANY = 24  # messages on an idle link that determine its latency: the waits of a few for other ranks look like it

_ROUNDING = 1e-9  # of the largest y: errors below it are rounding
_INFLATION = 50.0  # of a coefficient's variance: above it, other columns can stand for its own
_SIGNIFICANT = 3.0  # standard errors above 0
_HUBER, _PASSES = 4.0, 12  # deviations from which on a row counts less; passes of reweighting
_NORMAL = 0.6745  # median of absolute errors, in standard deviations


class Estimates(NamedTuple):
    """Coefficients of a linear model, by name.

    - ``values``: where the rows do not determine a coefficient, its prior.
    - ``errors``: standard errors of the coefficients that are determined.
    """

    values: dict[str, float]
    errors: dict[str, float]


@dataclass(frozen=True)
class Term:
    """A coefficient of a linear model, at least 0.

    - ``prior``: its value where the rows do not determine it.
    - ``is_effect``: a coefficient that is not significantly above 0 is 0, unless it may be as large as its prior, and
      then stays there. Other coefficients stay at their prior.
    """

    name: str
    prior: float = 0.0
    is_effect: bool = True


def estimate(terms: Sequence[Term], x: np.ndarray, y: np.ndarray, means: int = 0) -> Estimates:
    """Return the coefficients of y = x · coefficients. Rows that are far from the fit count less.

    The rows do not determine a coefficient if its column is 0, or if the other columns can stand for it. Of several
    columns that can stand for each other, the first is the one that stays at its prior.

    - ``x`` [rows, terms], ``y`` [rows]: with errors of about the same size in all rows.
    - ``means``: means that were subtracted from rows.
    """
    values, errors = {term.name: term.prior for term in terms}, dict[str, float]()
    free = [j for j in range(len(terms)) if np.abs(x[:, j]).max(initial=0.0) > 0]
    del free[: max(0, len(free) + means + 1 - len(y))]
    while (tied := _tied(x[:, free])) is not None:
        del free[tied]
    while free:
        known = np.array([0.0 if j in free else values[term.name] for j, term in enumerate(terms)])
        found, deviations = _robust(x[:, free], y - x @ known, means)
        weakest = int(np.argmin(found / deviations))
        if found[weakest] >= _SIGNIFICANT * deviations[weakest]:
            values |= {terms[j].name: float(value) for j, value in zip(free, found, strict=True)}
            errors |= {terms[j].name: float(each) for j, each in zip(free, deviations, strict=True)}
            break
        term = terms[free.pop(weakest)]
        if term.is_effect:
            is_likely = found[weakest] + _SIGNIFICANT * deviations[weakest] >= term.prior
            values[term.name], errors[term.name] = term.prior if is_likely else 0.0, float(deviations[weakest])
    return Estimates(values, errors)


def _tied(x: np.ndarray) -> int | None:
    """Return the first column that the others can stand for, or None."""
    if x.shape[1] < 2:
        return None
    scaled = x / np.linalg.norm(x, axis=0)
    values, vectors = np.linalg.eigh(scaled.T @ scaled)
    inflation = (vectors**2 / np.maximum(values, 1e-12)).sum(axis=1)
    tied = np.flatnonzero(inflation > _INFLATION)
    return int(tied[0]) if tied.size else None


def _robust(x: np.ndarray, y: np.ndarray, means: int) -> tuple[np.ndarray, np.ndarray]:
    """Return coefficients and their standard errors, by least squares with Huber's weights."""
    sizes = np.linalg.norm(x, axis=0)  # columns of very different sizes, as bytes beside numbers
    x, weights = x / sizes, np.ones_like(y)
    for _ in range(_PASSES):
        weighted = x * weights[:, None]
        found = np.linalg.solve(weighted.T @ x, weighted.T @ y)  # columns that others can stand for are not in x
        off = np.abs(y - x @ found)
        scale = max(float(np.median(off)) / _NORMAL, _ROUNDING * float(np.abs(y).max()), 1e-100)
        weights = 1 / np.maximum(1.0, off / (_HUBER * scale))
    freedom = max(1.0, float(weights.sum()) - x.shape[1] - means)
    variance = max(float((weights * off**2).sum()) / freedom, scale**2)
    inverse = np.linalg.inv((x * weights[:, None]).T @ x)
    return found / sizes, np.sqrt(variance * np.diag(inverse)) / sizes


# ---- the link


def link_costs(profile: Profile, alone: Sequence[Row], behind: Sequence[Row]) -> Estimates:
    """Return gap, β and α of each operation, what compute adds to a message, and the skew.

    Messages ``behind`` others give all but α and the skew, which are what messages ``alone`` on the link take beyond.
    """
    link = profile.link
    kinds = {name: kind for row in (*alone, *behind) for name, kind in row.kinds.items()}
    never_behind = kinds.keys() - {name for row in behind for name in row.kinds}
    gaps = {f"gap of {name}": link.gap_of(kind) for name, kind in kinds.items()}
    betas = {f"beta of {name}": link.beta_of(kind) for name, kind in kinds.items()}
    alphas = {f"alpha of {name}": link.alpha_of(kind) for name, kind in kinds.items()}
    terms = [Term("message_seconds"), Term("seconds_per_byte")]
    if not link.emulated:
        slopes = [Term(name, beta, is_effect=False) for name, beta in betas.items()]
        terms = [*(Term(name, gap) for name, gap in gaps.items()), *terms, *slopes]
    rates = _estimate(terms, [*behind, *(row for row in alone if row.kinds.keys() & never_behind)], gaps | betas)
    known = betas | {name: value for name, value in rates.values.items() if name not in gaps} | alphas
    often = [] if link.emulated else [n for n in kinds if sum(n in row.kinds for row in alone) >= _MANY]
    terms = [Term(f"alpha of {name}", alphas[f"alpha of {name}"]) for name in often]
    terms.append(Term("skew_seconds", profile.contention.skew_seconds))
    waits = _estimate(terms, alone, known)
    return Estimates(rates.values | waits.values, rates.errors | waits.errors)


@dataclass
class Row:
    """Messages that the link serves one behind the other: the seconds of all, and how often each cost counts.

    - ``count``: messages. ``wire``, ``idle``: of the last one, its bytes, and the seconds for which the link was idle
      before it; 0: the message before was still in flight.
    """

    seconds: float = 0.0
    kinds: dict[str, Kind] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    count: int = 0
    wire: int = 0
    idle: float = 0.0

    @property
    def is_alone(self) -> bool:
        """Return whether it is one message on an idle link."""
        return self.count == 1 and self.idle > 0

    def add(self, kind: Kind, wire: int, seconds: float, idle: float, computing: float) -> None:
        """Add a message. ``computing``: fraction of its ``seconds`` in which compute ran."""
        name = operation_name(kind)
        self.kinds[name] = kind
        self.count, self.wire, self.idle = self.count + 1, wire, idle
        self.seconds += seconds
        for cost, value in (("gap", 1), ("alpha", 1), ("beta", wire)):
            self.costs[f"{cost} of {name}"] += value
        self.costs["message_seconds"] += computing
        self.costs["seconds_per_byte"] += computing * wire
        self.costs["skew_seconds"] += idle > _IDLE_S


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


def served(plan: Plan, trace: PeriodTrace, sizes: Sequence[int]) -> Iterator[Row]:
    """Yield the messages of a period as the link serves them, a few consecutive ones together.

    ``sizes``: wire bytes of each message. The time of one is from its start, or the end of the message before, on.
    """
    if not trace.messages:
        return
    starts, ends = np.array(trace.messages).T
    begins = np.maximum(starts[1:], ends[:-1])
    following = [(begin + trace.period_s, end + trace.period_s) for begin, end in trace.slots]
    computing = np.diff(covered([*trace.slots, *following], np.array([begins, ends[1:]])), axis=0)[0]
    row, times = Row(), np.array([ends[1:] - begins, starts[1:] - ends[:-1], computing]).T.tolist()
    for message, size, (seconds, idle, beside) in zip(plan.messages[1:], sizes[1:], times, strict=True):
        if seconds <= 0:
            continue
        ends_alike = max(size, row.wire) < _ALIKE * min(size, row.wire)
        if row.count and (idle > 0 or row.count >= (_TOGETHER if ends_alike else 2 * _TOGETHER)):
            yield row
            row = Row()
        row.add(message.kind, size, seconds, max(0.0, idle), beside / seconds)
    if row.count:
        yield row


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
    return replace(link, alpha=column("alpha", link.alpha), beta=beta, gap=gap, block=block)


def covered(spans: Sequence[Span], at: np.ndarray) -> np.ndarray:
    """Return how many seconds of the spans lie before each time."""
    edges = np.array(union(spans)).reshape(-1, 2)
    if not len(edges):
        return np.zeros_like(at)
    lengths = np.diff(edges, axis=1)
    return np.interp(at, edges.ravel(), np.cumsum(np.hstack([np.zeros_like(lengths), lengths])))
