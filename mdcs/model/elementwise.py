"""How an optimizer can run on shards, found out by trying it, and the state that it keeps there.

A shard is a flat piece of parameters. An elementwise optimizer gives a piece the values that it gives the whole
parameter. The trial compares both over a few steps of the optimizer's own class, with the options of each of its
groups. Of an optimizer that looks at a parameter as a whole (its rows, its norm), a second trial finds whether it updates
each parameter on its own: such parameters are updated whole, each by one rank. Others are refused.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdcs.model.units import UnsupportedModel

FUNCTIONAL = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Classes that need no trial: torch's functions update their shards."""

_STEPS = 4
_SHAPES = {1: (192,), 2: (12, 16), 3: (4, 6, 8), 4: (4, 3, 4, 4)}
_OTHERS = {1: (40,), 2: (9, 7), 3: (5, 3, 4), 4: (3, 5, 2, 2)}
_RATE = 1e-2  # where a schedule begins with 0
_ROUNDING = 1e-9  # of float64, in which the trial runs

Options = Mapping[str, Any]


def same_options(optimizer: torch.optim.Optimizer, group: Options, *parameters: Tensor) -> torch.optim.Optimizer:
    """Return a new optimizer of the same class for other parameters, with the options of one of its groups."""
    options = {k: v for k, v in group.items() if k not in ("params", "param_names", "initial_lr")}
    accepted, known = inspect.signature(type(optimizer)).parameters, {**optimizer.defaults, **options}
    required = [k for k, p in accepted.items() if p.default is p.empty and k in known]
    made: torch.optim.Optimizer = type(optimizer)([{**options, "params": list(parameters)}], **{k: known[k] for k in required})
    return made


class FlatOptimizer:
    """The class of an optimizer on flat tensors, each of which brings its options and its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._like = optimizer
        self._made: torch.optim.Optimizer | None = None

    def first_state(self, options: Options, tensor: Tensor) -> dict[str, Any]:
        """Return the state that the class makes for a tensor before its first step (Adagrad), if any."""
        return dict(same_options(self._like, options, tensor).state.get(tensor, {}))

    def step(self, options: Options, tensor: Tensor, gradient: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Update a tensor in place; return its state after the step."""
        if self._made is None:
            self._made = same_options(self._like, options, tensor)
        made = self._made
        made.param_groups = [{**options, "params": [tensor]}]
        made.state = defaultdict(dict, {tensor: state} if state else {})
        tensor.grad = gradient
        try:
            made.step()
            return made.state[tensor]
        finally:
            tensor.grad = None
            made.param_groups, made.state = [], defaultdict(dict)  # keep neither memory nor gradients


@dataclass(frozen=True)
class StateLayout:
    """State that an optimizer keeps for a flat tensor, or, if ``whole``, for a whole parameter in its shape.

    - ``per_element``: key -> type of the state that has the tensor's shape; None: the tensor's type.
    - ``replicated``: keys of the other state, which is the same for every piece of a parameter: step counts, numbers. Of
      whole parameters also state of another shape, such as a sum per row.
    - ``plain``: the replicated keys whose values are Python numbers.
    - ``fixed``: bytes of the replicated tensors.
    - ``scratch``: temporary tensors of an update, in copies of the tensor: an estimate for updates that are not measured.
    """

    per_element: Mapping[str, torch.dtype | None] = field(default_factory=dict)
    replicated: frozenset[str] = frozenset()
    plain: frozenset[str] = frozenset()
    fixed: int = 0
    scratch: int = 0
    whole: bool = False

    def tensors(self, width: int) -> float:
        """Return the bytes of the state per element, in copies of a tensor of ``width`` bytes per element."""
        total = sum(1 if dtype is None else dtype.itemsize / width for dtype in self.per_element.values())
        return int(total) if total == int(total) else total

    def __or__(self, other: StateLayout) -> StateLayout:
        replicated = self.replicated | other.replicated
        per_element = {k: v for k, v in {**self.per_element, **other.per_element}.items() if k not in replicated}
        return StateLayout(
            per_element, replicated, self.plain | other.plain, max(self.fixed, other.fixed), max(self.scratch, other.scratch),
            self.whole or other.whole,
        )  # fmt: skip


