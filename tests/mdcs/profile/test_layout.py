"""Where elements lie, computed by hand: padding, types and what they come to in bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mdcs.profile.layout import Layout, itemsize
from mdcs.profile.link import Kind
from mdcs.profile.schema import Profile, Unit
from tests.mdcs.profiles import chain


def test_a_buffer_is_padded_for_the_ranks() -> None:
    layout = Layout(5, 2, param_width=2, grad_width=4, master_width=4)
    assert (layout.elements, layout.param_bytes, layout.grad_bytes, layout.updated_width) == (6, 12, 24, 4)
    assert (layout.width(True), layout.width(False)) == (2, 4)
    assert layout.ends((2, 3)) == (2, 6)  # padding belongs to the last part
    assert Layout(3, 2, 4, 4).updated_width == 4


def test_types_are_known_by_name() -> None:
    assert [itemsize(name) for name in ("float64", "float32", "bfloat16", "float8_e4m3fn")] == [8, 4, 2, 1]
    with pytest.raises(ValueError, match="'int64'"):
        Unit("u", (8,), True, (0, 0), (0, 0), "int64")
    with pytest.raises(ValueError, match="frozen but has masters"):
        Unit("u", (8,), False, (0, 0), None, "bfloat16", master_dtype="float32")


def test_messages_carry_one_type() -> None:
    units = chain(7, 8, 8, types=("bfloat16", "float32", "float32")).units
    profile = chain(7, 8, 8)
    profile = replace(profile, units=(units[0], replace(units[1], dtype="float32", grad_dtype="", master_dtype=""), units[2]))
    parts = ((0, 0), (1, 0), (2, 0))
    assert profile.by_type(Kind.AG_F, parts) == [((0, 0), (2, 0)), ((1, 0),)]
    assert profile.by_type(Kind.RS, parts) == [parts]  # gradients of all are float32
    assert Profile.from_json(profile.to_json()) == profile
