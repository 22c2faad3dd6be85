"""Options: dataclass fields that say what they mean and which values they may have.

A planner, model or engine that can be chosen in a config is a dataclass of such fields. They are declared once: whoever makes
the object in Python is told of a wrong value (:class:`Checked`), and so is whoever writes it in a config, with the full key::

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

LIMITS = ("choices", "above", "at_least", "at_most", "below", "length")
"""What :func:`option` takes: allowed values; limits of a number, or of each number of a list; the length of a list."""


class OptionError(ValueError):
    """A value that an option may not have. ``option`` is the field's name, ``complaint`` says what it must be."""

    def __init__(self, option: str, complaint: str) -> None:
        super().__init__(f"{option} {complaint}")
        self.option, self.complaint = option, complaint

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.option, self.complaint)


def option(default: T, about: str, **limits: Any) -> T:
    """A dataclass field: ``about`` in a few words, with its unit, and ``limits`` by the names in :data:`LIMITS`.

    Metadata of other names is kept for whoever declares the class. A default of type list is copied for every object.
    """
    metadata = {"about": about, **limits}
    made = (
        dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
        if isinstance(default, list)
        else dataclasses.field(default=default, metadata=metadata)
    )
    return made  # type: ignore[return-value]  # dataclasses.field returns a Field and says it returns the default's type


def options(of: Any) -> dict[str, dataclasses.Field[Any]]:
    """The options of a dataclass (or of an object of one) by name: its fields that :func:`option` has made."""
    return {field.name: field for field in dataclasses.fields(of) if "about" in field.metadata}


def shown(value: Any) -> str:
    """A value as it is typed in a config."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(shown, value))}]"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def check_value(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    """Raise OptionError unless ``value`` is within ``limits``; None is, always."""
    if value is None:
        return
    if "length" in limits and len(value) != limits["length"]:
        raise OptionError(name, f"must have {limits['length']} values, got {shown(value)}")
    for each in value if isinstance(value, (list, tuple)) else [value]:
        _check_one(name, each, limits)


def _check_one(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise OptionError(name, f"must be a finite number, got {shown(value)}")
    if "choices" in limits and not any(value is c or (value == c and type(value) is type(c)) for c in limits["choices"]):
        raise OptionError(name, f"must be one of {', '.join(map(shown, limits['choices']))}; got {shown(value)}")
    # Written as "not inside", so that a value that compares with nothing is outside.
    if "above" in limits and not value > limits["above"]:
        raise OptionError(name, f"must be > {shown(limits['above'])}, got {shown(value)}")
    if "at_least" in limits and not value >= limits["at_least"]:
        raise OptionError(name, f"must be >= {shown(limits['at_least'])}, got {shown(value)}")
    if "at_most" in limits and not value <= limits["at_most"]:
        raise OptionError(name, f"must be <= {shown(limits['at_most'])}, got {shown(value)}")
    if "below" in limits and not value < limits["below"]:
        raise OptionError(name, f"must be < {shown(limits['below'])}, got {shown(value)}")


class Checked:
    """A dataclass whose options are checked when it is made. Raises OptionError."""

    def __post_init__(self) -> None:
        for name, field in options(self).items():
            check_value(name, getattr(self, name), field.metadata)
