"""A training loop of one's own.

torchrun --nproc-per-node 2 examples/own_loop.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import mdcs


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(functional.gelu(self.wide(self.norm(x))))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(dist.get_rank())  # every rank has its own part of the data
    inputs = [torch.rand(32, 64, generator=made) for _ in range(count)]
    return [(x, x.argmax(1)) for x in inputs]


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(6)), nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    loader = batches(50)
    with mdcs.parallelize(model, optimizer, budget="75% of ddp") as parallel:  # of what DistributedDataParallel needs
        for batch in loader:
            loss = loss_of(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        memory = parallel.memory()["measured"]
        with parallel.evaluate():
            held_out = loss_of(batches(51)[-1])
        weights = parallel.state_dict()  # whole, on every rank, with the plain model's names

    if dist.get_rank() == 0:
        plan = parallel.plan
        print("strategies", ", ".join(f"{u.name}: {s}" for u, s in zip(parallel.units, plan.strategies, strict=True)))
        print(f"loss {loss.item():.4f}, held out {held_out.item():.4f}, {len(weights)} tensors")
        assert plan.budget is not None and plan.prediction is not None
        peak = "not measured" if memory is None else f"{memory['total']} bytes"
        print(f"budget {plan.budget} bytes, predicted peak {plan.prediction.peak_bytes} bytes, measured {peak}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
