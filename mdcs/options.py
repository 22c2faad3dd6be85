"""Options: dataclass fields with a description and allowed values.

A planner, model or engine that a config can choose is a dataclass of such fields. A wrong value raises an error when
the object is made in Python (:class:`Checked`), and when a config is read, with the full key::

    @dataclass(frozen=True)
    class Fusion(Checked):
        bucket_mib: float = option(25.0, "fused messages hold about so much", above=0)
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_ORDERS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "above": (">", operator.gt), "at_least": (">=", operator.ge), "at_most": ("<=", operator.le),
    "below": ("<", operator.lt),
}  # fmt: skip

LIMITS = ("choices", *_ORDERS, "length")
"""Limits that :func:`option` takes: the allowed values, limits of a number or of each of a list, the length of a list.
"""


class OptionError(ValueError):
    """A value that an option must not have: the field's name, and the rule that the value breaks (``complaint``)."""

    def __init__(self, option: str, complaint: str) -> None:
        super().__init__(option, complaint)
        self.option, self.complaint = option, complaint

    def __str__(self) -> str:
        return f"{self.option} {self.complaint}"


def option(default: T, about: str, **limits: Any) -> T:
    """Return a dataclass field with a description (``about``: a few words, with the unit) and limits.

    A list or dict is copied for every object. Other ``limits`` than :data:`LIMITS` are kept as metadata for the code
    that declares the class.
    """
    how: Any = {"default_factory": default.copy} if isinstance(default, (list, dict)) else {"default": default}
    made: T = dataclasses.field(**how, metadata={"about": about, **limits})
    return made


def options(of: Any) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a dataclass (or of an instance) that :func:`option` has made, by name."""
    return {field.name: field for field in dataclasses.fields(of) if "about" in field.metadata}


def shown(value: Any) -> str:
    """Return a value as one types it in a config."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{shown(each)}' for key, each in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def check_value(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    """Raise OptionError unless ``value`` is within ``limits``. None is always accepted."""
    if value is None:
        return
    if "length" in limits and len(value) != limits["length"]:
        raise OptionError(name, f"must have {limits['length']} values, got {shown(value)}")
    for each in value if isinstance(value, (list, tuple)) else [value]:
        _check_one(name, each, limits)


def _check_one(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise OptionError(name, f"must be a finite number, got {shown(value)}")
    choices = limits.get("choices")
    if choices is not None and not any(value is c or (value == c and type(value) is type(c)) for c in choices):
        raise OptionError(name, f"must be one of {', '.join(map(shown, choices))}; got {shown(value)}")
    for limit, (sign, holds) in _ORDERS.items():
        if limit in limits and not holds(value, limits[limit]):  # NaN fails every comparison, so it is refused
            raise OptionError(name, f"must be {sign} {shown(limits[limit])}, got {shown(value)}")


class Checked:
    """A dataclass that checks its options when it is made. Raises OptionError."""

    def __post_init__(self) -> None:
        for name, field in options(self).items():
            check_value(name, getattr(self, name), field.metadata)
