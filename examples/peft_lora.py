"""LoRA and DoRA by PEFT: frozen weights are sharded, too, and only the adapters have gradients and optimizer state.

torchrun --nproc-per-node 2 examples/peft_lora.py

PEFT's own `get_peft_model`, `PeftModel.from_pretrained` and, in `parallel.full_parameters()`, `save_pretrained` stay as
they are.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import mdcs


def base() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=3, n_embd=32, n_head=2, n_positions=16, vocab_size=31, bos_token_id=None, eos_token_id=None)
    )


def train(folder: str, *, ours: bool = True, steps: int = 20, **lora: Any) -> tuple[list[float], float]:
    """Losses of this rank, and that of a batch held out by the model that is loaded from the saved adapters."""
    config = LoraConfig(
        **{"r": 4, "lora_dropout": 0.1, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, **lora}
    )
    model: Any = get_peft_model(base(), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    run = mdcs.parallelize(model, optimizer, budget="floor+5%") if ours else DistributedDataParallel(model)
    losses = []
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        batch = torch.randint(31, (4, 1)) + torch.arange(16)
        loss = (model if ours else run)(input_ids=batch % 31, labels=batch % 31).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with run.full_parameters(cpu=True) if ours else nullcontext():
        model.save_pretrained(folder, is_main_process=dist.get_rank() == 0)
    dist.barrier()
    if ours:
        run.close()
    loaded = PeftModel.from_pretrained(base(), folder).eval()
    tokens = torch.arange(16)[None] % 31
    return losses, loaded(input_ids=tokens, labels=tokens).loss.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    made = [tempfile.mkdtemp()]
    dist.broadcast_object_list(made)
    losses, held_out = train(made[0])
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f}, then {losses[-1]:.4f}, held out {held_out:.4f}")
    dist.destroy_process_group()
