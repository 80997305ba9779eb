"""Which sizes share a trace, what ends it, and what makes a size a constant."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.behaviour.moving_sizes.conditions import conditions

WIDTH = 6
SMALL = (0, 1, 2, 3, 5)


class Net(nn.Module):
    """A table, a layer and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer, self.norm = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(self.table(x)).relu())
        return out


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = (model(x) * y).sum()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def compiled(step: Callable[..., Any], **options: Any) -> ws.CompiledStep:
    return ws.compile(step, backend="eager", fullgraph=True, **options)


def batch(*sizes: int) -> tuple[Tensor, Tensor]:
    return torch.randint(9, sizes), torch.randn(*sizes, WIDTH)


def equal_calls(ours: ws.CompiledStep, step: Callable[..., Any], calls: list[tuple[Any, ...]]) -> None:
    """Bitwise, results and parameters, after each call."""
    one, other = make(), make()
    for number, call in enumerate(calls):
        assert torch.equal(step(*one, *call), ours(*other, *call)), number
        assert all(map(torch.equal, one[0].parameters(), other[0].parameters())), number


def test_sizes_0_1_and_2_are_right_in_every_dim() -> None:
    sizes = list(itertools.product(SMALL, SMALL))
    ours = compiled(train, max_retraces=30)
    equal_calls(ours, train, [batch(*one) for one in (*sizes, *reversed(sizes))])
    # 0, 1, or more in each of two dims; and the constant traces before both dims have moved
    assert ours.cache_info().traces <= 9 + 2


def test_a_step_with_two_sizes_has_one_trace_for_all_others() -> None:
    ours = compiled(train)
    equal_calls(ours, train, [batch(4, length) for length in (7, 7, 9, 12, 5, 30)])
    assert ours.cache_info().traces == 2


def test_all_sizes_move_from_the_first_call_on_where_that_is_asked_for() -> None:
    ours = compiled(train, dynamic=True)
    equal_calls(ours, train, [batch(*sizes) for sizes in ((4, 7), (3, 7), (5, 9), (2, 12))])
    assert ours.cache_info().traces == 1


def test_what_another_step_has_kept_of_one_size_is_not_loaded_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path))
    for dynamic in (False, True):
        ours = compiled(train, dynamic=dynamic)
        equal_calls(ours, train, [batch(4, 7), batch(4, 9)])
        assert ours.cache_info().traces == (1 if dynamic else 2)
    assert conditions(ours) != []


def test_no_size_moves_where_that_is_asked_for() -> None:
    ours = compiled(train, dynamic=False)
    equal_calls(ours, train, [batch(4, length) for length in (7, 9, 12, 7)])
    assert ours.cache_info().traces == 3


def test_marked_dims_move_from_the_first_call_on() -> None:
    first = batch(4, 7)
    for one in first:
        torch._dynamo.mark_dynamic(one, 1)
    ours = compiled(train)
    equal_calls(ours, train, [first, batch(4, 9), batch(4, 12)])
    assert ours.cache_info().traces == 1


def test_static_dims_do_not_move() -> None:
    first = batch(4, 7)
    for one in first:
        torch._dynamo.mark_static(one, 0)
    ours = compiled(train, dynamic=True)
    equal_calls(ours, train, [first, batch(4, 9)])
    assert ours.cache_info().traces == 1
    assert [text for text in conditions(ours) if "shape[0]" in text] == []


def test_an_option_that_is_none_is_refused() -> None:
    with pytest.raises(ws.ConfigError, match="wants True, False or None, got 'yes'"):
        ws.compile(train, dynamic="yes")  # type: ignore[call-overload]


