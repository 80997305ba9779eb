"""What a trace takes for granted of sizes that are data holds in every call, or nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws

ROWS = 8


def adds_rows(model: nn.Module, x: Tensor, keep: Tensor, y: Tensor) -> Tensor:
    return (model(x)[keep] + y).square().sum()


def repeats_rows(model: nn.Module, x: Tensor, keep: Tensor, y: Tensor) -> Tensor:
    return (model(x).repeat_interleave(keep.long(), 0) * y).sum()


def has_targets(model: nn.Module, x: Tensor, keep: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[keep], y[:, 0].long() % 3)


def views_pairs(model: nn.Module, x: Tensor, keep: Tensor, y: Tensor) -> Tensor:
    chosen = model(x)[keep.nonzero()[:, 0]]
    return chosen.view(-1, 2, 3).prod(1).sum()


def promises(model: nn.Module, x: Tensor, keep: Tensor, y: Tensor) -> Tensor:
    """No operator looks at the number of rows: it is a factor."""
    places = keep.nonzero()[:, 0]
    torch._check(places.shape[0] == 4)
    return model(x)[places].sum() * places.shape[0]


def trained(loss_of: Callable[..., Tensor], calls: list[int], compiled: Callable[[Any], Any] | None) -> list[Any]:
    """The losses of calls whose masks select so many rows, an error in the place of those that raised one, and the
    parameters after each."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor, keep: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, keep, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run, found, numbers = (compiled or (lambda it: it))(step), [], torch.Generator().manual_seed(1)
    for count in calls:
        x, y = torch.randn(ROWS, 4, generator=numbers), torch.rand(4, 3, generator=numbers)
        try:
            result: Any = run(x, torch.arange(ROWS) < count, y)
        except (RuntimeError, ValueError):
            opt.zero_grad()
            result = "error"
        found.append((result, model.weight.detach().clone()))
    return found


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("loss_of", [adds_rows, repeats_rows, has_targets, views_pairs, promises])
def test_other_sizes_do_what_eager_code_does(loss_of: Any, may_go_live: bool, backend: Any) -> None:
    calls = [4, 4, 3, 4, 1, 6, 4]
    wanted = trained(loss_of, calls, None)
    found = trained(loss_of, calls, lambda step: ws.compile(step, backend=backend))
    assert [isinstance(result, str) for result, _ in found] == [isinstance(result, str) for result, _ in wanted]
    assert any(isinstance(result, str) for result, _ in wanted)
    for (result, weight), (other, other_weight) in zip(wanted, found, strict=True):
        if not isinstance(result, str):
            torch.testing.assert_close(other, result)
        torch.testing.assert_close(other_weight, weight)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_graph_writes_nothing_where_a_promise_does_not_hold(backend: Any) -> None:
    model = nn.Linear(4, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    @ws.compile(backend=backend, fullgraph=True)
    def step(x: Tensor, keep: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        adds_rows(model, x, keep, y).backward()
        opt.step()

    x, y = torch.randn(ROWS, 4), torch.rand(4, 3)
    step(x, torch.arange(ROWS) < 4, y)
    before = model.weight.detach().clone()
    with pytest.raises(
        RuntimeError, match=r"counts on Eq\(u0, 4\), which does not hold \(u0 is dim 0 of index, test_promises"
    ):
        step(x, torch.arange(ROWS) < 1, y)
    assert torch.equal(model.weight, before)
