"""A Muon loop: the matrices of the blocks by torch's Muon, all else by AdamW, each with its own rate."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import mdcs  # was: from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.c_q, self.c_k, self.c_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.c_fc, self.c_proj = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x: Tensor, x0: Tensor) -> Tensor:
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        normed = F.rms_norm(x, (x.size(-1),))
        x = x + F.scaled_dot_product_attention(self.c_q(normed), self.c_k(normed), self.c_v(normed), is_causal=True)
        return x + self.c_proj(F.relu(self.c_fc(F.rms_norm(x, (x.size(-1),)))).square())


class GPT(nn.Module):
    def __init__(self, vocab_size: int, dim: int, depth: int) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(vocab_size, dim), nn.ModuleList(Block(dim) for _ in range(depth))
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)
        self.lm_head.weight.data.zero_()

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = x0 = F.rms_norm(self.embed(inputs), (self.embed.embedding_dim,))
        for block in self.blocks:
            x = block(x, x0)
        logits = 15 * torch.tanh(self.lm_head(F.rms_norm(x, (x.size(-1),))) / 15)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


dist.init_process_group("gloo")
torch.manual_seed(0)
model = GPT(64, 16, 3)
matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
optimizer1 = torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95))
optimizer2 = torch.optim.Muon(matrices, lr=0.02, momentum=0.95)
optimizers = [optimizer1, optimizer2]
schedulers = [torch.optim.lr_scheduler.LambdaLR(opt, lambda it: 1 - it / 24) for opt in optimizers]
parallel = mdcs.parallelize(model, optimizers, budget="floor+5%")  # was: model = DistributedDataParallel(model)
tokens = torch.randint(64, (24, 4, 1), generator=torch.Generator().manual_seed(dist.get_rank())).repeat(1, 1, 17).cumsum(2) % 64
losses: list[float] = []
for text in tokens:
    loss = model(text[:, :-1], text[:, 1:])
    loss.backward()
    for opt, sched in zip(optimizers, schedulers, strict=True):
        opt.step()
        sched.step()
    model.zero_grad(set_to_none=True)
    losses.append(loss.item())
dist.destroy_process_group()
