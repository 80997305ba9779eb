"""Function modes that a step enters see the calls that they see in eager code, and change them as there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import wholestep as ws
from tests.harness.equality import equal


class Scaled(TorchFunctionMode):
    """Notes every call, and multiplies what two functions give."""

    def __init__(self, factor: float) -> None:
        self.factor, self.seen = factor, list[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        result = func(*args, **(kwargs or {}))
        return result * self.factor if func in (F.linear, torch.tanh, torch._C._nn.linear) else result


class Cube(torch.autograd.Function):
    """Is one record, where nothing looks into it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.tanh(x) ** 3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * 3 * torch.tanh(x) ** 2


Loss = Callable[[nn.Module, Tensor], Tensor]


def of_a_module(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def of_a_function(model: nn.Module, x: Tensor) -> Tensor:
    return Cube.apply(model(x).tanh()).mean()  # type: ignore[no-any-return, no-untyped-call]


def of_a_value(model: nn.Module, x: Tensor) -> Tensor:
    """Asks for a value: what has been recorded runs while the mode is on."""
    out = model(x)
    return out.square().mean() if out.sum() > 0 else torch.tanh(out).mean()  # type: ignore[no-any-return]


def trained(loss_of: Loss, compiled: Callable[[Any], Any], modes: list[Any], whole: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.25), nn.Linear(4, 3))
    opt = torch.optim.Adam(model.parameters(), lr=0.1)
    seen: list[Any] = []

    def step(x: Tensor, mode: AbstractContextManager[Any]) -> float:
        before = torch.tanh(model(x)).mean()
        with mode:
            loss = before + loss_of(model, x)
            if whole:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
        if not whole:
            loss.backward()
            opt.step()
            opt.zero_grad()
        return loss.item()

    run, generator = compiled(step), torch.Generator().manual_seed(1)
    for mode in modes:
        seen.append(run(torch.randn(2, 4, generator=generator), mode))
        seen.append([one.tolist() for one in model.parameters()])
        seen.append(getattr(mode, "seen", None))
    return seen


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("loss_of", [of_a_module, of_a_function, of_a_value])
def test_a_mode_of_the_user_sees_what_it_sees_in_eager_code(loss_of: Loss, whole: bool) -> None:
    def modes() -> list[Any]:
        return [*(Scaled(2.0) for _ in range(3)), nullcontext(), *(Scaled(0.5) for _ in range(3)), torch.device("cpu")]

    wanted = trained(loss_of, lambda step: step, modes(), whole)
    found = trained(loss_of, lambda step: ws.compile(step, backend="eager"), modes(), whole)
    for one, other in zip(found, wanted, strict=True):
        assert equal(one, other) if not isinstance(one, list) else list(map(str, one)) == list(map(str, other))
