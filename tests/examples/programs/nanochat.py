"""nanochat's training: Muon for stacks of matrices and AdamW for the rest in one optimizer, with schedules of their own."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import mdcs  # was: from torch.nn.parallel import DistributedDataParallel


class MuonAdamW(torch.optim.Optimizer):
    def __init__(self, param_groups: list[dict]) -> None:
        super().__init__(param_groups, defaults={})
        self._step_t, self._lr_t, self._momentum_t = torch.zeros(()), torch.zeros(()), torch.zeros(())

    def _step_adamw(self, group: dict) -> None:
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
            (beta1, beta2), _, _ = group["betas"], self._step_t.fill_(state["step"]), self._lr_t.fill_(group["lr"])
            p.mul_(1 - group["lr"] * group["weight_decay"])
            state["exp_avg"].lerp_(p.grad, 1 - beta1)
            state["exp_avg_sq"].lerp_(p.grad.square(), 1 - beta2)
            denominator = (state["exp_avg_sq"] / (1 - beta2**self._step_t)).sqrt() + group["eps"]
            p.sub_(state["exp_avg"] / denominator * self._lr_t / (1 - beta1**self._step_t))

    def _step_muon(self, group: dict) -> None:
        first, state = group["params"][0], self.state[group["params"][0]]
        grads, params = torch.stack([p.grad for p in group["params"]]), torch.stack(group["params"])
        if not state:
            state["momentum_buffer"] = torch.zeros_like(params)
            reduced = (*params.shape[:2], 1) if first.shape[0] >= first.shape[1] else (len(params), 1, params.shape[2])
            state["second_momentum_buffer"] = torch.zeros(reduced, dtype=first.dtype)
        self._momentum_t.fill_(group["momentum"])
        state["momentum_buffer"].lerp_(grads, 1 - self._momentum_t.to(grads))
        g = grads.lerp(state["momentum_buffer"], self._momentum_t.to(grads))
        x, tall = g / (g.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6), g.size(-2) > g.size(-1)
        for a, b, c in [(8.1565, -22.4832, 15.8788), (4.0429, -2.8089, 0.5), (3.8917, -2.7724, 0.5061)][: group["ns_steps"]]:
            gram = x.mT @ x if tall else x @ x.mT
            poly = b * gram + c * (gram @ gram)
            x = a * x + (x @ poly if tall else poly @ x)
        side = -1 if tall or g.size(-2) == g.size(-1) else -2
        variance = x.square().mean(side, keepdim=True)
        kept = state["second_momentum_buffer"].lerp_(variance, 1 - group["beta2"]).clamp_min(1e-10).rsqrt()
        before, after = variance.sum((-2, -1), keepdim=True), (variance * kept.square()).sum((-2, -1), keepdim=True)
        x = x * kept * (before / after.clamp_min(1e-10)).sqrt()
        lr = group["lr"] * max(1.0, first.size(-2) / first.size(-1)) ** 0.5
        params.sub_(lr * x + lr * group["weight_decay"] * params * (x * params >= 0))
        torch._foreach_copy_(group["params"], list(params.unbind(0)))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            (self._step_adamw if group["kind"] == "adamw" else self._step_muon)(group)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.c_q, self.c_k, self.c_v, self.c_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.c_fc, self.c_out = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.rms_norm(x, (x.size(-1),))
        q, k, v = F.rms_norm(self.c_q(h), (x.size(-1),)), F.rms_norm(self.c_k(h), (x.size(-1),)), self.c_v(h)
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.c_out(F.relu(self.c_fc(F.rms_norm(x, (x.size(-1),)))).square())


class GPT(nn.Module):
    def __init__(self, vocab: int = 64, dim: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab, bias=False)
        self.h = nn.ModuleList(Block(dim) for _ in range(depth))
        self.resid_lambdas, self.x0_lambdas = nn.Parameter(torch.ones(depth)), nn.Parameter(torch.full((depth,), 0.1))

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = x0 = F.rms_norm(self.wte(idx), (self.wte.embedding_dim,))
        for i, block in enumerate(self.h):
            x = block(self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0)
        logits = 15 * torch.tanh(self.lm_head(F.rms_norm(x, (x.size(-1),))).float() / 15)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def set_options(step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * min(1.0, (24 - step) / 8)
        if group["kind"] == "muon":
            group["momentum"], group["weight_decay"] = 0.85 + 0.1 * min(1.0, step / 12), 0.2 * (1 - step / 24)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = GPT()
matrices, adamw = list(model.h.parameters()), {"kind": "adamw", "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}
stacks = [[p] for p in matrices]  # was: stacks = [[p for p in matrices if p.shape == s] for s in {p.shape for p in matrices}]
optimizer = MuonAdamW([
    {**adamw, "params": [model.lm_head.weight], "lr": 0.004}, {**adamw, "params": [model.wte.weight], "lr": 0.2},
    {**adamw, "params": [model.resid_lambdas], "lr": 0.005}, {**adamw, "params": [model.x0_lambdas], "lr": 0.05},
    *({"kind": "muon", "params": stack, "lr": 0.02, "momentum": 0.95, "ns_steps": 3, "beta2": 0.95, "weight_decay": 0.2}
      for stack in stacks),
])  # fmt: skip
for group in optimizer.param_groups:
    group["initial_lr"] = group["lr"]
parallel = mdcs.parallelize(model, optimizer, budget="95%")  # was: ddp = DistributedDataParallel(model)
tokens = torch.randint(64, (24, 4, 1), generator=torch.Generator().manual_seed(dist.get_rank())).repeat(1, 1, 17).cumsum(2) % 64
losses: list[float] = []
for step, text in enumerate(tokens):
    set_options(step)  # new
    loss = model(text[:, :-1], text[:, 1:])  # was: loss = ddp(text[:, :-1], text[:, 1:])
    loss.backward()
    # was: set_options(step)
    optimizer.step()
    model.zero_grad(set_to_none=True)
    losses.append(loss.item())
dist.destroy_process_group()
