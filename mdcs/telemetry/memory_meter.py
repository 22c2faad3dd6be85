"""Tensor bytes of this process by category: live, at their peaks, and per window (a slot, for example).

On CPU a small C library (`shim.c`), compiled and loaded at the first `current_meter` of a process, counts the bytes
requested from torch's allocator. The count is exact, covers all threads, and includes storages resized in place.
Tensors that are older than the first meter count from then on.

Known buffers are labelled by category, at allocation (`Meter.tag`) or afterwards (`Meter.retag`). All other bytes
count as "activations": activations, workspace, the batch.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

from mdcs.plan.lifetimes import CATEGORIES

if TYPE_CHECKING:
    import torch  # imported by what uses it: who only names a meter must not wait for this import

UNTAGGED = "activations"
TOTAL = "total"

Reading = Mapping[str, int | None]
"""Bytes by category and in "total"; None for a number that this kind of meter cannot know."""

_SOURCE = Path(__file__).with_name("shim.c")
_FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SHIM_TAGS = 16
_READINGS = {"live": 0, "peaks": 1, "window": 2}  # by their numbers in the shim
_BACKEND_THREADS = b"pt_gloo_runloop"  # gloo's native collectives allocate their copies in these threads
_TAGS = {name: tag for tag, name in enumerate((UNTAGGED, *(name for name in CATEGORIES if name != UNTAGGED)))}
assert len(_TAGS) <= _SHIM_TAGS, "the shim counts 16 tags"


class Meter:
    """Counts the tensor bytes of this process. This base measures nothing: readings are None. A meter restarts its
    peaks in `reset`, and in `window` those of the next window, independently of each other. ``disturbs``: whether a
    reading takes long enough to show in the time of a slot.
    """

    disturbs = False

    def tag(self, category: str) -> AbstractContextManager[object]:
        """Label the allocations of this thread in the `with` block; nests. Raises KeyError for another category."""
        return _NOTHING

    def retag(self, tensor: torch.Tensor, category: str) -> int:
        """Move the whole storage of a tensor [any shape] to another category; return its bytes. 0 if nothing is
        measured, and for memory that did not come from the measured allocator: it is in no category.
        """
        return 0

    def live(self) -> Reading | None:
        """Return the bytes allocated now."""
        return self._read("live")

    def peaks(self) -> Reading | None:
        """Return the highest bytes since `reset`: each category at its own peak, and the total at its own."""
        return self._read("peaks")

    def window(self) -> Reading | None:
        """Return the peaks (as `peaks`) since the previous call of `window`."""
        return self._read("window")

    def reset(self) -> None:
        """Restart the peaks of `peaks` at the bytes that are live now."""

    def _read(self, which: str) -> Reading | None:
        return None


class ShimMeter(Meter):
    """Read the shim: byte-exact for CPU tensors, in every thread; one set of counters in a process. Raises RuntimeError
    if the shim cannot be loaded.
    """

    def __init__(self) -> None:
        shim, numbers = _shim(), ctypes.POINTER(ctypes.c_int64)
        self._set_tag = _function(shim, "mdcs_set_tag", ctypes.c_int, ctypes.c_int)
        self._retag = _function(shim, "mdcs_retag", ctypes.c_int64, ctypes.c_void_p, ctypes.c_int)
        self._shim_reads = _function(shim, "mdcs_read", None, ctypes.c_int, numbers)
        self._reset_peaks = _function(shim, "mdcs_reset_peaks", None)

    def tag(self, category: str) -> AbstractContextManager[object]:
        """Label allocations, as :meth:`Meter.tag`."""
        return _Tagged(self._set_tag, _TAGS[category])

    def retag(self, tensor: torch.Tensor, category: str) -> int:
        """Move a storage, as :meth:`Meter.retag`. Raises KeyError for an unknown category."""
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return 0
        return self._retag(storage.data_ptr(), _TAGS[category])

    def reset(self) -> None:
        """Restart the peaks of `peaks` at the bytes that are live now."""
        self._reset_peaks()

    def _read(self, which: str) -> Reading:
        out = (ctypes.c_int64 * (_SHIM_TAGS + 1))()
        self._shim_reads(_READINGS[which], out)
        return {name: out[_TAGS[name]] for name in CATEGORIES} | {TOTAL: out[_SHIM_TAGS]}


class CudaMeter(Meter):
    """Read the bytes requested from the caching allocator of one CUDA device: totals only, no categories. torch keeps
    one peak per device, which a reading restarts: every meter of the device folds it into its own.
    """

    disturbs = True  # torch builds, sorts and returns some 200 numbers
    _meters: ClassVar[WeakSet[CudaMeter]] = WeakSet()

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device, self._cuda = device, torch.cuda
        self._collect()
        self._peak = self._window_peak = 0
        self._meters.add(self)

    def reset(self) -> None:
        """Restart the peak of `peaks` at the bytes that are live now; `window` keeps its own peak."""
        self._collect()
        self._peak = 0

    def _read(self, which: str) -> Reading:
        if which == "live":
            total = self._requested("current")
        else:
            self._collect()
            total = self._window_peak if which == "window" else self._peak
            if which == "window":
                self._window_peak = 0
        return dict.fromkeys(CATEGORIES, None) | {TOTAL: total}

    def _collect(self) -> None:
        # torch restarts its peak at the live bytes, so after a fold all peaks are at least the live bytes.
        highest = self._requested("peak")
        for meter in self._meters:
            if meter._device == self._device:
                meter._peak = max(meter._peak, highest)
                meter._window_peak = max(meter._window_peak, highest)
        self._cuda.reset_peak_memory_stats(self._device)

    def _requested(self, which: str) -> int:
        return int(self._cuda.memory_stats(self._device).get(f"requested_bytes.all.{which}", 0))


def current_meter(device: torch.device | str) -> Meter:
    """Return the meter for `device`: CUDA's, the shim's, or one that measures nothing (:func:`unmeasured`)."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return CudaMeter(device)
    return Meter() if unmeasured(device) else ShimMeter()


