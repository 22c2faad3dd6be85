"""A device on the CPU that is as asynchronous as CUDA: nothing is done until something needs it, or it is let run ahead.

Inside of a :class:`Device` every tensor operation is a kernel, put on the queue of the stream that is current. Streams know
nothing of each other but what events say. Memory is the device's own: kernels hold addresses, so to say, and the host's
tensors only shapes. As with torch's caching allocator, memory belongs to the stream that it was asked for on, and what the
host frees is given away to the next that is allocated there, in *that stream's* order: from there on it is poison. Whoever
touches it is written down, as is whoever touches memory before its stream has come to where it was given out. So freeing too
early, allocating on the wrong stream and missing waits are found whatever the machine does, by an order of execution that
is legal and bad: ``ahead`` names the streams that do at once all that they may. What no event orders is then done in the
worst order.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from mdcs.profile.link import OPERATION, Collectives, Kind
from mdcs.runtime.communicator import Communicator

_VIEWS = {"aten::_unsafe_view", "aten::lift_fresh", "aten::_reshape_alias"}
_ANSWERS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero"}


class Memory:
    """One allocation, of the stream ``pool``."""

    def __init__(self, size: int, pool: Stream) -> None:
        self.bytes = torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN, or -1
        self.pool = pool
        self.is_born, self.is_freed = False, False


@dataclass(eq=False)
class Kernel:
    stream: Stream
    name: str
    run: Callable[[], object]
    after: Kernel | None = None  # on another stream
    touches: Sequence[Memory] = ()
    before: Kernel | None = None  # on its stream
    is_done: bool = False


@dataclass(eq=False)
class Stream:
    device: Device
    name: str
    queue: deque[Kernel] = field(default_factory=deque)
    free: list[Memory] = field(default_factory=list)
    last: Kernel | None = None

    def wait_event(self, event: Event) -> None:
        if event.kernel is not None:
            self.device.enqueue(self, "wait", lambda: None, after=event.kernel)


class Event:
    """As torch.cuda's. Whoever asks for one on the host has the device come to it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.kernel: Kernel | None = None
        self.seconds = 0.0

    def record(self, stream: Stream) -> None:
        def happen() -> None:
            self.seconds = time.perf_counter()

        self.kernel = self.device.enqueue(stream, "event", happen)

    def query(self) -> bool:
        if self.kernel is None or self.kernel.is_done:
            return True
        self.device.not_yet += 1
        self.device.come_to(self.kernel)  # so that the next look finds it
        return False

    def synchronize(self) -> None:
        self.device.host_waits("event")
        if self.kernel is not None:
            self.device.come_to(self.kernel)

    def elapsed_time(self, later: Event) -> float:
        return (later.seconds - self.seconds) * 1e3


