"""A Lightning strategy: trainer and module stay as they are, mdcs plans at the first batch and trains.

torchrun --nproc-per-node 2 examples/lightning_strategy.py

Clipping, accumulation, schedules, validation, Lightning's checkpoints with the optimizer and `ckpt_path` work. Manual
optimization is refused before the first batch; hooks between backward and the update (`on_before_optimizer_step`) are
not called, as updates are made beside backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import mdcs


class MdcsStrategy(DDPStrategy):
    """``policy`` says which modules are units, None chooses; ``plan`` is made within ``budget`` if it is None."""

    def __init__(
        self, policy: Any = None, *, budget: int | str | None = None, plan: mdcs.Plan | None = None, **more: Any
    ) -> None:
        super().__init__(**more)
        self._policy, self._budget, self._plan = policy, budget, plan
        self.parallel: mdcs.Session | None = None
        self._evaluating = ExitStack()

    def configure_ddp(self) -> None:
        """Wrap nothing: units have hooks."""

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if not self.lightning_module.automatic_optimization:
            raise ValueError(
                f"{type(self.lightning_module).__name__}: automatic_optimization=False steps inside of training_step, "
                "of which no plan can be made: return the loss instead, or write the loop around mdcs.parallelize"
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.parallel is None:
            self.parallel = self._started(lambda: super(MdcsStrategy, self).training_step(*args, **kwargs))
        return super().training_step(*args, **kwargs)

    def _started(self, step: Callable[[], Any]) -> mdcs.Session:
        module, [optimizer], trainer = self.lightning_module, self.optimizers, self.lightning_module.trainer
        units = mdcs.partition(module, self._policy)
        limit = trainer.gradient_clip_val or None
        clip_norm, clip_value = (None, limit) if trainer.gradient_clip_algorithm == "value" else (limit, None)
        if self._plan is None:

            def loss() -> torch.Tensor:
                out = step()
                return out["loss"] if isinstance(out, dict) else out

            module.log = module.log_dict = lambda *_, **__: None  # of passes that only measure
            try:
                self._plan = mdcs.autoplan(
                    module, optimizer, units, loss, budget=self._budget, micro_steps=trainer.accumulate_grad_batches,
                    cross_iteration=clip_norm is None,
                )  # fmt: skip
            finally:
                del module.log, module.log_dict
        return mdcs.parallelize(module, optimizer, self._plan, units, clip_norm=clip_norm, clip_value=clip_value)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        out = closure()  # forward and backward; Lightning has divided the loss by the accumulated batches
        self.parallel.step()
        return out

    def on_validation_start(self) -> None:
        if self.parallel is not None:
            self._evaluating.enter_context(self.parallel.evaluate())

    def on_validation_end(self) -> None:
        self._evaluating.close()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._evaluating.close()  # a checkpoint that validation ends with comes before on_validation_end
        return super().lightning_module_state_dict() if self.parallel is None else self.parallel.state_dict()

    def optimizer_state(self, optimizer: Any) -> Any:
        return super().optimizer_state(optimizer) if self.parallel is None else self.parallel.optimizer_state_dict()

    def on_train_end(self) -> None:
        """The module is whole on every rank again."""
        self._end(None)

    def on_exception(self, exception: BaseException) -> None:
        self._end(exception)

    def _end(self, exception: BaseException | None) -> None:
        ended, self.parallel = self.parallel, None
        if ended is not None:
            ended.__exit__(None if exception is None else type(exception), exception, None)


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)), nn.Linear(16, 1))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("train", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("held out", functional.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.seen.append(float(outputs["loss"]))


def train(strategy: DDPStrategy, ckpt_path: str | None = None, **options: Any) -> tuple[pl.Trainer, list[float]]:
    """The trainer with its module, whole, after two epochs, and their losses: those after ``ckpt_path``, if it is
    given."""
    inputs = torch.rand(64, 16, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    losses = Losses()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[losses, *options.pop("callbacks", [])],
        **{"enable_checkpointing": False, **options},
    )  # fmt: skip
    trainer.fit(Regression(), DataLoader(data, batch_size=4), DataLoader(data, batch_size=8), ckpt_path=ckpt_path)
    return trainer, losses.seen


if __name__ == "__main__":
    trainer, losses = train(MdcsStrategy(budget=2**18))
    if trainer.is_global_zero:
        print(f"loss {losses[0]:.4f}, then {losses[-1]:.4f}, held out {trainer.callback_metrics['held out']:.4f}")
