"""Small models of the shapes that matter: layers that fill buckets, convolutions, attention, checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def linear_layers(features: int, hidden: int, outputs: int) -> nn.Sequential:
    """Four linear layers; after each a ReLU."""
    widths = [features, hidden, hidden, hidden, outputs]
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())))


class Within(nn.Module):
    """A module whose forward runs under a context."""

    def __init__(self, inner: nn.Module, context: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        super().__init__()
        self.inner, self.context = inner, context

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            out: Tensor = self.inner(x)
        return out


class OwnLinear(nn.Module):
    """A layer without bias, written by a user."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        product = x.mm(self.weight.t())
        return product + torch.where(product < 0.5, 0.3, 0.6)


class OwnBetweenOthers(nn.Module):
    """The user's layer between two of torch's; two inputs, which are added."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        layers = (nn.Linear(width, width), OwnLinear(width), nn.Linear(width, width))
        self.layers = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.layers(x + y)
        return out


class Doubled(nn.Module):
    """The batch twice, one after the other, and two products."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(width, width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, x])
        return x + (x @ self.first) @ self.second


class AttentionByForward(nn.Module):
    """Attention whose ``forward`` is called as a method, past its hooks."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attentions = nn.ModuleList(nn.MultiheadAttention(width, num_heads=4, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """`x`: [batch, frequency, time, features]."""
        folded = x.flatten(0, 1)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            normal = norm(folded)
            folded, _ = attention.forward(normal, normal, normal)
        return folded.view(x.shape)


class TransposedLinear(nn.Module):
    """A transpose feeds a linear layer."""

    def __init__(self, features: int = 30, length: int = 10, hidden: int = 14) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(features, hidden), nn.Linear(length * hidden, 64)

    def forward(self, x: Tensor) -> Tensor:
        """`x`: [batch, features, length]."""
        out: Tensor = self.last(self.first(x.transpose(2, 1)).flatten(1))
        return out


class CheckpointedPairs(nn.Module):
    """Two pairs of linear layers, each checkpointed without reentering."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.pairs:
            x = checkpoint(pair, x, use_reentrant=False).cos()
        return x


class NoParameters(nn.Module):
    """Neither parameters nor inputs."""

    def forward(self) -> Tensor:
        return torch.randn(3) * torch.randn(3)


class NoInputs(nn.Module):
    """Parameters, and no inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self) -> Tensor:
        return torch.randn(3, device=self.scale.device) * self.scale
