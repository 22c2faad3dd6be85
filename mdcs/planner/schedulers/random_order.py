"""A random valid order: random cuts, fusions and issue slots. A baseline, and the generator of property tests."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import ClassVar

from mdcs.options import Checked, option
from mdcs.plan.plan import Plan
from mdcs.plan.schedule import Message
from mdcs.plan.strategy_assignment import StrategyAssignment
from mdcs.profile.link import REDUCTION, Kind


@dataclass(frozen=True)
class RandomOrder(Checked):
    """Cuts units, fuses messages and chooses issue slots at random. The same ``seed`` gives the same plan."""

    name: ClassVar[str] = "random"

    seed: int = option(0, "seed of the draw", at_least=0)
    max_blocks: int = option(3, "a unit is cut into as many blocks at most", at_least=1)
    fuse: float = option(0.3, "chance of a message to be fused with the one before it", at_least=0, at_most=1)

    def schedule(self, mix: StrategyAssignment) -> Plan:
        """Return a random valid plan."""
        rng = random.Random(self.seed)
        world = mix.profile.world
        blocks = []
        for layout in mix.profile.layouts:
            total = layout.elements
            cuts = [rng.randint(0, total // world) * world for _ in range(rng.randrange(self.max_blocks))]
            edges = [0, total] if layout.is_whole else sorted([0, *cuts, total])
            blocks.append(tuple(b - a for a, b in itertools.pairwise(edges) if b > a))
        slots: dict[tuple[Kind, int, int, int], int] = {}
        for op in sorted(mix.ops, key=lambda o: o.kind.is_gather):  # reductions first: gathers follow them
            for b in range(len(blocks[op.unit])):
                first, last = mix.period.window(op)
                if op.kind in REDUCTION and op.micro == 0:
                    first = max(first, slots.get((REDUCTION[op.kind], op.unit, 0, b), first))
                slots[op.kind, op.unit, op.micro, b] = rng.randint(first, last)
        keys = list(slots)
        rng.shuffle(keys)
        keys.sort(key=lambda k: k[0].is_gather)
        drafts: list[Message] = []
        for kind, unit, micro, block in keys:
            slot = slots[kind, unit, micro, block]
            fits = drafts and drafts[-1].kind is kind and drafts[-1].micro == micro and drafts[-1].slot == slot
            if fits and rng.random() < self.fuse:
                drafts[-1] = Message(kind, (*drafts[-1].parts, (unit, block)), slot, micro=micro)
            else:
                drafts.append(Message(kind, ((unit, block),), slot, micro=micro))
        return mix.plan(self.name, blocks, drafts)
