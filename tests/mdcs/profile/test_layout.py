"""Where elements lie: two sections of a unit, computed by hand."""

from __future__ import annotations

import pytest

from mdcs.profile.layout import Layout, Section
from mdcs.profile.schema import Profile, Unit

NARROW, WIDE = Section(5, 2, 2, 4), Section(3, 4, 4)


def test_each_section_is_padded_for_itself() -> None:
    layout = Layout((NARROW, WIDE), world=2)
    assert (layout.sizes, layout.ends, layout.elements) == ((6, 4), (6, 10), 10)
    assert (layout.param_bytes, layout.grad_bytes) == (6 * 2 + 4 * 4, 6 * 2 + 4 * 4)
    assert [layout.index(e) for e in (0, 5, 6, 9)] == [0, 0, 1, 1]
    # Padding belongs to the last segment of its section.
    assert layout.segment_ends((2, 3, 1, 2)) == (2, 6, 7, 10)
    assert (NARROW.updated_bytes, WIDE.updated_bytes) == (4, 4)
    assert (NARROW.width(True), Section(1, 2, 4).width(False)) == (2, 4)


def test_sections_are_of_whole_segments() -> None:
    unit = Unit("u", (2, 3, 3), True, (0, 0), (0, 0), (NARROW, WIDE))
    assert unit.numel == 8
    with pytest.raises(ValueError, match=r"segments \(4, 4\) do not make sections that end at \[5, 8\]"):
        Unit("u", (4, 4), True, (0, 0), (0, 0), (NARROW, WIDE))
    with pytest.raises(ValueError, match=r"do not make sections that end at \[5\]"):
        Unit("u", (5, 3), True, (0, 0), (0, 0), (NARROW,))
    with pytest.raises(ValueError, match="a section must have elements and bytes"):
        Section(0, 4, 4)


def test_what_says_nothing_has_the_widths_of_the_profile_and_frozen_units_no_masters(profile: Profile) -> None:
    whole, mixed, frozen = profile.layouts
    assert whole.sections == (Section(7, 2, 2, 4),) and mixed.sections == (NARROW, WIDE)
    assert frozen.sections == (Section(5, 2, 2), WIDE)
    assert profile.is_mixed
    assert Profile.from_json(profile.to_json()) == profile


@pytest.fixture
def profile() -> Profile:
    from tests.mdcs.profiles import chain

    plain = chain(7, 8, 8, frozen=[2], param_bytes=2, grad_bytes=2, master_bytes=4)
    a, b, c = plain.units
    units = (a, *(Unit(u.name, (5, 3), u.trainable, u.forward, u.backward, (NARROW, WIDE)) for u in (b, c)))
    return Profile(units, plain.slots, 2, plain.link, param_bytes=2, grad_bytes=2, master_bytes=4)