class GroupLayout(NamedTuple):
    """Parameter groups of an optimizer that are updated in one way, by index, and the state that they keep."""

    groups: tuple[int, ...]
    layout: StateLayout


def state_layouts(optimizer: torch.optim.Optimizer) -> list[GroupLayout]:
    """Return the groups that are updated on flat pieces, and those that are updated whole, with the state that they keep.

    The state is that of the group that keeps the most. Raises UnsupportedModel, naming the class and the reason, for an
    optimizer that cannot run on shards.
    """
    groups = tuple(range(len(optimizer.param_groups)))
    if type(optimizer) in FUNCTIONAL:
        return [GroupLayout(groups, _known(optimizer))]
    if _needs_closure(optimizer):
        raise _refused(optimizer, "its step() needs a closure, which runs forward and backward again")
    found = [_tried(optimizer, group) for group in optimizer.param_groups]
    out = []
    for whole in (False, True):
        own = tuple(i for i in groups if found[i].whole is whole)
        if own:
            layout = StateLayout(whole=whole)
            for i in own:
                layout |= found[i]
            out.append(GroupLayout(own, layout))
    return out


def _tried(optimizer: torch.optim.Optimizer, group: Options) -> StateLayout:
    """Return the state of a parameter group, on flat pieces if these become what whole parameters become."""
    options = {k: v for k, v in group.items() if k not in ("params", "param_names", "initial_lr")}
    if not float(options.get("lr", _RATE)):
        options["lr"] = optimizer.defaults.get("lr") or _RATE
    dims = sorted({min(max(p.dim(), 1), 4) for p in group["params"]} or {2})
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    device = torch.device("cpu") if device.type == "meta" else device
    found = StateLayout()
    try:
        for dim in dims:
            found |= _Trial(optimizer, options, _SHAPES[dim], device).run()
    except _ActsOnWhole:
        found = StateLayout(whole=True)
        for dim in dims:
            found |= _WholeTrial(optimizer, options, (_SHAPES[dim], _OTHERS[dim]), device).run()
    return found


def _known(optimizer: torch.optim.Optimizer) -> StateLayout:
    """SGD has one state tensor with momentum; Adam and AdamW have two moments, a third with amsgrad, and a step count.

    Fused updates need no scratch.
    """
    groups = optimizer.param_groups
    decayed = any(g["weight_decay"] for g in groups)
    if type(optimizer) is torch.optim.SGD:
        keys: dict[str, torch.dtype | None] = {"momentum_buffer": None} if any(g["momentum"] for g in groups) else {}
        layout, scratch = StateLayout(keys), int(decayed) + int(any(g["nesterov"] for g in groups))
    else:
        keys = {"exp_avg": None, "exp_avg_sq": None}
        keys |= {"max_exp_avg_sq": None} if any(g["amsgrad"] for g in groups) else {}
        layout = StateLayout(keys, frozenset({"step"}), fixed=4)
        scratch = 2 + int(decayed and type(optimizer) is torch.optim.Adam)
    fused = any(g.get("fused") for g in groups)
    return StateLayout(layout.per_element, layout.replicated, fixed=layout.fixed, scratch=0 if fused else scratch)


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _refused(
    optimizer: torch.optim.Optimizer, reason: str, kind: type[UnsupportedModel] = UnsupportedModel
) -> UnsupportedModel:
    return kind(f"optimizer {type(optimizer).__name__}: {reason}")


class _ActsOnWhole(UnsupportedModel):
    """A piece of a parameter becomes another than in the whole parameter."""


