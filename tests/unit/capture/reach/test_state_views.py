"""Results that are views of state: they show what later calls write there, as those of eager code do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.harness.training import backward_and_step
from wholestep.errors import CaptureError


class Model(nn.Module):
    """A layer whose weight is a part of a flat buffer, one with a norm, and an array."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flat", torch.linspace(-1.0, 1.0, 20))
        self.weight = nn.Parameter(self.flat[4:12].view(2, 4))
        self.norm, self.last = nn.BatchNorm1d(2), nn.Linear(2, 3)
        self.array = np.full(3, 0.5, np.float32)
        self.averages = [torch.zeros(3)]
        self.opt = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(x @ self.weight.t()))
        return out


Results = Callable[[Model], Any]
VIEWS: dict[str, Results] = {
    "detached": lambda model: model.last.weight.detach(),
    "row": lambda model: model.last.weight.data[1],
    "column": lambda model: model.last.weight.detach()[:, 1],
    "element": lambda model: model.last.bias.detach()[2],
    "transposed": lambda model: model.last.weight.detach().t(),
    "expanded": lambda model: model.last.bias.detach().expand(4, 3),
    "none": lambda model: model.last.bias.detach()[:0],
    "with a graph": lambda model: model.last.weight[1],
    "buffer": lambda model: model.norm.running_mean[1:],  # type: ignore[index]
    "part of the flat one": lambda model: model.flat[2:15:3],
    "part of the weight": lambda model: model.weight.detach()[1, 2:],
    "both": lambda model: {
        "w": model.last.weight.data[0],
        "sum": model.last.weight.detach().sum(),
        "all": [model.flat],
    },
    "average": lambda model: model.averages[0][1:],
    "momentum": lambda model: model.opt.state[model.last.weight]["momentum_buffer"][2],
    "parameter": lambda model: nn.Parameter(model.last.weight.detach()[0]),
}
ARRAYS: dict[str, Results] = {
    "array": lambda model: torch.from_numpy(model.array),
    "part of an array": lambda model: torch.as_tensor(model.array)[1:],
}
X = torch.linspace(-1.0, 2.0, 24).view(6, 4)


def make(get: Results, *, at_first: bool, **options: Any) -> tuple[Model, Callable[[Tensor], Any]]:
    torch.manual_seed(0)
    model = Model()
    backward_and_step(model(X).square().mean(), model.opt)  # there is momentum

    def step(x: Tensor) -> Any:
        early = get(model) if at_first else None
        backward_and_step(model(x).square().mean(), model.opt)
        model.averages[0].lerp_(model.last.bias.detach(), 0.5)
        return early if at_first else get(model)

    return model, ws.compile(step, **options) if options else step


def shown(get: Results, *, at_first: bool, **options: Any) -> list[str]:
    """What the results of three calls show, at the time and at the end."""
    model, step = make(get, at_first=at_first, **options)
    results, found = [], []
    for call in range(3):
        results.append(step(X + call))
        found.append(str(values(results[-1])))
        model.array[1] += 1.0
    with torch.no_grad():
        model.last.weight.mul_(2.0)
        model.flat.add_(1.0)
    return [*found, *map(str, map(values, results))]


def values(result: Any) -> Any:
    plain = torch.utils._pytree.tree_map(lambda one: one.detach().numpy(), result)  # type: ignore[attr-defined]
    return copy.deepcopy(plain)


@pytest.mark.parametrize("at_first", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_state_shows_what_is_written_later(name: str, at_first: bool) -> None:
    wanted = shown(VIEWS[name], at_first=at_first)
    assert shown(VIEWS[name], at_first=at_first, backend="eager", fullgraph=True) == wanted


def test_a_view_of_state_shows_what_compiled_kernels_write_later() -> None:
    model, step = make(VIEWS["row"], at_first=True, backend="inductor", fullgraph=True)
    results = [step(X + call).clone() if call == 1 else step(X + call) for call in range(3)]
    assert not torch.equal(results[1], model.last.weight[1])
    assert torch.equal(results[0], model.last.weight[1])


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("name", ARRAYS)
def test_a_tensor_on_an_array_shows_what_is_written_to_the_array(name: str, may_go_live: bool) -> None:
    assert shown(ARRAYS[name], at_first=False, backend="eager") == shown(ARRAYS[name], at_first=False)


def test_no_graph_returns_a_tensor_on_an_array() -> None:
    _, step = make(ARRAYS["array"], at_first=False, backend="eager", fullgraph=True)
    with pytest.raises(CaptureError, match="memory of an array"):
        step(X)


def test_the_graph_gives_nothing_that_the_state_shows() -> None:
    _, step = make(VIEWS["both"], at_first=False, backend="eager", fullgraph=True)
    step(X)
    assert [one.name for one in step.program().outputs if one.kind.value == "user"] == ["result.0"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("passed", [False, True])
def test_a_view_that_torch_gives_no_graph_is_a_tensor_like_any_other(passed: bool) -> None:
    """Made without gradients, of memory that was written to since: torch raises an error for its `grad_fn`."""
    found = []
    for options in ({}, {"backend": "eager", "fullgraph": True}):
        torch.manual_seed(0)
        model = Model()
        with torch.no_grad():
            row = model.last.weight[0]
            row.mul_(0.5)

        def step(x: Tensor, *given: Tensor, model: Model = model, row: Tensor = row) -> Tensor:
            with torch.no_grad():
                scale = (given[0] if given else row).sum()
            loss = model(x).square().mean() * (1 + scale.square())
            backward_and_step(loss, model.opt)
            return loss.detach()

        compiled = ws.compile(step, **options) if options else step  # type: ignore[arg-type]
        found.append([compiled(X, *([row] if passed else [])) for _ in range(3)] + [model.last.weight.detach(), row])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
