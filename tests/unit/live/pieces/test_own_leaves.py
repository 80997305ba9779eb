"""Tensors that a step makes and tells to ask for a gradient: attacks, gradient penalties, backwards in two parts."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.unit.live.both import Apart, Compiled, Step, Training, train_both, train_by_stages

CALLS = 8
"""A path is known from the third on, since what is made of data alone is recorded once it is known to matter."""
Body = Callable[[Training, Tensor], Tensor]


def told(tensor: Tensor) -> tuple[bool, bool, Tensor | None]:
    """What Python may ask it besides its numbers."""
    return tensor.requires_grad, tensor.is_leaf, tensor.grad


def noted(training: Training, loss: Tensor) -> Tensor:
    """Asked for its value, which makes any step live; what its function holds is still held."""
    training.notes.append(loss.item())
    return loss


def attack(training: Training, x: Tensor) -> Tensor:
    near = x.clone().requires_grad_()
    training.model(near).mean().backward()
    assert near.grad is not None
    away = (near + 0.1 * near.grad.sign()).detach()
    training.opt.zero_grad()
    return noted(training, training.update(training.model(away).square().mean()))


def attack_by_its_attribute(training: Training, x: Tensor) -> Tensor:
    near = x * 1.0
    near.requires_grad = True
    (slope,) = torch.autograd.grad(training.model(near).mean(), near)
    return noted(training, training.update(training.model(near.detach() + 0.1 * slope).square().mean()))


def steps_of_an_attack(training: Training, x: Tensor) -> Tensor:
    noise = torch.zeros_like(x)
    for _ in range(3):
        noise.requires_grad_()
        (slope,) = torch.autograd.grad(training.model(x + noise).mean(), noise)
        noise = (noise.detach() + 0.1 * slope.sign()).clamp(-0.2, 0.2)
    return noted(training, training.update(training.model(x + noise).square().mean()))


def penalty(training: Training, x: Tensor) -> Tensor:
    between = torch.lerp(x, x.flip(0), 0.3).requires_grad_()
    out = training.model(between)
    (slope,) = torch.autograd.grad(out.sum(), between, create_graph=True)
    return noted(training, training.update(out.mean() + (slope.norm(dim=1) - 1).square().mean()))


def backward_in_two_parts(training: Training, x: Tensor) -> Tensor:
    hidden = training.model.first(x)
    cut = hidden.detach().requires_grad_()
    loss = training.model.last(torch.relu(cut)).square().mean()
    loss.backward()
    hidden.backward(cut.grad)
    training.opt.step()
    training.opt.zero_grad()
    return noted(training, loss)


def kept(training: Training, x: Tensor) -> Tensor:
    asking = (x * 0.5).requires_grad_()
    loss = training.update(training.model(asking).mean())
    training.notes += [asking, told(asking), loss.item()]
    return loss


def made_to_ask(training: Training, x: Tensor) -> Tensor:
    asking = torch.zeros_like(x, requires_grad=True)
    loss = training.update(training.model(x + asking).mean())
    training.notes.append(asking)
    return loss


def a_view(training: Training, x: Tensor) -> Tensor:
    """What is written to the memory of one is seen in the other, also by a later piece."""
    base = x + training.model.first.bias.detach().sum()
    row = base[0].requires_grad_()
    (slope,) = torch.autograd.grad(training.model(row.expand(3, 4)).sum(), row)
    training.notes.append(slope.sum().item())
    base.mul_(2.0)
    training.notes += [row.detach().sum().item(), row, base]
    return training.update(training.model(x).mean())


def thawed_and_frozen(training: Training, x: Tensor) -> Tensor:
    asking = (x * 2.0).requires_grad_()
    (slope,) = torch.autograd.grad(training.model(asking).sum(), asking)
    asking.requires_grad_(False)
    training.notes.append(told(asking))
    return training.update(training.model(asking + slope).mean())


def a_second_loss_behind_a_read(training: Training, x: Tensor) -> Tensor:
    """No gradient of it comes to what is held of the first."""
    between = (x * 0.5).requires_grad_()
    (slope,) = torch.autograd.grad(training.model(between).sum(), between, create_graph=True)
    training.notes.append(training.update(slope.square().mean() + training.model(x).mean()).item())
    return noted(training, training.update(training.model(x).square().mean()))


PIECES: dict[Body, int] = {
    attack: 1, attack_by_its_attribute: 1, steps_of_an_attack: 1, penalty: 1, backward_in_two_parts: 1, kept: 1,
    made_to_ask: 1, a_view: 1, a_second_loss_behind_a_read: 2,
}  # fmt: skip
"""With how many launches a call has at least, once its way is known."""


def both_held(training: Training, x: Tensor) -> Tensor:
    """``grad`` is ``asking.grad``, and a write to the one is one to the other."""
    asking = (x * 2.0).requires_grad_()
    training.model(asking).mean().backward()
    grad = asking.grad
    assert grad is not None
    training.notes.append(grad.sum().item())
    grad.mul_(3.0)
    training.notes += [told(asking), grad]
    return training.update(training.model(x).mean())


def gradient_with_a_graph(training: Training, x: Tensor) -> Tensor:
    asking = (x * 2.0).requires_grad_()
    training.model(asking).square().mean().backward(create_graph=True)
    assert asking.grad is not None
    training.notes += [asking.grad.square().sum().item(), asking.grad.requires_grad]
    training.opt.zero_grad()
    return training.update(asking.grad.detach().sum() * training.model(x).mean())


def read_before_the_backward(training: Training, x: Tensor) -> Tensor:
    asking = (x * 2.0).requires_grad_()
    training.notes.append(asking.sum().item())
    loss = training.update(training.model(asking).square().mean())
    training.notes += [told(asking), loss.item()]
    return loss


def written_and_asked_again(training: Training, x: Tensor) -> Tensor:
    asking = (x * 2.0).requires_grad_()
    training.model(asking).square().mean().backward()
    with torch.no_grad():
        asking -= 0.1 * asking.grad  # type: ignore[operator]
    training.notes.append(asking.sum().item())
    asking.grad = None
    loss = training.update(training.model(asking).square().mean())
    training.notes += [asking, told(asking)]
    return loss


CASES: tuple[Body, ...] = (
    *PIECES, thawed_and_frozen, both_held, gradient_with_a_graph, read_before_the_backward, written_and_asked_again,
)  # fmt: skip


def made(body: Body) -> Callable[[Training], Step]:
    return lambda training: lambda x: body(training, x).detach()


def ask(training: Training, call: int) -> None:
    """What is noted is looked at behind the call, with what is not compared there."""
    leaves = [one for one in training.notes if isinstance(one, Tensor) and one.is_leaf]
    training.notes += [told(one) for one in leaves[-2:]]


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("compiled", [Compiled, Apart])
@pytest.mark.parametrize("body", CASES)
def test_it_is_as_in_eager_code(body: Body, compiled: type[Compiled]) -> None:
    count = compiled()
    train_both(made(body), between=ask, compiled=count, calls=CALLS)
    assert count.launches >= PIECES.get(body, 0) * (CALLS - 3)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("body", CASES)
def test_as_graphs_compute_it(body: Body) -> None:
    step = train_by_stages(made(body), CALLS, ask)
    launches = int(re.search(r"(\d+) launches", str(step.explain())).group(1))  # type: ignore[union-attr]
    assert launches >= PIECES.get(body, 0) * (CALLS - 3)
