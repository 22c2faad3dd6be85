"""A model of one's own: any callable that returns a module is a `_target_` of the group model, its arguments are keys.

Values may be nested, with `_target_` and `_partial_` as in `hydra.utils.instantiate`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hydra.errors import HydraException
from hydra.utils import get_object, instantiate

from experiments.tasks.inputs import Inputs
from experiments.tasks.model import Model
from mdcs.options import OptionError, option

if TYPE_CHECKING:
    from torch import nn

    from experiments.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class OwnModel(Model):
    """A model that a callable builds. Subclasses, made by `class_of`, add the callable's arguments."""

    target: ClassVar[str]
    builder: ClassVar[Callable[..., Any]]

    blocks: tuple[str, ...] = option((), "classes whose modules become units; none: repeated blocks are found")
    reads: Any = option({}, "what it reads: keys of experiments.tasks.inputs.Tokens, or another _target_ and its keys")
    loss: Any = option(None, "(model, batch) → loss, e.g. a _target_ with _partial_; null: cross-entropy of what it returns")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss is not None and "_target_" not in self.loss:
            raise OptionError("loss", f"must be null or a mapping with _target_, got {self.loss}")
        for field in dataclasses.fields(self):
            for target in _targets(getattr(self, field.name)):
                try:
                    get_object(target)
                except (ImportError, AttributeError, ValueError) as error:
                    raise OptionError(field.name, f"has _target_={target}: {' '.join(str(error).split())}") from error
        try:
            _ = self.inputs
        except (HydraException, TypeError, ValueError) as error:
            raise OptionError("reads", f"makes no inputs: {' '.join(str(error.__cause__ or error).split())}") from error

    @property
    def inputs(self) -> Inputs:
        tokens = {} if "_target_" in self.reads else {"_target_": "experiments.tasks.inputs.Tokens", "sequence": 64}
        made: Inputs = instantiate(tokens | self.reads)
        return made

    def make(self) -> Task:
        """Make the task with what the callable returns: a module, or a whole task."""
        from torch import nn

        from experiments.tasks.task import Task, cross_entropy

        own = {field.name for field in dataclasses.fields(OwnModel)}
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in own}
        built = type(self).builder(**instantiate(given, _convert_="all"))
        if isinstance(built, Task):
            return built
        if not isinstance(built, nn.Module):
            raise TypeError(f"{self.target} returned {type(built).__name__}, not a torch.nn.Module")
        return Task(built, cross_entropy if self.loss is None else instantiate(self.loss), self.blocks, self.inputs)


def _targets(value: Any) -> Iterator[str]:
    """Yield all `_target_` in a value, however nested."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield value["_target_"]
        for inner in value.values():
            yield from _targets(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _targets(inner)


def class_of(builder: Callable[..., Any], target: str, given: Iterable[str]) -> type[OwnModel]:
    """The class of models that `builder` builds; its options are those of `OwnModel` and the builder's arguments.

    given: names of arguments in a config, for a builder that takes any. Raises ValueError for an argument with the name
    of an option.
    """
    parameters = inspect.signature(builder).parameters.values()
    more = {*given} - {each.name for each in parameters} if any(each.kind is each.VAR_KEYWORD for each in parameters) else ()
    return _class_of(builder, target, frozenset(more))


@functools.cache
def _class_of(builder: Callable[..., Any], target: str, more: frozenset[str]) -> type[OwnModel]:
    taken, name_of = {field.name for field in dataclasses.fields(OwnModel)}, target.rpartition(".")[2]
    fields: list[Any] = [(name, Any, option(None, f"of {name_of}")) for name in sorted(more - taken)]
    parameters = inspect.signature(builder).parameters.values()
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    for each in named:
        if each.name in taken:
            if each.default is each.empty:
                raise ValueError(f"its argument {each.name} has the name of an option of all models")
            continue
        limits = {"needed": True} if each.default is each.empty else {}
        default = None if each.default is each.empty else each.default
        fields.append((each.name, Any, option(default, f"of {name_of}", **limits)))
    used = {"target", "builder", *dir(OwnModel)} - {"checkpointing"}  # which a model may have
    for name, *_ in fields:
        if name in used:
            raise ValueError(f"its argument {name} has a name that all models use")
    space = {"target": target, "builder": staticmethod(builder), "__module__": getattr(builder, "__module__", __name__)}
    return dataclasses.make_dataclass(
        name_of, fields, bases=(OwnModel,), namespace=space, frozen=True, kw_only=True
    )


def example() -> nn.Module:
    """The smallest language model of bytes, until `model._target_` names yours."""
    from torch import nn

    return nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 256))
