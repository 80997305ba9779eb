"""Live steps beside eager code: the same training twice, compared in every bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import wholestep as ws
from tests.harness.equality import equal
from wholestep.live.live_step import LiveStep

CALLS = 6


class Net(nn.Module):
    """A small network with what steps usually have: dropout, a norm with buffers, and plain state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.dropout = nn.Dropout(0.2)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.dropout(torch.relu(self.norm(self.first(x))))) / self.temperature
        return out


@dataclass
class Training:
    """One training, made anew for eager code and for the live step."""

    make_optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.AdamW(params, lr=0.01)
    model: Net = field(init=False)
    opt: torch.optim.Optimizer = field(init=False)
    notes: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.opt = self.make_optimizer(self.model.parameters())

    def update(self, loss: Tensor) -> Tensor:
        """Backward, update, gradients cleared."""
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss

    def state(self) -> Any:
        """All that a step may leave."""
        params = list(self.model.parameters())
        kinds = [(p.grad, p.requires_grad) for p in params]
        return [self.model.state_dict(), self.opt.state_dict(), self.notes, kinds]


Step = Callable[..., Any]


@dataclass(frozen=True)
class Unguarded:
    """A compiled piece that has no guards, so it cannot say quickly that nothing has changed."""

    run: Step

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    def call_if_unchanged(self, *args: Any) -> None:
        return None


@dataclass
class Compiled:
    """In the place of the stages: runs a piece as it is, and counts."""

    pieces: list[Step] = field(default_factory=list)
    launches: int = 0

    def __call__(self, function: Step, number: int) -> Step:
        self.pieces.append(function)

        def run(*args: Any) -> Any:
            self.launches += 1
            return function(*args)

        return Unguarded(run)


class Apart(Compiled):
    """Results lie on memory of their own, as those of a graph may."""

    def __call__(self, function: Step, number: int) -> Step:
        run = super().__call__(function, number)
        return Unguarded(lambda *args: [None if one is None else one.detach().clone() for one in run(*args)])


class AsAGraph(Compiled):
    """Inputs are tensors of the graph's own, on the memory of those given; results have no way back."""

    def __call__(self, function: Step, number: int) -> Step:
        run = super().__call__(function, number)

        def graph(inputs: list[Tensor], numbers: list[float], sizes: list[Tensor]) -> list[Tensor | None]:
            own = [one.detach().requires_grad_(one.requires_grad) if one.is_leaf else one for one in inputs]
            return [None if one is None else one.detach() for one in run(own, numbers, sizes)]

        return Unguarded(graph)


def batch(call: int) -> tuple[Tensor, ...]:
    """The arguments of a call, as most steps take them."""
    return (torch.randn(3, 4, generator=torch.Generator().manual_seed(call)),)


def assert_same(found: Any, wanted: Any, what: str) -> None:
    """Two trees of what anybody can look at, in every bit."""
    found_leaves, found_spec = pytree.tree_flatten(found)
    wanted_leaves, wanted_spec = pytree.tree_flatten(wanted)
    assert found_spec == wanted_spec, what
    for one, other in zip(found_leaves, wanted_leaves, strict=True):
        assert equal(one, other), f"{what}: {one} is not {other}"


def train_both(
    make_step: Callable[[Training], Step],
    arguments: Callable[[int], tuple[Any, ...]] = batch,
    between: Callable[[Training, int], None] = lambda training, call: None,
    *,
    compiled: Any = None,
    calls: int = CALLS,
    training: Callable[[], Training] = Training,
) -> LiveStep:
    """Runs a step eagerly and live, and compares everything after each call."""
    eager, live = training(), training()
    step, live_step = make_step(eager), LiveStep(make_step(live), "step", "", compiled or Compiled())
    for call in range(calls):
        torch.manual_seed(call)
        random.seed(call)
        wanted = step(*arguments(call))
        after = torch.random.get_rng_state()
        torch.manual_seed(call)
        random.seed(call)
        found = live_step(arguments(call), {})
        assert_same([found, live.state()], [wanted, eager.state()], f"call {call}")
        assert torch.equal(torch.random.get_rng_state(), after), f"call {call} has drawn otherwise"
        between(eager, call)
        between(live, call)
    return live_step


def train_by_stages(
    make_step: Callable[[Training], Step],
    calls: int = 4,
    between: Callable[[Training, int], None] = lambda training, call: None,
) -> ws.CompiledStep:
    """The same with pieces that the stages compile: what is peculiar to results of a graph is there then."""
    eager, live = Training(), Training()
    wanted, step = make_step(eager), ws.compile(make_step(live), backend="eager")
    for call in range(calls):
        torch.manual_seed(call)
        returned = wanted(*batch(call))
        torch.manual_seed(call)
        assert_same([step(*batch(call)), live.state()], [returned, eager.state()], f"call {call}")
        between(eager, call)
        between(live, call)
    return step
