"""Results that are views: what Python writes to them behind a read is written to what they are views of."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.live.both import AsAGraph, Compiled, Step, Training, train_both, train_by_stages


class Both(torch.nn.Module):
    """Gives a tensor with a graph, and a row of it without one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.inner(x)
        return out, out.detach()[0]


def test_what_a_module_gives_on_one_memory_is_written_to_behind_a_read() -> None:
    module = Both()

    def make(training: Training) -> Step:
        both = copy.deepcopy(module)

        def step(x: Tensor) -> None:
            out, row = both(x)
            loss = out.square().mean()
            loss.backward()
            row.mul_(0.5 + loss.tolist() % 1.0)
            training.notes.append((row.requires_grad, row.clone(), out.detach().clone()))

        return step

    train_by_stages(make)


ROWS = {
    "of what has a graph": lambda training, out: out.detach()[0],
    "of what has a graph, in its shape": lambda training, out: out.detach().t().view_as(out)[0],
    "of a parameter": lambda training, out: training.model.first.weight.data[0],
}


@pytest.mark.parametrize("row_of", ROWS.values(), ids=ROWS)
def test_a_view_without_a_graph_is_written_to_behind_a_read(row_of: Any) -> None:
    """Graphs make views without gradients, of what may require grad, and of what a parameter was before an update."""

    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            out = training.model(x)
            loss = training.update(out.square().mean())
            row = row_of(training, out)
            row.mul_(0.5 + loss.tolist() % 1.0)
            training.notes.append((row.requires_grad, row.clone()))
            return out.detach()

        return step

    train_by_stages(make)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("known", [0, 3])
def test_a_view_brings_what_it_views_into_a_graph(reads: bool, known: int) -> None:
    """In a way that is known, and where that happens on a new one behind a read."""

    def make(training: Training) -> Step:
        calls = iter(range(100))

        def step(x: Tensor) -> Tensor:
            out = training.model(x).detach()
            row = out[0]
            if reads:
                training.notes.append(row.tolist())
            if next(calls) >= known:
                row.mul_(training.model.last.weight.sum())
                training.notes.append(out.requires_grad)
                training.update(out.sum())
            return row.detach()

        return step

    train_both(make, compiled=AsAGraph())


def test_memory_that_is_exchanged_is_not_that_of_a_view() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            weight = training.model.last.weight
            row = weight.data
            weight.data = row * 0.5
            loss = training.update(training.model(x).mean())
            row.mul_(2.0)
            training.notes.append((loss.tolist(), row.clone()))
            return loss.detach()

        return step

    train_both(make)


def test_views_of_what_a_forward_gave_that_ran_again_are_on_the_memory_that_python_holds() -> None:
    def make(training: Training) -> Step:
        calls = iter(range(100))

        def step(x: Tensor) -> Tensor:
            number = next(calls)
            out = training.model.first(x)
            loss = out.square().mean() * (0.5 + out.max().tolist() % 1.0)  # runs the forward
            loss.backward()  # runs it again
            first, rest = out.detach().view(-1).split(8 + number % 2)[:2]
            turned = out.detach().t()[number % 3 :]
            training.notes.append(first.max().tolist())
            first.mul_(2.0)
            rest[0] = 3.0
            turned[0, 1] = 7.0
            training.opt.step()
            training.opt.zero_grad()
            training.notes.append((out.tolist(), first.clone(), rest.clone(), turned.clone()))
            return out.detach()

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled, calls=9)
    assert compiled.launches >= 9
