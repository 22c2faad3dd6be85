"""One's own model, data and optimizer: any callable is a `_target_` of their groups, and its arguments are keys.

Values may be nested, with `_target_`, `_partial_` and `_args_` as in `hydra.utils.instantiate`, which makes them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.tasks.data import Data, Inputs, Samples, Stream, Tokens
from experiments.tasks.model import Model
from experiments.tasks.optimizers import Optimizer
from mdcs.options import Checked, OptionError, option, shown

if TYPE_CHECKING:
    import torch
    from torch import nn

    from experiments.tasks.task import Task

_SPECIAL = ("_args_", "_convert_", "_recursive_")  # keys of `hydra.utils.instantiate` that are no arguments
_PLAIN = (str, int, float, bool, types.NoneType)


@dataclass(frozen=True, kw_only=True)
class Own(Checked):
    """Options that are the arguments of a callable. Subclasses are made by `class_of`."""

    _group: ClassVar[str]
    target: ClassVar[str]
    builder: ClassVar[Callable[..., Any]]
    unknown: ClassVar[frozenset[str]] = frozenset()  # arguments whose default is no plain value; null leaves them out

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self):
            for target in _targets(getattr(self, field.name)):
                try:
                    located(target)
                except (ModuleNotFoundError, ValueError) as error:
                    raise OptionError(field.name, f"has _target_={error}") from error

    def _require_target(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and not (isinstance(value, Mapping) and "_target_" in value):
            raise OptionError(name, f"must be null or a mapping with _target_, got {shown(value)}")

    def arguments(self) -> dict[str, Any]:
        """The options that are arguments of the callable, as they are configured."""
        own = {field.name for field in dataclasses.fields(type(self).__mro__[1])}
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in own}
        return {name: value for name, value in values.items() if value is not None or name not in self.unknown}

    def call(self, *first: Any, **more: Any) -> Any:
        """Call the callable with its arguments, `first` and `more`. Raises ValueError for whatever it raises."""
        try:
            made = instantiate({"_convert_": "all", **self.arguments(), "_target_": self.target, "_partial_": True})
            return made(*first, **more)
        except Exception as error:  # a callable is foreign code: it may raise anything
            cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ else error
            said = " ".join(str(cause).split())
            raise ValueError(f"{self._group}._target_={self.target} raised {type(cause).__name__}: {said}") from error


@dataclass(frozen=True, kw_only=True)
class OwnModel(Own, Model):
    """A model that a callable builds."""

    _group = "model"
    blocks: tuple[str, ...] = option((), "classes whose modules become units; none: repeated blocks are found")
    reads: Any = option({}, "the model's inputs: keys of experiments.tasks.data.Tokens, or another _target_ and keys")
    loss: Any = option(
        None, "(model, batch) → loss, e.g. a _target_ with _partial_; null: cross-entropy of the model's output"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.reads, Mapping):
            raise OptionError("reads", f"must be keys and values, e.g. {{sequence: 128}}; got {shown(self.reads)}")
        self._require_target("loss")
        try:
            _ = self.inputs
        except OmegaConfBaseException as error:
            raise OptionError(f"reads.{error.full_key}", str(error).partition("\n")[0]) from error
        except (HydraException, TypeError, ValueError) as error:
            raise OptionError("reads", f"makes no inputs: {' '.join(str(error.__cause__ or error).split())}") from error

    @property
    def inputs(self) -> Inputs:
        if "_target_" in self.reads:
            return cast(Inputs, instantiate(self.reads))
        tokens = OmegaConf.structured(Tokens(sequence=64), flags={"readonly": False})
        return cast(Inputs, OmegaConf.to_object(OmegaConf.merge(tokens, self.reads)))

    def make(self) -> Task:
        from torch import nn

        from experiments.tasks.task import Task, cross_entropy
        built = self.call()
        if isinstance(built, Task):
            return built
        if not isinstance(built, nn.Module):
            raise TypeError(f"model: {self.target} returned {type(built).__name__}, not a torch.nn.Module")
        return Task(built, cross_entropy if self.loss is None else instantiate(self.loss), self.blocks, self.inputs)


@dataclass(frozen=True, kw_only=True)
class OwnData(Own, Data):
    """Data that a callable returns: a Dataset of torch or of `datasets`, an IterableDataset, or a DataLoader of one. An
    argument `held_out` of the callable is no key: with True it returns the samples of evaluations."""

    _group = "data"
    collate: Any = option(
        None, "samples → batch, a _target_ with _partial_; null: the DataLoader's, or torch's default"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_target("collate")

    def require(self, inputs: Inputs) -> None:
        """Accept all: only the model can tell whether it reads such batches."""

    def tokens(self, inputs: Inputs) -> int | None:
        """The length of the first sample's `input_ids`; None for other samples, and for streams."""
        samples = self.samples(inputs, held_out=False)
        first = samples.at([0], 0) if isinstance(samples, Samples) else {}
        return int(first["input_ids"].numel()) if "input_ids" in first else None

    def samples(self, inputs: Inputs, held_out: bool) -> Samples | Stream:
        """The samples of a split, in the callable's order. Raises ValueError for a callable without such a split."""
        if held_out and not self.evaluates:
            raise ValueError(f"{self.target} has no argument held_out, and so no samples for evaluations")
        if held_out not in self._splits:
            self._splits[held_out] = self._load(held_out)
        return self._splits[held_out]

    @functools.cached_property
    def _splits(self) -> dict[bool, Samples | Stream]:
        """The splits that were asked for: a callable may take long."""
        return {}

    def _load(self, held_out: bool) -> Samples | Stream:
        from torch.utils.data import DataLoader, IterableDataset, default_collate
        found: Any = self.call(**({"held_out": held_out} if self.evaluates else {}))
        collate: Any = default_collate
        if isinstance(found, DataLoader):  # the order of samples and the size of batches are those of the config
            found, collate = found.dataset, found.collate_fn if found.batch_size is not None else default_collate
        if self.collate is not None:
            collate = instantiate(self.collate)
        if hasattr(found, "with_format") and getattr(found, "format", {"type": None})["type"] is None:
            found = found.with_format("torch")  # `datasets` has lists, which torch's collate takes for columns
        batch = functools.partial(_batch, collate, self.target)
        if not isinstance(found, IterableDataset) and hasattr(found, "__len__") and hasattr(found, "__getitem__"):
            return Samples(len(found), lambda indices, epoch: batch([found[int(i)] for i in indices]))
        if not hasattr(found, "__iter__"):
            what = f"{type(found).__name__}, no Dataset, IterableDataset or DataLoader"
            raise TypeError(f"data: {self.target} returned {what}")
        return Stream(found, batch)


