"""Private torch API does on the installed torch what mdcs uses it for."""

from __future__ import annotations

import ast
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.utils._python_dispatch import TorchDispatchMode

import mdcs
from mdcs import torch_compat


def test_no_other_module_uses_private_api() -> None:
    root = Path(mdcs.__file__).parent
    found = []
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            chain: list[str] = []
            if isinstance(node, ast.Attribute):
                chain = ast.unparse(node).split(".")
            elif isinstance(node, ast.ImportFrom):
                chain = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            private = [name for name in chain[1:] if name.startswith("_") and not name.startswith("__")]
            # torch.utils._python_dispatch is where torch's documents show TorchDispatchMode
            if chain and chain[0] in ("torch", "dist") and set(private) - {"_python_dispatch"}:
                found.append(f"{file.relative_to(root)}:{node.lineno} {'.'.join(chain)}")
    assert {entry.split(":")[0] for entry in found} == {"torch_compat.py"}, found


class _Refusing(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


def test_calls_pass_a_subclass() -> None:
    tensor = torch.ones(2).as_subclass(_Refusing)
    with torch_compat.without_torch_function():
        tensor.add_(1)
    with pytest.raises(AssertionError):
        tensor.add_(1)
    with torch_compat.without_torch_function():
        assert tensor.tolist() == [2, 2]


def test_the_innermost_dispatch_mode_is_known() -> None:
    assert torch_compat.innermost_dispatch_mode() is None
    with TorchDispatchMode() as outer:
        with TorchDispatchMode() as inner:
            assert torch_compat.innermost_dispatch_mode() is inner
        assert torch_compat.innermost_dispatch_mode() is outer


def test_a_weak_reference_tells_whether_memory_is_still_held() -> None:
    tensor = torch.zeros(4)
    view, held = tensor[:2], torch_compat.StorageWeakRef(tensor.untyped_storage())
    del tensor
    assert not held.expired()
    del view
    assert held.expired()


def test_writes_are_counted_and_views_know_their_base() -> None:
    whole = torch.zeros(4)
    view = whole[:2]
    before = torch_compat.version_of(whole)
    view.add_(1)
    assert torch_compat.version_of(whole) > before
    assert torch_compat.base_of(view) is whole
    assert torch_compat.base_of(whole) is None


def test_a_backward_pass_has_a_number_and_an_end() -> None:
    seen: list[object] = []
    x = torch.ones(1, requires_grad=True)

    def hook(grad: Tensor) -> None:
        seen.append(torch_compat.backward_pass())
        torch_compat.at_end_of_backward(lambda: seen.append("end"))

    y = x * 2
    y.register_hook(hook)
    x.register_post_accumulate_grad_hook(lambda p: seen.append("gradient"))
    assert torch_compat.backward_pass() == -1
    y.backward()
    assert seen[1:] == ["gradient", "end"]
    assert seen[0] != -1
    assert torch_compat.gradient_hooks(x)  # type: ignore[arg-type]
    assert not torch_compat.gradient_hooks(nn.Parameter(torch.ones(1)))


def test_compiled_autograd_and_the_compiler_are_seen() -> None:
    import torch._dynamo.compiled_autograd
    import torch._dynamo.convert_frame

    assert not torch_compat.is_backward_compiled()
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):  # type: ignore[no-untyped-call]
        assert torch_compat.is_backward_compiled()
    with torch_compat.nothing_compiles():  # from another thread, compiling would wait
        assert torch._dynamo.convert_frame.compile_lock._is_owned()  # type: ignore[attr-defined]


def test_a_profiler_is_seen() -> None:
    assert not torch_compat.is_profiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_compat.is_profiled()


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    yield dist.new_group()
    if dist.is_initialized():
        dist.destroy_process_group()


def test_store_and_backend_of_processes(group) -> None:
    store = dist.PrefixStore("test", torch_compat.default_store())
    store.set("word", "said")
    assert torch_compat.own_connection(store).get("word") == b"said"
    tensor = torch.ones(2)
    for of in (None, group):
        torch_compat.cpu_backend(of).allreduce([tensor]).wait()
    assert tensor.tolist() == [1, 1]


def test_aborting_a_group_waits_for_nobody(group) -> None:
    torch_compat.abort(group)  # of gloo it may be a no-op, with a warning


def test_nccl_keeps_buffers_before_2_8(monkeypatch) -> None:
    assert torch_compat.VERSION >= (2, 6)
    for version, keeps in (((2, 7), True), ((2, 8), False), ((2, 13), False)):
        monkeypatch.setattr(torch_compat, "VERSION", version)
        assert torch_compat.nccl_keeps_buffers() is keeps


def test_a_process_alone_reads_a_checkpoint(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": {"weight": torch.arange(3.0)}}, checkpoint_id=tmp_path)
    read = {"model": {"weight": torch.zeros(3)}}
    torch_compat.load_checkpoint(read, FileSystemReader(tmp_path), DefaultLoadPlanner())
    assert read["model"]["weight"].tolist() == [0, 1, 2]


def test_what_needs_a_gpu_or_fsdp2_exists() -> None:
    from torch.distributed.fsdp import FSDPModule

    assert callable(torch.cuda._sleep)
    assert callable(FSDPModule._set_unshard_async_op)


def test_a_profiler_does_not_see_unrecorded_operators() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        with torch_compat.unrecorded():
            torch.ones(2).neg()
        torch.ones(2).exp()
    names = {event.name for event in profiled.events()}
    assert "aten::exp" in names and "aten::neg" not in names
