"""Puts the messages on the wire in the plan's order, several in flight, and finishes them in that order.

Two threads: the *starter* launches a message when its turn has come, compute has issued it, its data is ready and
fewer than ``depth`` are in flight; the *finisher* waits for the oldest, unpacks it, runs the updates that
it completes and frees its buffers. Every count below is a FIFO index since the start of training: messages
``[0, processed)`` are done, ``[processed, started)`` in flight, ``[started, issued)`` waiting for their turn.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mdcs.plan.ledger import Ledger, most_in_flight
from mdcs.plan.messages import Plan
from mdcs.runtime.account import Account
from mdcs.runtime.errors import RunError
from mdcs.runtime.executor import Executor
from mdcs.runtime.last_words import LastWords
from mdcs.runtime.pacing import Pacer
from mdcs.runtime.record import Recorder
from mdcs.runtime.scaling import LossScale
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.updates import Updates
from mdcs.runtime.wire import Transfer, Wire

_LISTEN_SECONDS = 0.5
"""How often one who waits asks whether another rank has left."""


class Dispatcher:
    """The two threads, and what the training thread asks of them; ``error`` is what ended them, if anything did."""

    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        storages: list[UnitStorage],
        wire: Wire,
        updates: Updates,
        account: Account,
        executor: Executor,
        recorder: Recorder,
        *,
        control: dist.ProcessGroup | None,
        pacer: Pacer | None,
        clip_norm: float | None,
        loss_scale: LossScale | None,
        timeout_s: float,
        last_words: LastWords,
    ) -> None:
        self.plan, self.ledger, self.storages = plan, ledger, storages
        self.wire, self.updates, self.account = wire, updates, account
        self.executor, self.recorder = executor, recorder
        self.control, self.pacer, self.timeout_s = control, pacer, timeout_s
        self.clip_norm, self.loss_scale, self.last_words = clip_norm, loss_scale, last_words
        self.lock = account.lock
        self.n = len(plan.messages)
        self.issued = self.started = self.processed = 0
        self.first_period = 0  # the period whose gathers alone are sent: the prologue
        self.step = 1
        self._periods_ahead = 0  # a period's number less its iteration's
        self.error: BaseException | None = None
        self._stop = False
        self._skipped: set[int] = set()  # sent ahead of their turn by drain(), or not sent in the prologue
        self._marks: dict[int, Any] = {}
        self._in_flight: deque[tuple[int, Transfer, Any]] = deque()
        self._shards: dict[tuple[int, int], Tensor] = {}  # reduced gradients that wait for the barrier
        self._transient = [e.transient for e in ledger.messages]
        reductions = [i for i, m in enumerate(plan.messages) if not m.kind.is_gather]
        self.last_reduction = reductions[-1] if reductions else -1
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=f"mdcs-{name}", daemon=True)
            for name, loop in (("starter", self._start_loop), ("finisher", self._finish_loop))
        ]
        for thread in self._threads:
            thread.start()

    # -- called by the training thread --------------------------------------------------------------------------

    def issue(self, index: int, activations: int, mark: Any) -> None:
        """Reserve the message's bytes, waiting for those in flight if need be, and let it start."""
        i = index % self.n
        message, effect = self.plan.messages[i], self.ledger.messages[i]
        with self.lock:
            if self._in_prologue(index) and not self.plan.in_prologue(message) or index in self._skipped:
                self._skipped.add(index)
            else:
                self.wait(
                    lambda: self.account.fits(effect.held + activations, self._pending(index)),
                    f"bytes for {self.describe(i)}",
                )
                self.account.reserve((effect.held,))
                self._marks[index] = mark
            self.issued = index + 1
            self.lock.notify_all()
        if message.blocking:
            with self.lock:
                self.wait_for(index + 1, self.describe(i))

    def _in_prologue(self, index: int) -> bool:
        return index < (self.first_period + 1) * self.n

    def _pending(self, upcoming: int | None = None) -> int:
        """The most bytes that messages not yet done may take while in flight."""
        transient = [self._transient[g % self.n] for g in range(self.processed, self.issued) if g not in self._skipped]
        if upcoming is not None:
            transient.append(self._transient[upcoming % self.n])
        return most_in_flight(transient, self.plan.profile.link.depth)

    def admit(self, size: int, what: str) -> None:
        """Wait until ``size`` bytes of compute fit beside all that is held. Call with the lock held."""
        self.wait(lambda: self.account.fits(size, self._pending()), f"bytes for {what}")

    def wait_for(self, count: int, what: str) -> None:
        """Wait until the first ``count`` messages are done. Call with the lock held."""
        self.wait(lambda: self.processed >= count, what)

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until ``ready``; raises RunError after ``timeout_s``, when a thread has failed or when another rank has left.

        Call with the lock held.
        """
        deadline = time.monotonic() + self.timeout_s
        while not ready():
            self.check()
            if self.lock.wait(min(_LISTEN_SECONDS, deadline - time.monotonic())):
                continue
            heard = self.last_words.heard()
            if heard or time.monotonic() >= deadline:
                first = "none" if self.processed == self.issued else self.describe(self.processed % self.n)
                raise RunError(
                    f"rank {self.wire.rank}, step {self.step}: waited {'' if heard else f'{self.timeout_s:g} s '}for {what}; "
                    f"the first message that is not done: {first} ({self.issued - self.processed} issued, "
                    f"{self.started - self.processed} of them started){f' ({heard})' if heard else ''}"
                )
        self.check()

    def check(self) -> None:
        """Raise what has gone wrong in a thread."""
        if self.error is not None:
            raise self.error

    def describe(self, i: int) -> str:
        """Message ``i`` of the plan in words."""
        m = self.plan.messages[i]
        parts = ", ".join(f"{self.storages[u].name}[{b}]" for u, b in m.parts)
        return f"message {i} ({m.kind} of {parts})"

    def finish_iteration(self, base: int) -> None:
        """Finish what is issued, then the reductions of the period that starts at ``base`` which are not issued.

        All ranks are at the same slot here and have issued the same messages, so the order stays the same on all.
        """
        with self.lock:
            self.wait_for(self.issued, "the messages in flight")
            first = self.issued
        if base <= self.first_period * self.n:
            return  # the prologue reduces nothing
        ahead = [
            index
            for index in range(max(first, base), base + self.last_reduction + 1)
            if not self.plan.messages[index % self.n].kind.is_gather and index not in self._skipped
        ]
        if not ahead:
            return
        mark = self.executor.mark()
        put_away = self._put_away(mark)
        for index in ahead:
            self._marks[index] = mark
            transfer, begin = self._start(index)
            self._finish(index, transfer, begin)
            self._skipped.add(index)
        for unit in put_away:
            self._fetch(unit)

    def _put_away(self, mark: Any) -> list[int]:
        """Free what is gathered ahead for the next forward: the plan has no room beside it for reductions at this slot."""
        if self.account.cap is None:
            return []
        units = [u for u, s in enumerate(self.storages) if s.strategy.sharded and s.is_full]
        with self.executor.communicating():
            self.executor.after(mark)
            with self.lock:
                for u in units:
                    self.storages[u].free_full()
                    self.account.book("full_parameters", -self.storages[u].full_bytes)
        return units

    def _fetch(self, unit: int) -> None:
        """Gather a unit again that was put away; its bytes are still reserved."""
        storage = self.storages[unit]
        try:
            with self.executor.communicating():
                with self.lock:
                    storage.allocate_full()
                    self.account.book("full_parameters", storage.full_bytes)
                self.executor.finish(self.wire.gather_now(unit))
        except RuntimeError as e:
            raise RunError(f"rank {self.wire.rank}, step {self.step}: gather of {storage.name}: {e}") from e

    def has_begun_updates(self, base: int) -> bool:
        """Whether messages that update parameters are issued of the period that starts at ``base``."""
        issued = range(self.issued - base)
        if not self.plan.cross_iteration:
            return self.last_reduction in issued
        return any(not self.plan.messages[i].kind.is_gather for i in issued)

    def restart(self) -> int:
        """Forget the plan's place, with nothing in flight: the next period is a prologue. Returns its number."""
        with self.lock:
            self.first_period = self.issued // self.n + 1
            self._periods_ahead = self.first_period + 1 - self.step
            self.issued = self.started = self.processed = self.first_period * self.n
            self._skipped.clear()
            self._marks.clear()
            self._shards.clear()
            self.lock.notify_all()
        return self.first_period

    def stop(self) -> None:
        """End the threads; what is in flight is waited for."""
        with self.lock:
            self._stop = True
            self.lock.notify_all()
        for thread in self._threads:
            thread.join(timeout=5)

    # -- threads ------------------------------------------------------------------------------------------------

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as e:
            with self.lock:
                if self.error is None:
                    self.error = e if isinstance(e, RunError) else RunError(str(e))
                self._stop = True
                self.lock.notify_all()

    def _start_loop(self) -> None:
        depth = self.plan.profile.link.depth
        while True:
            with self.lock:
                while not self._stop and not (
                    self.started < self.issued
                    and self.started - self.processed < depth
                    and self.processed > self._required(self.started)
                ):
                    self.lock.wait()
                if self._stop:
                    return
                index = self.started
                if index in self._skipped:
                    self.lock.wait_for(lambda: self._stop or self.processed == self.started)
                    self._skipped.discard(index)
                    self.started = self.processed = index + 1
                    self.lock.notify_all()
                    continue
            transfer, begin = self._start(index)
            with self.lock:
                self._in_flight.append((index, transfer, begin))
                self.started = index + 1
                self.lock.notify_all()

    def _required(self, index: int) -> int:
        after = self.plan.waits_for[index % self.n]
        return -1 if after < 0 or self._in_prologue(index) else index - index % self.n + after

    def _finish_loop(self) -> None:
        while True:
            with self.lock:
                while not self._stop and not self._in_flight:
                    self.lock.wait()
                if self._stop and not self._in_flight:
                    return
                index, transfer, begin = self._in_flight[0]
            self._finish(index, transfer, begin)
            with self.lock:
                self._in_flight.popleft()
                self.processed = index + 1
                self.lock.notify_all()

    def _start(self, index: int) -> tuple[Transfer, Any]:
        i = index % self.n
        message, effect = self.plan.messages[i], self.ledger.messages[i]
        try:
            mark = self._marks.pop(index, None)
            with self.executor.communicating():
                if mark is not None:
                    self.executor.after(mark)
                with self.lock:
                    for u, size in effect.full:
                        self.storages[u].allocate_full()
                        self.account.book("full_parameters", size)
                    transfer = self.wire.allocate(message)
                    self.account.book("staging", effect.staging)
                    self.account.book("gradient_shards", effect.shards)
                begin = self.executor.stamp()
                if self.pacer is not None:
                    self.pacer.started(index)
                self.wire.launch(transfer)
            return transfer, begin
        except Exception as e:
            raise self._failure(index, e) from e

    def _finish(self, index: int, transfer: Transfer, begin: Any) -> None:
        i = index % self.n
        message, effect = self.plan.messages[i], self.ledger.messages[i]
        try:
            self.executor.finish(transfer.works)
            if self.pacer is not None:
                self.pacer.hold(index, message.kind, self.plan.wire(message))
            with self.executor.communicating():
                end = self.executor.stamp()
                self.recorder.message(message, index // self.n - self._periods_ahead, begin, end)
                self.wire.land(transfer)
                self.executor.finish([])
                with self.lock:
                    transfer.free_staging()
                    self.account.book("staging", -effect.staging)
                    for u, size in effect.gradients_after_link:
                        self.storages[u].free_gradient()
                        self.account.book("gradients", -size)
                shards = [] if message.kind.is_gather else self._update(i, transfer)
                with self.lock:
                    for shard in shards:
                        shard.untyped_storage().resize_(0)
                    for u, size in effect.gradients_after_update:
                        self.storages[u].free_gradient()
                        self.account.book("gradients", -size)
                    self.account.book("gradient_shards", -effect.shards_freed)
                    freed = effect.gradients_after_link + effect.gradients_after_update
                    self.account.release((effect.shards_of_others, *(size for _, size in freed)))
        except Exception as e:
            raise self._failure(index, e) from e

    def _update(self, i: int, transfer: Transfer) -> list[Tensor]:
        """Update the blocks that the message has reduced; in barrier mode all of them, with the last.

        Returns the gradient shards that are done with.
        """
        message, effect = transfer.message, self.ledger.messages[i]
        ready = {part: transfer.shards.get(part) for part in message.parts}
        if not self.plan.cross_iteration:
            self._shards |= {p: s for p, s in ready.items() if s is not None}
            if i != self.last_reduction:
                return []
            reduced = dict.fromkeys(p for m in self.plan.messages if not m.kind.is_gather for p in m.parts)
            ready = {part: self._shards.get(part) for part in reduced}
        gradients: dict[tuple[int, int], Tensor] = {}
        for (u, b), shard in ready.items():
            storage = self.storages[u]
            gradients[u, b] = storage.gradient(b)[storage.region(b)] if shard is None else shard
        is_finite, scale = self._scale(gradients)
        with self.lock:
            self.account.book("update_scratch", effect.scratch)
        begin = self.executor.stamp()
        for (u, b), gradient in gradients.items() if is_finite else ():
            self.updates.step(u, b, gradient, scale)
        self.executor.finish([])
        self.recorder.update(message, begin, self.executor.stamp())
        self._shards.clear()
        with self.lock:
            self.account.book("update_scratch", -effect.scratch)
        return [shard for shard in ready.values() if shard is not None]

    def _scale(self, gradients: dict[tuple[int, int], Tensor]) -> tuple[bool, float | None]:
        """Whether all gradients are finite, and the factor that undoes the loss scale and brings their global norm down to
        ``clip_norm``, as torch's clip_grad_norm_ does. (True, None) where there is nothing to scale.

        Shards are counted by their owner, whole (dp) gradients by rank 0; their squares are summed in float64.
        """
        if self.clip_norm is None and self.loss_scale is None:
            return True, None
        total = torch.zeros((), dtype=torch.float64)
        for (u, _), gradient in gradients.items():
            whole = self.plan.strategies[u].value == "dp"
            if not whole or self.wire.rank == 0:
                # In the gradient's own precision, if it has enough: in another one torch would make a whole copy of it.
                precision = torch.float32 if gradient.element_size() < 4 else None
                total += torch.linalg.vector_norm(gradient, dtype=precision).double().cpu() ** 2
        if self.control is not None:
            dist.all_reduce(total, group=self.control)
        norm, scale = float(total.sqrt()), 1.0
        if self.loss_scale is not None:
            is_finite, scale = math.isfinite(norm), 1 / self.loss_scale.value
            self.loss_scale.update(is_finite)
            if not is_finite:
                return False, None
        self.recorder.norm = norm * scale
        if self.clip_norm is not None:
            scale *= min(1.0, self.clip_norm / (self.recorder.norm + 1e-6))
        return True, scale

    def _failure(self, index: int, e: Exception) -> RunError:
        """The step it names is the one in which the message was issued; compute may be in the next by now."""
        if isinstance(e, RunError):
            return e
        period, i = divmod(index, self.n)
        step = period - self._periods_ahead + (self.plan.messages[i].slot >= self.plan.period.turn)
        return RunError(self.last_words.after(f"rank {self.wire.rank}, step {step}: {self.describe(i)}: {e}"))
