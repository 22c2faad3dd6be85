"""Options: dataclass fields with a description and allowed values.

A planner, model or engine that a config can choose is a dataclass of such fields. Each field is declared once. A wrong
value raises an error when the object is made in Python (:class:`Checked`), and when a config is read, with the full
key::

    @dataclass(frozen=True)
    class Fusion(Checked):
        bucket_mib: float = option(25.0, "fused messages hold about so much", above=0)

Imports nothing else of mdcs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

LIMITS = ("choices", "renamed", "above", "at_least", "at_most", "below", "length")
"""Limits that :func:`option` takes.

- ``choices``: the allowed values.
- ``renamed``: old names of choices, which are allowed too, with the names of today.
- ``above``, ``at_least``, ``at_most``, ``below``: limits of a number, or of each number of a list.
- ``length``: the length of a list.
"""


class OptionError(ValueError):
    """A value that an option must not have.

    - ``option``: the field's name.
    - ``complaint``: the rule that the value breaks.
    """

    def __init__(self, option: str, complaint: str) -> None:
        super().__init__(f"{option} {complaint}")
        self.option, self.complaint = option, complaint

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.option, self.complaint)


def option(default: T, about: str, **limits: Any) -> T:
    """Return a dataclass field with a description and limits.

    - ``default``: the default value. A list is copied for every object.
    - ``about``: a few words that describe the option, with its unit.
    - ``limits``: limits by the names in :data:`LIMITS`. Other names are kept as metadata for the code that declares the
      class.
    """
    metadata = {"about": about, **limits}
    made = (
        dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
        if isinstance(default, list)
        else dataclasses.field(default=default, metadata=metadata)
    )
    return made  # type: ignore[return-value]  # dataclasses.field returns a Field and says it returns the default's type


def options(of: Any) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a dataclass (or of an instance) that :func:`option` has made, by name."""
    return {field.name: field for field in dataclasses.fields(of) if "about" in field.metadata}


def shown(value: Any) -> str:
    """Return a value as one types it in a config."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(shown, value))}]"
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
    value = limits.get("renamed", {}).get(value, value) if isinstance(value, str) else value
    if "choices" in limits and not any(value is c or (value == c and type(value) is type(c)) for c in limits["choices"]):
        raise OptionError(name, f"must be one of {', '.join(map(shown, limits['choices']))}; got {shown(value)}")
    # "not value > limit" rather than "value <= limit": NaN fails every comparison, so it is refused.
    if "above" in limits and not value > limits["above"]:
        raise OptionError(name, f"must be > {shown(limits['above'])}, got {shown(value)}")
    if "at_least" in limits and not value >= limits["at_least"]:
        raise OptionError(name, f"must be >= {shown(limits['at_least'])}, got {shown(value)}")
    if "at_most" in limits and not value <= limits["at_most"]:
        raise OptionError(name, f"must be <= {shown(limits['at_most'])}, got {shown(value)}")
    if "below" in limits and not value < limits["below"]:
        raise OptionError(name, f"must be < {shown(limits['below'])}, got {shown(value)}")


class Checked:
    """A dataclass that checks its options when it is made. Raises OptionError."""

    def __post_init__(self) -> None:
        for name, field in options(self).items():
            check_value(name, getattr(self, name), field.metadata)
