"""A training program in the style of nanoGPT. Five of its lines are mdcs's: each says what it was with DDP.

torchrun --nproc-per-node 2 examples/nanogpt.py

Accumulation, a learning rate set by hand, clipping, evaluation before the first step, and checkpoints are as they were.
"""

import math
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import mdcs  # was: from torch.nn.parallel import DistributedDataParallel as DDP

block_size, batch_size, n_layer, n_head, n_embd, vocab_size = 32, 8, 4, 4, 64, 128
max_iters, eval_interval, eval_iters, accumulation, learning_rate, grad_clip = 20, 10, 2, 2, 1e-2, 1.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, n_head, -1).transpose(1, 2)
            for part in self.attn(self.ln_1(x)).split(n_embd, dim=2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, n_embd))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


dist.init_process_group("gloo")
master_process = dist.get_rank() == 0
torch.manual_seed(1337)
text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long().clamp(max=vocab_size - 1)
drawn = torch.Generator().manual_seed(dist.get_rank())


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - block_size - 1, (batch_size,), generator=drawn).tolist()
    pieces = torch.stack([text[i : i + block_size + 1] for i in starts])
    return pieces[:, :-1], pieces[:, 1:]


def get_lr(it: int) -> float:
    return learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * it / max_iters)))


model = GPT()
decayed = [p for p in model.parameters() if p.dim() > 1]
rest = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=learning_rate
)
parallel = mdcs.parallelize(model, optimizer, budget="80%", clip_norm=grad_clip)  # was: model = DDP(model)


def estimate_loss() -> float:
    model.eval()
    with parallel.evaluate():  # was: with torch.no_grad():
        losses = [model(*get_batch())[1].item() for _ in range(eval_iters)]
    model.train()
    return sum(losses) / eval_iters


out = Path(tempfile.mkdtemp())
X, Y = get_batch()
for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        held_out = estimate_loss()
        weights = parallel.state_dict()  # was: weights = model.module.state_dict()
        checkpoint = {"model": weights, "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        if master_process:
            print(f"step {iter_num}: held out {held_out:.4f}")
            torch.save(checkpoint, out / "ckpt.pt")
    for micro_step in range(accumulation):
        model.require_backward_grad_sync = micro_step == accumulation - 1
        logits, loss = model(X, Y)
        loss = loss / accumulation
        X, Y = get_batch()
        loss.backward()
    # was: nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(f"iter {iter_num}: loss {loss.item() * accumulation:.6f}")
dist.destroy_process_group()