def _batch(collate: Callable[[list[Any]], Any], target: str, samples: list[Any]) -> Any:
    made = collate(samples)
    if isinstance(made, (list, tuple)) and len(made) == 2:
        return dict(zip(("inputs", "labels"), made, strict=True))
    if not isinstance(made, Mapping):
        rule = "must be a dict of tensors, or (inputs, labels)"
        raise TypeError(f"data: a batch of {target} {rule}, got {type(made).__name__}")
    return dict(made)


@dataclass(frozen=True, kw_only=True)
class OwnOptimizer(Own, Optimizer):
    """An optimizer that a callable makes of the parameters, its first argument."""

    _group = "optimizer"

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return self.call(parameters)


KINDS: dict[str, type[Own]] = {"model": OwnModel, "data": OwnData, "optimizer": OwnOptimizer}


def located(target: str) -> Any:
    """The object that a `_target_` names: package.module.name, or package.module.Class.name. Raises ModuleNotFoundError
    for a module that is missing, and ValueError for whatever else goes wrong, both with one line."""
    module, _, name = target.rpartition(".")
    if not module or not name:
        raise ValueError(f"must be package.module.name, got {target or 'nothing'}")
    try:
        owner: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        outer, _, cls = module.rpartition(".")
        if error.name != module or not outer or not hasattr(importlib.import_module(outer), cls):
            raise ModuleNotFoundError(f"{target}: no module {error.name}") from error
        owner = getattr(importlib.import_module(outer), cls)
    except Exception as error:  # the module is foreign code: its import may raise anything
        raise ValueError(f"{target}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    if not hasattr(owner, name):
        raise ValueError(f"{target}: {module} has no {name}")
    return getattr(owner, name)


def _targets(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield value["_target_"]
        for inner in value.values():
            yield from _targets(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _targets(inner)


def class_of(group: str, builder: Callable[..., Any], target: str, given: Mapping[str, Any]) -> type[Own]:
    """The class of the group's objects that `builder` makes. Its options are those of the group and the builder's
    arguments. given: keys and values of a config. An argument with a default whose name the group uses is no option.
    Raises ValueError for one without a default."""
    more = {*given} & {*_SPECIAL}
    if not isinstance(positional := given.get("_args_") or [], list):
        raise OptionError("_args_", f"must be a list of arguments in their order, got {shown(positional)}")
    parameters = inspect.signature(builder).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        more = {*given} - {each.name for each in parameters}
    return _class_of(group, builder, target, frozenset(more), len(positional))


@functools.cache
def _class_of(group: str, builder: Callable[..., Any], target: str, more: frozenset[str], positional: int) -> type[Own]:
    kind, name_of = KINDS[group], target.rpartition(".")[2]
    used = {"target", "builder", *dir(kind)} - {"checkpointing"}  # which a model may have
    fields: list[Any] = [(name, Any, option(None, f"of {name_of}")) for name in sorted(more - used)]
    parameters = [*inspect.signature(builder).parameters.values()][positional + (group == "optimizer") :]
    evaluates = group == "data" and "held_out" in {each.name for each in parameters}
    types_of, unknown = _types(builder), set()
    for each in parameters:
        if evaluates and each.name == "held_out" or each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            continue
        needed = each.default is each.empty
        if each.name in used:
            if needed:
                raise ValueError(f"its argument {each.name} has the name of a key of every {group}")
            continue
        default = None if needed or not _is_plain(each.default) else each.default
        if default is None and each.default is not None:
            unknown.add(each.name)
        of = _checkable(types_of.get(each.name, Any), default)
        fields.append((each.name, of, option(default, f"of {name_of}", **({"needed": True} if needed else {}))))
    space = {
        "target": target, "builder": staticmethod(builder), "unknown": frozenset(unknown),
        "__module__": getattr(builder, "__module__", __name__), **({} if group == "model" else {"name": name_of}),
        **({"evaluates": evaluates} if group == "data" else {}),
    }  # fmt: skip
    return dataclasses.make_dataclass(name_of, fields, bases=(kind,), namespace=space, frozen=True, kw_only=True)


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, _PLAIN)


def _types(builder: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(builder.__init__ if isinstance(builder, type) else builder)  # type: ignore[misc]
    except Exception:  # annotations are the builder's own code
        return {}


def _checkable(of: Any, default: Any) -> Any:
    """The type of an argument if it is one of plain values, else Any: a value may then be nested."""
    parts = typing.get_args(of) if typing.get_origin(of) in (types.UnionType, typing.Union) else (of,)
    if of is types.NoneType or not all(part in _PLAIN for part in parts):
        return Any
    return of | None if default is None and types.NoneType not in parts else of
