"""Options say what they may be, in Python as in a config."""

import pickle
from dataclasses import dataclass

import pytest

from mdcs.options import Checked, OptionError, check_value, option, options, shown


@dataclass(frozen=True)
class Bucket(Checked):
    mib: float = option(4.0, "size, MiB", above=0)
    order: str = option("fifo", "who goes first", choices=("fifo", "deadline"))
    betas: list[float] = option([0.9, 0.999], "decay", at_least=0, below=1, length=2)
    seed: int | None = option(None, "of the draw", at_least=0, at_most=9)
    derived: int = 7  # no option


def test_defaults_are_allowed_and_lists_are_not_shared():
    one, other = Bucket(), Bucket()
    one.betas.append(1)
    assert other.betas == [0.9, 0.999]
    assert list(options(Bucket)) == list(options(one)) == ["mib", "order", "betas", "seed"]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"mib": 0}, "mib must be > 0, got 0"),
        ({"mib": float("nan")}, "mib must be a finite number, got nan"),
        ({"order": "lifo"}, "order must be one of fifo, deadline; got lifo"),
        ({"betas": [0.9]}, "betas must have 2 values, got [0.9]"),
        ({"betas": [0.9, 0.99, 0.999]}, "betas must have 2 values, got [0.9,0.99,0.999]"),
        ({"betas": [0.9, 1.0]}, "betas must be < 1, got 1"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"seed": 10}, "seed must be <= 9, got 10"),
    ],
)
def test_a_value_outside_its_limits_is_refused_by_name(values, complaint):
    with pytest.raises(OptionError) as caught:
        Bucket(**values)
    assert str(caught.value) == complaint
    assert complaint == f"{caught.value.option} {caught.value.complaint}"
    assert str(pickle.loads(pickle.dumps(caught.value))) == complaint


def test_true_is_not_one():
    check_value("x", True, {"choices": (True, "auto")})
    with pytest.raises(OptionError, match="must be one of true, auto; got 1"):
        check_value("x", 1, {"choices": (True, "auto")})


def test_values_are_shown_as_they_are_typed():
    assert [shown(v) for v in (True, None, 2.50, [1, 0.5], "a")] == ["true", "null", "2.5", "[1,0.5]", "a"]
