"""What random programs hold things in. Loaded anew for each run of a program: as a file of the user's, and as one of an
installed package. So classes and globals are as fresh as objects are."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

SCALE = 1.0
"""A global of another file, which `scaled` reads."""
SETTINGS = {"w": 1.0}
GRAD_WEIGHT: float | None = None
"""What this rank's gradients of a `Net` count; the average over all ranks is 1."""


def drawn_and_put_back() -> float:
    """A number that nobody else misses."""
    state = random.getstate()
    drawn = random.random()
    random.setstate(state)
    return drawn


def drawn_by_numpy_and_put_back() -> float:
    """The same of numpy's generator."""
    state = np.random.get_state()
    drawn = float(np.random.rand())
    np.random.set_state(state)
    return drawn


def scaled(value: Any) -> Any:
    """Reads a global of its own file."""
    return value * SCALE


class Box:
    """A plain object, with the usual ways to its number."""

    kind_scale = 1.0
    """An attribute of the class."""

    def __init__(self, w: Any = 1.0) -> None:
        self.w = w
        self.kept: list[Any] = []

    doubled = property(lambda self: getattr(self, "".join(["w"])) * 2)

    def times(self, value: Any) -> Any:
        """Reads its own attribute."""
        return value * self.w * self.kind_scale

    def keep(self, value: Any) -> None:
        """Keeps the last two."""
        self.kept = [*self.kept[-1:], value]


class Slotted:
    """Without a dict."""

    __slots__ = ("w",)

    def __init__(self, w: Any = 1.0) -> None:
        self.w = w


class Computed:
    """A property with a setter."""

    def __init__(self, w: Any = 1.0) -> None:
        self._half = w

    @property
    def w(self) -> Any:
        """What is kept elsewhere."""
        return self._half

    @w.setter
    def w(self, value: Any) -> None:
        self._half = value


class Mapping:
    """Hands things out of a dict, as batches of graph libraries do."""

    def __init__(self, w: Any = 1.0) -> None:
        self.__dict__["_mapping"] = {"w": w}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_mapping"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._mapping[name] = value


class Table(dict[str, Any]):
    """A dict with attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


@dataclass
class Record:
    """A dataclass."""

    w: Any = 1.0
    n: int = 0


class Net(nn.Module):
    """A network with dropout, a norm, and plain state that its forward reads and writes."""

    def __init__(self, *, norm: bool, dropout: float, counts: bool, talks: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.scale, self.calls, self._counts, self._talks = 1.0, 0, counts, talks
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        hidden = self.dropout(torch.tanh(self.norm(self.first(x)))) * self.scale
        if self._counts:
            self.calls += 1
            self.seen += 1
        if self._talks and self.calls % 3 == 0:
            print("forward", self.calls, hidden.detach().abs().max().item())
        out: Tensor = self.last(hidden)
        return out if GRAD_WEIGHT is None else Weighted.apply(out, GRAD_WEIGHT)  # type: ignore[no-any-return]


class Square(torch.autograd.Function):
    """A function with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x


class Weighted(torch.autograd.Function):
    """A tensor as it is, with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.weight, None


def norm_of(param: Tensor) -> float:
    """Of a gradient, which may be gone."""
    return 0.0 if param.grad is None else param.grad.norm().item()


def decay(param: Tensor) -> None:
    """Writes to a weight in place."""
    with torch.no_grad():
        param.mul_(0.99)


def flat_gradients(model: nn.Module) -> Tensor:
    """One buffer, and every gradient a view of it."""
    params = list(model.parameters())
    flat = torch.zeros(sum(param.numel() for param in params))
    for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.grad = part.view_as(param)
    return flat


def reshard(model: nn.Module) -> None:
    """Has every module of ``fully_shard`` drop what it has gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def clamped_row(weight: Tensor, most: float) -> Tensor:
    """Writes to a view of a weight, and gives what it is then."""
    with torch.no_grad():
        return weight[0].clamp_(-most, most).clone()


def scale_grads(params: Iterable[Tensor], factor: float) -> None:
    """In place, those that are there."""
    for param in params:
        if param.grad is not None:
            param.grad.mul_(factor)


def replace_grads(params: Iterable[Tensor], factor: float) -> None:
    """By new tensors."""
    for param in params:
        param.grad = None if param.grad is None else param.grad * factor


def endless() -> Iterator[float]:
    """Numbers that somebody takes one by one."""
    number = 0.0
    while True:
        number += 0.25
        yield number % 1.0
