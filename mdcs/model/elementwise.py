"""Trials of an optimizer: whether it can run on shards, and the state that it keeps there.

An elementwise optimizer gives a flat piece of parameters the values that it gives the whole parameter. The trial
compares both over a few steps of the optimizer's own class, with the options and the shapes of each of its groups. Of
an optimizer that looks at a parameter as a whole (its rows, its norm), a second trial finds whether it updates each
parameter on its own: such parameters are updated whole, each by one rank. Others are refused.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mdcs.model.flat_optimizer import Counts, FlatOptimizer, Options, is_plain, numbers_of, options_of, same_options
from mdcs.model.units import UnsupportedModel

FUNCTIONAL = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Classes that need no trial: torch's functions update their shards."""

_SCALES = 1, 1, 1e-3, 1e3, 1  # of the values and of each step's gradients: limits may be anywhere
_MOST = 1 << 16  # elements of a tensor in the trial, more than the sizes from which optimizers differ
_FEWEST = 192  # elements that are cut into pieces
_RATE = 1e-2  # where a schedule begins with 0
_ROUNDING = 1e-9  # of float64, in which the trial runs
_KEEP = "in another way for each piece of the parameters: keep it in self.state[p]"
_REMEDY = " (of one that stacks parameters: put each into a parameter group of its own)"


@dataclass(frozen=True)
class StateLayout:
    """State that an optimizer keeps for a flat tensor, or, if ``whole``, for a whole parameter in its shape.

    - ``per_element``: key -> type of the state that has the tensor's shape; None: the tensor's type.
    - ``replicated``: keys of the other state, which is the same for every piece of a parameter: step counts, numbers;
      of whole parameters also state of another shape, such as a sum per row. ``plain``: those with Python numbers.
    - ``fixed``: bytes of the replicated tensors.
    - ``scratch``: temporary tensors of an update, in copies of the tensor: estimated, for updates that are not
      measured.
    - ``counts``: a step changes numbers of groups or object (:class:`mdcs.model.flat_optimizer.Counts`).
    """

    per_element: Mapping[str, torch.dtype | None] = field(default_factory=dict)
    replicated: frozenset[str] = frozenset()
    plain: frozenset[str] = frozenset()
    fixed: int = 0
    scratch: int = 0
    whole: bool = False
    counts: bool = False

    def tensors(self, width: int) -> float:
        """Return the bytes of the state per element, in copies of a tensor of ``width`` bytes per element."""
        total = sum(1 if dtype is None else dtype.itemsize / width for dtype in self.per_element.values())
        return int(total) if total == int(total) else total

    def __or__(self, other: StateLayout) -> StateLayout:
        replicated = self.replicated | other.replicated
        per_element = {k: v for k, v in {**self.per_element, **other.per_element}.items() if k not in replicated}
        return StateLayout(
            per_element, replicated, self.plain | other.plain, max(self.fixed, other.fixed),
            max(self.scratch, other.scratch), self.whole or other.whole, self.counts or other.counts,
        )  # fmt: skip


def state_layouts(optimizer: torch.optim.Optimizer) -> list[tuple[tuple[int, ...], StateLayout]]:
    """Return the groups (by index) that are updated on flat pieces, and those updated whole, with the most state that
    one of them keeps. Raises UnsupportedModel, naming class and reason, for an optimizer that cannot run on shards.
    """
    groups = tuple(range(len(optimizer.param_groups)))
    if type(optimizer) in FUNCTIONAL:
        return [(groups, _known(optimizer))]
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise _refused(optimizer, "its step() needs a closure, which runs forward and backward again")
    layouts = [_tried(optimizer, group) for group in optimizer.param_groups]
    kinds = [tuple(i for i in groups if layouts[i].whole is whole) for whole in (False, True)]
    return [(members, functools.reduce(operator.or_, [layouts[i] for i in members])) for members in kinds if members]


_TRIED: dict[tuple[Any, ...], StateLayout] = {}
"""Results by class, options and shapes: a start asks several times, and groups are alike."""


def _tried(optimizer: torch.optim.Optimizer, group: Options) -> StateLayout:
    """Return the state of a parameter group, on flat pieces if these become what whole parameters become."""
    options = {k: v for k, v in options_of(group).items() if k != "initial_lr"}
    if not float(options.get("lr", _RATE)):
        options["lr"] = optimizer.defaults.get("lr") or _RATE
    counts = Counter(_smaller(p.shape) for p in group["params"] if p.numel()) or Counter({(12, 16): 1})
    shapes = [shape for shape, count in counts.items() for _ in range(min(count, 2))]
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    device = torch.device("cpu") if device.type == "meta" else device
    elements = min(_MOST, sum(p.numel() for p in group["params"]))
    attributes = [(k, v) for k, v in vars(optimizer).items() if is_plain(v)]
    key = type(optimizer), *map(repr, (options, optimizer.defaults, attributes, shapes, elements, device))
    if key not in _TRIED:
        random = torch.random.fork_rng(devices=[])  # it may draw random numbers
        with random, torch.no_grad(), torch.compiler.set_stance("force_eager"), _NoMessages(optimizer):
            trial = _Trial(optimizer, options, shapes, device)
            try:
                _TRIED[key] = trial.in_pieces(elements)
            except _ActsOnWhole:
                _TRIED[key] = trial.one_by_one()
    return _TRIED[key]


