"""A Hugging Face Trainer whose model is trained by a plan of mdcs, made at the first batch.

LD_PRELOAD=$(python -m mdcs.measure.memory) torchrun --nproc-per-node 2 examples/hf_trainer.py

`max_grad_norm`, accumulation, schedules, evaluation and `save_model` work; the norm that is logged is that of the step before.
Of a checkpoint of the Trainer's only the model is written (`save_only_model=True`): `trainer.parallel.checkpoint()` has all.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import mdcs


class MdcsTrainer(Trainer):
    """``policy`` says which modules are units; ``plan`` is made within ``budget`` bytes if it is None."""

    def __init__(
        self, *args: Any, policy: Any, budget: int | None = None, plan: mdcs.Plan | None = None, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self.policy, self.budget, self.plan = policy, budget, plan
        self.parallel: mdcs.Parallel | None = None
        self._mixed_mesh_grads = False  # else it looks at gradients, which may be gone

    def create_accelerator_and_postprocess(self) -> None:
        """Accelerate shares out the data; it neither wraps the model nor clips."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = lambda model, *_, **__: model
        self.accelerator.prepare_optimizer = lambda optimizer, *_, **__: Steps(optimizer, self)
        self.accelerator.clip_grad_norm_ = lambda *_, **__: None if self.parallel is None else self.parallel.grad_norm

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as self._run:  # at its end the model is whole on every rank
            self._run.callback(setattr, self, "parallel", None)
            return super().train(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if self.parallel is None:
            model.train()
            optimizer, units = self.optimizer.optimizer, mdcs.partition(model, self.policy)
            prepared = self._prepare_inputs(inputs)
            clip = self.args.max_grad_norm or None
            self.plan = self.plan or mdcs.autoplan(
                model, optimizer, units, lambda: self.compute_loss(model, prepared), budget=self.budget,
                micro_steps=self.args.gradient_accumulation_steps, cross_iteration=clip is None,
            )  # fmt: skip
            self.parallel = self._run.enter_context(mdcs.parallelize(model, optimizer, self.plan, units, clip_norm=clip))
        return super().training_step(model, inputs, num_items_in_batch)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.parallel is None else self.parallel.evaluate():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.parallel is None:
            return super().save_model(output_dir, _internal_call)
        whole = self.parallel.state_dict(rank0_only=True, cpu=True)
        if self.args.should_save:
            self._save(output_dir, state_dict=whole)


class Steps(AcceleratedOptimizer):
    """The optimizer as the Trainer sees it: a step ends the iteration of the plan."""

    def __init__(self, optimizer: torch.optim.Optimizer, trainer: MdcsTrainer) -> None:
        super().__init__(optimizer)
        self._trainer = trainer

    def step(self, closure: Any = None) -> None:
        self._trainer.parallel.step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """There is nothing to zero."""


class Words(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) * (index % 5 + 1)) % 31
        return {"input_ids": tokens, "labels": tokens}


def train(kind: type[Trainer], folder: str, options: dict[str, Any], **more: Any) -> tuple[Trainer, list[float]]:
    """The trainer, and the logged losses of two epochs."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_embd=16, n_head=2, n_positions=16, vocab_size=31, bos_token_id=None, eos_token_id=None,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        folder, use_cpu=True, num_train_epochs=2, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        report_to="none", save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = kind(model=model, args=arguments, train_dataset=Words(), eval_dataset=Words(), **more)
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        trainer, losses = train(MdcsTrainer, made, {}, policy=mdcs.ByClass(("GPT2Block",)), budget=2**19)
        held_out = trainer.evaluate()["eval_loss"]
        if trainer.is_world_process_zero():
            print(f"loss {losses[0]:.4f}, then {losses[-1]:.4f}, held out {held_out:.4f}")
    dist.destroy_process_group()
