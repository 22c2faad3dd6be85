"""Training by a rank in these tests: a model with torch's DDP, and with FSDP2 as a plan says."""

from __future__ import annotations

import copy
import functools
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import mdcs
from mdcs.export.document import document
from mdcs.export.fsdp2 import apply_plan, clip_grad_norm_, parameter_groups
from mdcs.plan.plan import Plan
from mdcs.profile.link import Link
from mdcs.profile.recompute import CHOICES, FULL, uniform
from mdcs.profiler.consensus import on_rank_zero
from mdcs.profiler.merging import merge_profiles
from tests.mdcs.measured import measure_profile
from tests.mdcs.profiles import in_nodes
from tests.mdcs.runtime.training import How, Setup, optimizer_for, recomputing, scheduler_for, setup, strategy_for

ROOT = Path(__file__).resolve().parents[3]


def planned(made: Setup, how: How) -> Plan:
    """A plan of this job, the same on all ranks."""
    optimizer = optimizer_for("adam", made.model)
    units = mdcs.partition(made.model, made.policy)
    rank, world = dist.get_rank(), dist.get_world_size()
    link = Link.uniform(1.0, 50.0)
    profile = merge_profiles(
        measure_profile(
            made.model, units, lambda: made.loss(made.model, made.batch(0, 0, rank)), optimizer,
            world=world, link=in_nodes(link, world, how.per_node, 0.1) if how.per_node else link, iterations=2,
            recompute=how.recompute not in ("", "random"),
        )
    )  # fmt: skip
    job = mdcs.Job(profile)
    if profile.recompute:
        job = mdcs.Job(profile, recompute=uniform(profile.recompute, len(units), how.recompute))
    elif how.recompute:
        rng = random.Random(how.seed)
        job = recomputing(job, made.model, units, [rng.choice(CHOICES) for _ in units])
    return on_rank_zero(lambda: mdcs.make_plan(job, strategy_for(how), scheduler_for(how)))


def losses(made: Setup, model: nn.Module, optimizer: Any, clip: Any, steps: int) -> list[Any]:
    """Loss of every step, with the norm of its gradients."""
    out = []
    for step in range(steps):
        loss = made.loss(model, made.batch(step, 0, dist.get_rank()))
        loss.backward()
        norm = clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        out.append((loss.item(), float(norm)))
    return out


def as_ddp(name: str, how: How) -> dict[str, Any]:
    """Losses and norms of both, and the file."""
    made = setup(name)
    plan = planned(made, how)
    twin = copy.deepcopy(made.model)
    wrapped = DistributedDataParallel(twin)
    expected = losses(made, wrapped, torch.optim.Adam(wrapped.parameters(), lr=1e-2), torch.nn.utils.clip_grad_norm_, 4)
    file = json.loads(json.dumps(document(plan)))
    apply_plan(made.model, file)
    got = losses(made, made.model, torch.optim.Adam(parameter_groups(made.model), lr=1e-2), clip_grad_norm_, 4)
    return {"ddp": expected, "fsdp2": got, "meshes": {tuple(group["mesh"]) for group in file["groups"]}}


def recomputed(name: str, how: How) -> dict[str, Any]:
    """Losses of FSDP2, and of DDP with checkpoint() in the same modules; how often these ran forward per step; their names."""
    made = setup(name)
    plan = planned(made, how)
    file = json.loads(json.dumps(document(plan)))
    chosen = {name: choice for group in file["groups"] for name, choice in group["recompute"].items()}
    twin = copy.deepcopy(made.model)
    for name, choice in chosen.items():
        by_hand(twin.get_submodule(name), choice)
    wrapped = DistributedDataParallel(twin)
    adam = torch.optim.Adam(wrapped.parameters(), lr=1e-2)
    expected = [loss for loss, _ in losses(made, wrapped, adam, lambda parameters, norm: 0.0, 3)]
    inner = {name: made.model.get_submodule(name) for name in chosen}
    names = [*made.model.state_dict()]
    apply_plan(made.model, file)
    calls = dict.fromkeys(chosen, 0)
    for name, module in inner.items():
        module.register_forward_pre_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
    adam = torch.optim.Adam(parameter_groups(made.model), lr=1e-2)
    got = [loss for loss, _ in losses(made, made.model, adam, lambda parameters, norm: 0.0, 3)]
    return {
        "ddp": expected, "fsdp2": got, "calls": {count / 3 for count in calls.values()}, "choices": {*chosen.values()},
        "names": names == [*made.model.state_dict()],
    }  # fmt: skip


def statistics_with_and_without(name: str) -> dict[str, Any]:
    """Buffers that differ between all activations kept and all computed again, by FSDP2; whether any were."""
    found = []
    for choice in ("", FULL):
        made = setup(name)
        plan = planned(made, How("fsdp", "priority", recompute=choice))
        apply_plan(made.model, plan)
        losses(made, made.model, torch.optim.Adam(parameter_groups(made.model)), lambda parameters, norm: 0.0, 2)
        found.append({name.replace("_checkpoint_wrapped_module.", ""): b for name, b in made.model.named_buffers()})
    differing = [name for name, buffer in found[0].items() if not torch.equal(buffer, found[1][name])]
    return {"again": FULL in plan.recompute, "differing": differing}


def by_hand(module: nn.Module, choice: str) -> None:
    """Checkpointing as one writes it, with the operators that torch's documentation keeps."""
    aten = torch.ops.aten
    keep = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default]
    kept = [*keep, aten._scaled_dot_product_flash_attention_for_cpu.default]
    contexts = {} if choice == FULL else {"context_fn": functools.partial(create_selective_checkpoint_contexts, kept)}
    module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False, **contexts)


def by_the_loader(name: str, how: How) -> dict[str, Any]:
    """Losses and norms with apply_plan, and with what docs/export.md shows."""
    shown: dict[str, Any] = {}
    [loader] = re.findall(r"<!-- loader -->\n```python\n(.*?)```", (ROOT / "docs/export.md").read_text(encoding="utf-8"), re.S)
    exec(loader, shown)
    made = setup(name)
    plan = planned(made, how)
    twin = copy.deepcopy(made.model)
    apply_plan(made.model, plan)
    got = losses(made, made.model, torch.optim.Adam(parameter_groups(made.model), lr=1e-2), clip_grad_norm_, 3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fsdp2.json"
        path.write_text(json.dumps(document(plan)), encoding="utf-8")
        shown["load"](path, twin, "cpu")
    again = losses(made, twin, torch.optim.Adam(parameter_groups(twin), lr=1e-2), shown["clip"], 3)
    return {"fsdp2": got, "loader": again}
