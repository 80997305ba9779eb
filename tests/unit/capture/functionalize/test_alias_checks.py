"""Inputs that share memory: which do, and what a step may do to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.harness.training import backward_and_step
from wholestep.capture.functionalize.alias_checks import overlaps
from wholestep.errors import CaptureError

HERE = Path(__file__).name


def test_views_of_other_parts_have_nothing_in_common() -> None:
    flat = torch.zeros(4, 6)
    assert overlaps([flat[:2], flat[2:], torch.zeros(4, 6)]) == []
    assert overlaps([flat[:, ::2], flat[:, 1::2]]) == []
    assert overlaps([flat[:0], flat]) == []


def test_pairs_are_told_once_each() -> None:
    flat = torch.zeros(4, 6)
    assert overlaps([flat[1], flat, flat[2], flat.t()]) == [(0, 1), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert overlaps([flat[:, ::2], flat[:, ::3]]) == [(0, 1)]
    assert overlaps([flat.view(torch.uint8), flat]) == [(0, 1)]


class Flat:
    """A layer whose weight and gradient are parts of flat tensors."""

    def __init__(self) -> None:
        self.weights, self.gradients, self.average = torch.ones(6), torch.zeros(6), torch.zeros(6)
        self.weight = nn.Parameter(self.weights[:4].view(2, 2))
        self.opt = torch.optim.SGD([self.weight], lr=0.01)

    def update(self, x: Tensor) -> Tensor:
        return backward_and_step((x @ self.weight).square().sum(), self.opt)

    def reads_after_a_write(self, x: Tensor) -> Tensor:
        loss = self.update(x)
        self.average.lerp_(self.weights, 0.1)  # <- here
        return loss

    def returns_its_bits(self, x: Tensor) -> Tensor:
        bits = self.weights.view(torch.int32)
        self.update(x)
        return bits

    def writes_to_both(self, x: Tensor) -> Tensor:
        loss = self.update(x)
        self.weights.mul_(0.9)  # <- here
        return loss

    def flat_gradients(self, x: Tensor) -> Tensor:
        self.gradients.zero_()
        loss = (x @ self.weight).square().sum()
        loss.backward()  # <- here
        self.opt.step()
        return loss

    def reads_before_the_write(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before = self.weights.sum()
        return before, self.update(x)


def line_of(method: Callable[..., Any]) -> str:
    """``file.py:12`` of the marked line."""
    lines = Path(__file__).read_text().splitlines()
    start = method.__code__.co_firstlineno
    return f"{Path(__file__).name}:{next(n for n in range(start, len(lines)) if '# <- here' in lines[n - 1])}"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("reads_after_a_write", "uses self.weights after the write"),
        ("returns_its_bits", "the step returns self.weights after the write"),
        ("writes_to_both", "uses self.weights after the write"),
        ("flat_gradients", "uses self.weight.grad after the write"),
    ],
)
def test_what_a_graph_would_not_see_is_refused(name: str, told: str) -> None:
    held = Flat()
    if name == "flat_gradients":
        held.weight.grad = held.gradients[:4].view(2, 2)
    step, before = getattr(held, name), held.weights.clone()
    with pytest.raises(CaptureError, match="share memory") as raised:
        ws.compile(step, backend="eager", fullgraph=True)(torch.ones(3, 2))
    assert told in str(raised.value)
    assert name == "returns_its_bits" or line_of(step) in str(raised.value)
    assert torch.equal(held.weights, before)


def test_what_is_read_before_the_write_is_what_eager_code_reads() -> None:
    plain, compiled, x = Flat(), Flat(), torch.ones(3, 2)
    step = ws.compile(compiled.reads_before_the_write, backend="eager")
    for _ in range(3):
        assert all(map(torch.equal, plain.reads_before_the_write(x), step(x)))
        assert torch.equal(plain.weights, compiled.weights)


def transposed_twins(x: Tensor, weight: nn.Parameter, twin: nn.Parameter, opt: torch.optim.Optimizer) -> None:
    backward_and_step((x @ weight @ twin).square().sum(), opt)


@pytest.mark.parametrize("foreach", [False, True])
def test_two_parameters_in_one_memory_are_refused(foreach: bool) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    twin = nn.Parameter(weight.detach().t())
    opt = torch.optim.SGD([weight, twin], lr=0.1, foreach=foreach)
    with pytest.raises(CaptureError, match="share memory"):
        ws.compile(transposed_twins, backend="eager", fullgraph=True)(torch.ones(3, 2), weight, twin, opt)


def test_writing_to_an_expanded_argument_is_refused() -> None:
    def step(x: Tensor) -> Tensor:
        x[0].mul_(2)
        return x.sum()

    with pytest.raises(CaptureError, match="an expanded tensor"):
        ws.compile(step, backend="eager", fullgraph=True)(torch.ones(1, 3).expand(4, 3))


def scales_a_tensor_twice(x: Tensor, y: Tensor) -> None:
    torch._foreach_mul_([x, y, x], 2)


def scales_a_view_as_well(x: Tensor, y: Tensor) -> None:
    torch._foreach_mul_([x, y, x[1:]], 2)


def reads_what_the_item_before_wrote(x: Tensor, y: Tensor) -> None:
    torch._foreach_add_([x, y], [y, x])


def reads_a_view_of_what_the_item_before_wrote(x: Tensor, y: Tensor) -> None:
    torch._foreach_add_([x, y], [y, x.view(1, 3)[0]])


def scales_by_one_of_its_items(x: Tensor, y: Tensor) -> None:
    one = y[0]
    torch._foreach_mul_([one, x], one)


def writes_two_results_to_one(x: Tensor, y: Tensor) -> None:
    torch.aminmax(x, out=(y[0], y[0]))


@pytest.mark.parametrize(
    "write", [scales_a_tensor_twice, scales_a_view_as_well, reads_what_the_item_before_wrote,
              reads_a_view_of_what_the_item_before_wrote, scales_by_one_of_its_items, writes_two_results_to_one],
    ids=lambda write: write.__name__,
)  # fmt: skip
def test_items_of_a_call_that_use_one_memory_are_refused(write: Callable[[Tensor, Tensor], None]) -> None:
    """Eager code goes through a list, each item sees the writes before it. A graph would give other numbers."""
    x, y = torch.arange(3.0), torch.ones(3)

    def step(z: Tensor) -> Tensor:
        write(x, y)
        return z * 2

    with pytest.raises(CaptureError, match=rf"{HERE}:\d+\naten\.\w+\.\w+ writes to .*one memory"):
        ws.compile(step, backend="eager", fullgraph=True)(torch.ones(3))
    assert torch.equal(x, torch.arange(3.0))
    assert torch.equal(y, torch.ones(3))


def test_a_clipped_gradient_that_stands_in_the_list_twice_is_told_by_name() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 4.0)

    def step(x: Tensor) -> Tensor:
        torch.nn.utils.clip_grad_norm_([weight, weight], 1.0, foreach=True)
        return x * 2

    told = (
        r"_foreach_mul_.* item 0 of a list \(weight.grad\) and writes to it again as item 1 of a list \(weight.grad\)"
    )
    with pytest.raises(CaptureError, match=told):
        ws.compile(step, backend="eager", fullgraph=True)(torch.ones(3))
    assert torch.equal(weight.grad, torch.full((3,), 4.0))


def parts_of_one_tensor(x: Tensor, y: Tensor) -> None:
    torch._foreach_mul_([x[:1], x[1:], y[::2], y[1::2]], 2)


def each_item_by_itself(x: Tensor, y: Tensor) -> None:
    torch._foreach_mul_([x, y], [x.view(1, 3)[0], y])


def one_gradient_of_two_parameters(x: Tensor, y: Tensor) -> None:
    weights = [torch.ones(3), torch.ones(3)]
    zeros = [[torch.zeros(3), torch.zeros(3)] for _ in range(2)]
    steps = [torch.ones(()), torch.ones(())]
    torch._fused_adamw_(
        weights, [y, y], *zeros, [], steps, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False,
        maximize=False,
    )  # fmt: skip
    x.copy_(weights[0] + weights[1])


@pytest.mark.parametrize(
    "write", [parts_of_one_tensor, each_item_by_itself, one_gradient_of_two_parameters], ids=lambda one: one.__name__
)
def test_items_that_meet_nowhere_or_in_their_own_place_are_done(write: Callable[[Tensor, Tensor], None]) -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        write(x, y)
        return x + y

    x, y = torch.arange(3.0), torch.arange(1.0, 4)
    expected = step(x.clone(), y.clone())
    assert torch.equal(ws.compile(step, backend="eager")(x, y), expected)


def test_one_tensor_twice_in_a_list_that_is_read_is_none_of_our_business() -> None:
    def step(x: Tensor) -> Tensor:
        return torch.stack(torch._foreach_mul([x, x], 2))

    assert torch.equal(ws.compile(step, backend="eager")(torch.ones(3)), torch.full((2, 3), 2.0))


class Shown:
    """A layer whose weight is shown to NumPy."""

    def __init__(self) -> None:
        self.weight, self.frozen = nn.Parameter(torch.ones(2, 2)), torch.ones(2)
        self.opt = torch.optim.SGD([self.weight], lr=0.01)
        self.row, self.constant = self.weight.detach().numpy()[1, ::-1], self.frozen.numpy()

    def reads_what_is_written(self, x: Tensor) -> float:
        backward_and_step((x @ self.weight).square().sum(), self.opt)
        return float(self.row.sum())

    def reads_what_stays(self, x: Tensor) -> float:
        backward_and_step((x @ self.weight * self.frozen).square().sum(), self.opt)
        return float(self.constant.sum())


def test_an_array_on_memory_that_the_step_writes_to_is_refused() -> None:
    step = ws.compile(Shown().reads_what_is_written, fullgraph=True)
    with pytest.raises(CaptureError, match=r"self\.row, an array on the memory of a \[2, 2\] that it writes to"):
        step(torch.ones(1, 2))


@pytest.mark.parametrize("may_go_live", [True])
def test_such_a_step_reads_what_was_written(may_go_live: bool) -> None:
    eager, step = Shown(), ws.compile(Shown().reads_what_is_written, backend="eager")
    for _ in range(3):
        assert step(torch.ones(1, 2)) == eager.reads_what_is_written(torch.ones(1, 2))


@pytest.mark.parametrize(
    "held", [bytearray(), memoryview(bytes(8))[::2], np.zeros((0, 3))], ids=["none", "even", "empty"]
)
def test_other_buffers_are_no_arrays_on_it(held: Any) -> None:
    shown = Shown()

    def step(x: Tensor) -> int:
        backward_and_step((x @ shown.weight).square().sum(), shown.opt)
        return len(held)

    assert ws.compile(step, backend="eager", fullgraph=True)(torch.ones(1, 2)) == len(held)


def test_an_array_on_memory_that_stays_is_compared() -> None:
    shown = Shown()
    step = ws.compile(shown.reads_what_stays, backend="eager")
    assert [step(torch.ones(1, 2)), step(torch.ones(1, 2))] == [2.0, 2.0]
    shown.constant[0] = 3.0
    assert step(torch.ones(1, 2)) == 4.0
