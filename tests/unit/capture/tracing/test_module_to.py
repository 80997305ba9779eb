"""Modules that are moved to where they are: nothing in a step. What really converts them is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.unit.capture.steps import differing, twins
from wholestep.capture.tracing.module_to import module_to_is_identity
from wholestep.errors import CaptureError

HERE = Path(__file__).name


class Moving(nn.Module):
    """Moves its parts in every call, as code does that was written for several devices."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        self.linear = self.linear.to(x.dtype)
        normed: Tensor = self.norm.to(x.device).float()(self.linear(x))
        return normed


def moving() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Moving()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train_after_to(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = model.to("cpu")(x).square().mean()
    loss.backward()
    model.to(torch.float32)  # with gradients
    opt.step()
    opt.zero_grad()
    return loss


def test_a_module_may_be_moved_to_where_it_is() -> None:
    eager, ours = twins(moving)
    step = ws.compile(train_after_to, backend="eager")
    for _ in range(3):
        x = torch.randn(3, 4)
        assert torch.equal(train_after_to(*eager, x), step(*ours, x))
        assert differing(eager[0], ours[0]) == []
    info = step.cache_info()
    assert (info.traces, info.hits) == (1, 2)


@pytest.mark.parametrize("convert", [nn.Module.double, lambda model: model.linear.half()], ids=["all", "a part"])
def test_what_converts_is_refused_and_changes_nothing(convert: object) -> None:
    model, _ = moving()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def step(x: Tensor) -> Tensor:
        convert(model)  # type: ignore[operator]
        return model(x)

    with pytest.raises(CaptureError, match=rf"{HERE}:\d+") as raised:
        ws.compile(step, backend="eager", fullgraph=True)(torch.randn(3, 4))
    assert "Do it before the step, once." in str(raised.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_method_of_torch_is_put_back() -> None:
    original = nn.Module._apply
    with module_to_is_identity():
        assert nn.Module._apply is not original
    assert nn.Module._apply is original