@functools.cache
def unmeasured(device: torch.device | str) -> str:
    """Return why memory is not measured on this device, in a line; "" where it is."""
    try:
        if not str(device).startswith("cuda"):
            _shim()
    except (OSError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    return ""


@functools.cache
def _shim() -> ctypes.PyDLL:
    """Load the shim into this process: it counts from here on. Raises RuntimeError, also as `build` does. One path per
    process: a second copy of the library would count with the first.
    """
    # PyDLL keeps the GIL during a call: a call takes nanoseconds, and releasing the GIL would cost more.
    shim = ctypes.PyDLL(str(build()))
    if _function(shim, "mdcs_attach", ctypes.c_int)() <= 0:
        raise RuntimeError(
            "memory on CPU cannot be measured: torch's allocator (libc10.so) is not found, or cannot be watched"
        )
    adopt = _function(shim, "mdcs_adopt", ctypes.c_bool, ctypes.c_void_p, ctypes.c_int64)
    for storage in _storages():
        adopt(storage.data_ptr(), storage.nbytes())
    _function(shim, "mdcs_tag_threads", None, ctypes.c_char_p, ctypes.c_int)(_BACKEND_THREADS, _TAGS["staging"])
    return shim


def _storages() -> Iterator[torch.UntypedStorage]:
    """Yield the storages of all tensors in this process, gradients included, that come from torch's CPU allocator."""
    import torch

    objects = gc.get_objects()
    kinds = {kind for kind in {*map(type, objects)} if issubclass(kind, torch.Tensor)}
    for each in objects:
        if type(each) not in kinds:  # isinstance would ask proxies, which import or warn
            continue
        for tensor in (each, each.grad if each.is_leaf else None):
            try:
                storage = None if tensor is None else tensor.untyped_storage()
                if storage is None or storage.device.type != "cpu" or storage.nbytes() == 0:
                    continue
                storage.data_ptr()
            except (NotImplementedError, RuntimeError):  # sparse, or a wrapper of tensors
                continue
            if storage.resizable() and not storage.is_shared():  # else another's: NumPy's, a file's, several processes'
                yield storage


def build() -> Path:
    """Compile the shim with $CC, cc, gcc or clang, once per source and machine; return the path of the shared library.
    A library that another user could have written is compiled again. Several processes may build at the same time.
    Raises RuntimeError off Linux, without a compiler, when compilation fails, or if another user owns the cache.
    """
    if sys.platform != "linux":
        raise RuntimeError("memory on CPU is measured on Linux only")
    source = _SOURCE.read_bytes()
    # The C library is part of the machine: a home directory may be shared by nodes of different releases.
    machine = f"{platform.machine()}-{'-'.join(platform.libc_ver())}"
    identity = b"\0".join([source, machine.encode(), *(flag.encode() for flag in _FLAGS)])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mdcs"
    library = cache / f"memory-{hashlib.sha256(identity).hexdigest()[:16]}.so"
    cache.mkdir(parents=True, exist_ok=True)
    about = cache.stat()
    if not _ours(about):
        raise RuntimeError(
            f"{cache} is another user's, and what is in it would be loaded: set XDG_CACHE_HOME to one of yours"
        )
    if about.st_mode & _OTHERS_WRITE:
        cache.chmod(about.st_mode & ~_OTHERS_WRITE)
    elif library.exists() and _ours(info := library.stat()) and not info.st_mode & _OTHERS_WRITE:
        return library
    compiler = _compiler()
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        unfinished = Path(folder) / library.name
        command = [*compiler, *_FLAGS, str(_SOURCE), "-o", str(unfinished)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{result.stderr.strip()}")
        unfinished.chmod(0o700)
        os.replace(unfinished, library)
    return library


def _ours(info: os.stat_result) -> bool:
    return info.st_uid in (0, os.geteuid())


def _compiler() -> list[str]:
    for candidate in (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]):
        if candidate and shutil.which(candidate[0]):
            return candidate
    raise RuntimeError(
        "measuring memory on CPU needs a C compiler: "
        "install gcc or clang (Debian: apt install gcc libc6-dev), or set CC"
    )


class _Tagged:
    """`with` block of one tag; a new one per use, so that it nests and is safe in any thread."""

    __slots__ = ("_previous", "_set_tag", "_tag")

    def __init__(self, set_tag: Callable[[int], int], tag: int) -> None:
        self._set_tag, self._tag = set_tag, tag

    def __enter__(self) -> None:
        self._previous = self._set_tag(self._tag)

    def __exit__(self, *error: object) -> None:
        self._set_tag(self._previous)


_NOTHING: AbstractContextManager[object] = nullcontext()


def _function(shim: ctypes.PyDLL, name: str, result: type | None, *arguments: type) -> Callable[..., Any]:
    function = getattr(shim, name)
    function.restype = result
    function.argtypes = arguments
    return function
