"""Who holds a gradient besides its parameter. What becomes of graphs then: `test_cudagraph.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wholestep.lower.cudagraph.grad_ownership import GradOwnership, is_supported, keepable


@pytest.fixture
def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2, 3)) for _ in range(4)]


def left() -> list[Tensor]:
    """As a graph leaves them: one with memory of its own, one with a piece of it, two that share theirs."""
    bucket = torch.ones(20)
    return [torch.ones(2, 3), torch.ones(9)[3:].view(2, 3), bucket[:6].view(2, 3), bucket[8:14].view(2, 3)]


def give(kept: GradOwnership, params: list[nn.Parameter]) -> None:
    for number, grad in kept.fresh().items():
        params[number].grad = grad


HOLDS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "itself": lambda params: params[0].grad,
    "detached": lambda params: params[1].grad.detach(),
    "a view": lambda params: params[2].grad[0],
    "a list": lambda params: [one.grad for one in params],
    "numpy": lambda params: params[3].grad.numpy(),
    "for another library": lambda params: torch.utils.dlpack.to_dlpack(params[0].grad),
    "as its data": lambda params: params[0].grad.data,
    "of a graph": lambda params: (params[1].grad * nn.Parameter(torch.ones(3))).sum(),
}


@pytest.mark.parametrize("name", HOLDS)
def test_who_holds_a_gradient_is_seen(name: str, params: list[nn.Parameter]) -> None:
    kept = GradOwnership(dict(enumerate(left())))
    assert kept.are_unshared(params)
    for _ in range(2):
        give(kept, params)
        assert kept.are_unshared(params)
        held = HOLDS[name](params)
        assert not kept.are_unshared(params)
        del held
        assert kept.are_unshared(params)


def test_another_parameter_that_has_it_is_seen(params: list[nn.Parameter]) -> None:
    """As training by several processes shares gradients; also where the first one has none any more."""
    kept, other = GradOwnership(dict(enumerate(left()))), nn.Parameter(torch.zeros(2, 3))
    give(kept, params)
    other.grad = params[0].grad
    assert not kept.are_unshared(params)
    params[0].grad = None
    assert not kept.are_unshared(params)
    other.grad = None
    assert kept.are_unshared(params)


def test_a_gradient_that_is_replaced_or_written_to_is_free(params: list[nn.Parameter]) -> None:
    kept = GradOwnership(dict(enumerate(left())))
    give(kept, params)
    params[0].grad = None
    params[1].grad = torch.zeros(2, 3)
    params[2].grad.add_(1)
    params[3].grad.data = torch.zeros(2, 3)
    torch.optim.SGD(params[1:], lr=0.1).step()
    nn.utils.clip_grad_norm_(params, 1.0)
    assert kept.are_unshared(params)
    torch.autograd.backward(params[1].sum())
    assert kept.are_unshared(params)


def test_what_is_done_to_a_gradient_is_not_seen_in_the_next_one(params: list[nn.Parameter]) -> None:
    kept = GradOwnership(dict(enumerate(left())))
    give(kept, params)
    params[0].grad.t_()
    params[1].grad.requires_grad_()
    params[2].grad.mark = True
    give(kept, params)
    assert params[0].grad.shape == (2, 3)
    assert not params[1].grad.requires_grad
    assert not hasattr(params[2].grad, "mark")


def test_only_gradients_with_memory_of_their_own_are_lent() -> None:
    memory, other = torch.zeros(20), torch.zeros(4, 3)
    grads = {
        0: memory[:6].view(2, 3), 1: memory[6:12].view(3, 2).t(), 2: torch.zeros(1).expand(2, 3),
        3: torch.zeros(9).as_strided((3, 3), (2, 2)), 4: other.t(), 5: torch.zeros(2), 6: torch.zeros(8)[::2],
        7: torch.zeros(2, 3, 1, 1).contiguous(memory_format=torch.channels_last),
    }  # fmt: skip
    assert sorted(keepable(grads, {other.untyped_storage().data_ptr()})) == [0, 1, 5, 7]


def test_this_torch_says_who_holds_a_tensor() -> None:
    assert is_supported()
