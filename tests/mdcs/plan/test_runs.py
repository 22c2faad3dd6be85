"""Pieces of blocks that a rank updates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mdcs.plan.runs import runs
from tests.mdcs.profiles import ADAM, chain, planned

# a has 8 elements (32 bytes), b has 4 (16 bytes); (live, peak) of the activations in the order of the model.
PLAIN = chain(8, 4, world=2, optimizer=ADAM)
ACTIVATIONS = ((10, 30), (30, 40), (40, 50), (30, 45))  # F:a F:b B:b B:a
PROFILE = replace(
    PLAIN, slots=tuple(replace(s, live=low, peak=high) for s, (low, high) in zip(PLAIN.slots, ACTIVATIONS, strict=True))
)


@pytest.mark.parametrize(
    ("strategy", "rank", "block", "expected"),
    [
        # Segments of 7 and 2 elements, padded to 10, in blocks of 6 and 4; a rank has 3 and 2 of them.
        ("zero2", 0, 0, [(0, 3, 0)]),
        ("zero2", 1, 0, [(3, 3, 0)]),
        ("zero2", 0, 1, [(6, 1, 0), (7, 1, 1)]),
        ("zero2", 1, 1, [(8, 2, 1)]),  # the padding belongs to the last segment
        ("dp", 0, 1, [(6, 1, 0), (7, 3, 1)]),
        ("dp", 1, 0, [(0, 6, 0)]),
    ],
)
def test_runs(strategy: str, rank: int, block: int, expected: list[tuple[int, int, int]]) -> None:
    unit = replace(PROFILE.units[0], segments=(7, 2))
    profile = replace(PROFILE, units=(unit, PROFILE.units[1]))
    plan = planned(profile, strategy)
    messages = [replace(m, parts=((0, b),)) for m in plan.messages for b in range(2) if m.parts[0][0] == 0] + [
        m for m in plan.messages if m.parts[0][0] == 1
    ]
    cut = replace(
        plan, blocks=((6, 4), (4,)), messages=tuple(sorted(messages, key=lambda m: (m.slot, m.kind.is_gather)))
    )
    assert runs(cut, 0, block, rank) == expected
