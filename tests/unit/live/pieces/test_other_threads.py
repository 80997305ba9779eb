"""Another thread calls a module while calls of a live step wait to run: it has the parameters of eager code."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

import wholestep as ws

CALLS = 5


class Training:
    """A model that is evaluated in a thread of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.notes: list[float] = []

    def evaluate(self, x: Tensor) -> None:
        with torch.no_grad():
            self.notes.append(float(self.model(x).sum()))


def step(t: Training, x: Tensor) -> None:
    t.model(x).square().mean().backward()
    t.opt.step()
    t.opt.zero_grad()
    thread = threading.Thread(target=t.evaluate, args=(x,))
    thread.start()
    thread.join()


def test_it_sees_the_last_update() -> None:
    eager, ours, compiled = Training(), Training(), ws.compile(step, backend="eager")
    for number in range(CALLS):
        x = torch.full((2, 4), 1.0 + number)
        step(eager, x)
        compiled(ours, x)
    assert ours.notes == eager.notes


def test_a_module_without_parameters_of_the_step_disturbs_nothing() -> None:
    other = nn.Linear(4, 4)

    def beside(t: Training, x: Tensor) -> float:
        loss = t.model(x).square().mean()
        loss.backward()
        thread = threading.Thread(target=lambda: other(torch.ones(1, 4)))
        thread.start()
        thread.join()
        t.opt.step()
        t.opt.zero_grad()
        return float(loss)

    eager, ours, compiled = Training(), Training(), ws.compile(beside, backend="eager")
    for number in range(CALLS):
        x = torch.full((2, 4), 1.0 + number)
        assert beside(eager, x) == compiled(ours, x)
    assert compiled.explain().live.launches >= CALLS - 1


def test_gradients_of_single_rows_behind_an_update() -> None:
    """Tensors of ``torch.func`` have no memory that could be told from others."""

    def per_row(t: Training, x: Tensor) -> Tensor:
        step_of_all = t.model(x).square().mean()
        step_of_all.backward()
        t.opt.step()
        t.opt.zero_grad()
        t.notes.append(float(step_of_all))
        params = {name: param.detach() for name, param in t.model.named_parameters()}

        def loss_of_row(params: dict[str, Tensor], row: Tensor) -> Tensor:
            return torch.func.functional_call(t.model, params, (row[None],)).square().mean()

        slopes = torch.func.vmap(torch.func.grad(loss_of_row), (None, 0))(params, x)
        norm = slopes["0.weight"].norm()
        t.notes.append(float(norm))
        return norm

    eager, ours, compiled = Training(), Training(), ws.compile(per_row, backend="eager")
    for number in range(CALLS):
        x = torch.full((2, 4), 1.0 + number)
        assert torch.equal(per_row(eager, x), compiled(ours, x))
    assert ours.notes == eager.notes
