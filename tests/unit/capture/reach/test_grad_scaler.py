"""GradScaler in a step: scale, counter and skipped updates are those of eager code, call after call."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

import wholestep as ws
from wholestep.errors import CaptureError

WIDTH, STEPS, INFINITE = 8, 9, (1, 5)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
}
Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor], Tensor]


def step_of(
    scaler: GradScaler, *, clips: bool = False, updates: bool = True, fails: str = "", half: bool = True
) -> Step:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if fails == "at a call" and loss > 0:
            raise ValueError
        if fails == "while capturing" and loss > 0:
            loss = -loss
        scaler.step(optimizer)
        if updates:
            scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def new_scaler(**options: Any) -> GradScaler:
    return GradScaler("cpu", init_scale=1024.0, growth_interval=3, **options)


def training(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, GradScaler]:
    model = model_of()
    return model, OPTIMIZERS["adamw"](model.parameters()), new_scaler(**options)


def train(
    name: str, *, backend: str | None, clips: bool, used: bool = False, half: bool = True
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    model, scaler = model_of(), new_scaler()
    if used:
        scaler.scale(torch.zeros(()))  # makes its tensors
    optimizer = OPTIMIZERS[name](model.parameters())
    step = step_of(scaler, clips=clips, half=half)
    run = step if backend is None else ws.compile(step, backend=backend)
    losses, states = [], []
    for number in range(STEPS):
        x = torch.randn(4, WIDTH)
        losses.append(run(model, optimizer, x * float("inf") if number in INFINITE else x))
        states.append(scaler.state_dict())
    return [*losses, *model.parameters()], states


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scale_and_updates_are_those_of_eager_code(name: str, clips: bool, used: bool) -> None:
    (wanted, states), (found, own) = (
        train(name, backend=backend, clips=clips, used=used) for backend in (None, "eager")
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert own == states
    scales = [state["scale"] for state in states]
    assert scales[:2] == [1024.0, 512.0]  # an infinity halves it
    assert scales[4:6] == [1024.0, 512.0]  # three good steps in a row double it


def test_inductor_trains_so_too() -> None:
    (wanted, states), (found, own) = (
        train("sgd", backend=backend, clips=True, half=False) for backend in (None, "inductor")
    )
    assert own == states
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1.3e-6, atol=1e-5, equal_nan=True)


def test_a_scaler_that_is_off_does_nothing() -> None:
    model, optimizer, scaler = training(enabled=False)
    step = ws.compile(step_of(scaler), backend="eager")
    assert step(model, optimizer, torch.ones(4, WIDTH)).isfinite()
    assert scaler.state_dict() == {}


def test_a_scale_that_is_set_between_calls_is_used() -> None:
    model, optimizer, scaler = training()
    step = ws.compile(step_of(scaler), backend="eager")
    step(model, optimizer, torch.ones(4, WIDTH))
    scaler.load_state_dict(scaler.state_dict() | {"scale": 8.0, "_growth_tracker": 0})
    step(model, optimizer, torch.full((4, WIDTH), float("inf")))
    assert scaler.get_scale() == 4.0


def test_other_factors_are_another_graph() -> None:
    model, optimizer, scaler = training()
    step = ws.compile(step_of(scaler), backend="eager")
    step(model, optimizer, torch.ones(4, WIDTH))
    scaler.set_backoff_factor(0.125)
    step(model, optimizer, torch.full((4, WIDTH), float("inf")))
    assert scaler.get_scale() == 128.0


def test_an_update_outside_of_the_step_is_refused_and_the_scaler_stays_usable() -> None:
    model, optimizer, scaler = training()
    compiled = ws.compile(step_of(scaler, updates=False), backend="eager", fullgraph=True)
    with pytest.raises(CaptureError, match=r"scaler.*its update\(\) is not called there.*scaler.update\(\)"):
        compiled(model, optimizer, torch.ones(4, WIDTH))
    step_of(scaler, clips=True)(model, optimizer, torch.ones(4, WIDTH))
    assert scaler.get_scale() == 1024.0


@pytest.mark.parametrize(("fails", "error"), [("at a call", ValueError), ("while capturing", CaptureError)])
def test_a_step_that_fails_on_its_way_leaves_no_notes(fails: str, error: type[Exception]) -> None:
    model, optimizer, scaler = training()
    compiled = ws.compile(step_of(scaler, clips=True, fails=fails), backend="eager", fullgraph=True)
    with pytest.raises(error):
        compiled(model, optimizer, torch.ones(4, WIDTH))
    step_of(scaler, clips=True)(model, optimizer, torch.ones(4, WIDTH))  # else: unscale_() has already been called


@pytest.mark.parametrize("options", [{"foreach": True}, {}], ids=str)
def test_an_optimizer_that_leaves_the_choice_to_python_is_named(options: dict[str, Any]) -> None:
    model, scaler = model_of(), new_scaler()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    with pytest.raises(CaptureError, match="fused=True"):
        ws.compile(step_of(scaler), backend="eager", fullgraph=True)(model, optimizer, torch.ones(4, WIDTH))


def test_notes_are_put_back_whatever_else_is_refused() -> None:
    (model, optimizer, scaler), chance = training(), random.Random(0)
    inner = step_of(scaler, clips=True, updates=False)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        return inner(model, optimizer, x * chance.random())

    with pytest.raises(CaptureError, match="chance"):
        ws.compile(step, backend="eager", fullgraph=True)(model, optimizer, torch.ones(4, WIDTH))
    step_of(scaler, clips=True)(model, optimizer, torch.ones(4, WIDTH))
