"""The memory meter counts exactly what torch requests.

The stories below run one after the other in one child process (this file, run as a program), in which nothing else
allocates, and each becomes one test here.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import random
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mdcs.plan.lifetimes import CATEGORIES
from mdcs.telemetry import memory_meter
from mdcs.telemetry.memory_meter import CudaMeter, Meter, ShimMeter, current_meter

MIB = 2**20
Story = Callable[["Change"], None]
STORIES: dict[str, Story] = {}


class Change:
    """Readings of the meter, less the bytes live when the story began."""

    def __init__(self) -> None:
        self.meter = ShimMeter()
        self.meter.window()
        self.meter.reset()
        self.before = self.meter.live()

    def less_before(self, reading: dict[str, int]) -> dict[str, int]:
        """Only the categories that changed."""
        changes = {name: value - self.before[name] for name, value in reading.items()}
        return {name: change for name, change in changes.items() if change}

    def live(self) -> dict[str, int]:
        return self.less_before(self.meter.live())

    def peaks(self) -> dict[str, int]:
        return self.less_before(self.meter.peaks())

    def window(self) -> dict[str, int]:
        return self.less_before(self.meter.window())


def story(function: Story) -> Story:
    STORIES[function.__name__] = function
    return function


def tensor_of(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


# ---- stories, told in a process of their own -------------------------------------------------------------


@story
def a_tensor_counts_its_bytes_until_it_is_freed(change: Change) -> None:
    tensor = tensor_of(12_345)
    assert change.live() == {"activations": 12_345, "total": 12_345}
    del tensor
    assert change.live() == {}
    assert change.peaks() == {"activations": 12_345, "total": 12_345}


@story
def a_view_counts_nothing(change: Change) -> None:
    tensor = tensor_of(MIB)
    view = tensor[17:].view(-1)
    assert change.live()["total"] == MIB
    del tensor
    assert change.live()["total"] == MIB, "the view keeps the storage alive"
    del view
    assert change.live() == {}


@story
def what_onednn_keeps_for_each_shape_counts_nothing(change: Change) -> None:
    layer, counted = torch.nn.Conv2d(2, 3, 3), list[dict[str, int]]()
    with torch.no_grad():
        for samples in (1, 2, 3):
            layer(torch.ones(samples, 2, 9, 9))
            counted.append(change.live())
    assert counted == [{name: 57 * 4 for name in ("activations", "total")}] * 3, "its weights and bias"
    assert change.peaks()["total"] >= 3 * 3 * 7 * 7 * 4


@story
def every_category_is_counted_apart(change: Change) -> None:
    tensors = []
    for size, category in enumerate(CATEGORIES, start=1000):
        with change.meter.tag(category):
            tensors.append(tensor_of(size))
    sizes = {category: size for size, category in enumerate(CATEGORIES, start=1000)}
    assert change.live() == sizes | {"total": sum(sizes.values())}


@story
def tags_nest_and_end_with_their_block(change: Change) -> None:
    with change.meter.tag("optimizer"):
        with change.meter.tag("staging"):
            inner = tensor_of(1)
        outer = tensor_of(10)
        try:
            with change.meter.tag("gradients"):
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            after_error = tensor_of(100)
    outside = tensor_of(1000)
    assert change.live() == {"staging": 1, "optimizer": 110, "activations": 1000, "total": 1111}
    del inner, outer, after_error, outside


@story
def an_unknown_category_is_an_error(change: Change) -> None:
    with pytest.raises(KeyError, match="weights"):
        change.meter.tag("weights")


@story
def a_released_storage_is_freed_and_regathered_under_the_current_tag(change: Change) -> None:
    with change.meter.tag("parameters"):
        tensor = tensor_of(7 * MIB)
    storage = tensor.untyped_storage()
    storage.resize_(0)
    assert change.live() == {}
    with change.meter.tag("full_parameters"):
        storage.resize_(7 * MIB)
    assert change.live() == {"full_parameters": 7 * MIB, "total": 7 * MIB}


@story
def another_thread_allocates_under_its_own_tag(change: Change) -> None:
    with change.meter.tag("parameters"), ThreadPoolExecutor(1) as other:
        untagged = other.submit(tensor_of, 5000).result()

        def gather() -> torch.Tensor:
            with change.meter.tag("staging"):
                return tensor_of(300)

        staged = other.submit(gather).result()
        mine = tensor_of(20)
    assert change.live() == {"activations": 5000, "staging": 300, "parameters": 20, "total": 5320}
    del untagged, staged, mine


@story
def what_gloos_threads_allocate_is_staging(change: Change) -> None:
    def copy_in_a_collective() -> torch.Tensor:
        set_name = 15
        ctypes.CDLL(None).prctl(set_name, b"pt_gloo_runloop", 0, 0, 0)
        return tensor_of(700)

    with change.meter.tag("parameters"), ThreadPoolExecutor(1) as gloo:
        copied = gloo.submit(copy_in_a_collective).result()
        mine = tensor_of(20)
    assert change.live() == {"staging": 700, "parameters": 20, "total": 720}
    del copied, mine


@story
def retag_moves_the_bytes_and_leaves_the_total(change: Change) -> None:
    tensor = tensor_of(800)
    assert change.meter.retag(tensor[100:], "optimizer") == 800
    assert change.live() == {"optimizer": 800, "total": 800}
    assert change.peaks() == {"activations": 800, "optimizer": 800, "total": 800}
    del tensor
    assert change.live() == {}, "freed from the category it was moved to"


@story
def retag_leaves_out_a_buffer_it_never_counted(change: Change) -> None:
    foreign = torch.frombuffer(bytearray(4096), dtype=torch.uint8)
    assert change.meter.retag(foreign, "optimizer") == 0 and change.live() == {}
    assert change.meter.retag(torch.empty(0), "optimizer") == 0


@story
def every_category_and_the_total_have_peaks_of_their_own(change: Change) -> None:
    with change.meter.tag("gradients"):
        gradients = tensor_of(60)
    with change.meter.tag("staging"):
        staging = tensor_of(50)
    del gradients
    with change.meter.tag("staging"):
        more = tensor_of(40)
    assert change.peaks() == {"gradients": 60, "staging": 90, "total": 110}
    del staging, more


@story
def reset_starts_peaks_from_what_is_live(change: Change) -> None:
    kept, gone = tensor_of(300), tensor_of(9000)
    del gone
    change.meter.reset()
    assert change.peaks() == {"activations": 300, "total": 300}
    assert change.window() == {"activations": 9300, "total": 9300}, "windows do not care"
    del kept


@story
def each_window_has_its_own_peaks(change: Change) -> None:
    first = tensor_of(100)
    tensor_of(50)  # dies at once
    assert change.window() == {"activations": 150, "total": 150}
    assert change.window() == {"activations": 100, "total": 100}, "a quiet window peaks at what it inherits"
    del first
    assert change.window() == {"activations": 100, "total": 100}, "it was live when this window began"
    assert change.window() == {}
    assert change.peaks() == {"activations": 150, "total": 150}, "the run's peak does not care about windows"


@story
def a_linear_layer_peaks_where_arithmetic_says(change: Change) -> None:
    batch, inputs, outputs, w = 32, 96, 160, 4  # w: bytes of a float32
    with change.meter.tag("parameters"):
        layer = torch.nn.Linear(inputs, outputs)
    data, gradient = torch.ones(batch, inputs), torch.ones(batch, outputs)
    parameters = (inputs * outputs + outputs) * w
    held = (batch * inputs + batch * outputs) * w
    assert change.live() == {"parameters": parameters, "activations": held, "total": parameters + held}

    change.meter.window()
    output = layer(data)
    assert change.window()["activations"] == held + batch * outputs * w
    output.backward(gradient)
    # backward makes the two parameters' gradients, while the output is still referenced here
    assert change.window()["activations"] == held + batch * outputs * w + parameters
    assert change.peaks()["total"] == parameters + held + batch * outputs * w + parameters
    del output
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert change.meter.retag(parameter.grad, "gradients") == parameter.numel() * w
    assert change.live() == {
        "parameters": parameters, "gradients": parameters, "activations": held, "total": 2 * parameters + held,
    }  # fmt: skip


@story
def threads_hammering_leave_nothing(change: Change) -> None:
    """Each thread frees what its neighbour allocated; thousands live at once, so the table also grows."""
    threads, rounds = 8, 40
    boxes: list[queue.SimpleQueue[list[torch.Tensor]]] = [queue.SimpleQueue() for _ in range(threads)]

    def hammer(me: int) -> None:
        dice = random.Random(me)
        held: list[torch.Tensor] = []
        for _ in range(rounds):
            with change.meter.tag(dice.choice(CATEGORIES)):
                batch = [tensor_of(dice.randrange(1, 3000)) for _ in range(100)]
            for tensor in dice.sample(batch, 10):
                change.meter.retag(tensor, dice.choice(CATEGORIES))
            held += batch[:50]
            boxes[(me + 1) % threads].put(batch[50:])
            del batch, tensor
            boxes[me].get().clear()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(hammer, range(threads)))
    assert change.live() == {}


@story
def a_growing_table_forgets_nothing(change: Change) -> None:
    sizes = [1 + n % 7 for n in range(40_000)]  # the table starts with room for 8,192 blocks
    tensors = [tensor_of(size) for size in sizes]
    assert change.live()["total"] == sum(sizes)
    random.Random(0).shuffle(tensors)
    del tensors[10_000:]
    left = sum(tensor.numel() for tensor in tensors)
    assert change.live()["total"] == left
    tensors.clear()
    assert change.live() == {}


@story
def a_forked_child_keeps_counting(change: Change) -> None:
    """Forking while other threads allocate must not leave the child with a held lock."""
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            tensor_of(64)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                before = change.meter.live()["total"]
                kept = tensor_of(777)
                os._exit(0 if change.meter.live()["total"] - before == len(kept) else 1)
            _, status = os.waitpid(child, 0)
            assert status == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@story
def a_cpu_has_the_shim(change: Change) -> None:
    assert isinstance(current_meter("cpu"), ShimMeter)


@story
def what_is_older_than_the_meter_is_counted_once_and_leaves_nothing(change: Change) -> None:
    assert BEFORE.pop("live") == OLDER + OLDER_GRADIENT
    older = BEFORE.pop("older")
    assert change.meter.retag(older, "parameters") == OLDER
    assert change.live() == {"parameters": OLDER, "activations": -OLDER}
    older.grad = None
    del older
    assert change.live() == {"activations": -OLDER - OLDER_GRADIENT, "total": -OLDER - OLDER_GRADIENT}
    BEFORE.clear()  # NumPy's, and memory of several processes: not counted, neither when it is freed
    assert change.live()["total"] == -OLDER - OLDER_GRADIENT


OLDER = OLDER_GRADIENT = 40_000
BEFORE: dict[str, Any] = {}


def allocate_before() -> None:
    BEFORE["older"] = torch.ones(OLDER // 4, requires_grad=True)
    BEFORE["older"].sum().backward()
    BEFORE["view"] = BEFORE["older"].detach()[5:]
    BEFORE["numpy"] = torch.from_numpy(np.ones(1000))
    BEFORE["shared"] = torch.ones(1000).share_memory_()
    wrapper: Any = type("Wrapper", (torch.Tensor,), {"__torch_dispatch__": classmethod(lambda *given: NotImplemented)})
    BEFORE["wrapper"] = torch.Tensor._make_wrapper_subclass(wrapper, (4,))  # as DTensor: it has no memory of its own
    BEFORE["live"] = ShimMeter().live()["total"]
    del BEFORE["view"]


def tell_stories() -> None:
    allocate_before()
    outcomes = {}
    for name, tell in STORIES.items():
        try:
            tell(Change())
            outcomes[name] = ""
        except BaseException:
            outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))


# ---- the tests ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def outcomes(cache: Path) -> dict[str, str]:
    import_path = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "PYTHONPATH": import_path}
    story_teller = [sys.executable, __file__]
    child = subprocess.run(story_teller, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr
    told: dict[str, str] = json.loads(child.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize("name", STORIES)
def test_in_a_process_of_its_own(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


def test_the_shim_is_compiled_once_into_the_cache(cache: Path) -> None:
    library = memory_meter.build()
    built = library.stat().st_mtime_ns
    assert library.parent == cache / "mdcs"
    assert memory_meter.build() == library and library.stat().st_mtime_ns == built


def test_a_library_that_others_may_have_written_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library, ours = memory_meter.build(), memory_meter._ours

    def is_made_anew() -> bool:
        """Whether the next build replaces what somebody has put where the shim would be."""
        assert memory_meter.build() == library
        return library.read_bytes().startswith(b"\x7fELF")

    library.write_bytes(b"not the shim")
    assert not is_made_anew(), "one that nobody else could write is trusted"
    for writable in (library, library.parent):
        library.write_bytes(b"not the shim")
        writable.chmod(0o777)
        assert is_made_anew()
        assert not (library.stat().st_mode | library.parent.stat().st_mode) & 0o022
    library.write_bytes(b"not the shim")
    inode = library.stat().st_ino
    monkeypatch.setattr(memory_meter, "_ours", lambda found: found.st_ino != inode and ours(found))
    assert is_made_anew(), "it was another user's"
    monkeypatch.setattr(memory_meter, "_ours", lambda found: False)
    with pytest.raises(RuntimeError, match=f"^{tmp_path / 'mdcs'} is another user's, .*: set XDG_CACHE_HOME"):
        memory_meter.build()


def test_concurrent_builds_leave_one_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(4) as pool:
        libraries = set(pool.map(lambda _: memory_meter.build(), range(4)))
    assert list((tmp_path / "mdcs").iterdir()) == list(libraries)


def test_a_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken-cc"
    compiler.write_text("#!/bin/sh\necho no room left on device >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", f"{compiler} -m64")
    with pytest.raises(RuntimeError, match=r"broken-cc -m64 .*failed:\nno room left on device"):
        memory_meter.build()
    assert not list((tmp_path / "mdcs").iterdir()), "nothing half-built stays behind"


@pytest.fixture
def uncounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process whose meter has not been loaded, and cannot be: there is no compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    for cached in (memory_meter._shim, memory_meter.unmeasured):
        cached.cache_clear()
    yield
    for cached in (memory_meter._shim, memory_meter.unmeasured):
        cached.cache_clear()


def test_without_a_compiler_nothing_is_measured_and_nothing_fails(uncounted: None) -> None:
    meter = current_meter(torch.device("cpu"))
    assert type(meter) is Meter
    with meter.tag("parameters"):
        tensor = tensor_of(10)
    assert meter.retag(tensor, "optimizer") == 0
    meter.reset()
    readings = [read() for read in (meter.live, meter.peaks, meter.window)]
    assert readings == [None] * 3
    assert "gcc" in memory_meter.unmeasured(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="needs a C compiler: install gcc or clang") as error:
        ShimMeter()
    assert "\n" not in str(error.value)


def test_the_cuda_meter_keeps_run_and_window_peaks_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = SimpleNamespace(current=100, peak=100)

    def use(high: int, then: int) -> None:
        stats.peak, stats.current = max(stats.peak, high), then

    def restart(device: torch.device) -> None:
        stats.peak = stats.current

    def read(device: torch.device) -> dict[str, int]:
        return {f"requested_bytes.all.{name}": value for name, value in vars(stats).items()}

    monkeypatch.setattr(torch.cuda, "memory_stats", read)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", restart)
    meter = CudaMeter(torch.device("cuda:0"))

    def totals(meter: CudaMeter) -> tuple[int | None, int | None]:
        peaks, window = meter.peaks(), meter.window()
        assert peaks["gradients"] is None and peaks.keys() == {*CATEGORIES, "total"}
        return peaks["total"], window["total"]

    use(high=900, then=100)
    assert totals(meter) == (900, 900)
    use(high=300, then=200)
    assert totals(meter) == (900, 300)
    meter.reset()
    assert totals(meter) == (200, 200)
    assert meter.live() == dict.fromkeys(CATEGORIES, None) | {"total": 200}

    # torch has one peak for all of them: what one meter reads, or the making of one, takes nothing from another.
    use(high=700, then=150)
    other = CudaMeter(torch.device("cuda:0"))
    use(high=400, then=120)
    assert totals(other) == (400, 400)
    other.reset()
    assert totals(meter) == (700, 700)
    use(high=800, then=100)
    assert totals(meter) == (800, 800) and totals(other) == (800, 800)


if __name__ == "__main__":
    tell_stories()
