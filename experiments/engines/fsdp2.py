"""torch's fully_shard (FSDP2), on every block and on what the blocks leave over.

On CPU its collectives are timed by passing through here: fully_shard takes other ones of its user. By itself it waits for
each at once there; with `engine.prefetch` gathers are in flight while blocks before them compute. The reduce-scatter
is the backend's own, or an all-to-all and a local sum, which sends half of what gloo's own does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.config.schema import Config, ConfigError
from experiments.engines.base import Engine, EngineOptions, Peer, Trained
from mdcs.options import OptionError, option, shown
from mdcs.profile.algorithms import Collectives
from mdcs.profile.link import Kind

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Fsdp2(EngineOptions):
    """Raises OptionError for a size of groups without groups, and for groups without one."""

    name = "fsdp2"

    reshard: str = option(
        "always", "after forward a block is sharded as at rest, not at all, or over groups of ranks",
        choices=("always", "never", "group"),
    )  # fmt: skip
    reshard_group: int | None = option(None, "ranks of a group, with reshard=group", at_least=2)
    prefetch: int | None = option(
        None, "blocks gathered ahead, asynchronously; null: as fully_shard does by itself", at_least=1
    )
    reduce_scatter: str = option(
        "own", "the backend's own, or an all-to-all with a local sum", choices=("own", "all_to_all")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.reshard == "group") != (self.reshard_group is not None):
            got = f"{self.reshard} with {shown(self.reshard_group)}"
            raise OptionError("reshard_group", f"goes with reshard=group and no other; got {got}")

    @property
    def label(self) -> str:
        """For instance fsdp2 never all_to_all 2."""
        values = (self.reshard_group or self.reshard, self.reduce_scatter, self.prefetch)
        return " ".join([self.name, *(str(value) for value in values if value is not None)])

    def check(self, config: Config) -> None:
        """Raise ConfigError for groups that the ranks cannot be divided into."""
        super().check(config)
        group, ranks = self.reshard_group, config.cluster.ranks
        if group is not None and ranks % group:
            raise ConfigError("engine.reshard_group", f"must divide cluster.ranks={ranks}, got {group}")

    def prepare(self, config: Config, workload: Trained) -> Engine:
        """Around every block of the model and the rest."""
        return Fsdp2Engine(self, config, workload)


class Fsdp2Engine(Peer):
    def __init__(self, options: Fsdp2, config: Config, workload: Trained) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
            raise ConfigError("engine", f"fsdp2 needs a newer torch: in {torch.__version__} it takes no collectives")
        blocks = workload.blocks()
        mesh = init_device_mesh(workload.device.type, (workload.world,))
        reshard = {"always": True, "never": False, "group": options.reshard_group}[options.reshard]
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        root: Any = fully_shard(workload.model, mesh=mesh, reshard_after_forward=False)  # its backward comes at once
        super().__init__(config, workload, root, workload.optimizer_of(root))
        self.shows_waits = self.shows_messages = workload.device.type == "cpu"
        self._root = root
        self._tune(blocks, options)

    def _tune(self, blocks: list[nn.Module], options: Fsdp2) -> None:
        """Prefetching and collectives, as the options say."""
        from experiments.engines import fsdp2_collectives as timed

        ahead = options.prefetch
        if ahead is not None:
            _prefetch([self._root, *blocks], ahead)
            self._root._set_unshard_async_op(self.workload.device.type == "cpu")  # where there is no stream to wait
        if self.workload.world == 1:
            return
        modules: list[Any] = [self._root, *blocks]
        own = options.reduce_scatter == "own"
        if not own and self.collectives.backend == "gloo":
            self.collectives = Collectives(all_gather="native", reduce_scatter="all_to_all")
        elif self.collectives.backend == "gloo":
            self.collectives = Collectives(all_gather="native", reduce_scatter="native")
        for module in modules:
            if self.shows_messages:
                module.set_custom_all_gather(timed.Gather(self))
            if self.shows_messages or not own:
                module.set_custom_reduce_scatter(timed.ReduceScatter(self, timed.reduce_scatter if own else timed.all_to_all))

    def synchronizing(self, last: bool) -> AbstractContextManager[Any]:
        self._root.set_requires_gradient_sync(last)
        self._root.set_is_last_backward(last)
        return nullcontext()

    def clip(self, norm: float) -> Tensor:
        total: Any = super().clip(norm)
        whole: Tensor = total.full_tensor()
        return whole

    # ---- what the collectives tell

    def sent(self, kind: Kind, size: int, begin: float, end: float, *, waited: bool) -> None:
        """``size`` is of the whole message."""
        self.seen.message(kind, self.collectives.sent(kind, size, self.workload.world), (begin, end))
        if waited:
            self.seen.waits.append((begin, end))


def _prefetch(modules: list[Any], ahead: int) -> None:
    """Each gathers the ``ahead`` next ones before it computes: in forward those behind it, in backward those before it."""
    root, *blocks = modules
    for i, module in enumerate(modules):
        if following := modules[i + 1 : i + 1 + ahead]:
            module.set_modules_to_forward_prefetch(following)
        before = blocks[::-1][:ahead] if module is root else blocks[max(0, i - 1 - ahead) : i - 1][::-1]
        if before:
            module.set_modules_to_backward_prefetch(before)