def _smaller(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape of at most ``_MOST`` elements: the longest side is halved until it is one."""
    sides = list(shape) or [1]
    while math.prod(sides) > _MOST:
        longest = sides.index(max(sides))
        sides[longest] = -(-sides[longest] // 2)
    return tuple(sides)


def _known(optimizer: torch.optim.Optimizer) -> StateLayout:
    """SGD has one state tensor with momentum; Adam and AdamW two moments, a third with amsgrad, and a step count."""
    groups = optimizer.param_groups
    decayed = any(g["weight_decay"] for g in groups)
    if type(optimizer) is torch.optim.SGD:
        keys = ["momentum_buffer"] if any(g["momentum"] for g in groups) else []
        scratch = int(decayed) + int(any(g["nesterov"] for g in groups))
        layout = StateLayout(dict.fromkeys(keys), scratch=scratch)
    else:
        keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if any(g["amsgrad"] for g in groups) else ())]
        scratch = 2 + int(decayed and type(optimizer) is torch.optim.Adam)
        layout = StateLayout(dict.fromkeys(keys), frozenset({"step"}), fixed=4, scratch=scratch)
    return replace(layout, scratch=0) if any(g.get("fused") for g in groups) else layout


def _refused(
    optimizer: torch.optim.Optimizer, reason: str, kind: type[UnsupportedModel] = UnsupportedModel
) -> UnsupportedModel:
    return kind(f"optimizer {type(optimizer).__name__}: {reason}")


class _ActsOnWhole(UnsupportedModel):
    """A piece of a parameter becomes another than in the whole parameter."""


class _NoMessages(TorchDispatchMode):
    """Refuses collectives, before a rank waits for others that do not call them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self._optimizer = optimizer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise _refused(
                self._optimizer,
                "its step() sends messages, and mdcs does so itself: take its variant for one device "
                "(SingleDeviceMuonWithAuxAdam for MuonWithAuxAdam), or torch.optim.Muon",
            )
        return func(*args, **(kwargs or {}))


class _Trial:
    """A few steps on a group of parameters of these ``shapes``, which other ways to update it must give the same. One
    more parameter is in a group beside it, as a step may depend on all groups.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, options: Options, shapes: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        self._optimizer, self._options = optimizer, options
        self._refused = functools.partial(_refused, optimizer)
        random, own = torch.Generator().manual_seed(0), [*shapes, shapes[0]]
        self._start, *self._gradients = (
            [torch.randn(*shape, dtype=torch.float64, generator=random).to(device) * scale for shape in own]
            for scale in _SCALES
        )
        self._parameters = [torch.nn.Parameter(start.clone()) for start in self._start]
        self._states, self._counted = self._try("on a parameter it raises", self._together)
        if all(map(torch.equal, self._parameters, self._start)):
            raise self._refused("its step() does not change the parameters of its groups")
        for key, value in (item for state in self._states for item in state.items()):
            if value is not None and not isinstance(value, (Tensor, int, float)):
                raise self._refused(f"its state {key} is a {type(value).__name__}, neither a tensor nor a number")

    def _together(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Update all parameters; return their state, and the numbers of groups and object that have changed."""
        *parameters, beside = self._parameters
        made = same_options(self._optimizer, self._options, *parameters, beside=[beside])
        before = numbers_of(made)
        for gradients in self._gradients:
            for p, gradient in zip(self._parameters, gradients, strict=True):
                p.grad = gradient.clone()
            made.step()
        changed = {k: v for k, v in numbers_of(made).items() if before.get(k) != v}
        return [dict(made.state.get(p, {})) for p in self._parameters], changed

    def _apart(
        self, places: Sequence[Tensor], gradients_of: Callable[[list[Tensor]], Iterable[Tensor]]
    ) -> list[dict[str, Any]]:
        """Update tensors one after the other as the runtime does, with one object for all; return their state."""
        like = same_options(self._optimizer, self._options, torch.zeros_like(self._start[0]))
        counts = Counts(like) if self._counted else None
        made = FlatOptimizer(like, counts=counts is not None)
        states = [made.first_state(self._options, place) for place in places]
        for gradients in self._gradients:
            if counts is not None:
                counts.look_ahead()
            options = options_of(like.param_groups[0])
            for i, gradient in enumerate(gradients_of(gradients)):
                copied = gradient.clone()
                states[i] = dict(made.step(options, places[i], copied, states[i]))
                copied.fill_(torch.nan)  # no state may be a view of it
            if counts is not None:
                counts.move_on()
        numbers = numbers_of(like)
        counted = next((k for k, v in self._counted.items() if numbers.get(k) != v), None)
        if counted is not None:
            raise self._refused(f"its step() changes {counted}, {_KEEP}")
        return states

    # -- on flat pieces

    def in_pieces(self, elements: int) -> StateLayout:
        """Return the state of flat pieces. Raises _ActsOnWhole where pieces and whole differ. Parameters lie one after
        the other, again and again, as in units, so that the longest piece has ``elements`` at least.
        """
        own = sum(start.numel() for start in self._start)
        times = -(-2 * max(elements, _FEWEST) // own)

        def flat(tensors: Sequence[Tensor]) -> Tensor:
            return torch.cat([tensor.detach().flatten() for tensor in tensors]).repeat(times)

        end, updated = own * times, flat(self._parameters)
        cuts = 0, 7, end // 5, end // 2 + 1, end
        # the short one first: a matrix optimizer may need the square of a piece's bytes
        for count in (1, len(cuts) - 1):
            places, moved = [slice(a, b) for a, b in zip(cuts[:count], cuts[1:], strict=False)], flat(self._start)
            pieces = [moved[place] for place in places]
            apart = functools.partial(self._apart, pieces, lambda own: [flat(own)[place] for place in places])  # noqa: B023
            states = self._try("on a flat piece it raises", apart, _ActsOnWhole)
            if not _alike(updated[: cuts[count]], moved[: cuts[count]]):
                raise self._refused("a parameter differs when updated piece by piece", _ActsOnWhole)
        per_element: dict[str, torch.dtype | None] = {}
        replicated: dict[str, Any] = {}
        for key in dict.fromkeys(k for state in (*self._states, *states) for k, v in state.items() if v is not None):
            values, parts = [state.get(key) for state in self._states], [state.get(key) for state in states]
            if [getattr(v, "shape", None) for v in values] == [p.shape for p in self._parameters]:
                if [getattr(part, "shape", None) for part in parts] != [piece.shape for piece in pieces]:
                    raise self._refused(f"its {key} is not made piece by piece", _ActsOnWhole)
                if not _alike(flat(values), torch.cat(parts)):
                    raise self._refused(f"its {key} differs when updated piece by piece", _ActsOnWhole)
                per_element[key] = None if values[0].dtype == torch.float64 else values[0].dtype
            elif all(_alike(values[0], other) for other in (*values, *parts)):
                replicated[key] = values[0]
            else:
                raise self._refused(f"its {key} differs from piece to piece", _ActsOnWhole)
        plain = frozenset(key for key, value in replicated.items() if not isinstance(value, Tensor))
        fixed = sum(value.nbytes for value in replicated.values() if isinstance(value, Tensor))
        return StateLayout(
            per_element, frozenset(replicated), plain, fixed, len(per_element) + 2, counts=bool(self._counted)
        )  # fmt: skip

    # -- parameter by parameter

    def one_by_one(self) -> StateLayout:
        """Return the state of a parameter that is updated alone. Raises UnsupportedModel where this differs."""
        alone = [start.clone() for start in self._start]
        states = self._try(
            f"updated alone, a parameter makes it raise{_REMEDY}", lambda: self._apart(alone, lambda own: own)
        )
        layout = StateLayout(whole=True, counts=bool(self._counted))
        for p, state, q, own in zip(self._parameters, self._states, alone, states, strict=True):
            for key in [*state, *(k for k in own if k not in state)]:
                if not _alike(state.get(key), own.get(key)):
                    raise self._refused(f"its {key} differs when a parameter is updated alone{_REMEDY}")
            if not _alike(p.detach(), q):
                raise self._refused("a parameter differs when updated alone")
            known = {key: value for key, value in own.items() if value is not None}
            shaped = {k: v for k, v in known.items() if getattr(v, "shape", None) == q.shape}
            per_element = {k: None if v.dtype == q.dtype else v.dtype for k, v in shaped.items()}
            plain = frozenset(key for key, value in known.items() if not isinstance(value, Tensor))
            layout |= StateLayout(per_element, frozenset(known) - per_element.keys(), plain, whole=True)
        return layout

    def _try(self, what: str, work: Callable[[], Any], kind: type[UnsupportedModel] = UnsupportedModel) -> Any:
        try:
            return work()
        except UnsupportedModel:
            raise
        except Exception as e:
            raise self._refused(f"{what} {type(e).__name__}: {e}", kind) from e


def _alike(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and bool(a == b)
    if a.shape != b.shape:
        return False
    return torch.equal(a, b) or torch.allclose(a.double(), b.double(), rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True)
