"""A Hugging Face Trainer whose model is trained by a plan of mdcs, made at the first batch.

torchrun --nproc-per-node 2 examples/hf_trainer.py

The Trainer's default settings work, and so do its checkpoints with model and optimizer, `resume_from_checkpoint`,
`load_best_model_at_end`, accumulation, schedules, label smoothing and evaluation. A checkpoint is the one that the
plain Trainer writes: rank 0 holds model and optimizer state whole, on the CPU, meanwhile. The norm that is logged is
that of the step before.
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
    """``policy`` says which modules are units, None chooses; ``plan`` is made within ``budget`` if it is None."""

    def __init__(
        self,
        *args: Any,
        policy: Any = None,
        budget: int | str | None = None,
        plan: mdcs.Plan | None = None,
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        self.policy, self.budget, self.plan = policy, budget, plan
        self.parallel: mdcs.Session | None = None
        self._mixed_mesh_grads = False  # else it looks at gradients, which may be gone

    def create_accelerator_and_postprocess(self) -> None:
        """Accelerate shares out the data; it neither wraps the model nor clips."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = lambda model, *_, **__: model
        self.accelerator.prepare_optimizer = lambda optimizer, *_, **__: Steps.of(optimizer, self)
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

            def loss() -> torch.Tensor:
                batch = {**prepared}  # label smoothing takes the labels out of it
                with self.compute_loss_context_manager():
                    return self.compute_loss(model, batch, num_items_in_batch=num_items_in_batch)

            clip = self.args.max_grad_norm or None
            self.plan = self.plan or mdcs.autoplan(
                model, optimizer, units, loss, budget=self.budget, micro_steps=self.args.gradient_accumulation_steps,
                cross_iteration=clip is None,
            )  # fmt: skip
            self.parallel = self._run.enter_context(
                mdcs.parallelize(model, optimizer, self.plan, units, clip_norm=clip)
            )
        return super().training_step(model, inputs, num_items_in_batch)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.parallel is None else self.parallel.evaluate():
            return super().evaluation_loop(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.parallel is not None and state_dict is None:
            state_dict = self.parallel.state_dict(rank0_only=not self.args.save_on_each_node, cpu=True)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.parallel is not None:  # every rank gathers; those that save ask for the state
            self.optimizer.whole = self.parallel.optimizer_state_dict(
                rank0_only=not self.args.save_on_each_node, cpu=True
            )
        super()._save_optimizer_and_scheduler(output_dir)
        self.optimizer.whole = None

    def _load_best_model(self) -> None:
        whole = nullcontext() if self.parallel is None else self.parallel.full_parameters(writeback=True)
        with whole:
            super()._load_best_model()


class Steps(AcceleratedOptimizer):
    """The optimizer as the Trainer sees it: a step ends the iteration of the plan."""

    def __init__(self, optimizer: torch.optim.Optimizer, trainer: MdcsTrainer) -> None:
        super().__init__(optimizer)
        self._trainer = trainer
        self.whole: dict[str, Any] | None = None  # the state, while it is saved

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, trainer: MdcsTrainer) -> Steps:
        """Around an optimizer, or what is one already, when the Trainer trains again."""
        return optimizer if isinstance(optimizer, cls) else cls(optimizer, trainer)

    def step(self, closure: Any = None) -> None:
        self._trainer.parallel.step()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self.whole is None else self.whole

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """There is nothing to zero."""


class Words(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) * (index % 5 + 1)) % 31
        return {"input_ids": tokens, "labels": tokens}


def train(
    kind: type[Trainer], folder: str, options: dict[str, Any], resume: str | None = None, **more: Any
) -> tuple[Trainer, list[float]]:
    """The trainer after two epochs, and their logged losses, those before the checkpoint ``resume`` included."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_embd=16, n_head=2, n_positions=16, vocab_size=31, bos_token_id=None, eos_token_id=None,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        folder, use_cpu=True, num_train_epochs=2, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        report_to="none", disable_tqdm=True, **{"save_strategy": "no", **options},
    )  # fmt: skip
    trainer = kind(model=model, args=arguments, train_dataset=Words(), eval_dataset=Words(), **more)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        trainer, losses = train(MdcsTrainer, made, {}, budget="80%")
        held_out = trainer.evaluate()["eval_loss"]
        if trainer.is_world_process_zero():
            print(f"loss {losses[0]:.4f}, then {losses[-1]:.4f}, held out {held_out:.4f}")
    dist.destroy_process_group()
