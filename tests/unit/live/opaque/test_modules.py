"""A module is one record where all that its Python reads is known. Any other one runs, and its children are records."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from tests.unit.live.both import CALLS, Compiled, Net, Step, Training, Unguarded, train_both
from wholestep.api.report.live_explanation import explain_live
from wholestep.live.live_step import LiveStep
from wholestep.live.opaque.modules import MAX_STATES, OpaqueModule

COMMON: dict[str, Any] = {"scale": 1.0}


class Pair(NamedTuple):
    mean: Tensor
    nothing: None


class Outputs(dict[str, Any]):
    """As libraries return them: a class of their own, which torch's pytrees know."""


pytree.register_pytree_node(
    Outputs, lambda one: (list(one.values()), list(one)), lambda items, keys: Outputs(zip(keys, items, strict=True))
)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Double.apply(self.layer(x))
        return out


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


class Counting(nn.Module):
    """Writes a number of Python at each call, around a child that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.calls = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1.0
        out: Tensor = self.inner(x) * self.calls
        return out


class Scaled(nn.Module):
    """Reads a global of its file."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * COMMON["scale"]
        return out


class Structured(nn.Module):
    """Returns what `make` says."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(4, 4), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layer(x))


@dataclass
class Parts(Training):
    """A training of one module more, before the network."""

    make_part: Callable[[], nn.Module] = Doubling
    part: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        torch.manual_seed(1)
        self.part = self.make_part()
        self.opt = self.make_optimizer([*self.part.parameters(), *self.model.parameters()])

    def state(self) -> Any:
        return [super().state(), self.part.state_dict()]


def appends(training: Training) -> Step:
    def step(x: Tensor) -> None:
        part = training.part if isinstance(training, Parts) else nn.Identity()
        training.notes.append(training.update(training.model(part(x)).square().mean()).item())

    return step


def modules_of(live: LiveStep) -> list[str]:
    """The modules among the records of the path used last."""
    return [
        type(record.key.function.module).__name__
        for record in live.pieces[-1].path.records
        if isinstance(record.key.function, OpaqueModule)
    ]


@contextmanager
def calls_of(code: CodeType) -> Iterator[list[int]]:
    """Counts how often some code runs."""
    count = [0]

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        count[0] += event == "call" and frame.f_code is code

    sys.setprofile(watch)
    try:
        yield count
    finally:
        sys.setprofile(None)


def test_the_python_of_a_known_module_does_not_run() -> None:
    training = Training()
    live = LiveStep(appends(training), "step", "", Compiled())
    for _ in range(3):
        live((torch.ones(3, 4),), {})
    live.pieces[-1].call = Unguarded(lambda inputs, numbers, sizes: [torch.ones(())])
    with calls_of(Net.forward.__code__) as count:
        live((torch.ones(3, 4),), {})
        assert (count[0], live.stats.launches) == (0, 3)
        training.model.temperature = 2.0
        live((torch.ones(3, 4),), {})
        assert count[0] > 0


@pytest.mark.parametrize("make_part", [Doubling, Checkpointed, Scaled])
def test_a_module_is_a_record_whatever_torch_it_uses(make_part: Callable[[], nn.Module]) -> None:
    compiled = Compiled()
    live = train_both(appends, compiled=compiled, training=lambda: Parts(make_part=make_part))
    assert modules_of(live) == [make_part.__name__, "Net"]
    assert compiled.launches == CALLS - 1


def test_of_a_module_that_counts_the_children_are_records() -> None:
    live = train_both(appends, training=lambda: Parts(make_part=Counting))
    assert modules_of(live)[0] == "Sequential"
    assert explain_live(live, "eager").live.open_modules[0][0] == "Counting"
    assert "Modules whose own Python runs at every call" in str(explain_live(live, "eager"))


@pytest.mark.parametrize(
    "make",
    [
        lambda y: (y, None),
        lambda y: [y, (y * 2).detach()],
        lambda y: Pair(y, None),
        lambda y: {"mean": y},
        lambda y: Outputs(mean=y, more=y.detach().tanh()),
        lambda y: y[:, :2],
    ],
    ids=["tuple", "list", "named tuple", "dict", "a registered class", "a view"],
)
def test_what_it_returns_is_of_the_same_class(make: Callable[[Tensor], Any]) -> None:
    def make_step(training: Training) -> Step:
        assert isinstance(training, Parts)

        def step(x: Tensor) -> Any:
            found = training.part(x)
            kinds = None if isinstance(found, Tensor) else (type(found), len(found))
            first = pytree.tree_leaves(found)[0]
            training.notes.append((kinds, training.update(first.square().mean()).item()))
            return found

        return step

    live = train_both(make_step, training=lambda: Parts(make_part=lambda: Structured(make)))
    assert modules_of(live) == ["Structured"]


def test_one_that_returns_its_argument_or_its_weight_runs_its_python() -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return x, self.layer.weight

    def make_step(training: Training) -> Step:
        assert isinstance(training, Parts)

        def step(x: Tensor) -> Any:
            same, weight = training.part(x)
            training.notes.append((same is x, weight is training.part.layer.weight))
            training.notes.append(training.update((training.model(same) * weight.sum()).mean()).item())

        return step

    train_both(make_step, training=lambda: Parts(make_part=Returning))


def moves_a_global(training: Training, call: int) -> None:
    if len(training.notes) == call + 1:
        COMMON["scale"] = 1.0 + call % 3


def test_what_changes_between_calls_is_seen() -> None:
    def make_step(training: Training) -> Step:
        step = appends(training)

        def scaled(x: Tensor) -> None:
            COMMON["scale"] = 1.0 + len(training.notes) // 2  # both trainings share it
            step(x)

        return scaled

    train_both(make_step, training=lambda: Parts(make_part=Scaled))


def test_two_states_in_one_step() -> None:
    def make_step(training: Training) -> Step:
        def step(x: Tensor) -> None:
            training.model.train()
            loss = training.model(x).square().mean()
            training.model.eval()
            with torch.no_grad():
                seen = training.model(x).mean()
            training.notes.append((training.update(loss).item(), seen.item()))

        return step

    train_both(make_step)


def test_gradients_are_cleared_first() -> None:
    def make_step(training: Training) -> Step:
        def step(x: Tensor) -> None:
            training.opt.zero_grad()
            loss = training.model(x).square().mean()
            loss.backward()
            training.opt.step()
            training.notes.append(loss.item())

        return step

    compiled = Compiled()
    live = train_both(make_step, compiled=compiled)
    assert modules_of(live) == ["Net"]
    assert compiled.launches >= CALLS - 2


def test_one_that_asks_for_gradients_sees_them() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            return out if self.layer.weight.grad is None else out[:, :2]

    def make_step(training: Training) -> Step:
        assert isinstance(training, Parts)

        def step(x: Tensor) -> None:
            out = training.part(x)
            shape = tuple(out.shape)
            training.notes.append((shape, training.update(out.square().mean()).item()))

        return step

    def between(training: Training, call: int) -> None:
        assert isinstance(training, Parts)
        if call % 3 == 2:
            training.part(torch.ones(1, 4)).mean().backward()

    train_both(make_step, between=between, training=lambda: Parts(make_part=Asking), calls=8)


def test_a_forward_in_autocast() -> None:
    def make_step(training: Training) -> Step:
        def step(x: Tensor) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = training.model(x).float().square().mean()
            training.notes.append(training.update(loss).item())

        return step

    compiled = Compiled()
    live = train_both(make_step, compiled=compiled)
    assert modules_of(live) == ["Net"]
    assert compiled.launches == CALLS - 1


def test_buffers_that_a_pending_call_writes_are_seen() -> None:
    def make_step(training: Training) -> Step:
        def step(x: Tensor) -> None:
            loss = training.model(x).square().mean()
            mean = training.model.norm.running_mean
            assert mean is not None
            training.notes.append(mean.sum().item())
            training.update(loss)
            training.notes.append(mean.clone())

        return step

    train_both(make_step)


def test_a_weight_that_is_used_beside_the_module() -> None:
    def make_step(training: Training) -> Step:
        def step(x: Tensor) -> None:
            weight = training.model.first.weight
            loss = (training.model(x @ weight.t()[:, :4]).mean() + weight.square().sum()) * 0.1
            training.notes.append(training.update(loss).item())

        return step

    compiled = Compiled()
    train_both(make_step, compiled=compiled)
    assert compiled.launches == CALLS - 1


def test_a_step_that_ends_early_leaves_buffers_as_eager_code_does() -> None:
    def make_step(training: Training) -> Step:
        def step(x: Tensor) -> None:
            loss = training.model(x).square().mean()
            if loss.item() > 0 and len(training.notes) == 3:
                training.notes.append(loss)
                return
            training.notes.append(training.update(loss).item())

        return step

    train_both(make_step)


def test_a_hook_that_comes_later_runs() -> None:
    def between(training: Training, call: int) -> None:
        if call == 2:
            training.model.last.bias.register_hook(lambda grad: training.notes.append(float(grad.sum())))

    train_both(appends, between=between)


def test_one_that_is_called_in_many_states_is_open() -> None:
    def between(training: Training, call: int) -> None:
        training.model.temperature += 1.0

    live = train_both(appends, between=between, calls=MAX_STATES + 4)
    assert "states" in live.learned.modules.open["Net"]


def test_one_that_fails_says_so_itself() -> None:
    def make_step(training: Training) -> Step:
        def step(x: Tensor) -> None:
            try:
                training.model(x[:, :3])
            except RuntimeError as error:
                training.notes.append(str(error))
            training.notes.append(training.update(training.model(x).mean()).item())

        return step

    train_both(make_step)


class Around(nn.Module):
    """Around another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(2 * x)
        return out + 1


def test_modules_that_each_call_makes_run_their_python() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            out = nn.Sequential(Around(training.model), nn.Tanh())(x)
            loss = training.update(out.square().mean())
            training.notes.append(loss.item())
            return loss.detach()

        return step

    compiled = Compiled()
    step = train_both(make, compiled=compiled)
    assert compiled.launches >= CALLS - 1
    assert "Net" not in step.learned.modules.open
