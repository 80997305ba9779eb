"""Attention over sizes that move is not cuDNN's, unless the step asks for that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import wholestep as ws
from wholestep.capture.sizes.attention_kernels import without_plans

cuda = torch.backends.cuda


def step_that_tells(*asked: SDPBackend) -> Any:
    """Gives 1 where a trace may have cuDNN's, and else 0."""

    def told(x: Tensor) -> Tensor:
        return x * float(cuda.cudnn_sdp_enabled())

    def step(x: Tensor) -> Tensor:
        if not asked:
            return told(x)
        with sdpa_kernel(list(asked)):
            return told(x)

    return step


@pytest.mark.parametrize(
    ("asked", "dynamic", "wanted"),
    [
        ((), True, 0.0),
        ((), False, 1.0),
        ((SDPBackend.CUDNN_ATTENTION,), True, 1.0),
        ((SDPBackend.FLASH_ATTENTION,), True, 0.0),
    ],
)
def test_which_kernels_a_trace_may_have(asked: tuple[SDPBackend, ...], dynamic: bool, wanted: float) -> None:
    compiled = ws.compile(step_that_tells(*asked), backend="eager", dynamic=dynamic, fullgraph=True)
    assert torch.equal(compiled(torch.ones(5, 2)), torch.full((5, 2), wanted))
    assert cuda.cudnn_sdp_enabled()


def test_a_choice_of_one_stays() -> None:
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]), without_plans():
        assert cuda.cudnn_sdp_enabled()
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        with without_plans():
            assert not cuda.cudnn_sdp_enabled()
        assert cuda.cudnn_sdp_enabled()


def test_an_error_puts_it_back() -> None:
    with pytest.raises(ZeroDivisionError), without_plans():
        raise ZeroDivisionError
    assert cuda.cudnn_sdp_enabled()
