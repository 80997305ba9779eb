"""Storage that a step frees and fills: memory is gone and back when it is in eager code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.conformance.patterns.pattern import (
    CALLS,
    Pattern,
    check,
    lines,
    on_devices,
    row,
)
from wholestep.ir import op_info
from wholestep.ir.program import Stage

_watched: list[Tensor] = []
_sizes: list[int] = []


@torch.library.custom_op("patterns::look", mutates_args=())
def look(x: Tensor) -> Tensor:
    """A copy of x. Notes down how many bytes the storages of the watched tensors have at this moment."""
    _sizes.extend(tensor.untyped_storage().size() for tensor in _watched)
    return x.clone()


look.register_fake(torch.empty_like)


@pytest.fixture(autouse=True)
def nothing_watched() -> Iterator[None]:
    yield
    _watched.clear()
    _sizes.clear()


class FreedArgument(Pattern):
    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def arguments(self, call: int) -> tuple[Any, ...]:
        _watched[:] = [torch.randn(10, device=self.device)]
        return (_watched[0],)

    def step(self, x: Tensor) -> Tensor:
        y = torch.sin(x)
        x.untyped_storage().resize_(0)
        return torch.cos(look(y))


class FreedByInductorsOperator(FreedArgument):
    def step(self, x: Tensor) -> Tensor:
        y = torch.sin(x)
        torch.ops.inductor.resize_storage_bytes_(x, 0)
        return torch.cos(look(y))


class FreedByTypedStorage(FreedArgument):
    def step(self, x: Tensor) -> Tensor:
        y = torch.sin(x)
        x._typed_storage()._resize_(0)
        return torch.cos(look(y))


class FreedThroughAnAlias(FreedArgument):
    def step(self, x: Tensor) -> Tensor:
        y = torch.sin(x)
        x.detach().view(2, 5).untyped_storage().resize_(0)
        return torch.cos(look(y))


class FreedBesideACallThatMayFail(FreedArgument):
    def step(self, x: Tensor) -> Tensor:
        y = torch.sin(x)
        x.untyped_storage().resize_(0)
        return y + look(torch.ones_like(y))


FREED = [
    FreedArgument, FreedByInductorsOperator, FreedByTypedStorage, FreedThroughAnAlias, FreedBesideACallThatMayFail,
]  # fmt: skip


@on_devices
@pytest.mark.parametrize("kind", FREED)
@row("storage_resize_zero")
@torch.no_grad()
def test_storage_freed_in_a_step_is_gone_while_it_goes_on(kind: type[FreedArgument], device: str) -> None:
    check(lambda: kind(device))
    # Eager and compiled: it was gone while the step went on, which a call that may fail does not hold up. Where
    # Inductor makes one kernel of what reads it and of what reads the result of that call, it goes after that.
    compiled = 40 if device == "cuda" and kind is FreedBesideACallThatMayFail else 0
    assert _sizes == [0] * CALLS + [compiled] * CALLS


class FilledArgument(Pattern):
    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def arguments(self, call: int) -> tuple[Any, ...]:
        out = torch.randn(10, device=self.device)
        out.untyped_storage().resize_(0)
        return torch.randn(10, device=self.device), out

    def step(self, x: Tensor, out: Tensor) -> None:
        y = torch.sin(x)
        assert out.untyped_storage().size() == 0
        out.untyped_storage().resize_(x.untyped_storage().size())
        out.copy_(y.cos())


class FilledInParts(FilledArgument):
    def step(self, x: Tensor, out: Tensor) -> None:
        out.untyped_storage().resize_(40)
        out[:4].copy_(x[:4])
        out[4:].fill_(7)


class FilledFromAnotherType(FilledArgument):
    def step(self, x: Tensor, out: Tensor) -> Tensor:
        out.untyped_storage().resize_(40)
        out.copy_(x.double() * 3)
        return out * 2


class FilledTwice(FilledArgument):
    """Full, freed and full again, while a call that may fail stands between."""

    def arguments(self, call: int) -> tuple[Any, ...]:
        return torch.randn(10, device=self.device), torch.randn(10, device=self.device)

    def step(self, x: Tensor, out: Tensor) -> Tensor:
        y = x * out
        out.untyped_storage().resize_(0)
        z = look(y)
        out.untyped_storage().resize_(40)
        out.copy_(z + 1)
        return out * 2


@on_devices
@pytest.mark.parametrize("kind", [FilledArgument, FilledInParts, FilledFromAnotherType, FilledTwice])
@row("storage_resize_nonzero")
@torch.no_grad()
def test_storage_filled_again_equals_eager_code(kind: type[FilledArgument], device: str) -> None:
    check(lambda: kind(device))


@row("storage_resize_nonzero")
def test_the_size_of_a_storage_belongs_to_the_signature() -> None:
    def step(x: Tensor, out: Tensor) -> Tensor:
        if out.untyped_storage().size() == 0:
            out.untyped_storage().resize_(40)
            return out.copy_(x) * 2
        return x + out

    compiled = ws.compile(step, fullgraph=True)
    x, full, freed = torch.randn(10), torch.randn(10), torch.randn(10)
    assert torch.equal(compiled(x, full), x + full)
    freed.untyped_storage().resize_(0)
    assert torch.equal(compiled(x, freed), x * 2)
    assert torch.equal(freed, x)
    assert torch.equal(compiled(x, full), x + full)
    assert compiled.cache_info().reasons == ("the storage of argument 1 had 40 bytes, has 0",)


class FreedState(Pattern):
    """A tensor of the state is freed in one step and filled in the next."""

    def __init__(self) -> None:
        self.kept = torch.arange(10.0)

    def arguments(self, call: int) -> tuple[Any, ...]:
        return (torch.randn(10),)

    def step(self, x: Tensor) -> Tensor:
        storage = self.kept.untyped_storage()
        if storage.size():
            y = x + self.kept
            storage.resize_(0)
            return y
        storage.resize_(40)
        self.kept.copy_(x)
        return x * 3

    def seen(self) -> dict[str, Any]:
        return {"size": self.kept.untyped_storage().size()}


@row("storage_resize_nonzero")
@torch.no_grad()
def test_state_that_is_freed_in_one_call_and_filled_in_the_next() -> None:
    check(FreedState, traces=2)


@row("storage_resize_zero")
@torch.no_grad()
def test_freed_state_is_kept_until_nothing_can_fail_any_more() -> None:
    buffer = torch.arange(3.0)
    table = torch.randn(5, 3)

    def step(rows: Tensor) -> Tensor:
        y = buffer.sum()
        buffer.untyped_storage().resize_(0)
        return y + nn.functional.embedding(rows, table)

    compiled = ws.compile(step, fullgraph=True)
    with pytest.raises(IndexError):
        compiled(torch.tensor([0, 9]))
    assert torch.equal(buffer, torch.arange(3.0))
    assert torch.equal(compiled(torch.tensor([0, 1])), torch.arange(3.0).sum() + table[:2])
    assert buffer.untyped_storage().size() == 0


@row("storage_resize_zero")
@torch.no_grad()
def test_a_captured_program_says_what_is_freed() -> None:
    step = ws.compile(lambda x: (x.sin(), x.untyped_storage().resize_(0))[0].cos(), fullgraph=True)
    step(torch.randn(3))
    captured = step.program(Stage.CAPTURED)
    assert [n.target for n in captured.graph.nodes if n.op == "call_function"].count(op_info.RESIZE_STORAGE) == 1
    targets = lines(step)
    assert targets.index(op_info.RESIZE_STORAGE_) == 1 + targets.index(torch.ops.aten.sin.default)
