"""Indexing replaced for a while: tensors are no sequences meanwhile, and none afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wholestep.capture.scalars.tensor_indexing import indexing_replaced, is_sequence, is_supported

ORIGINAL = Tensor.__getitem__


class Own(Tensor):
    """A class of the user's."""


class Listed(Tensor):
    """One that is a sequence by itself."""

    def __getitem__(self, index: Any) -> Any:
        return ORIGINAL(self, index)


def scalars() -> list[Any]:
    return [torch.zeros(()), nn.Parameter(torch.zeros(())), torch.zeros(()).as_subclass(Own)]


def check() -> None:
    for one in scalars():
        assert not is_sequence(one)
        assert torch.tensor([one.detach().as_subclass(Tensor)]).tolist() == [0.0]
        assert torch.tensor([one]).tolist() == [0.0]


def test_it_is_supported_here() -> None:
    assert is_supported()


def test_a_tensor_is_no_sequence_meanwhile_and_afterwards() -> None:
    check()
    with indexing_replaced(lambda tensor, index: ("replaced", index)):
        assert torch.ones(3)[1:2] == ("replaced", slice(1, 2))  # type: ignore[comparison-overlap]
        assert nn.Parameter(torch.ones(3))[0] == ("replaced", 0)  # type: ignore[comparison-overlap]
        check()

        class Late(Tensor):
            """Made meanwhile."""

    check()
    assert not is_sequence(torch.zeros(()).as_subclass(Late))
    assert torch.tensor([torch.zeros(()).as_subclass(Late)]).tolist() == [0.0]
    assert "__getitem__" not in vars(Tensor)
    assert torch.arange(3)[1:].tolist() == [1, 2]
    assert [one.item() for one in torch.arange(3)] == [0, 1, 2]


def test_what_was_a_sequence_stays_one() -> None:
    one = torch.arange(3).as_subclass(Listed)
    assert is_sequence(one)
    with indexing_replaced(lambda tensor, index: "replaced"):
        assert is_sequence(one)
    assert is_sequence(one)
    check()


def fail(tensor: Tensor, index: Any) -> Any:
    raise ValueError("indexed")


def test_an_error_ends_it() -> None:
    with pytest.raises(ValueError, match="indexed"), indexing_replaced(fail):
        torch.ones(3)[0]
    assert torch.ones(3)[0] == 1
    check()
