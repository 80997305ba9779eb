"""Memory of gradients, parameters and state under another name: what is done to it keeps its place among calls.

A backward names no gradient and the step of an optimizer no parameter, so what they write is told by its memory alone.
Arrays, storages and C++ code tell nobody when they look, so what they could see is there before Python goes on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import wholestep as ws
from tests.harness.equality import equal

CALLS = 6


@dataclass
class Flat:
    """A training whose gradients lie in one buffer, as trainers with a clipping or an all-reduce of their own have it.

    It has other names for memory of a parameter and of the optimizer's state, too.
    """

    has_arrays: bool = False
    """Whether arrays, an import by DLPack and a storage object lie on memory of it as well."""
    model: nn.Linear = field(init=False)
    opt: torch.optim.Optimizer = field(init=False)
    grads: Tensor = field(init=False)
    weight: Tensor = field(init=False)
    script: torch.jit.ScriptModule = field(init=False)
    average: Tensor = field(default_factory=lambda: torch.zeros(4, 4))
    notes: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.grads = torch.zeros(20)
        self.model.weight.grad, self.model.bias.grad = self.grads[:16].view(4, 4), self.grads[16:]
        self.weight = self.model.weight.data
        if self.has_arrays:
            self.array, self.slopes = self.weight.numpy(), self.model.weight.grad.numpy()
            self.imported = torch.from_dlpack(self.weight)
            self.storage = self.model.bias.untyped_storage()
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            self.script = torch.jit.trace(self.model, torch.ones(1, 4))

    def backward(self, x: Tensor) -> Tensor:
        self.grads.zero_()
        loss = self.model(x).pow(2).mean()
        loss.backward()
        return loss

    def state(self) -> list[object]:
        return [self.model.state_dict(), self.opt.state_dict(), self.grads, self.average, self.notes]


def scaled(t: Flat, x: Tensor) -> Tensor:
    loss = t.backward(x)
    t.grads.mul_(0.5)
    t.opt.step()
    return loss.detach()


def clipped(t: Flat, x: Tensor) -> Tensor:
    t.backward(x)
    norm = t.grads.norm()
    t.grads.mul_((0.1 / (norm + 1e-6)).clamp(max=1))
    t.opt.step()
    return norm


def clipped_by_a_number(t: Flat, x: Tensor) -> None:
    loss = t.backward(x)
    t.notes += [float(t.grads.norm()), float(loss)]
    if t.notes[-2] > 0.3:
        t.grads.mul_(0.3 / t.notes[-2])
    t.opt.step()


def exchanged(t: Flat, x: Tensor) -> Tensor:
    t.backward(x)
    t.grads.copy_(t.grads * 2)
    t.opt.step()
    return t.grads.sum()


def cleared_behind(t: Flat, x: Tensor) -> Tensor:
    t.grads.add_(0.1)
    t.opt.step()
    t.grads.zero_()
    return x.sum()


def averaged(t: Flat, x: Tensor) -> Tensor:
    t.backward(x)
    t.opt.step()
    t.average.lerp_(t.weight, 0.1)
    return t.average.sum()


def averaged_behind_an_update_alone(t: Flat, x: Tensor) -> Tensor:
    t.grads.fill_(0.3)
    t.opt.step()
    t.average.lerp_(t.weight, 0.1)
    t.opt.step()
    return t.average.sum()


def decayed(t: Flat, x: Tensor) -> Tensor:
    t.backward(x)
    t.opt.step()
    t.weight.mul_(0.9)
    return t.model(x).detach().sum()


def momentum_decayed(t: Flat, x: Tensor) -> None:
    loss = t.backward(x)
    t.notes.append(loss.item())
    if t.opt.state:
        t.average = t.opt.state[t.model.weight]["momentum_buffer"].view(16)
        t.average.mul_(0.5)
    t.opt.step()


def momentum_replaced(t: Flat, x: Tensor) -> None:
    loss = t.backward(x)
    t.opt.step()
    state = t.opt.state[t.model.weight]
    state["momentum_buffer"] = state["momentum_buffer"] * 0.5
    t.notes.append(loss.item())


def array_read(t: Flat, x: Tensor) -> float:
    t.backward(x)
    t.opt.step()
    return float(t.array.sum())


def slopes_read(t: Flat, x: Tensor) -> Tensor:
    loss = t.backward(x)
    t.notes.append(float(np.abs(t.slopes).sum()))
    t.opt.step()
    return loss.detach()


def slopes_scaled(t: Flat, x: Tensor) -> Tensor:
    loss = t.backward(x)
    t.slopes *= 0.5
    t.opt.step()
    return loss.detach()


def array_scaled(t: Flat, x: Tensor) -> Tensor:
    t.backward(x)
    t.opt.step()
    t.array *= 0.9
    return t.model(x).detach().sum()


def memory_read(t: Flat, x: Tensor) -> list[object]:
    t.backward(x)
    t.opt.step()
    return [memoryview(t.array).tolist()[0][0], bytes(t.storage), t.imported.sum()]


def evaluated_in_cpp(t: Flat, x: Tensor) -> Tensor:
    t.backward(x)
    t.opt.step()
    with torch.no_grad():
        return t.script(x).sum()


ARRAYS: tuple[Callable[[Flat, Tensor], object], ...] = (
    array_read, slopes_read, slopes_scaled, array_scaled, memory_read,
)  # fmt: skip
STEPS: tuple[Callable[[Flat, Tensor], object], ...] = (
    scaled, clipped, clipped_by_a_number, exchanged, cleared_behind, averaged, averaged_behind_an_update_alone,
    decayed, momentum_decayed, momentum_replaced, evaluated_in_cpp, *ARRAYS,
)  # fmt: skip


@pytest.mark.parametrize("notes", [False, True], ids=["quiet", "notes"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_calls_on_it_keep_their_place(step: Callable[[Flat, Tensor], object], notes: bool) -> None:
    """`notes`: a number is asked for before the step's own lines, so that it is live in any case."""

    def noting(t: Flat, x: Tensor) -> object:
        if notes:
            t.notes.append((t.model.weight * x[0, 0]).sum().item())
        return step(t, x)

    eager, ours, compiled = Flat(step in ARRAYS), Flat(step in ARRAYS), ws.compile(noting, backend="eager")
    for number in range(CALLS):
        torch.manual_seed(number)
        x = torch.randn(3, 4)
        given = [(noting(eager, x), eager.state()), (compiled(ours, x), ours.state())]
        assert all(map(equal, *map(pytree.tree_leaves, given))), number


@pytest.mark.parametrize("step", [scaled, clipped, averaged], ids=lambda step: step.__name__)
def test_what_lies_in_front_of_it_is_a_piece(step: Callable[[Flat, Tensor], object]) -> None:
    training, compiled = Flat(), ws.compile(step, backend="eager")
    for _ in range(CALLS):
        compiled(training, torch.ones(3, 4))
    live = compiled.explain().live
    assert live.launches >= CALLS - 1
    assert live.executed <= 2 * CALLS
