"""Every use of torch's private API, each with its reason. ``tests/mdcs/test_torch_compat.py`` shows each on this torch.

Supported: torch 2.6 and later (``setup.cfg``), of which 2.13 is tested by CI. Whatever differs between versions is
decided here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# documented nowhere; a weak reference to memory
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.utils._pytree import tree_leaves as tree_leaves  # public in documents only
from torch.utils._pytree import tree_map_only as tree_map_only

VERSION: tuple[int, ...] = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
"""Major and minor version of the installed torch."""

# -- tensors --------------------------------------------------------------------------------------------------------


def without_torch_function() -> AbstractContextManager[Any]:
    """Return a context in which ``__torch_function__`` of tensor subclasses is not called. Closed parameters
    (:mod:`mdcs.model.guard`) refuse calls by it; the runtime's own calls pass.
    """
    return torch._C.DisableTorchFunctionSubclass()


@contextlib.contextmanager
def without_autograd() -> Iterator[None]:
    """Run a block or a function without gradients and outside of the loop's inference mode. The order counts:
    ``inference_mode(False)`` turns gradients on again.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def version_of(tensor: Tensor) -> int:
    """Return a counter of the writes into a tensor: a change is seen without reading values from the device."""
    return tensor._version


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which this one is a view; None if it is none. Autograd rebuilds views from their bases."""
    return tensor._base


def innermost_dispatch_mode() -> Any:
    """Return the ``TorchDispatchMode`` that sees operators first: only that one can be left; None if there is none."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return _get_current_dispatch_mode()


def copy_all(into: list[Tensor], values: list[Tensor] | tuple[Tensor, ...]) -> None:
    """Copy tensors [any shapes] in one call: the host's time for a call counts in every message."""
    torch._foreach_copy_(into, values)


def broadcast_coalesced(tensors: list[Tensor], group: dist.ProcessGroup, size: int) -> None:
    """Broadcast rank 0's values of tensors [any shapes], those of one type packed up to ``size`` bytes, as DDP does."""
    dist._broadcast_coalesced(group, tensors, size, 0)


