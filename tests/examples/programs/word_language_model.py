"""pytorch/examples' word_language_model: an LSTM whose state goes from batch to batch, and SGD written by hand."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import mdcs  # was: from torch.nn.parallel import DistributedDataParallel

Hidden = tuple[Tensor, ...]


class RNNModel(nn.Module):
    def __init__(self, ntoken: int, ninp: int, nhid: int, nlayers: int, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.decoder.weight = self.encoder.weight

    def forward(self, input: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        decoded = self.decoder(self.drop(output))
        return F.log_softmax(decoded.view(-1, decoded.size(-1)), dim=1), hidden


def repackage_hidden(h: Hidden) -> Hidden:
    return tuple(v.detach() for v in h)


def init_hidden(bsz: int) -> Hidden:
    return torch.zeros(2, bsz, 16), torch.zeros(2, bsz, 16)


def get_batch(source: Tensor, i: int) -> tuple[Tensor, Tensor]:
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


dist.init_process_group("gloo")
torch.manual_seed(1111)
ntokens, bptt, clip, lr = 32, 7, 0.25, 20.0
corpus = torch.randint(ntokens, (2, 360, 4)).cumsum(1)[dist.get_rank()] % ntokens
train_data, val_data = corpus[:300], corpus[300:]
model = RNNModel(ntokens, 16, 16, 2, 0.2)
optimizer = torch.optim.SGD(model.parameters(), lr)  # new
parallel = mdcs.parallelize(model, optimizer, clip_norm=clip)  # was: model = DistributedDataParallel(model)
criterion = nn.NLLLoss()
losses: list[float] = []


def evaluate(data_source: Tensor) -> float:
    model.eval()
    total_loss, hidden = 0.0, init_hidden(4)
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, bptt):
            data, targets = get_batch(data_source, i)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(data_source) - 1)


def train() -> None:
    model.train()
    hidden = init_hidden(4)
    for i in range(0, train_data.size(0) - 1, bptt):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        # was: nn.utils.clip_grad_norm_(model.parameters(), clip)
        for group in optimizer.param_groups:  # was: for p in model.parameters():
            group["lr"] = lr  # was: p.data.add_(p.grad, alpha=-lr)
        optimizer.step()  # new
        losses.append(loss.item())


best_val_loss = None
for _ in range(2):
    train()
    val_loss = evaluate(val_data)
    losses.append(val_loss)
    if not best_val_loss or val_loss < best_val_loss:
        best_val_loss = val_loss
    else:
        lr /= 4.0
dist.destroy_process_group()
