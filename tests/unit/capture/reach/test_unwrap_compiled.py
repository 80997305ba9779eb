"""What was given to torch.compile takes part in a step as it was written."""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
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


def blocks_with_dropout() -> tuple[Any, Any]:
    model = Blocks(dropout=0.1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


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
    eager, ours = twins(blocks_with_dropout)
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


def test_no_warning_of_torch_compile_tells_of_the_hooks_of_a_trace() -> None:
    net = dynamo(nn.Linear(8, 8), backend="eager")
    step = ws.compile(train, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(net, torch.optim.SGD(net.parameters(), lr=0.1), torch.randn(4, 8))
    assert step.cache_info().traces == 1


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("reads", [False, True])
def test_a_loop_that_is_compiled_calls_the_step_as_it_is(reads: bool) -> None:
    eager, ours = twins(blocks_with_dropout)
    step = ws.compile(train_and_read if reads else train, backend="eager")

    @dynamo(backend="eager")
    def call(x: Tensor) -> Any:
        return step(*ours, x * 2) * 3

    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(4, 8)
        torch.manual_seed(seed)
        wanted = (train_and_read if reads else train)(*eager, x * 2) * 3
        torch.manual_seed(seed)
        assert float(call(x)) == float(wanted)


def train_and_read(*args: Any) -> float:
    return train(*args).item()


class Branching(nn.Module):
    """Is open in a live step, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x * 2 if x.sum() > 0 else x), 0.1)


def module_that_branches(wrap: Wrap, net: nn.Module) -> Callable[[Tensor], Tensor]:
    return wrap(net)  # type: ignore[no-any-return]


def function_of_results(wrap: Wrap, net: nn.Module) -> Callable[[Tensor], Tensor]:
    double = wrap(lambda x: x.tanh() * 2)
    return lambda x: double(net(x)) + double(x)


def function_around_a_module(wrap: Wrap, net: nn.Module) -> Callable[[Tensor], Tensor]:
    return wrap(lambda x: net(x) + net(x).detach())  # type: ignore[no-any-return]


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("case", [module_that_branches, function_of_results, function_around_a_module])
def test_in_a_live_step_it_runs_as_it_was_written(case: Callable[..., Any]) -> None:
    """Dynamo would look into the recording of calls, and into functions of torch that have other code meanwhile."""

    def training(wrap: Wrap) -> tuple[nn.Module, Callable[[Tensor], float]]:
        torch.manual_seed(0)
        net = Branching()
        forward, opt = case(wrap, net), torch.optim.SGD(net.parameters(), lr=0.1)
        return net, lambda x: backward_and_step(forward(x).square().mean(), opt).item()

    compiled: list[object] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiled.append(module)
        return module.forward

    wrap = functools.partial(dynamo, backend=backend)
    (net, eager), (own, step) = training(as_it_is), training(wrap)
    live = ws.compile(step, backend="eager")
    for seed in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        torch.manual_seed(seed)
        wanted = eager(x)
        torch.manual_seed(seed)
        assert live(x) == wanted
        assert all(map(torch.equal, own.parameters(), net.parameters()))
    assert not compiled
    assert wrap(lambda x: x + 1)(torch.ones(2)).tolist() == [2, 2]
    assert compiled
