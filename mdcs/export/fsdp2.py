"""A plan applied to a model by torch's checkpoint_wrapper and fully_shard; the loop's work for several meshes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mdcs.export.document import SCHEMA, document
from mdcs.model.recompute import checkpoint_contexts
from mdcs.plan.plan import Plan
from mdcs.profile.recompute import SELECTIVE
from mdcs.sizes import aligned
from mdcs.torch_compat import checkpoint_wrapper, gather_on_cpu_ahead


def apply_plan(
    model: nn.Module, plan: Plan | Mapping[str, Any], mesh: DeviceMesh | None = None, **options: Any
) -> nn.Module:
    """Call fully_shard on ``model`` as a plan, or its exported file, says; return the model. Collective.

    Modules that recompute their activations are wrapped in torch's checkpoint_wrapper first, of which state dicts show
    nothing.

    - ``mesh``: all ranks, by default in one dimension; the ranks of a node are neighbours. Units that are replicated,
      in whole or across nodes, get meshes of (replicas, shards) of the same ranks.
    - ``options`` (``mp_policy``, ``offload_policy``): passed to every fully_shard call.

    Make the optimizer afterwards, of :func:`parameter_groups`. Raises ValueError, before anything is changed: for a
    model that the plan does not fit (names the unit), for a mesh of another size, and for a file of another schema.
    """
    from_file: Mapping[str, Any] = document(plan) if isinstance(plan, Plan) else plan
    if from_file["schema"] != SCHEMA:
        raise ValueError(f"the file has schema {from_file['schema']}, this mdcs reads {SCHEMA}: export the plan again")
    device = next(model.parameters()).device.type
    mesh = mesh or init_device_mesh("cpu" if device == "meta" else device, (from_file["ranks"],))
    if mesh.size() != from_file["ranks"]:
        raise ValueError(f"the plan is for {from_file['ranks']} ranks, the mesh has {tuple(mesh.mesh.shape)}")
    _check(model, from_file)
    for group in from_file["groups"]:
        for name, choice in group["recompute"].items():
            _wrap(model, model.get_submodule(name), choice == SELECTIVE)
    groups: list[tuple[Any, Mapping[str, Any]]] = [
        ([model.get_submodule(name) for name in group["modules"]], group) for group in from_file["groups"]
    ]
    meshes = _meshes(mesh, dict.fromkeys(tuple(group["mesh"]) for _, group in groups))
    for modules, group in groups:
        wrapped = modules if len(modules) > 1 else modules[0]
        fully_shard(
            wrapped, mesh=meshes[tuple(group["mesh"])], reshard_after_forward=group["reshard_after_forward"], **options
        )
    for [module, *_], group in groups:
        if ahead := group["forward_prefetch"]:
            module.set_modules_to_forward_prefetch([model.get_submodule(name) for name in ahead])
        if ahead := group["backward_prefetch"]:
            module.set_modules_to_backward_prefetch([model.get_submodule(name) for name in ahead])
    # no streams on CPU: without async_op the host waits for every gather where it is issued
    if mesh.device_type == "cpu":
        gather_on_cpu_ahead(model)
    return model


def _wrap(model: nn.Module, module: nn.Module, selective: bool) -> None:
    """Put the module into a checkpoint_wrapper, wherever the model has it."""
    places = [(outer, name) for outer in model.modules() for name, inner in outer._modules.items() if inner is module]
    wrapper = checkpoint_wrapper(module, functools.partial(checkpoint_contexts, module, selective))
    for outer, name in places:
        outer.register_module(name, wrapper)


def _meshes(mesh: DeviceMesh, shapes: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], DeviceMesh]:
    """Return a mesh by shape, of the ranks of ``mesh``; ``mesh`` itself where its shape is one of them. Collective."""
    names = ("replicate", "shard")
    return {
        shape: mesh
        if shape == tuple(mesh.mesh.shape)
        else DeviceMesh(mesh.device_type, mesh.mesh.reshape(shape), mesh_dim_names=names[-len(shape) :])
        for shape in shapes
    }


def _check(model: nn.Module, from_file: Mapping[str, Any]) -> None:
    """Raise ValueError, as :func:`apply_plan`, unless the file's groups fit the model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    left = set(model.parameters())
    for group in from_file["groups"]:
        unit = f"unit {', '.join(group['units'])}" if group["units"] else "the whole model"
        missing = next((name for name in group["modules"] if name not in modules), None)
        if missing is not None:
            raise ValueError(
                f"{unit}: the model ({type(model).__name__}) has no module {missing!r}: the plan is of another one"
            )
        parameters = [p for name in group["modules"] for p in modules[name].parameters() if p in left]
        sizes = [p.numel() for p in dict.fromkeys(parameters)]
        left.difference_update(parameters)
        if group["elements"] != sum(map(aligned, sizes)):
            raise ValueError(f"{unit}: has {group['elements']} elements in the plan and {sum(sizes)} in the model")
        if len({p.dtype for p in parameters if p.requires_grad}) > 1:
            raise ValueError(f"{unit}: has parameters of several types, and fully_shard takes one for a group")


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the trainable parameters as parameter groups for an optimizer, one group per mesh. Fused and foreach
    updates accept only parameters of one mesh in a group.
    """
    return [{"params": members} for members in _by_mesh(p for p in model.parameters() if p.requires_grad)]


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip gradients as torch's clip_grad_norm_, for parameters on several meshes; return their 2-norm [scalar]."""
    meshes = _by_mesh(p for p in parameters if p.grad is not None)
    norms = [get_total_norm([p.grad for p in members if p.grad is not None]) for members in meshes]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole))
    for members in meshes:
        clip_grads_with_norm_(members, max_norm, total)
    return total


def _by_mesh(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    out: dict[Any, list[Tensor]] = {}
    for p in parameters:
        out.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return list(out.values())
