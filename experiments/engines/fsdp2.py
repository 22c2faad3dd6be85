"""torch's fully_shard (FSDP2), on every block and on the remaining parameters, or as an exported plan of mdcs says.

On CPU, the collectives are replaced through fully_shard's own hooks, so that their times can be measured. By default
fully_shard waits for each gather at once there. With `engine.prefetch`, gathers are in flight while earlier blocks
compute. The reduce-scatter is the backend's own, or an all-to-all and a local sum, which sends half as much as gloo's.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.config.schema import Config, ConfigError, EngineOptions
from experiments.engines.base import Engine, Peer, Trained
from mdcs.options import OptionError, option
from mdcs.profile.link import Collectives

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Fsdp2(EngineOptions):
    """Options of FSDP2. Raises OptionError for `plan` together with options that the plan decides."""

    name = "fsdp2"
    reshard: str = option("always", "reshard blocks after forward: always, or never", choices=("always", "never"))
    prefetch: int | None = option(None, "blocks that are gathered ahead; null: fully_shard's default", at_least=1)
    reduce_scatter: str = option(
        "own", "own: the backend's; all_to_all: an all-to-all and a local sum", choices=("own", "all_to_all")
    )
    plan: str | None = option(None, "fsdp2.json of mdcs export, which lists the calls; null: a call per block")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plan is not None and (self.reshard, self.prefetch) != ("always", None):
            got = f"reshard={self.reshard}, prefetch={self.prefetch}"
            raise OptionError("plan", f"says what to reshard and prefetch itself; got {got}")

    @property
    def label(self) -> str:
        values = ("plan" if self.plan else self.reshard, self.reduce_scatter, self.prefetch)
        return " ".join([self.name, *(str(value) for value in values if value is not None)])

    def check(self, config: Config) -> None:
        super().check(config)
        plan, ranks = self.plan, config.cluster.ranks
        if plan is None:
            return
        from mdcs.export.document import SCHEMA
        try:
            said = json.loads(Path(plan).read_text(encoding="utf-8"))
            schema, planned = said["schema"], said["ranks"]
            meshes = [group["mesh"] for group in said["groups"] if schema == SCHEMA]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError("engine.plan", f"is not a file of mdcs export: {error}") from error
        if schema != SCHEMA:
            raise ConfigError("engine.plan", f"{plan} has schema {schema}, not {SCHEMA}: export the plan again")
        if planned != ranks:
            raise ConfigError("engine.plan", f"is for {planned} ranks, cluster.ranks={ranks}")
        if self.reduce_scatter != "own" and any(len(mesh) > 1 for mesh in meshes):
            problem = "must be own where a plan has dp or shards within nodes, whose reductions torch makes itself"
            raise ConfigError("engine.reduce_scatter", f"{problem}; got {self.reduce_scatter}")

    def prepare(self, config: Config, workload: Trained) -> Engine:
        return Fsdp2Engine(self, config, workload)


class Fsdp2Engine(Peer):
    def __init__(self, options: Fsdp2, config: Config, workload: Trained) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard
        if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
            raise ConfigError("engine", f"fsdp2 needs a newer torch: in {torch.__version__} it takes no collectives")
        if options.plan is not None:
            self._follow(options, config, workload)
            return
        blocks = workload.blocks()
        mesh = init_device_mesh(workload.device.type, (workload.world,))
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=options.reshard == "always")
        root: Any = fully_shard(workload.model, mesh=mesh, reshard_after_forward=False)  # its backward comes at once
        super().__init__(config, workload, root, workload.optimizer_of(root))
        self.shows_waits = self.shows_messages = workload.device.type == "cpu"
        self._root = root
        if options.prefetch is not None:
            _prefetch([root, *blocks], options.prefetch)
            root._set_unshard_async_op(workload.device.type == "cpu")  # a CPU has no stream to wait
        self._collect([root, *blocks], options)

    def _follow(self, options: Fsdp2, config: Config, workload: Trained) -> None:
        """Apply an exported plan. If the plan has all-reduces, neither messages nor waits are shown: torch makes those
        messages itself."""
        from mdcs.export.fsdp2 import apply_plan, parameter_groups
        assert options.plan is not None
        plan = json.loads(Path(options.plan).read_text(encoding="utf-8"))
        root: Any = apply_plan(workload.model, plan)
        groups: Any = parameter_groups(root)
        super().__init__(config, workload, root, config.optimizer.make(groups))
        self._root = root
        if all(len(group["mesh"]) == 1 for group in plan["groups"]):
            self.shows_waits = self.shows_messages = workload.device.type == "cpu"
            self._collect([workload.model.get_submodule(group["modules"][0]) for group in plan["groups"]], options)

    def _collect(self, modules: list[Any], options: Fsdp2) -> None:
        from experiments.engines import fsdp2_collectives as timed
        if self.workload.world == 1:
            return
        own = options.reduce_scatter == "own"
        if own:
            self.collectives = Collectives("native", self.collectives.backend)  # an all-to-all sends as much as a ring
        for module in modules:
            if self.shows_messages:
                module.set_custom_all_gather(timed.Gather(self))
            if self.shows_messages or not own:
                module.set_custom_reduce_scatter(
                    timed.ReduceScatter(self, timed.reduce_scatter if own else timed.all_to_all)
                )

    def synchronizing(self, last: bool) -> AbstractContextManager[Any]:
        self._root.set_requires_gradient_sync(last)
        self._root.set_is_last_backward(last)
        return nullcontext()

    def clip(self, norm: float) -> Tensor:
        from mdcs.export.fsdp2 import clip_grad_norm_
        return clip_grad_norm_(self.model.parameters(), norm)  # parameters may be on several meshes


def _prefetch(modules: list[Any], ahead: int) -> None:
    """Make each module gather the ``ahead`` next modules before it computes, in the order of forward or backward."""
    root, *blocks = modules
    for i, module in enumerate(modules):
        if following := modules[i + 1 : i + 1 + ahead]:
            module.set_modules_to_forward_prefetch(following)
        before = blocks[::-1][:ahead] if module is root else blocks[max(0, i - 1 - ahead) : i - 1][::-1]
        if before:
            module.set_modules_to_backward_prefetch(before)
