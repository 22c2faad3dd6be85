"""The end of an iteration before its time: the reductions that the plan would issue in the next forward are sent now."""

from __future__ import annotations

from mdcs.runtime.executor import run_on_comm_stream
from mdcs.runtime.failure_channel import FailureChannel
from mdcs.runtime.message_runner import MessageRunner
from mdcs.runtime.stream_transport import StreamTransport
from mdcs.runtime.thread_transport import ThreadTransport


def finish_iteration(transport: ThreadTransport | StreamTransport, base: int) -> None:
    """Finish the issued messages, then send the reductions of the period that starts at ``base`` which are not issued.

    All ranks are at the same slot here and have issued the same messages, so the order is the same on all ranks.
    """
    queue, runner = transport.queue, transport.runner
    with runner.account.lock:
        transport.wait_for(queue.issued, "the messages in flight")
    if base <= queue.first_period * queue.n:
        return  # the prologue reduces nothing
    ahead = [
        index
        for index in range(max(queue.issued, base), base + runner.last_reduction + 1)
        if not runner.plan.messages[index % queue.n].kind.is_gather and not queue.is_skipped(index)
    ]
    if not ahead:
        return
    # The plan has no room for reductions beside the units that are gathered ahead for the next forward.
    has_limit = queue.admission.cap is not None
    gathered = [u for u, s in enumerate(runner.storages) if has_limit and s.strategy.sharded and s.is_full]
    for unit in gathered:
        _free(runner, unit)
    for index in ahead:
        transport.send_ahead(index)
    for unit in gathered:
        _gather(runner, unit)


def _free(runner: MessageRunner, unit: int) -> None:
    """Free a gathered unit; its bytes stay reserved."""
    storage = runner.storages[unit]
    with runner.account.lock:
        storage.free_full()
        runner.account.record("full_parameters", -storage.full_bytes)


def _gather(runner: MessageRunner, unit: int) -> None:
    storage = runner.storages[unit]
    with runner.account.lock:
        storage.allocate_full()
        runner.account.record("full_parameters", storage.full_bytes)
    with runner.place.during(f"gather of {storage.name}"), run_on_comm_stream(runner.executor):
        runner.executor.wait_works(runner.wire.unshard_now(unit))


def stop_threads(transport: ThreadTransport | StreamTransport, failures: FailureChannel) -> None:
    """Stop a run that ends without close()."""
    failures.publish_uncaught()
    transport.stop()
    failures.end()