class _Trial:
    """A few steps on a parameter of about 200 elements and on its pieces, which must become the same."""

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options, shape: Sequence[int], device: torch.device) -> None:
        self._optimizer, self._options = optimizer, options
        random = torch.Generator().manual_seed(0)
        start, *self._gradients = (
            torch.randn(shape, dtype=torch.float64, generator=random).to(device) for _ in range(_STEPS + 1)
        )
        self._start, self._whole, self._flat = start, torch.nn.Parameter(start.clone()), start.flatten()
        cuts = (0, self._flat.numel() // 5, self._flat.numel() // 2 + 1, self._flat.numel())
        self._places = [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
        self._flat = self._flat.clone()

    def run(self) -> StateLayout:
        """Return the state of the pieces. Raises UnsupportedModel where pieces and whole differ."""
        forks = torch.random.fork_rng(devices=[])  # an optimizer may draw random numbers
        with forks, torch.no_grad():
            whole = self._try("on a parameter it raises", self._on_the_whole)
            pieces = self._try(f"{self._as_a_whole()}: on a flat piece it raises", self._on_pieces, _ActsOnWhole)
        if torch.equal(self._whole, self._start):
            raise self._refused("its step() does not change the parameters of its groups")
        self._compare(self._whole, self._flat, "a parameter")
        keys = [key for key in whole if any(state.get(key) is not None for state in (whole, *pieces))]
        return self._layout(whole, pieces, keys)

    def _on_the_whole(self) -> dict[str, Any]:
        made = same_options(self._optimizer, self._options, self._whole)
        before = {k: v for k, v in made.param_groups[0].items() if k != "params"}
        for gradient in self._gradients:
            self._whole.grad = gradient.clone()
            made.step()
        after = {k: v for k, v in made.param_groups[0].items() if k != "params"}
        changed = [k for k, v in after.items() if k not in before or repr(v) != repr(before[k])]
        if changed:
            raise self._refused(f"its step() changes {changed[0]} of its parameter groups, and shards keep state of their own")
        return dict(made.state.get(self._whole, {}))

    def _on_pieces(self) -> list[dict[str, Any]]:
        """Update each piece as the runtime does. Gradients are overwritten after the step: no state may be a view of them."""
        made, pieces = FlatOptimizer(self._optimizer), [self._flat[place] for place in self._places]
        states = [made.first_state(self._options, piece) for piece in pieces]
        for gradient in self._gradients:
            for i, place in enumerate(self._places):
                own = gradient.flatten()[place].clone()
                states[i] = made.step(self._options, pieces[i], own, states[i])
                own.fill_(torch.nan)
        return states

    def _layout(self, whole: dict[str, Any], pieces: list[dict[str, Any]], keys: list[str]) -> StateLayout:
        per_element: dict[str, torch.dtype | None] = {}
        plain, fixed = set(), 0
        for key in keys:
            value, cut = whole[key], [state.get(key) for state in pieces]
            if isinstance(value, Tensor) and value.shape == self._whole.shape:
                shapes = [getattr(c, "shape", None) for c in cut]
                if shapes != [self._flat[place].shape for place in self._places]:
                    raise self._refused(f"{self._as_a_whole()}: its {key} is not made piece by piece", _ActsOnWhole)
                self._compare(value, torch.cat([c.flatten() for c in cut]), f"its {key}")  # type: ignore[union-attr]
                per_element[key] = None if value.dtype == torch.float64 else value.dtype
            elif isinstance(value, (Tensor, int, float)):
                for c in cut:
                    if type(c) is not type(value) or not torch.equal(torch.as_tensor(c), torch.as_tensor(value)):
                        raise self._refused(f"{self._as_a_whole()}: its {key} is another one on each piece", _ActsOnWhole)
                if isinstance(value, Tensor):
                    fixed += value.nbytes
                else:
                    plain.add(key)
            else:
                raise self._refused(f"its state {key} is a {type(value).__name__}, neither a tensor nor a number")
        return StateLayout(per_element, frozenset(keys) - per_element.keys(), frozenset(plain), fixed, len(per_element) + 2)

    def _compare(self, whole: Tensor, flat: Tensor, what: str) -> None:
        whole = whole.detach().flatten()
        if not torch.equal(whole, flat) and not torch.allclose(
            whole.double(), flat.double(), rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True
        ):
            raise self._refused(
                f"{self._as_a_whole()}: {what} becomes another one where it is updated piece by piece", _ActsOnWhole
            )

    def _as_a_whole(self) -> str:
        kind = "matrices" if self._whole.dim() > 1 else "parameters"
        return f"it updates {kind} as a whole, and a shard is a flat piece of them"

    def _try(self, what: str, work: Callable[[], Any], kind: type[UnsupportedModel] = UnsupportedModel) -> Any:
        try:
            return work()
        except UnsupportedModel:
            raise
        except Exception as e:
            raise self._refused(f"{what} {type(e).__name__}: {e}", kind) from e

    def _refused(self, reason: str, kind: type[UnsupportedModel] = UnsupportedModel) -> UnsupportedModel:
        return _refused(self._optimizer, reason, kind)


class _WholeTrial:
    """A few steps on two parameters together and on each alone, which must become the same."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, options: Options, shapes: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        self._optimizer, self._options = optimizer, options
        random = torch.Generator().manual_seed(0)
        numbers = [
            [torch.randn(*shape, dtype=torch.float64, generator=random).to(device) for shape in shapes] for _ in range(_STEPS + 1)
        ]
        self._start, *self._gradients = numbers

    def run(self) -> StateLayout:
        """Return the state of a parameter. Raises UnsupportedModel where together and alone differ."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            together = self._together()
            alone = [self._alone(i) for i in range(len(self._start))]
        layout = StateLayout(whole=True)
        for (p, state), (q, own) in zip(together, alone, strict=True):
            for key in state.keys() | own.keys():
                if not _alike(state.get(key), own.get(key)):
                    raise self._refused(f"its {key} is another one where a parameter is updated alone")
            if not _alike(p, q):
                raise self._refused("a parameter becomes another one where it is updated alone")
            layout |= self._layout(p, own)
        return layout

    def _together(self) -> list[tuple[Tensor, dict[str, Any]]]:
        parameters = [torch.nn.Parameter(start.clone()) for start in self._start]
        made = same_options(self._optimizer, self._options, *parameters)
        for gradients in self._gradients:
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient.clone()
            made.step()
        return [(p.detach(), dict(made.state.get(p, {}))) for p in parameters]

    def _alone(self, i: int) -> tuple[Tensor, dict[str, Any]]:
        """Update a parameter as the runtime does: its gradient is overwritten after the step."""
        made, p = FlatOptimizer(self._optimizer), self._start[i].clone()
        state = made.first_state(self._options, p)
        for gradients in self._gradients:
            gradient = gradients[i].clone()
            state = made.step(self._options, p, gradient, state)
            gradient.fill_(torch.nan)
        return p, dict(state)

    def _layout(self, p: Tensor, state: Mapping[str, Any]) -> StateLayout:
        own = {key: value for key, value in state.items() if value is not None}
        strange = next((key for key, value in own.items() if not isinstance(value, (Tensor, int, float))), None)
        if strange is not None:
            raise self._refused(f"its state {strange} is a {type(own[strange]).__name__}, neither a tensor nor a number")
        per_element = {k: None if v.dtype == p.dtype else v.dtype for k, v in own.items() if getattr(v, "shape", None) == p.shape}
        plain = frozenset(key for key, value in own.items() if not isinstance(value, Tensor))
        return StateLayout(per_element, frozenset(own) - per_element.keys(), plain, whole=True)

    def _refused(self, reason: str) -> UnsupportedModel:
        return _refused(self._optimizer, reason)


def _alike(a: Any, b: Any) -> bool:
    """Whether two values are the same, but for rounding."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and bool(a == b)
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True)