class Device(TorchDispatchMode):
    """``ahead``: streams that run ahead of the host's need, by name; a number: any, by chance. In the place of torch.cuda for
    :class:`mdcs.runtime.executor.CudaExecutor`; ``misuse`` is what was found, ``waits`` what the host has waited for.
    """

    def __init__(self, ahead: Sequence[str] | int) -> None:
        super().__init__()
        self.ahead = ahead
        self.chance = random.Random(ahead if isinstance(ahead, int) else 0)
        self.compute = Stream(self, "compute")
        self.streams = [self.compute]
        self.current = self.compute
        self.misuse: list[str] = []
        self.waits: list[str] = []
        self.not_yet = 0  # answers to query()
        self._known: dict[int, tuple[StorageWeakRef, Memory | None]] = {}  # None: the host's own

    # -- what the executor asks of torch.cuda -------------------------------------------------------------------

    def Stream(self, *arguments: Any, **options: Any) -> Stream:
        self.streams.append(Stream(self, ("communication", "updates")[(len(self.streams) - 1) % 2]))  # as the executor asks
        return self.streams[-1]

    def Event(self, **options: Any) -> Event:
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _compile_kernel(self, text: str, name: str) -> Callable[..., object]:
        return lambda args, stream: self.enqueue(stream, "pause", lambda: time.sleep(1e-4))

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(total_memory=1 << 40)

    def set_per_process_memory_fraction(self, share: float, device: Any) -> None:
        pass

    def get_per_process_memory_fraction(self, device: Any) -> float:
        return 1.0

    def empty_cache(self) -> None:
        pass

    def memory_stats(self, device: Any) -> dict[str, int]:
        return {}

    # -- queues -------------------------------------------------------------------------------------------------

    def enqueue(
        self, stream: Stream, name: str, run: Callable[[], object], after: Kernel | None = None, touches: Sequence[Memory] = ()
    ) -> Kernel:
        kernel = stream.last = Kernel(stream, name, run, after, touches, stream.last)
        stream.queue.append(kernel)
        if isinstance(self.ahead, int):
            while self.chance.random() < 0.4:
                queue = self.chance.choice(self.streams).queue
                if queue:
                    self.come_to(queue[0])
        elif stream.name in self.ahead:
            self.come_to(kernel)
        return kernel

    @staticmethod
    def ancestors(kernel: Kernel) -> set[Kernel]:
        """The kernels that are done before this one in any order of execution."""
        found: set[Kernel] = set()
        todo = [kernel]
        while todo:
            this = todo.pop()
            for other in (this.before, this.after):
                if other is not None and other not in found:
                    found.add(other)
                    todo.append(other)
        return found

    def come_to(self, kernel: Kernel) -> None:
        """Do what is before a kernel, and it; nothing else."""
        queue = kernel.stream.queue
        while not kernel.is_done:
            first = queue[0]
            if first.after is not None and not first.after.is_done:
                self.come_to(first.after)
                continue
            queue.popleft()
            for memory in first.touches:
                if memory.is_freed or not memory.is_born:
                    when = "after it was freed" if memory.is_freed else "before it was free"
                    self.misuse.append(f"{first.name} on {first.stream.name} touches memory of {memory.pool.name} {when}")
            first.is_done = True
            with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
                first.run()

    def come_to_all(self) -> None:
        """Do all that is enqueued."""
        for stream in self.streams:
            if stream.queue:
                self.come_to(stream.queue[-1])

    def host_waits(self, what: str) -> None:
        self.waits.append(what)

    def synchronize(self, stream: Stream, what: str) -> None:
        self.host_waits(what)
        if stream.queue:
            self.come_to(stream.queue[-1])

    # -- memory -------------------------------------------------------------------------------------------------

    def allocate(self, storage: torch.UntypedStorage, size: int) -> Memory:
        with _disable_current_modes(), torch.inference_mode(False):
            memory = Memory(size, self.current)
        self._known[storage._cdata] = StorageWeakRef(storage), memory

        freed, self.current.free = self.current.free, []

        def give() -> None:
            memory.is_born = True
            for old in freed:
                old.is_freed = True
                old.bytes.fill_(0xFF)

        self.enqueue(self.current, "allocation", give)
        return memory

    def free(self, memory: Memory) -> None:
        """The next that is asked for on its stream gets it."""
        memory.pool.free.append(memory)

    def _collect(self) -> None:
        """Free what the host holds no more."""
        for key in [key for key, (reference, _) in self._known.items() if reference.expired()]:
            _, memory = self._known.pop(key)
            if memory is not None:
                self.free(memory)

    def memory(self, tensor: Tensor) -> Memory | None:
        """Values of a tensor; what the device has not seen yet has the values that it has on the host."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            with _disable_current_modes(), torch.inference_mode(False):
                whole = torch.empty(0, dtype=torch.uint8).set_(storage).clone()
            made = self.allocate(storage, storage.nbytes())
            made.bytes, made.is_born = whole, True
        return self._known[storage._cdata][1]

    def read(self, tensor: Tensor) -> Tensor:
        """Its values once all that is enqueued is done."""
        self.come_to_all()
        with _disable_current_modes(), torch.inference_mode(False):
            return self.address(tensor)().clone()

    def _resized(self, storage: torch.UntypedStorage, size: int) -> None:
        known = self._known.pop(storage._cdata, None)
        if known is not None and known[1] is not None:
            self.free(known[1])
        if size:
            self.allocate(storage, size)

    def address(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return all that a kernel knows of a tensor, whatever becomes of that on the host."""
        memory = self.memory(tensor)
        if memory is None:  # the host's: its value goes with the kernel
            value = tensor.detach().clone()
            return lambda: value
        dtype, size, stride, offset = tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
        return lambda: memory.bytes.view(dtype).as_strided(size, stride, offset)

    # -- kernels ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Device:
        device, resize = self, torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            device._resized(storage, size)
            return out

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        del torch.UntypedStorage.resize_

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        if schema.name.startswith("profiler::"):
            return func(*args, **kwargs)
        self._collect()
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        if schema.name.startswith("aten::new_") or schema.name.endswith("_like"):
            tensors = []  # of which only the shape is asked
        if schema.name == "aten::lift_fresh":  # torch.tensor(...): the host's, as an optimizer's count of steps
            storage = args[0].untyped_storage()
            self._known.setdefault(storage._cdata, (StorageWeakRef(storage), None))
        memories = [self.memory(t) for t in tensors]
        if schema.name in _VIEWS or _is_view(schema) or (tensors and not any(memories)):
            return func(*args, **kwargs)
        if not tensors:
            made = func(*args, **kwargs)
            memory = self.allocate(made.untyped_storage(), made.untyped_storage().nbytes())
            if "empty" not in schema.name:
                value, target = made.clone(), self.address(made)
                self.enqueue(self.current, schema.name, lambda: target().copy_(value), touches=[memory])
            return made
        touched = [m for m in memories if m is not None]
        addresses = iter([self.address(t) for t in tensors])
        held = tree_map(lambda x: next(addresses) if isinstance(x, Tensor) else (lambda: x), [*args, kwargs], is_leaf=_is_leaf)

        def call() -> Any:
            *real, named = tree_map(lambda get: get(), held)
            return func(*real, **named)

        if schema.name.startswith("c10d::"):
            self.come_to_all()
        if schema.name in _ANSWERS or schema.name.startswith("c10d::"):
            self.synchronize(self.current, schema.name)
            with _disable_current_modes():
                answer = call()
                for tensor in tensors if schema.name.startswith("c10d::") else ():
                    tensor.copy_(self.address(tensor)())  # for who reads it on the host
                return answer
        like, named_like = tree_map(_meta, (args, kwargs))
        shapes = func(*like, **named_like)
        several = isinstance(shapes, (tuple, list))
        outs, fresh = [], []
        for given, shape in zip(schema.returns, shapes if several else [shapes], strict=False) if shapes is not None else ():
            if given.alias_info is not None:
                written = given.alias_info.before_set
                places = enumerate(schema.arguments)
                [(i, where)] = [(i, a) for i, a in places if a.alias_info and a.alias_info.before_set == written]
                outs.append(kwargs[where.name] if where.kwarg_only else args[i])
            elif isinstance(shape, Tensor):
                outs.append(torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype))
                touched.append(self.allocate(outs[-1].untyped_storage(), outs[-1].untyped_storage().nbytes()))
                fresh.append((len(outs) - 1, self.address(outs[-1])))
            else:
                outs.append(shape)

        def run() -> None:
            results = call()
            for i, target in fresh:
                target().copy_(results[i] if several else results)

        self.enqueue(self.current, schema.name, run, touches=touched)
        return (type(shapes)(outs) if several else outs[0]) if outs else None

    def talking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Messages between hosts, on tensors that are theirs. While one waits for another its device goes on."""

        def outside(*arguments: Any, **options: Any) -> Any:
            self.come_to_all()
            with _disable_current_modes():
                return function(*arguments, **options)

        return outside

    # -- messages -----------------------------------------------------------------------------------------------

    def connect(self, collectives: Collectives, group: Any, synchronous: bool) -> Any:
        """In the place of :class:`Communicator`: collectives on the caller's stream, as NCCL's are without async_op."""
        assert synchronous
        real = Communicator(collectives, group)

        def launch(kind: Kind, *tensors: Tensor | None) -> Any:
            addresses = [None if t is None else self.address(t) for t in tensors]
            memories = [m for t in tensors if t is not None and (m := self.memory(t)) is not None]

            def send() -> None:
                real.launch(kind, *(None if a is None else a() for a in addresses)).wait()

            self.enqueue(self.current, OPERATION[kind], send, touches=memories)
            return SimpleNamespace(wait=lambda: None)

        return SimpleNamespace(launch=launch)


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Tensor)


def _is_view(schema: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _meta(x: Any) -> Any:
    """Return the shapes of tensors, on no device."""
    if isinstance(x, torch.device):
        return "meta"
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x
