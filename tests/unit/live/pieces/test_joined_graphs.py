"""A tensor into which a call writes what has a graph is in that graph from there on, in a live step, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.live.both import CALLS, Compiled, Step, Training, Unguarded, train_both, train_by_stages


@pytest.mark.parametrize("read", ["", "before", "behind"])
def test_a_tensor_that_is_written_to_joins_the_graph(read: str) -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            hidden = training.model.first(x)
            sums = torch.zeros_like(hidden)
            if read == "before":
                training.notes.append(sums.sum().item())
            same = sums.index_add_(0, torch.tensor([0, 0, 1]), hidden)
            assert same is sums
            assert sums.requires_grad
            if read == "behind":
                training.notes.append(sums.detach().tolist())
            loss = training.model.last(training.model.norm(sums)).mean()
            training.notes.append(training.update(loss).item())
            return sums.detach()

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert compiled.launches >= CALLS - 1


def rows(out: Tensor, value: Tensor) -> None:
    for row in range(len(out)):
        out[row] = value[row]


def columns(out: Tensor, value: Tensor) -> None:
    out[:, :3] = value[:, :3]
    out.mul_(2)
    out[:, torch.tensor([3, 5])] = value[:, :2]


MAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: torch.zeros(len(x), 8), "clone": lambda x: x.repeat(1, 2).clone(),
    "new": lambda x: x.new_empty(len(x), 8).zero_(),
}  # fmt: skip


def row_copied(out: Tensor, value: Tensor) -> None:
    for row in range(len(out)):
        out[row].copy_(value[row])


def row_added(out: Tensor, value: Tensor) -> None:
    for row in range(len(out)):
        out[row] += value[row]


def columns_added(out: Tensor, value: Tensor) -> None:
    out[:, 2:5] += value[:, :3]
    out[:, 0].mul_(2).add_(value[:, 7])


def through_a_view_of_a_view(out: Tensor, value: Tensor) -> None:
    out.view(-1)[3:5].view(2).sub_(value[0, :2])


def diagonal(out: Tensor, value: Tensor) -> None:
    out.diagonal().copy_(value.diagonal())
    out.diagonal().add_(1.0)


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "rows": rows, "columns": columns, "copy": lambda out, value: out.copy_(value),
    "setitem": lambda out, value: torch.Tensor.__setitem__(out, ..., value), "copy to rows": row_copied,
    "add to rows": row_added, "add to columns": columns_added, "a view of a view": through_a_view_of_a_view,
    "diagonal": diagonal,
}  # fmt: skip
BY_ROWS = (rows, row_copied, row_added, diagonal)
"""Of another number of rows they make other calls."""


@pytest.mark.parametrize("moves", [False, True], ids=["one size", "sizes"])
@pytest.mark.parametrize("make_out", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_data_into_which_a_result_is_written_joins_the_graph(
    write: Callable[[Tensor, Tensor], Any], make_out: Callable[[Tensor], Tensor], moves: bool
) -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            out = make_out(x)
            write(out, training.model.first(x))
            training.notes.append((out.requires_grad, out.is_leaf))
            loss = training.model.last(out).mean()
            training.notes.append(loss.item())
            training.update(loss)
            return out.detach()

        return step

    def sized(call: int) -> tuple[Tensor]:
        return (torch.randn(3 + call % 3 if moves else 3, 4),)

    compiled = Compiled()
    calls = 12 if moves else CALLS
    train_both(make, sized, compiled=compiled, calls=calls)
    if write not in BY_ROWS or not moves:
        assert compiled.launches >= calls - 4
    train_by_stages(make)


class Apart(Compiled):
    """Results on memory of their own, which a compiler may give."""

    def __call__(self, function: Step, number: int) -> Step:
        run = super().__call__(function, number)
        return Unguarded(lambda *args: [one if one is None else one.detach().clone() for one in run.run(*args)])


@pytest.mark.parametrize("keeps", ["row", "another", "a later call", "nothing"])
def test_views_that_are_held_share_memory_with_what_they_view(keeps: str) -> None:
    """Results of a piece do not, so such a call runs as eager code."""

    def make(training: Training) -> Step:
        calls: list[int] = []

        def step(x: Tensor) -> Tensor:
            calls.append(0)
            out = torch.zeros(len(x), 8)
            another = out[1]
            if keeps != "another" and (keeps != "a later call" or len(calls) < 4):
                another = None
            row = out[0]
            row.copy_(training.model.first(x)[0])
            if keeps != "a later call":
                training.notes.append((out.requires_grad, row.requires_grad, row.is_leaf))
            if keeps != "row":
                del row
            if keeps == "another":
                training.notes.append((another.requires_grad, another.is_leaf, type(another.grad_fn).__name__))
            loss = training.update(training.model.last(out).mean()).detach()
            training.notes.append(loss.item())
            if another is not None:
                training.notes.append((another.requires_grad, another.is_leaf))
            with torch.no_grad():
                if keeps == "row":
                    row.add_(1)
                if another is not None:
                    another.add_(1)
            training.notes.append(out.tolist())
            return loss

        return step

    train_both(make)
    train_both(make, compiled=Apart())
    train_by_stages(make, 8)
