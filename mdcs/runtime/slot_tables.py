"""Tables of the events at each slot of a plan, made before training."""

from __future__ import annotations

from mdcs.plan.gradient_readiness import parameters_in_block
from mdcs.plan.plan import Plan
from mdcs.runtime.storage import UnitStorage


class SlotTables:
    """Tables by slot.

    - ``opens``: units whose parameters become usable at its begin. ``closes``: units that stop at its end.
    - ``last``: trainable units whose gradients of a micro-step end with it.
    - ``early``: for each message that may leave before it: unit -> parameters whose gradients the message carries.
    """

    def __init__(self, plan: Plan, storages: list[UnitStorage]) -> None:
        period, length = plan.period, plan.period.length
        self.opens: list[list[UnitStorage]] = [[] for _ in range(length)]
        self.closes: list[list[UnitStorage]] = [[] for _ in range(length)]
        self.last: list[list[int]] = [[] for _ in range(length)]
        for u, storage in enumerate(storages):
            for micro in range(period.micro_steps):
                first, last = period.forward(u, micro)
                backward, end = period.backward(u, micro), period.last_use(u, micro) % length
                self.opens[first % length].append(storage)
                if storage.strategy.regathers and backward is not None:
                    self.closes[last % length].append(storage)
                    self.opens[backward[0] % length].append(storage)
                if storage.strategy.sharded or storage.trainable:  # trainable: the runtime holds its gradients from here on
                    self.closes[end].append(storage)
                if storage.trainable:
                    self.last[end].append(u)
        self.early = _leaving_early(plan)


def _leaving_early(plan: Plan) -> dict[int, list[dict[int, range]]]:
    out: dict[int, list[dict[int, range]]] = {}
    for message, part in zip(plan.messages, plan.schedule.ready, strict=True):
        if part < 1:
            carried: dict[int, range] = {}
            for u, b in message.parts:
                own = parameters_in_block(plan.profile, u, plan.blocks[u], b)
                known = carried.setdefault(u, own)
                carried[u] = range(min(known.start, own.start), max(known.stop, own.stop))
            out.setdefault(message.slot, []).append(carried)
    return out