def norms_in_float64(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return each tensor's 2-norm [scalar], summed in float64: on a GPU in a few kernels that read values once."""
    return list(torch._foreach_norm(list(tensors), 2, torch.float64))


# -- autograd and the compiler --------------------------------------------------------------------------------------


def backward_pass() -> int:
    """Return a number of the backward pass that calls this; -1 outside. Checkpointing runs forward in one."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of this backward pass: no hook of a tensor or a module runs there."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def will_get_gradient(parameter: nn.Parameter) -> bool:
    """Return whether the running backward pass will reach the parameter. Exact: the pass has walked its graph."""
    if not parameter.requires_grad:  # frozen since the run began
        return False
    with without_torch_function():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad, which brings no gradient to parameters
        return False


def in_function_forward() -> bool:
    """Return whether this runs in the forward of a custom autograd function (a reentrant checkpoint); not no_grad()."""
    return not (torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def may_hold_checkpoints() -> bool:
    """Return whether this backward pass may run reentrant checkpoints: not autograd.grad, nor ``inputs=``."""
    return bool(torch.autograd.Variable._execution_engine.is_checkpoint_valid())


def gradient_hooks(parameter: nn.Parameter) -> list[Any]:
    """Return the parameter's hooks for its accumulated gradient: the runtime's would take it away from others."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def transforms() -> list[str]:
    """Return the names of torch.func's transforms around this call ("grad", …): hooks do not see through them."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return []
    return [str(level.key()).rpartition(".")[2].lower() for level in torch._C._functorch.get_interpreter_stack() or ()]


def is_backward_compiled() -> bool:
    """Return whether compiled autograd is on: it calls hooks while it traces."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and bool(getattr(compiled, "compiled_autograd_enabled", False))


def run_not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function excluded from torch.compile; what it calls may be compiled."""
    return torch.compiler.disable(function, recursive=False)


class ModuleHook:
    """A hook that torch.compile leaves out of what it compiles. In a copy or pickle of the module it is a function of
    the standard library that does nothing: the copy drives no plan, and a process without this package can load the
    pickle.
    """

    def __init__(self, hook: Callable[..., None]) -> None:
        try:
            self._hook = torch.compiler.disable(hook, reason=_WHOLE_GRAPHS)
        except TypeError:  # before torch 2.7
            self._hook = torch.compiler.disable(hook)

    def __call__(self, *arguments: Any) -> None:
        """Call the hook."""
        self._hook(*arguments)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


_WHOLE_GRAPHS = (
    "mdcs sends messages before and after the forward of a unit, which no graph can hold. With fullgraph=True compile "
    'what is inside of a unit: wrap the compiled module itself, mdcs.ByClass(("OptimizedModule",)), or compile its '
    "forward, block.forward = torch.compile(block.forward, fullgraph=True). Or leave fullgraph out"
)


def operators(*names: str) -> dict[Any, list[str]]:
    """Return those of ATen's operators with these names that this torch has, each with the names of its arguments."""
    found = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    return {packet.default: [a.name for a in packet.default._schema.arguments] for packet in found}


def nothing_compiles() -> AbstractContextManager[Any]:
    """Hold off torch.compile: its process-wide flag makes torch's optimizers round differently in all threads."""
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    return contextlib.nullcontext() if compiler is None else compiler.compile_lock


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Hide operators of this thread from torch's profiler. The range of a gloo work ends in the thread that waits for
    the work. If the profiler has stopped by then, the process crashes (seen with torch 2.13).
    """
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)


def is_profiled() -> bool:
    """Return whether a profiler of torch records: named ranges cost time that nobody sees otherwise."""
    return torch.autograd.profiler._is_profiler_enabled


def named_range(phase: str, *what: object) -> AbstractContextManager[Any]:
    """Return a context whose body is ``mdcs::<phase> <what>`` in a trace; next to free without a profiler."""
    if not is_profiled():
        return _NOTHING
    return torch.profiler.record_function(" ".join([f"mdcs::{phase}", *map(str, what)]))


_NOTHING = contextlib.nullcontext()

# -- optimizers -----------------------------------------------------------------------------------------------------


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return the numbers of hooks before and after ``optimizer.step()``, which the runtime does not call."""
    return len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning rate schedules that the optimizer has stepped: they warn if its ``step()`` was not called."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def count_as_scheduled(step: Any) -> None:
    """Mark a function in the place of ``optimizer.step()`` as known to schedules, which warn of one that is not."""
    step._wrapped_by_lr_sched = True


def has_batch_statistics(module: nn.Module) -> bool:
    """Return whether a module is a normalization with running statistics: forward in training does not read them."""
    return isinstance(module, nn.modules.batchnorm._NormBase)


# -- processes ------------------------------------------------------------------------------------------------------


def default_store() -> dist.Store:
    """Return the store of the default process group: ranks meet there when their connections are gone."""
    return dist.distributed_c10d._get_default_store()


def own_connection(store: dist.Store) -> dist.Store:
    """Return a store with a connection of its own, which answers while another thread waits in ``store``. Before torch
    2.7, and for stores that cannot, ``store`` itself.
    """
    try:
        return store.clone()  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return store


def cpu_backend(group: dist.ProcessGroup | None) -> Any:
    """Return the backend that carries a group's CPU tensors: torch's wrappers cost more than gloo does for a small
    message.
    """
    return (group or dist.distributed_c10d._get_default_group())._get_backend(torch.device("cpu"))


def abort(group: dist.ProcessGroup) -> None:
    """End an NCCL group without waiting for its messages; destroying it would wait."""
    dist.distributed_c10d._abort_process_group(group)


def nccl_keeps_buffers() -> bool:
    """Return whether NCCL groups call ``record_stream`` on buffers (before torch 2.8), which frees memory late."""
    return VERSION < (2, 8)


# -- checkpoints ----------------------------------------------------------------------------------------------------


def load_checkpoint(tree: dict[str, Any], reader: Any, planner: Any) -> None:
    """Read with DCP on this rank alone. The public function of torch 2.6 always communicates."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    _load_state_dict(tree, reader, no_dist=True, planner=planner)


# -- devices --------------------------------------------------------------------------------------------------------


def spin(cycles: int) -> None:
    """Launch a kernel that does nothing for so many cycles."""
    torch.cuda._sleep(cycles)


_PAUSE = """
extern "C" __global__ void mdcs_pause(int nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < nanoseconds);
}
"""


def pause_kernel(cuda: Any = torch.cuda) -> Callable[[float, Any], None]:
    """Return a launcher (seconds, stream) of a kernel that spins by the device's timer, whatever its clock does.
    ``cuda``: torch.cuda, or its stand-in in tests. Raises AttributeError before torch 2.9, OSError or RuntimeError
    where the machine has no compiler of kernels.
    """
    kernel = cuda._compile_kernel(_PAUSE, "mdcs_pause")

    def launch(seconds: float, stream: Any) -> None:
        left = round(seconds * 1e9)
        while left > 0:
            kernel(args=[min(left, 2**31 - 1)], stream=stream)
            left -= 2**31 - 1

    return launch


def gather_on_cpu_ahead(module: nn.Module) -> None:
    """Let FSDP2 gather asynchronously on a CPU: without streams the host would wait where a gather is launched."""
    module._set_unshard_async_op(True)  # type: ignore[operator]


def checkpoint_wrapper(module: nn.Module, contexts: Callable[[], Any]) -> nn.Module:
    """Return the module in torch's wrapper that recomputes its activations, of which state dicts show nothing."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

    return wrappers.checkpoint_wrapper(module, context_fn=contexts)
