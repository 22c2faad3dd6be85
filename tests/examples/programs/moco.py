"""MoCo: a momentum encoder, a queue of keys in a buffer, batches shuffled among the ranks, collectives in forward."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import mdcs  # was: from torch.nn.parallel import DistributedDataParallel


@torch.no_grad()
def concat_all_gather(tensor: Tensor) -> Tensor:
    gathered = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.contiguous())
    return torch.cat(gathered)


class MoCo(nn.Module):
    def __init__(self, base_encoder: nn.Module, dim: int = 8, K: int = 64, m: float = 0.999, T: float = 0.07) -> None:
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q, self.encoder_k = base_encoder, copy.deepcopy(base_encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self) -> None:
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data.mul_(self.m).add_(param_q.data, alpha=1 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys: Tensor) -> None:
        keys, ptr = concat_all_gather(keys), int(self.queue_ptr)
        self.queue[:, ptr : ptr + len(keys)] = keys.T
        self.queue_ptr[0] = (ptr + len(keys)) % self.K

    @torch.no_grad()
    def _keys_of_shuffled(self, im_k: Tensor) -> Tensor:
        everyone = concat_all_gather(im_k)
        shuffled = torch.randperm(len(everyone))
        dist.broadcast(shuffled, src=0)
        mine = shuffled.view(dist.get_world_size(), -1)[dist.get_rank()]
        k = concat_all_gather(F.normalize(self.encoder_k(everyone[mine]), dim=1))
        return k[shuffled.argsort().view(dist.get_world_size(), -1)[dist.get_rank()]]

    def forward(self, im_q: Tensor, im_k: Tensor) -> tuple[Tensor, Tensor]:
        q = F.normalize(self.encoder_q(im_q), dim=1)
        # was: self._momentum_update_key_encoder()
        k = self._keys_of_shuffled(im_k)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / self.T
        self._dequeue_and_enqueue(k)
        return logits, torch.zeros(len(logits), dtype=torch.long)


dist.init_process_group("gloo")
torch.manual_seed(0)
encoder = nn.Sequential(
    nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8),
)  # fmt: skip
model = MoCo(encoder)
optimizer = torch.optim.SGD(encoder.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
parallel = mdcs.parallelize(model, optimizer, broadcast_buffers=True)  # was: model = DistributedDataParallel(model)
torch.manual_seed(dist.get_rank())
losses: list[float] = []
for _ in range(20):
    images = torch.rand(4, 3, 8, 8)
    with parallel.full_parameters(writeback=True):  # was: pass
        model._momentum_update_key_encoder()  # new
    output, target = model(im_q=images + 0.1 * torch.rand(4, 3, 8, 8), im_k=images + 0.1 * torch.rand(4, 3, 8, 8))
    loss = F.cross_entropy(output, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
dist.destroy_process_group()
