"""DINO: a student learns from its own average, gradients are clipped one by one, the last layer rests in the first epoch."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import mdcs  # was: from torch.nn.parallel import DistributedDataParallel


class ViT(nn.Module):
    def __init__(self, dim: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.patch_embed, self.pos_embed = nn.Conv2d(3, dim, 8, 8), nn.Parameter(torch.randn(1, 16, dim) * 0.02)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(dim, 2, 32, 0.0, F.gelu, batch_first=True) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = x + F.interpolate(self.pos_embed.transpose(1, 2), x.size(1)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(1)


class DINOHead(nn.Module):
    def __init__(self, dim: int = 16, out: int = 24) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
        self.last_layer, self.rests = nn.Parameter(torch.randn(out, 8)), False

    def forward(self, x: Tensor) -> Tensor:
        last_layer = self.last_layer.detach() if self.rests else self.last_layer  # was: last_layer = self.last_layer
        return F.linear(F.normalize(self.mlp(x), dim=-1), F.normalize(last_layer, dim=-1))


class MultiCropWrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = ViT(), DINOHead()

    def forward(self, crops: list[Tensor]) -> Tensor:
        sizes = sorted({crop.size(-1) for crop in crops}, reverse=True)
        return self.head(torch.cat([self.backbone(torch.cat([c for c in crops if c.size(-1) == size])) for size in sizes]))


def clip_gradients(parameters: list[nn.Parameter], clip: float) -> None:
    for p in parameters:
        if p.grad is not None:
            coefficient = clip / (p.grad.norm(2) + 1e-6)
            if coefficient < 1:
                p.grad.mul_(coefficient)


class ClippedAdamW(torch.optim.AdamW):
    def step(self, closure=None):
        clip_gradients([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


dist.init_process_group("gloo")
torch.manual_seed(0)
student = MultiCropWrapper()
teacher, center = copy.deepcopy(student).requires_grad_(False), torch.zeros(24)
regularized = [p for p in student.parameters() if p.ndim > 1]
groups = [{"params": regularized}, {"params": [p for p in student.parameters() if p.ndim == 1], "weight_decay": 0.0}]
optimizer = ClippedAdamW(groups)  # was: optimizer = torch.optim.AdamW(groups)
head, weights = student.head, list(student.parameters())
parallel = mdcs.parallelize(student, optimizer, budget="98%")  # was: student = DistributedDataParallel(student)
random = torch.Generator().manual_seed(dist.get_rank())
losses: list[float] = []
for it in range(24):
    epoch = it // 8
    optimizer.param_groups[0]["weight_decay"] = 0.04 + 0.36 * it / 24
    for group in optimizer.param_groups:
        group["lr"] = 5e-3 * min(1.0, (it + 1) / 4)
    images = torch.rand(4, 3, 32, 32, generator=random)
    crops = [images + 0.1, images.flip(3), images[..., :16, :16], images[..., 16:, 16:]]
    head.rests = epoch < 1  # new
    seen = student(crops).view(4, 4, -1) / 0.1
    target = F.softmax((teacher(crops[:2]) - center) / 0.04, -1).view(2, 4, -1)
    pairs = [(i, j) for i in range(2) for j in range(4) if i != j]
    loss = -sum((target[i] * F.log_softmax(seen[j], -1)).sum(-1).mean() for i, j in pairs) / len(pairs)
    optimizer.zero_grad()
    loss.backward()
    # was: clip_gradients(weights, 0.1)
    # was: head.last_layer.grad = None if epoch < 1 else head.last_layer.grad
    optimizer.step()
    with torch.no_grad():
        mean = teacher(crops[:2]).mean(0)
        dist.all_reduce(mean)
        center.lerp_(mean / dist.get_world_size(), 0.1)
        with parallel.full_parameters():  # new
            for q, k in zip(weights, teacher.parameters(), strict=True):
                k.mul_(0.9).add_(q, alpha=0.1)
    losses.append(loss.item())
dist.destroy_process_group()
