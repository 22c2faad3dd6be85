"""Sends the messages in the plan's order, with several in flight, and finishes them in that order.

A message starts when its turn has come, compute has issued it, its data is ready, and fewer than ``depth`` messages are
in flight. The thread that meets the last of these conditions starts the message: the training thread when it issues
the message, else the *finisher*. The finisher waits for the oldest message, unpacks it, runs the updates that it
completes, and frees its buffers. A third thread, the *starter*, starts large messages: gloo copies the payload on the
calling thread, which would block compute. Threads wake each other only if another thread waits for the event.

Every count below is a FIFO index since the start of training: messages ``[0, processed)`` are done, ``[processed,
started)`` in flight, ``[started, issued)`` waiting for their turn.
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

from mdcs.plan.ledger import Ledger
from mdcs.plan.message import Message
from mdcs.plan.messages import Plan
from mdcs.runtime import norm
from mdcs.runtime.account import Account, InFlight
from mdcs.runtime.errors import RunError
from mdcs.runtime.executor import Executor, between
from mdcs.runtime.last_words import LastWords
from mdcs.runtime.pacing import Pacer
from mdcs.runtime.record import Recorder
from mdcs.runtime.scaling import LossScale
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.updates import Updates
from mdcs.runtime.wire import Transfer, Wire
from mdcs.sizes import MIB

LISTEN_SECONDS = 0.5
"""Seconds between checks, while waiting, whether another rank has left."""
_LARGE_BYTES = MIB // 4
"""Wire bytes from which on the starter starts a message. Estimated: at 0.4 ms per MiB as long as a wake-up."""


class Dispatcher:
    """The finisher thread, the starter thread where messages are large, and the training thread's interface to them.

    ``error``: the error that ended the threads, or None.
    """

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
        self.first_period = 0  # the prologue: a period of which only gathers are sent
        self.step = 1
        self._periods_ahead = 0  # number of a period minus number of its iteration
        self.error: BaseException | None = None
        self._stop = False
        self._skipped: set[int] = set()  # sent ahead of their turn by drain(), or not sent in the prologue
        self._marks: dict[int, Any] = {}
        self._in_flight: deque[tuple[int, Transfer, Any]] = deque()
        self._depth = plan.profile.link.depth
        self._pending = InFlight(self._depth)  # transient bytes of the messages that are issued and not done
        self._work = threading.Condition(self.lock)  # what the finisher waits for, when it is idle
        self._idle = False
        self._large = threading.Condition(self.lock)  # what the starter waits for
        self._starting = False  # a thread is starting a message, and will start the next one
        self._progress = threading.Condition(self.lock)  # the training thread waits on this
        self._awaited: Callable[[], bool] | None = None  # the condition that it waits for
        self._shards: dict[tuple[int, int], Tensor] = {}  # reduced gradients that wait for the barrier
        self._needs_norm = clip_norm is not None or loss_scale is not None
        wide = any(dtype == torch.float64 for s in storages if s.trainable for dtype in s.gradient_dtypes)
        self._norm_dtype = torch.float64 if wide else torch.float32
        self._transient = [e.transient for e in ledger.messages]
        self._is_large = [plan.wire(m) >= _LARGE_BYTES for m in plan.messages]
        reductions = [i for i, m in enumerate(plan.messages) if not m.kind.is_gather]
        self.last_reduction = reductions[-1] if reductions else -1
        self._begin()

    def _begin(self) -> None:
        finisher = threading.Thread(target=self._run, args=(self._finish_all,), name="mdcs-finisher", daemon=True)
        starter = threading.Thread(target=self._run, args=(self._start_large,), name="mdcs-starter", daemon=True)
        self._threads = [finisher, starter] if any(self._is_large) else [finisher]
        for thread in self._threads:
            thread.start()

    # -- called by the training thread --------------------------------------------------------------------------

    def issue(self, index: int, activations: int, mark: Any) -> None:
        """Reserve the message's bytes, waiting for messages in flight if necessary, and let it start."""
        i = index % self.n
        message, effect = self.plan.messages[i], self.ledger.messages[i]
        with self.lock:
            if self._in_prologue(index) and not self.plan.in_prologue(message) or index in self._skipped:
                self._skipped.add(index)
            else:
                transient = self._transient[i]

                def fits() -> bool:
                    return self.account.admits(effect.held + activations, self._pending.most(transient), transient - self._freed)

                if not fits():
                    self.wait(fits, f"bytes for {self.describe(i)}")
                self._pending.add(transient)
                self.account.reserve((effect.held,))
                self._marks[index] = mark
            self.issued = index + 1
            self._pass_skipped()
        self._start_ready()
        if message.blocking:
            with self.lock:
                self.wait_for(index + 1, self.describe(i))

    def has_room(self, index: int, activations: int) -> bool:
        """Return whether the message's bytes fit beside ``activations`` without waiting for messages in flight."""
        i = index % self.n
        with self.lock:
            in_flight = self._pending.most(self._transient[i])
            return self.account.fits(self.ledger.messages[i].held + activations + self.account.excess, in_flight)

    def _in_prologue(self, index: int) -> bool:
        return index < (self.first_period + 1) * self.n

    def admit(self, size: int, what: str) -> None:
        """Wait until ``size`` bytes of compute fit beside all that is held. Call with the lock held."""
        self.wait(lambda: self.account.admits(size, self._pending.most(), -self._freed), f"bytes for {what}")

    @property
    def _freed(self) -> int:
        """Other buffers' bytes that the issued messages free when done; computed only where there is excess."""
        if not self.account.excess:
            return 0
        return sum(self.ledger.messages[i % self.n].freed for i in range(self.processed, self.issued) if i not in self._skipped)

    def wait_for(self, count: int, what: str) -> None:
        """Wait until the first ``count`` messages are done. Call with the lock held."""
        self.wait(lambda: self.processed >= count, what)

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until ``ready``. Call with the lock held exactly once.

        Raises RunError after ``timeout_s``, when a thread has failed, and when another rank has left.
        """
        deadline = time.monotonic() + self.timeout_s
        while not ready():
            self.check()
            self._awaited = lambda: self.error is not None or ready()
            in_time = self._progress.wait_for(self._awaited, min(LISTEN_SECONDS, deadline - time.monotonic()))
            self._awaited = None
            if in_time:
                continue
            self.lock.release()  # the store may answer late or never: let the other threads go on meanwhile
            try:
                heard = self.last_words.heard()
            finally:
                self.lock.acquire()
            if not ready() and (heard or time.monotonic() >= deadline):
                first = "none" if self.processed == self.issued else self.describe(self.processed % self.n)
                raise RunError(
                    f"rank {self.wire.rank}, step {self.step}: waited {'' if heard else f'{self.timeout_s:g} s '}for {what}; "
                    f"the first message that is not done: {first} ({self.issued - self.processed} issued, "
                    f"{self.started - self.processed} of them started){f' ({heard})' if heard else ''}"
                )
        self.check()

    def check(self) -> None:
        """Raise the error of a thread, if there is one."""
        if self.error is not None:
            raise self.error

    def describe(self, i: int) -> str:
        """Return message ``i`` of the plan in words."""
        m = self.plan.messages[i]
        parts = ", ".join(f"{self.storages[u].name}[{b}]" for u, b in m.parts)
        return f"message {i} ({m.kind} of {parts})"

    def finish_iteration(self, base: int) -> None:
        """Finish the issued messages, then send the reductions of the period that starts at ``base`` which are not yet
        issued.

        All ranks are at the same slot here and have issued the same messages, so the order is the same on all ranks.
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
        put_away = self._put_away()
        mark = self.executor.mark()
        for index in ahead:
            self._send_now(index, mark)
            self._skipped.add(index)
        for unit in put_away:
            self._fetch(unit)

    def _send_now(self, index: int, mark: Any) -> None:
        self._marks[index] = mark
        transfer, begin = self._start(index)
        self._finish(index, transfer, begin)

    def _put_away(self) -> list[int]:
        """Free the units gathered ahead for the next forward: the plan has no room for reductions beside them here."""
        if self.account.cap is None:
            return []
        units = [u for u, s in enumerate(self.storages) if s.strategy.sharded and s.is_full]
        with self.lock:
            for u in units:
                self.storages[u].free_full()
                self.account.book("full_parameters", -self.storages[u].full_bytes)
        return units

    def _fetch(self, unit: int) -> None:
        """Gather a unit freed by :meth:`_put_away` again; its bytes are still reserved."""
        storage = self.storages[unit]
        with self.lock:
            storage.allocate_full()
            self.account.book("full_parameters", storage.full_bytes)
        try:
            with between(self.executor):
                self.executor.finish(self.wire.gather_now(unit))
        except RuntimeError as e:
            raise RunError(f"rank {self.wire.rank}, step {self.step}: gather of {storage.name}: {e}") from e

    def has_begun_updates(self, base: int) -> bool:
        """Return whether a message that updates parameters is issued in the period that starts at ``base``."""
        issued = range(self.issued - base)
        if not self.plan.cross_iteration:
            return self.last_reduction in issued
        return any(not self.plan.messages[i].kind.is_gather for i in issued)

    def restart(self) -> int:
        """Forget the position in the plan, with nothing in flight: the next period is a prologue. Return its number."""
        with self.lock:
            self.first_period = self.issued // self.n + 1
            self._periods_ahead = self.first_period + 1 - self.step
            self.issued = self.started = self.processed = self.first_period * self.n
            self._skipped.clear()
            self._marks.clear()
            self._shards.clear()
        return self.first_period

    def end_step(self) -> None:
        """Compute has reached the end of an iteration: nothing to do with threads."""

    def stop(self) -> None:
        """End the threads after the issued messages. If all ranks stop at the same slot, none waits for a missing peer.
        """
        with self.lock:
            self._stop = True
            self._wake_all()
        deadline = time.monotonic() + 5.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # -- starting -----------------------------------------------------------------------------------------------

    def _start_ready(self, as_starter: bool = False) -> None:
        """Start the messages that can start now, one at a time and in order; leave large ones to the starter.

        Call without the lock.
        """
        while True:
            with self.lock:
                index = None if self._starting else self._next()
                if index is None:
                    return
                if self._is_large[index % self.n] and not as_starter:
                    self._large.notify()
                    return
                self._starting = True
            transfer, begin = self._start(index)
            with self.lock:
                self._in_flight.append((index, transfer, begin))
                self.started = index + 1
                self._starting = False
                if self._idle:
                    self._work.notify()

    def _next(self) -> int | None:
        """Return the index of the next message if it can start now, else None."""
        index = self.started
        if index == self.issued or index in self._skipped or self.error is not None:
            return None
        can_start = index - self.processed < self._depth and self.processed > self._required(index)
        return index if can_start else None

    def _pass_skipped(self) -> None:
        """Count skipped messages as done once all before them are."""
        while self.processed == self.started < self.issued and self.started in self._skipped:
            self._skipped.discard(self.started)
            self.started = self.processed = self.started + 1

    def _required(self, index: int) -> int:
        after = self.plan.waits_for[index % self.n]
        return -1 if after < 0 or self._in_prologue(index) else index - index % self.n + after

    def _behind(self, index: int) -> Any:
        """Return the mark of the compute stream behind which the message starts."""
        return self._marks.pop(index)

    def _start(self, index: int) -> tuple[Transfer, Any]:
        i = index % self.n
        message, effect = self.plan.messages[i], self.ledger.messages[i]
        try:
            with self.lock:
                for u, size in effect.full:  # allocated outside of communicating(): compute's stream owns and frees this memory
                    self.storages[u].allocate_full()
                    self.account.book("full_parameters", size)
                mark = self._behind(index)
            with self.executor.communicating():
                self.executor.after(mark)
                with self.lock:
                    transfer = self.wire.allocate(message)
                    self.account.book("staging", effect.staging)
                    self.account.book("gradient_shards", effect.shards)
                begin = self.executor.stamp()
                if self.pacer is not None:
                    self.pacer.started(index)
                self.wire.launch(transfer)
            return transfer, begin
        except Exception as e:
            self.error = self.error or self._failure(index, e)
            raise self.error from e

    def _start_large(self) -> None:
        """Run the starter thread."""
        while True:
            self._start_ready(as_starter=True)
            with self.lock:
                while self._starting or self._next() is None:
                    if self._has_ended():
                        return
                    self._large.wait()

    # -- both threads -------------------------------------------------------------------------------------------

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:
            with self.lock:
                self.error = self.error or (e if isinstance(e, RunError) else RunError(str(e)))
                self._wake_all()

    def _has_ended(self) -> bool:
        return self.error is not None or self._stop and self.processed == self.issued

    def _wake_all(self) -> None:
        for waited_for in (self._work, self._large, self._progress):
            waited_for.notify()

    # -- the finisher -------------------------------------------------------------------------------------------

    def _finish_all(self) -> None:
        while self._has_work():
            self._finish_oldest()

    def _has_work(self) -> bool:
        """Wait for a message in flight; return False at the end."""
        with self.lock:
            while not self._in_flight:
                if self._has_ended():
                    return False
                self._idle = True
                self._work.wait()
                self._idle = False
        return True

    def _finish_oldest(self) -> None:
        index, transfer, begin = self._in_flight[0]
        self._finish(index, transfer, begin)
        with self.lock:
            self._in_flight.popleft()
            self._pending.remove()
            self.processed = index + 1
            self._pass_skipped()
            if self._awaited is not None and self._awaited():
                self._progress.notify()
            if self._stop:
                self._wake_all()
        self._start_ready()

    def _finish(self, index: int, transfer: Transfer, begin: Any) -> None:
        i = index % self.n
        message, effect = self.plan.messages[i], self.ledger.messages[i]
        try:
            with self.executor.communicating():
                self.executor.finish(transfer.works)
                self._hold(index, message)
                end = self.executor.stamp()
                self.recorder.message(i, index // self.n - self._periods_ahead, begin, end)
                self.wire.land(transfer)
                with self.lock:
                    transfer.free_staging()
                    self.account.book("staging", -effect.staging)
                    self._free_gradients(effect.gradients_after_link)
                if message.kind.is_gather:
                    return
                shards = self._update(i, transfer)
                with self.lock:
                    for shard in shards:
                        shard.untyped_storage().resize_(0)
                    self._free_gradients(effect.gradients_after_update)
                    self.account.book("gradient_shards", -effect.shards_freed)
                    self._release(i)
        except Exception as e:
            raise self._failure(index, e) from e

    def _hold(self, index: int, message: Message) -> None:
        """Delay the end of the message to that of the emulated link, if there is one."""
        if self.pacer is not None:
            self.pacer.hold(index, message.kind, self.plan.wire(message))

    def _free_gradients(self, gradients: tuple[tuple[int, int], ...]) -> None:
        for u, size in gradients:
            self.storages[u].free_gradient()
            self.account.book("gradients", -size)

    def _release(self, i: int) -> None:
        """Release the reserved bytes of the buffers that a message frees."""
        effect = self.ledger.messages[i]
        self.account.release((effect.freed,))

    def _update(self, i: int, transfer: Transfer) -> list[Tensor]:
        """Update the blocks that the message has reduced; in barrier mode all blocks, with the last reduction.

        Returns the gradient shards that can be freed.
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
        with self.updates.meter.tag("update_scratch"):
            work = norm.workspace(gradients.values(), self.storages[0].device) if self._needs_norm else None
        scratch = max(effect.scratch, 0 if work is None else work.nbytes)
        with self.lock:
            self.account.book("update_scratch", scratch)
        is_finite, scale = (True, None) if work is None else self._scale(gradients, work)
        del work
        begin = self.executor.stamp()
        if is_finite:
            self.updates.step(gradients, scale)
        self.recorder.update(i, begin, self.executor.stamp())
        self._shards.clear()
        with self.lock:
            self.account.book("update_scratch", -scratch)
        return [shard for shard in ready.values() if shard is not None]

    def _scale(self, gradients: dict[tuple[int, int], Tensor], work: Tensor) -> tuple[bool, Tensor | None]:
        """Return (all gradients are finite, factor on gradients): the factor undoes the loss scale and clips the global
        norm.

        Clips as torch's clip_grad_norm_ does, with the norm in the gradients' precision, but at least float32. Of the
        ranks that have the same part, only the first counts it (rank 0 for a whole dp gradient). The host reads the
        norm only for a loss scale.
        """
        counted = [g for (u, _), g in gradients.items() if self.storages[u].replica[0] == 0]
        top = norm.largest(counted, work.device)
        self._reduce(top, dist.ReduceOp.MAX)
        squares = norm.squares(counted, top, work)
        self._reduce(squares, dist.ReduceOp.SUM)
        total, undo = norm.norm(top, squares), 1.0
        if self.loss_scale is not None:
            is_finite, undo = math.isfinite(float(total)), 1 / self.loss_scale.value
            self.loss_scale.update(is_finite)
            if not is_finite:
                return False, None
        self.recorder.norm = (total * undo).to(self._norm_dtype)
        if self.clip_norm is None:
            return True, torch.full_like(total, undo)
        return True, (self.clip_norm / (self.recorder.norm + 1e-6)).clamp(max=1.0) * undo

    def _reduce(self, value: Tensor, how: Any) -> None:
        if self.control is not None:
            dist.all_reduce(value, how, group=self.control)

    def _failure(self, index: int, e: Exception) -> RunError:
        """Return the error of a message, naming the step that issued it; compute may be in the next one by now."""
        if isinstance(e, RunError):
            return e
        period, i = divmod(index, self.n)
        step = period - self._periods_ahead + (self.plan.messages[i].slot >= self.plan.period.turn)
        return RunError(self.last_words.after(f"rank {self.wire.rank}, step {step}: {self.describe(i)}: {e}"))
