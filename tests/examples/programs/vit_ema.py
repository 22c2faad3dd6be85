"""timm's training of a ViT: drop path, mixed labels, values of gradients clipped, and a moving average of the weights."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mdcs  # was: from torch.nn.parallel import DistributedDataParallel


class DropPath(nn.Module):
    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        return x * x.new_empty(x.shape[0], *(1,) * (x.ndim - 1)).bernoulli_(keep).div_(keep)


class Block(nn.Module):
    def __init__(self, dim: int, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.mlp = nn.Linear(dim, 3 * dim), nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.gamma = nn.Parameter(torch.full((dim,), 0.1))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn(self.norm1(x)).chunk(3, -1)
        x = x + self.drop_path(self.gamma * F.scaled_dot_product_attention(q, k, v))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    def __init__(self, dim: int = 16, depth: int = 4, drop_path: float = 0.2) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 8, 8)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, dim)), nn.Parameter(torch.randn(1, 17, dim) * 0.02)
        self.blocks = nn.Sequential(*(Block(dim, drop_path * i / (depth - 1)) for i in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class ModelEma(nn.Module):
    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            ema_v.lerp_(model_v, weight=1 - self.decay)


class AveragedAdamW(mdcs.WithAverage, torch.optim.AdamW):  # new
    average_decay = 0.9


dist.init_process_group("gloo")
torch.manual_seed(0)
target = torch.randint(5, (96,))
dataset = TensorDataset(torch.randn(96, 3, 32, 32) + target[:, None, None, None] / 4, F.one_hot(target, 5).float())
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset), drop_last=True)
model = VisionTransformer()
decayed, others = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim <= 1]
groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
optimizer = AveragedAdamW(groups, lr=3e-3)  # was: optimizer = torch.optim.AdamW(groups, lr=3e-3)
# was: model_ema = ModelEma(model, decay=0.9)
parallel = mdcs.parallelize(model, optimizer, budget="floor+5%", clip_value=0.02)  # was: model = DistributedDataParallel(model)
torch.manual_seed(dist.get_rank())
losses: list[float] = []
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    model.train()
    for input, target in loader:
        lam = torch.rand(()).item()
        input, target = lam * input + (1 - lam) * input.flip(0), lam * target + (1 - lam) * target.flip(0)
        loss = -(target * F.log_softmax(model(input), -1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        # was: nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        # was: model_ema.update(model.module)
        losses.append(loss.item())
    averaged = model.eval()  # was: averaged = model_ema.module
    with parallel.evaluate(weights="average"):  # was: with torch.no_grad():
        losses += [averaged(input).sum().item() for input, _ in loader]
dist.destroy_process_group()
