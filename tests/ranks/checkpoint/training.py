"""A small training with all that a checkpoint must bring back, under any strategy, and its values whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import wholestep as ws
from wholestep.config import Strategy


class Net(nn.Module):
    """Dims that no number of ranks divides, tied weights, dropout, buffers, a number, something frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.last = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.last.weight = self.tokens.weight
        self.block = nn.Linear(6, 6)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x)
        y = y + self.drop(self.block(y))
        out: Tensor = self.last(self.norm(self.scale * y)) + self.frozen.sum()
        return out


@dataclass(frozen=True, slots=True)
class Setup:
    """A strategy on so many ranks."""

    strategy: Strategy
    ranks: int
    mesh: tuple[int, int] | None = None
    """Replicas and shards, where the ranks are a mesh of two axes."""

    def __str__(self) -> str:
        kind = type(self.strategy).__name__.lower()
        return f"{kind}{self.ranks}" if self.mesh is None else f"{'h' + kind}{'x'.join(map(str, self.mesh))}"


SETUPS = {
    str(one): one
    for one in (
        *(Setup(strategy, ranks) for strategy in (ws.DDP(), ws.ZeRO(), ws.FSDP()) for ranks in (1, 2, 4)),
        *(Setup(ws.FSDP(), shape[0] * shape[1], mesh=shape) for shape in ((2, 2), (1, 2), (2, 1))),
        Setup(ws.ZeRO(), 4, mesh=(2, 2)),
    )
}


@dataclass(slots=True)
class Training:
    """Live objects."""

    model: nn.Module
    opt: Optimizer
    step: ws.CompiledStep

    def run(self, calls: int, first: int = 0) -> list[Tensor]:
        """The losses of some calls, each with a batch of its own."""
        return [self.step(self.model, self.opt, batch(call)) for call in range(first, first + calls)]

    def save(self, path: Any, **options: Any) -> ws.PendingCheckpoint:
        return ws.save_checkpoint(path, self.model, self.opt, self.step, **options)

    def load(self, path: Any) -> None:
        ws.load_checkpoint(path, self.model, self.opt, self.step)


def train_step(model: Any, opt: Optimizer, x: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), x)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return loss.detach()


def adamw(model: nn.Module) -> Optimizer:
    """Two groups of different rates."""
    scale = [one for name, one in model.named_parameters() if name == "scale"]
    others = [one for name, one in model.named_parameters() if name != "scale"]
    return torch.optim.AdamW([{"params": scale, "lr": 0.02}, {"params": others}], lr=0.01)


def training(setup: Setup, seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = Net()
    torch.manual_seed(1000 * seed + rank())  # dropout of each rank is its own
    names = ("dp_replicate", "dp_shard")
    mesh = init_device_mesh("cpu", setup.mesh, mesh_dim_names=names) if setup.mesh else None
    step = ws.compile(train_step, strategy=setup.strategy, mesh=mesh, backend="eager", fullgraph=True)
    return Training(model, adamw(model), step)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def batch(call: int) -> Tensor:
    draw = torch.Generator().manual_seed(31 * call + rank())
    return torch.randint(11, (5,), generator=draw)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()


def values(one: Training) -> dict[str, Tensor]:
    """Parameters, buffers, optimizer state and rates, whole."""
    found = {name: whole(tensor) for name, tensor in one.model.state_dict().items()}
    for name, param in one.model.named_parameters():
        found |= {f"{key} of {name}": whole(held) for key, held in one.opt.state.get(param, {}).items()}
    rates = [group["lr"] for group in one.opt.param_groups]
    return found | {"rates": torch.tensor(rates, dtype=torch.float64)}


def differences(want: dict[str, Tensor], came: dict[str, Tensor]) -> list[str]:
    """Names of what differs in a bit."""
    names = [name for name in want if name in came and not torch.equal(want[name], came[name])]
    return names + sorted(want.keys() ^ came.keys())
