"""Side passes: passes of the loop that bring no gradients which are the step's (:class:`mdcs.model.hooks.Listener`).

The plan waits meanwhile. All ranks come to the same place of it, finish the messages that they have issued, and make the
units whole by collectives. Then each rank runs what it likes, until the plan goes on. What a side pass adds to ``.grad``
stays there, as with DDP's ``no_sync()``: the next gradient of the step comes on top of it.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from mdcs.runtime.context import RunContext
from mdcs.runtime.departures import Departures
from mdcs.runtime.evaluation import Evaluation
from mdcs.runtime.process_groups import SIDE_PASS, ProcessGroups
from mdcs.runtime.wire import Wire
from mdcs.torch_compat import without_autograd

MORE = (
    "Call step() after each batch; to accumulate gradients, put all but the last forward and backward of a step under "
    "`with parallel.no_sync():`, or plan for more of them (micro_steps=)"
)
TOO_LATE = (
    f"{SIDE_PASS}: came between the last backward pass of the step and step(): evaluate before that backward pass or after "
    f"step(). {MORE}"
)


class SidePasses:
    """The block of side passes between two passes of the plan.

    - ``accumulates``: the loop is in ``no_sync()``. ``is_open``: the plan waits.
    - ``had_backward``: a backward pass of this step was a side pass.
    """

    def __init__(
        self, context: RunContext, wire: Wire, departures: Departures, evaluation: Evaluation, groups: ProcessGroups
    ) -> None:
        self.departures, self._evaluation, self._groups, self._place = departures, evaluation, groups, context.place
        self._wire, self._storages = wire, wire.units.storages
        self.accumulates = self.is_open = self.had_backward = False
        self._block = ExitStack()
        self._makes_graphs = False  # a backward with create_graph: a later one uses the parameters again, in any order

    def begin(self, progress: int, period: int | None) -> None:
        """Make units whole at this place of the step, all ranks together.

        ``period``: number of the period whose reductions are not issued yet; None inside of an iteration.
        """
        with self.departures.timed(), self._place.during(SIDE_PASS), without_autograd():
            answers = self._groups.agree_on_call(SIDE_PASS, self._place.step, progress)
            if len(set(answers)) > 1:
                raise self._place.error(f"{SIDE_PASS}: run it at the same place of the step on every rank")
            if period is not None:
                self._wire.finish_iteration(period)
            else:
                with self._wire.lock:
                    self._wire.wait_for(self._wire.queue.issued, "the messages in flight")
            self._open = [storage.guard.is_open for storage in self._storages]
            self._full = [storage.is_full for storage in self._storages]
            self._block.enter_context(self._evaluation.unsharded())
            self.is_open = True
        self.departures.seen["ran a pass beside the plan"] = 1

    def use(self, unit: int, in_backward: bool) -> None:
        """Make sure that a unit is whole: in a forward until it returns, in a backward until the plan goes on."""
        self._evaluation.enter(unit)
        self._makes_graphs |= in_backward and torch.is_grad_enabled()

    def leave(self, unit: int) -> None:
        """End a forward of a unit."""
        self._evaluation.leave(unit)

    def end(self) -> None:
        """Let the plan go on: free what it has not gathered.

        After a backward that made a graph units stay whole until the pass of the plan that comes next has ended.
        """
        self.is_open = False
        with self.departures.timed():
            kept = self._evaluation.keep() if self._makes_graphs else ()
            self._block.close()
            for storage, was_open in zip(self._storages, self._open, strict=True):
                if was_open:
                    storage.guard.open()
                else:
                    storage.guard.close()
            for unit in kept:
                if not self._full[unit]:
                    self._wire.units.take_outside(unit)
                    self._storages[unit].guard.open()
        self._makes_graphs = False
