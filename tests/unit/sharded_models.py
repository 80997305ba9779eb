"""Small trainings with parameters of even and of uneven sizes, for strategies that shard them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.cli.workloads.gpt import GPT, GPTConfig

CLASSES, CONTEXT = 12, 8


class TiedGPT(nn.Module):
    """A language model whose table of tokens is its last layer, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.scale = nn.Embedding(CLASSES, width), nn.Parameter(torch.ones(()))
        self.block = nn.TransformerEncoderLayer(width, 1, 2 * width + 1, dropout=0.0, batch_first=True)
        self.last = nn.Linear(width, CLASSES, bias=False)
        self.last.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits (rows, context, classes)."""
        return self.last(self.block(self.tokens(x)) * self.scale)


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES))


def _conv(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Linear(4 * width, CLASSES)
    )


def _gpt(width: int) -> nn.Module:
    return GPT(GPTConfig(num_layers=2, num_heads=1, width=width, context=CONTEXT))


MODELS: dict[str, Callable[[int], nn.Module]] = {"mlp": _mlp, "conv": _conv, "gpt": _gpt, "tied": TiedGPT}
"""Models of a width: 8 is a multiple of 2 and 4 ranks, 7 of none."""

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw_single": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False),
    "adamw_foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True),
    "adamw_fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
}


def made(model: str, width: int, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, the same numbers in every call."""
    torch.manual_seed(2)
    module = MODELS[model](width)
    return module, OPTIMIZERS[optimizer](module)


def batch(model: str, rows: int = 24) -> tuple[Tensor, Tensor]:
    """Rows and classes; 24 divide by 2, 3 and 4 ranks, and what each of them gets by 2."""
    generator = torch.Generator().manual_seed(rows)

    def classes(*shape: int) -> Tensor:
        return torch.randint(CLASSES, shape, generator=generator)

    if model in ("gpt", "tied"):
        return classes(rows, CONTEXT), classes(rows, CONTEXT)
    shape = (rows, 6) if model == "mlp" else (rows, 2, 4, 4)
    return torch.randn(shape, generator=generator), classes(rows)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean over the rows."""
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def train(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """A step with clipping."""
    loss = loss_of(model, x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()
    opt.zero_grad()
    return loss.detach()


def accumulate(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """A step of two micro-batches."""
    for rows, classes in zip(x.chunk(2), y.chunk(2), strict=True):
        (loss_of(model, rows, classes) / 2).backward()
    opt.step()
    opt.zero_grad()


def keep_gradients(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """A step that adds to the gradients of the step before."""
    loss_of(model, x, y).backward()
    opt.step()


def leave_gradients(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """A step whose update is somebody else's."""
    loss = loss_of(model, x, y)
    loss.backward()
    return loss.detach()
