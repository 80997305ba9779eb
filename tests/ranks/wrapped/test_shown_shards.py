"""Code that knows of ``fully_shard``: it sees DTensors where eager code does, and what it does to parts is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import wholestep as ws
from wholestep.api.report.live_explanation import LiveExplanation

pytestmark = pytest.mark.ranks

CALLS = 4
TOLERANCE = 2**5 * torch.finfo(torch.float32).eps


class Asking(nn.Linear):
    """Its forward has the whole parameter, which is no DTensor."""

    seen: bool = True

    def forward(self, x: Tensor) -> Tensor:
        self.seen = isinstance(self.weight, DTensor)
        return super().forward(x)


@dataclass
class Training:
    """A model whose user has sharded it, and what the user keeps of its parts."""

    layer: type[nn.Linear] = nn.Linear
    model: Any = field(init=False)
    opt: torch.optim.Optimizer = field(init=False)
    parts: list[Tensor] = field(init=False)
    averages: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(self.layer(9, 9), nn.ReLU()) for _ in range(2)), nn.Linear(9, 4))
        for block in self.model[:2]:
            fully_shard(block)
        fully_shard(self.model)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.parts = [param.to_local().detach() for param in self.model.parameters()]
        self.averages = [part.clone() for part in self.parts]

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.opt.step()
        self.opt.zero_grad()

    def clip(self, squares: Tensor) -> Tensor:
        """Scales gradients by the norm of all parts, of whose squares `squares` are this rank's."""
        dist.all_reduce(squares)
        norm = squares.sqrt()
        for param in self.model.parameters():
            param.grad.mul_((0.1 / (norm + 1e-6)).clamp(max=1))
        return norm


Step = Callable[[Training, Tensor, Tensor], object]


def clips_parts_of_dtensors(t: Training, x: Tensor, y: Tensor) -> Tensor:
    t.backward(x, y)
    squares = torch.zeros(())
    for param in t.model.parameters():
        grad = param.grad
        squares = squares + (grad._local_tensor if isinstance(grad, DTensor) else grad).pow(2).sum()
    norm = t.clip(squares)
    t.update()
    return norm


def clips_what_has_parts(t: Training, x: Tensor, y: Tensor) -> Tensor:
    t.backward(x, y)
    grads = [param.grad for param in t.model.parameters()]
    norm = t.clip(sum((one.to_local() if hasattr(one, "to_local") else one).pow(2).sum() for one in grads))
    t.update()
    return norm


def clips_by_torch(t: Training, x: Tensor, y: Tensor) -> Tensor:
    t.backward(x, y)
    norm = nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
    t.update()
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def asks_in_a_forward(t: Training, x: Tensor, y: Tensor) -> list[bool]:
    t.backward(x, y)
    t.update()
    return [block[0].seen for block in t.model[:2]]


def asks_for_classes(t: Training, x: Tensor, y: Tensor) -> list[object]:
    t.backward(x, y)
    params = list(t.model.parameters())
    seen = [(type(one).__name__, isinstance(one.grad, DTensor), isinstance(one, (list, dict))) for one in params]
    t.update()
    return seen


def counts_numbers(t: Training, x: Tensor, y: Tensor) -> int:
    t.backward(x, y)
    t.update()
    params = t.model.parameters()
    return sum(one.to_local().numel() if isinstance(one, DTensor) else one.numel() for one in params)


def gives_gradients(t: Training, x: Tensor, y: Tensor) -> list[Tensor]:
    t.backward(x, y)
    grads = [param.grad for param in t.model.parameters()]
    t.update()
    return grads


def averages_parts(t: Training, x: Tensor, y: Tensor) -> Tensor:
    t.backward(x, y)
    t.update()
    with torch.no_grad():
        for average, param in zip(t.averages, t.model.parameters(), strict=True):
            average.lerp_(param.to_local(), 0.1)
    return torch.stack([average.sum() for average in t.averages])


def averages_kept_parts(t: Training, x: Tensor, y: Tensor) -> None:
    t.backward(x, y)
    t.update()
    for average, part in zip(t.averages, t.parts, strict=True):
        average.lerp_(part, 0.1)


def averages_kept_parts_behind_a_read(t: Training, x: Tensor, y: Tensor) -> float:
    loss = t.backward(x, y).item()
    averages_kept_parts(t, x, y)
    return loss


def decays_kept_parts(t: Training, x: Tensor, y: Tensor) -> Tensor:
    for part in t.parts:
        part.mul_(0.9)
    loss = t.backward(x, y)
    t.update()
    return loss


def updates_parts(t: Training, x: Tensor, y: Tensor) -> None:
    t.backward(x, y)
    with torch.no_grad():
        for param in t.model.parameters():
            param.to_local().sub_(param.grad.to_local(), alpha=0.1)
    t.opt.zero_grad()


STEPS: dict[Step, bool] = {
    clips_by_torch: True, asks_in_a_forward: True, asks_for_classes: True,
    clips_parts_of_dtensors: False, clips_what_has_parts: False, counts_numbers: False, gives_gradients: False,
    averages_parts: False, averages_kept_parts: False, averages_kept_parts_behind_a_read: False,
    decays_kept_parts: False, updates_parts: False,
}  # fmt: skip
"""With whether they are one graph."""


def differs_from_eager(step: Step) -> tuple[str, int | None]:
    """What differs, and of a live step how many pieces it has launched."""
    layer = Asking if step is asks_in_a_forward else nn.Linear
    eager, ours, compiled = Training(layer), Training(layer), ws.compile(step, backend="eager")
    for number in range(CALLS):
        torch.manual_seed(10 * number + dist.get_rank())
        x, y = torch.randn(6, 9), torch.randint(0, 4, (6,))
        if not same(step(eager, x, y), compiled(ours, x, y)):
            return f"what call {number} gives", None
        for what in ("parts", "averages"):
            if not same(getattr(eager, what), getattr(ours, what)):
                return f"{what} after call {number}", None
        if not same(list(eager.model.parameters()), list(ours.model.parameters())):
            return f"parameters after call {number}", None
    explanation = compiled.explain()
    return "", explanation.live.launches if isinstance(explanation, LiveExplanation) else None


def same(a: object, b: object) -> bool:
    """The same classes of leaves, and the same numbers: ours are added up in another order."""
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return all(type(one) is type(other) and _close(one, other) for one, other in pairs)


def _close(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    one, other = (each.full_tensor() if isinstance(each, DTensor) else each for each in (one, other))
    return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_it_does_what_eager_code_does(pool2: Any, step: Step, may_go_live: bool) -> None:
    for differs, launches in pool2.run(differs_from_eager, step):
        assert not differs
        assert (launches is None) == STEPS[step]


@pytest.mark.parametrize("may_go_live", [True])
def test_what_lies_in_front_of_parts_is_a_piece(pool2: Any, may_go_live: bool) -> None:
    assert [launches >= CALLS - 2 for _, launches in pool2.run(differs_from_eager, averages_parts)] == [True, True]
