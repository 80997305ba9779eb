"""Hooks of tensors and modules: what they compute and what they count."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.conformance.patterns.pattern import (
    CALLS,
    Pattern,
    check,
    on_devices,
    plain,
    row,
    same,
)
from tests.harness.rank_pools import Pool
from wholestep.errors import CaptureError


@dataclasses.dataclass
class Held:
    val: Tensor


class HookWithClosure(Pattern):
    def __init__(self) -> None:
        self.held = [Held(torch.tensor(88)), Held(torch.tensor(99))]

    def arguments(self, call: int) -> tuple[Any, ...]:
        return torch.randn(4, requires_grad=True), self.held[call % 2]

    def step(self, x: Tensor, held: Held) -> Tensor:
        y = x.sin()
        more = y + 1
        y.register_hook(lambda grad: grad + held.val + more)
        return torch.autograd.grad(y.sin().sum(), x)[0]


class HookOnLeaf(HookWithClosure):
    def __init__(self) -> None:
        super().__init__()
        self.leaf = torch.ones(4, requires_grad=True)

    def arguments(self, call: int) -> tuple[Any, ...]:
        return (self.held[call % 2],)

    def step(self, held: Held) -> None:  # type: ignore[override]
        y = self.leaf.sin()
        more = y + 1
        y.register_hook(lambda grad: grad + held.val + more)
        y.sin().sum().backward()

    def seen(self) -> dict[str, Any]:
        return {"grad": self.leaf.grad}


@row("intermediate_hook_with_closure")
def test_a_hook_with_a_closure_equals_eager_code() -> None:
    check(HookWithClosure)


@row("intermediate_hook_with_closure")
def test_a_hook_that_accumulates_into_a_leaf_equals_eager_code() -> None:
    check(HookOnLeaf, traces=2)  # without and with a gradient at entry


class Hooked(nn.Linear):
    def __init__(self, device: str) -> None:
        super().__init__(10, 10, device=device)
        self.calls_pre = torch.tensor(0, device=device)
        self.calls_post = torch.tensor(0, device=device)
        self.calls_forward = torch.tensor(0, device=device)
        self.register_full_backward_pre_hook(_pre_hook)
        self.register_full_backward_hook(_post_hook)
        self.register_forward_hook(_forward_hook)


def _pre_hook(module: Any, grads: Any) -> Any:
    assert module.weight.size() == (10, 10)
    module.calls_pre.add_(1)
    return (torch.sin(grads[0] + 1.2),)


def _post_hook(module: Any, grads_in: Any, grads_out: Any) -> Any:
    module.calls_post.add_(1)
    return None if grads_in[0] is None else (torch.sin(grads_in[0] + 3.4),)


def _forward_hook(module: Any, args: Any, out: Tensor) -> Tensor:
    module.calls_forward += 1
    return out * 0.5


class ModuleHooks(Pattern):
    def __init__(self, layers: int, device: str = "cpu") -> None:
        self.model = nn.Sequential(*(Hooked(device) for _ in range(layers)))
        self.inp = torch.rand(2, 10, requires_grad=True, device=device)

    def step(self, *batch: Tensor) -> Tensor:
        out = self.model(batch[0] if batch else self.inp)
        out.sum().backward()
        return out.detach()

    def seen(self) -> dict[str, Any]:
        counts = [[m.calls_pre, m.calls_post, m.calls_forward] for m in self.model]
        return {"counts": counts, "grads": [p.grad for p in [self.inp, *self.model.parameters()]]}


@on_devices
@pytest.mark.parametrize(
    "layers",
    [
        pytest.param(1, marks=row("module_backward_hooks")),
        pytest.param(2, marks=row("module_backward_hooks_multi_layers")),
    ],
)
def test_module_backward_hooks_equal_eager_code(layers: int, device: str) -> None:
    check(lambda: ModuleHooks(layers, device), traces=2)


def module_hooks_on_a_rank() -> None:
    world = ws.init()
    seen: list[list[Any]] = [[], []]
    for compiled in (False, True):
        torch.manual_seed(0)
        pattern = ModuleHooks(2, str(world.device))
        layers = pattern.model
        step: Callable[..., Tensor] = pattern.step
        if compiled:
            step = ws.compile(pattern.step, fullgraph=True)
        else:
            pattern.model = DistributedDataParallel(layers)  # type: ignore[assignment]
        for call in range(CALLS):
            x = torch.randn(2, 10, generator=torch.Generator().manual_seed(10 * call + world.rank)).to(world.device)
            counts = [[m.calls_pre, m.calls_post, m.calls_forward] for m in layers]
            seen[compiled].append(plain([step(x), counts, [p.grad for p in layers.parameters()]]))
            layers.zero_grad()
    assert same(*seen), seen


@row("module_backward_hooks_multi_layers")
def test_module_backward_hooks_on_two_ranks_equal_eager_ddp(ranks2: Pool) -> None:
    ranks2.run(module_hooks_on_a_rank)


class Counter:
    """What a Python hook may count in."""

    total = 0

    def __init__(self) -> None:
        self.calls, self.items, self.table = 0, [0], {"n": 0}

    def attribute(self, *_: Any) -> None:
        self.calls += 1

    def item(self, *_: Any) -> None:
        self.items[0] += 1

    def entry(self, *_: Any) -> None:
        self.table["n"] += 1

    def grows(self, *_: Any) -> None:
        self.items.append(1)

    def of_the_class(self, *_: Any) -> None:
        Counter.total += 1

    def __call__(self, *_: Any) -> None:
        self.calls += 1

    def state(self) -> tuple[Any, ...]:
        return self.calls, self.items, self.table, Counter.total


def _hook_everywhere(model: nn.Linear, loose: Tensor, where: str, hook: Callable[..., None]) -> Any:
    """Hooks `hook` in; gives the handle."""
    return {
        "forward": lambda: model.register_forward_hook(hook),
        "forward_pre": lambda: model.register_forward_pre_hook(hook),
        "backward": lambda: model.register_full_backward_hook(hook),
        "backward_pre": lambda: model.register_full_backward_pre_hook(hook),
        "parameter": lambda: model.weight.register_hook(hook),
        "accumulated": lambda: model.weight.register_post_accumulate_grad_hook(hook),
        "leaf": lambda: loose.register_hook(hook),
        "global": lambda: register_module_forward_hook(hook),
    }[where]()


HOW = ["attribute", "item", "entry", "__call__", "grows", "of_the_class"]
PLACES = ["forward", "forward_pre", "backward", "backward_pre", "parameter", "accumulated", "leaf", "global"]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("how", HOW)
@row("module_backward_hooks")
@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_hook_that_counts_in_python_is_refused_at_its_line(where: str, how: str) -> None:
    counter, model, loose = Counter(), nn.Linear(4, 4), torch.ones(4, requires_grad=True)
    hook = counter if how == "__call__" else getattr(counter, how)
    before = repr(counter.state())
    code = getattr(Counter, how).__code__
    handle = _hook_everywhere(model, loose, where, hook)

    def step(x: Tensor) -> Tensor:
        loss = (model(x) * loose).sum()
        loss.backward()
        return loss

    try:
        with pytest.raises(CaptureError, match="The step changes Python state") as caught:
            ws.compile(step, fullgraph=True)(torch.rand(2, 4))
    finally:
        handle.remove()
    assert f"{Path(__file__).name}:{code.co_firstlineno + 1} in {how}" in str(caught.value)
    assert repr(counter.state()) == before
    assert model.weight.grad is None


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("how", HOW)
@row("module_backward_hooks")
@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_hook_counts_in_a_live_step_as_in_eager_code(where: str, how: str, may_go_live: bool) -> None:
    counts = []
    for compiled in (False, True):
        Counter.total = 0
        counter, model, loose = Counter(), nn.Linear(4, 4), torch.ones(4, requires_grad=True)
        hook = counter if how == "__call__" else getattr(counter, how)
        handle = _hook_everywhere(model, loose, where, hook)

        def step(x: Tensor, model: nn.Linear = model, loose: Tensor = loose) -> Tensor:
            loss = (model(x) * loose).sum()
            loss.backward()
            return loss.detach()

        run = ws.compile(step, backend="eager") if compiled else step
        try:
            for _ in range(3):
                run(torch.rand(2, 4))
        finally:
            handle.remove()
        counts.append(repr(counter.state()))
    Counter.total = 0
    assert counts[0] == counts[1]
    assert counts[0] != repr(Counter().state())


@row("module_backward_hooks")
def test_what_a_hook_sets_on_a_parameter_is_refused() -> None:
    model = nn.Linear(4, 4)
    model.weight.calls = 0  # type: ignore[attr-defined]

    def count(weight: Any) -> None:
        weight.calls += 1

    model.weight.register_post_accumulate_grad_hook(count)

    def step(x: Tensor) -> None:
        model(x).sum().backward()

    with pytest.raises(CaptureError, match=r"in count: model\.weight\.calls was 0, is 1"):
        ws.compile(step, fullgraph=True)(torch.rand(2, 4))
    assert model.weight.calls == 0


@row("module_backward_hooks")
def test_attributes_of_a_parameter_are_in_sight() -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight.scale = 3  # type: ignore[attr-defined]
    step = ws.compile(lambda x: model(x).detach() * model.weight.scale, fullgraph=True)
    x = torch.rand(2, 4)
    for scale in (3, 3, 5):
        model.weight.scale = scale  # type: ignore[attr-defined]
        assert torch.equal(step(x), model(x) * scale)
    assert step.cache_info().traces == 2
