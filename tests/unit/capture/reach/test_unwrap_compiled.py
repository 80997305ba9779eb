"""What was given to torch.compile takes part in a step as it was written."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws
from tests.harness.training import backward_and_step
from tests.unit.capture.steps import Blocks, train, twins
from wholestep.util.log_once import log_once

Wrap = Callable[..., Any]
as_it_is: Wrap = lambda thing, **options: thing  # noqa: E731
# Lightning replaces torch.compile in a process that imports it: each call notes its options at the module anew.
dynamo = inspect.unwrap(torch.compile)
by_dynamo: Wrap = lambda thing, **options: dynamo(thing, backend="eager", **options)  # noqa: E731


@pytest.fixture(autouse=True)
def nothing_logged() -> None:
    log_once.cache_clear()


def model(wrap: Wrap, model: Any, opt: Any) -> tuple[Any, ...]:
    return train, (wrap(model), opt)


def model_itself(wrap: Wrap, model: Any, opt: Any) -> tuple[Any, ...]:
    if wrap is by_dynamo:
        model.compile(backend="eager")
    return train, (model, opt)


def blocks(wrap: Wrap, model: Any, opt: Any) -> tuple[Any, ...]:
    model.blocks[0] = wrap(model.blocks[0], fullgraph=True)
    model.blocks[1].forward = wrap(model.blocks[1].forward, dynamic=False)
    return train, (model, opt)


def loss(wrap: Wrap, model: Any, opt: Any) -> tuple[Any, ...]:
    scale, last = torch.tensor(2.0), nn.Linear(3, 3)
    opt.add_param_group({"params": last.parameters()})

    @wrap
    def loss_of(logits: Tensor) -> Tensor:
        return F.mse_loss(last(logits) * scale, torch.ones_like(logits))

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        loss = loss_of(model(x))
        backward_and_step(loss, opt)
        return loss.detach(), last.weight.detach().clone()

    return step, ()


def update(wrap: Wrap, model: Any, opt: Any) -> tuple[Any, ...]:
    stepped = wrap(opt.step)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        stepped()
        opt.zero_grad()
        return loss

    return step, ()


def whole(wrap: Wrap, model: Any, opt: Any) -> tuple[Any, ...]:
    return wrap(train), (model, opt)


def within(wrap: Wrap, model: Any, opt: Any) -> tuple[Any, ...]:
    def step(x: Tensor) -> Tensor:
        return train(wrap(model), opt, x)

    return step, ()


CASES = {
    model: ["model"], model_itself: ["model"], blocks: ["model.blocks.0", "model.blocks.1"], loss: ["loss_of"],
    update: ["stepped"], whole: ["train"], within: [],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_is_traced_as_it_was_written(case: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    def make() -> tuple[Any, Any]:
        model = Blocks(dropout=0.1)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    eager, ours = twins(make)
    (step, args), (own, own_args) = case(as_it_is, *eager), case(by_dynamo, *ours)
    torch.manual_seed(0)
    found = ws.compile(own, backend="eager")
    if case is loss:  # which makes a layer of its own
        with torch.no_grad():
            for one, other in zip(eager[1].param_groups[1]["params"], ours[1].param_groups[1]["params"], strict=True):
                other.copy_(one)
    for seed in range(3):
        x = torch.randn(4, 8)
        torch.manual_seed(seed)
        wanted = step(*args, x)
        torch.manual_seed(seed)
        results = found(*own_args, x)
        pairs = zip(results, wanted, strict=True) if isinstance(wanted, tuple) else [(results, wanted)]
        assert all(torch.equal(one, other) for one, other in pairs)
    params = zip(eager[0].parameters(), ours[0].parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in params)
    assert found.cache_info().traces == 1
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.split()[2] for line in told if "torch.compile of" in line] == CASES[case]


def test_what_torch_compile_leaves_alone_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    double = torch.compiler.disable(lambda x: x * 2)
    found = ws.compile(lambda x: double(x) + 1, backend="eager")
    assert found(torch.ones(2)).tolist() == [3, 3]
    assert "has no part" not in caplog.text


def test_torch_compile_works_along_with_the_step() -> None:
    """Before, between and after calls: the setting that lets a trace through is the trace's alone."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    own = torch.compile(net, backend="eager")
    step = ws.compile(train, backend="eager")
    for _ in range(3):
        x = torch.randn(3, 4)
        assert torch.equal(own(x), net(x))
        step(own, opt, x)
    assert step.cache_info().traces == 1
    with pytest.raises(RuntimeError, match="symbolically trace"):
        torch.fx.experimental.proxy_tensor.make_fx(own)(torch.ones(1, 4))