def longer_or_shorter(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    return train(model, opt, x, y * 2 if x.shape[1] > 8 else y)


def test_a_question_of_python_is_a_condition_of_the_trace() -> None:
    ours = compiled(longer_or_shorter)
    equal_calls(ours, longer_or_shorter, [batch(4, length) for length in (7, 6, 5, 9, 12, 8, 30, 3)])
    assert ours.cache_info().traces == 3
    assert "args.0.shape[1] > 8" in conditions(ours)
    assert any("shape[1]" in reason and "does not hold" in reason for reason in ours.cache_info().reasons)


def added(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    return train(model, opt, x, y + x[..., None])


def halves(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    """Of two words, each half has one: torch computes and lays out that size otherwise."""
    first, second = (model(x) * y).chunk(2, dim=1)
    loss = first.sum() + (2 * second).sum()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def test_a_condition_that_holds_for_one_size_leaves_the_others_one_trace() -> None:
    ours = compiled(halves)
    equal_calls(ours, halves, [batch(4, length) for length in (7, 2, 9, 12, 5, 30, 2, 7)])
    assert ours.cache_info().traces == 3
    assert ours.explain().sizes.constant == ()


def test_an_error_of_the_step_makes_no_size_a_constant() -> None:
    """It is raised with symbols and without, and tells nothing of them."""

    def checked(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[1] < 1:
            raise ValueError("no words")
        return train(model, opt, x, y)

    ours, one, other = compiled(checked), make(), make()
    for length in (7, 0, 9, 12, 0, 5, 30):
        x, y = batch(4, length)
        if length:
            assert torch.equal(train(*one, x, y), ours(*other, x, y)), length
        else:
            with pytest.raises(ws.CaptureError, match="no words"):
                ours(*other, x, y)
    assert ours.cache_info().traces == 2


def test_sizes_that_were_equal_and_are_not() -> None:
    ours = compiled(added)
    calls = [batch(4, 7), batch(4, 9), batch(4, 12), (batch(4, 1)[0], batch(4, 12)[1]), batch(4, 5)]
    equal_calls(ours, added, calls)
    one, other = batch(4, 5), batch(4, 6)
    with pytest.raises((RuntimeError, ws.CaptureError), match="5"):
        ours(*make(), one[0], other[1])


def test_another_order_in_memory_is_another_trace() -> None:
    def lying(count: int, length: int) -> tuple[Tensor, Tensor]:
        x, y = batch(length, count)
        return x.t(), y.transpose(0, 1)

    ours = compiled(train)
    equal_calls(ours, train, [batch(4, 7), batch(4, 9), lying(4, 9), lying(4, 11), batch(4, 12)])
    assert ours.cache_info().traces == 3
    assert any("strides" in reason for reason in ours.cache_info().reasons)


def by_number(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    return train(model, opt, x, y * float(len(range(x.shape[1]))))


def test_a_size_that_python_wants_as_a_number_is_named_and_constant(caplog: pytest.LogCaptureFixture) -> None:
    ours = compiled(by_number)
    with caplog.at_level(logging.WARNING, logger="wholestep"):
        equal_calls(ours, by_number, [batch(4, length) for length in (7, 9, 12, 7)])
    assert ours.cache_info().traces == 3
    told = [record.message for record in caplog.records if "is a constant" in record.message]
    assert any("dim 1 of argument 2 is a constant" in text.lower() and "test_sizes.py" in text for text in told), told


def of_a_list(model: Any, opt: Any, words: list[Tensor], weights: dict[str, Tensor], y: Tensor) -> Tensor:
    """Rows of any number and length, a row of weights each, and what all are weighed by."""
    sums = torch.stack([model(x).sum(0) * weights[str(number)].sum() for number, x in enumerate(words)])
    loss = sums.sum() * y.mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def rows(*lengths: int, others: int) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    weights = {str(number): torch.rand(length + 1) for number, length in enumerate(lengths)}
    return [torch.randint(9, (length,)) for length in lengths], weights, torch.rand(others)


def test_what_has_moved_is_known_for_arguments_of_another_structure() -> None:
    """Each number of rows is a trace, and no length is: not that of a row which other calls lack, nor one behind it."""
    ours = compiled(of_a_list)
    calls = [rows(5, 7, 4, others=6), rows(6, 9, others=8), rows(3, 5, 8, others=3), rows(7, 4, others=9)]
    calls += [rows(*lengths, others=5) for lengths in ((9, 3, 6), (8, 8), (4, 5, 5), (3, 9))]
    equal_calls(ours, of_a_list, calls)
    assert ours.cache_info().traces == 3, ours.cache_info().reasons


def seen_twice(model: Any, opt: Any, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    y.mul_(2)
    return train(model, opt, x, y * z[..., None])


def apart(length: int) -> tuple[Tensor, Tensor, Tensor]:
    x, y = batch(4, length)
    return x, y, torch.randn(4, length)


def overlapping(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Words, and two tensors in one memory."""
    x, memory = batch(4, length)
    return x, memory, memory.flatten()[: 4 * length].view(4, length)


@pytest.mark.parametrize("dynamic", [None, False])
def test_a_write_that_another_argument_sees_is_never_left_out(dynamic: bool | None) -> None:
    """A graph knows its inputs apart. Where they are not, it is another trace, which is refused."""
    ours, one, other = compiled(seen_twice, dynamic=dynamic), make(), make()
    for length in (7, 9, 9):
        torch.manual_seed(length)
        wanted = seen_twice(*one, *apart(length))
        torch.manual_seed(length)
        assert torch.equal(wanted, ours(*other, *apart(length)))
    with pytest.raises(ws.CaptureError, match="share memory"):
        ours(*other, *overlapping(9))


def test_explain_says_which_sizes_move_and_on_what_conditions() -> None:
    model = nn.Linear(4, 3)

    @ws.compile(backend="eager")
    def step(x: Tensor, y: Tensor) -> Tensor:
        out, keep = model(x), y > 0
        loss = (out[keep].sum() + out.sum()).detach()
        return loss * 2 if x.shape[0] > 6 else loss

    for rows in (8, 9, 10):
        step(torch.randn(rows, 4), torch.randint(0, 3, (rows,)))
    sizes = step.explain().sizes
    assert sizes.moving == ("args.0.shape[0]", "args.1.shape[0]")
    assert set(sizes.conditions) == {"args.1.shape[0] == args.0.shape[0]", "args.1.shape[0] > 6"}
    assert [one.partition(" ")[0] for one in sizes.of_data] == ["index"]
    assert sizes.constant == ()
    assert "args.1.shape[0] > 6" in str(step.explain())


def test_explain_says_which_size_is_a_constant_and_why() -> None:
    model = nn.Linear(4, 3)

    @ws.compile(backend="eager")
    def step(x: Tensor) -> None:
        out = model(x)
        torch.kron(out, torch.ones(2, 2)).sum().backward()

    for rows in (8, 9, 10):
        step(torch.randn(rows, 4))
    (constant,) = step.explain().sizes.constant
    assert constant.startswith("Dim 0 of argument 0 is a constant: aten.kron.default wants a number")
