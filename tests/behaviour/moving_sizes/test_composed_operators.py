"""Operators that torch's C++ makes of others, and that ask there for sizes as numbers, run on one symbolic trace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._decomp import decomposition_table

import wholestep as ws
from tests.behaviour.moving_sizes.conditions import conditions

F = nn.functional
WIDTH = 4


def transposed(x: Tensor) -> Tensor:
    """A layer on a tensor that is not in order."""
    return x.flatten(2).transpose(1, 2) @ torch.ones(3, WIDTH).requires_grad_() + x.mean()


def attention(x: Tensor) -> Tensor:
    seen = x.flatten(2).transpose(1, 2)
    mask = torch.ones(seen.shape[1], seen.shape[1], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(seen, seen, seen, attn_mask=mask)


def compiled(function: Callable[[Tensor], Tensor]) -> tuple[Callable[..., Any], ws.CompiledStep]:
    """A step that trains what is before a function of images, and the same compiled for all sizes."""

    def step(model: Any, opt: Any, x: Tensor) -> Tensor:
        loss = function(model(x)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step, ws.compile(step, backend="eager", fullgraph=True, dynamic=True)


def equal_calls(function: Callable[[Tensor], Tensor]) -> ws.CompiledStep:
    """Bitwise, results and weights, after each of some calls of other sizes."""
    step, ours = compiled(function)
    sides = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.PReLU()
        sides.append((model, torch.optim.SGD(model.parameters(), lr=0.1)))
    for number, sizes in enumerate([(2, 3, 6, 8), (4, 3, 5, 9), (3, 3, 12, 4)]):
        x = torch.randn(sizes)
        torch.manual_seed(number)
        wanted = step(*sides[0], x)
        torch.manual_seed(number)
        assert torch.equal(wanted, ours(*sides[1], x)), number
        assert all(map(torch.equal, sides[0][0].parameters(), sides[1][0].parameters())), number
    return ours


TRANSFORMED: dict[str, Callable[[Tensor], Tensor]] = {
    "of one dim": lambda x: torch.fft.fft(x, dim=0).abs(),
    "of two dims": lambda x: torch.fft.fft2(x, dim=(0, 3)).real,
    "of real numbers": lambda x: torch.fft.rfft2(x).abs(),
    "and back": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=2), n=x.shape[2], dim=2),
    "of another order in memory": lambda x: torch.fft.rfft(x.permute(3, 0, 2, 1), dim=2).abs().flatten(1),
    "over time": lambda x: torch.stft(
        x.flatten(1), 8, hop_length=4, window=torch.hann_window(8), return_complex=True
    ).abs(),
}


DESCRIBED_OTHERWISE = torch.__version__ < "2.12"
"""torch 2.11 says other strides of transforms than its kernels give, of constant sizes too."""


@pytest.mark.parametrize("name", TRANSFORMED)
def test_one_trace_for_transforms_of_all_sizes(name: str) -> None:
    if DESCRIBED_OTHERWISE and name == "of another order in memory":
        pytest.skip("strides of torch 2.11")
    assert equal_calls(TRANSFORMED[name]).cache_info().traces == 1


@pytest.mark.skipif(DESCRIBED_OTHERWISE, reason="strides of torch 2.11")
def test_a_transform_is_for_one_order_of_dims_in_memory() -> None:
    """Strides of an argument that none of its sizes give: what is given has its dims in the order of the argument."""

    def step(x: Tensor) -> Tensor:
        return torch.fft.fft(x, dim=2).flatten()  # a view of one order, a copy of another

    ours = ws.compile(step, backend="eager", fullgraph=True, dynamic=True)
    for strides in ((400, 20, 1), (20, 400, 1), (800, 40, 1)):
        x = torch.randn(2000, dtype=torch.complex64).as_strided((3, 4, 5), strides)
        assert torch.equal(ours(x), step(x))
        assert any("stride(0) <= " in text or "stride(1) <= " in text for text in conditions(ours))


@pytest.mark.parametrize("function", [transposed, attention])
def test_one_trace_for_all_sizes(function: Callable[[Tensor], Tensor]) -> None:
    assert equal_calls(function).cache_info().traces == 1


RESIZED: dict[str, Callable[[Tensor], Tensor]] = {
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest-exact": lambda x: F.interpolate(x, scale_factor=1.5, mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"),
    "two factors": lambda x: F.interpolate(x, scale_factor=(1.3, 0.7), mode="bilinear", align_corners=True),
    "bicubic to a size": lambda x: F.interpolate(x, size=(7, 9), mode="bicubic"),
    "to another's size": lambda x: F.interpolate(x[:, :, ::2], size=x.shape[2:], mode="bilinear"),
    "nearest to another's size": lambda x: F.interpolate(x[:, :, ::2], size=x.shape[2:]),
    "a factor that is computed anew": lambda x: F.interpolate(x, scale_factor=1.7, recompute_scale_factor=True),
    "antialias": lambda x: F.interpolate(x, size=(5, 5), mode="bilinear", antialias=True),
    "linear": lambda x: F.interpolate(x.flatten(2), scale_factor=2, mode="linear"),
    "trilinear": lambda x: F.interpolate(x[:, :, None], scale_factor=2, mode="trilinear"),
    "channels-last": lambda x: F.interpolate(
        x.contiguous(memory_format=torch.channels_last), scale_factor=2, mode="bilinear"
    ),
    "a layer": lambda x: nn.Upsample(scale_factor=2, mode="bilinear")(x),
}


@pytest.mark.parametrize("name", RESIZED)
def test_images_are_resized_in_one_trace_for_all_sizes(name: str) -> None:
    assert equal_calls(RESIZED[name]).cache_info().traces == 1


@pytest.mark.parametrize("mask", [lambda x: x > 0, lambda x: x[:1, :1] > 0, lambda x: x > 1e9])
def test_what_a_mask_selects_and_its_gradient(mask: Callable[[Tensor], Tensor]) -> None:
    """The whole of it, some rows, and nothing."""
    assert equal_calls(lambda x: x.masked_select(mask(x)).sum() + x.mean()).cache_info().traces == 1


@pytest.fixture
def asking() -> Iterator[list[str]]:
    """Operators whose kernels ask for sizes as numbers, one when it has drawn. Gives what has run of them."""
    ran: list[str] = []

    def asks(x: Tensor) -> Tensor:
        ran.append("asks")
        return x / torch.ops.aten.size.default(x)[0]

    def draws(x: Tensor) -> Tensor:
        ran.append("draws")
        return (x + torch.rand_like(x)) / torch.ops.aten.size.default(x)[0]

    def differs(x: Tensor) -> Tensor:
        ran.append("differs")
        return x / torch.ops.aten.size.default(x)[0]

    def form(x: Tensor) -> Tensor:
        ran.append("form")
        return x / x.shape[0]

    def another(x: Tensor) -> Tensor:
        ran.append("form")
        return x * (1 / x.shape[0])

    with torch.library._scoped_library("composed_operators", "DEF") as library:
        for kernel in (asks, draws, differs):
            library.define(f"{kernel.__name__}(Tensor x) -> Tensor")
            library.impl(kernel.__name__, kernel, "CompositeImplicitAutograd")
        made = torch.ops.composed_operators
        forms = {made.asks.default: form, made.draws.default: form, made.differs.default: another}
        with patch.dict(decomposition_table, forms):
            yield ran


def test_an_operator_that_asks_is_described_by_its_python_form(asking: list[str]) -> None:
    ours = equal_calls(lambda x: torch.ops.composed_operators.asks(x))
    assert ours.cache_info().traces == 1
    assert asking == ["asks"] * 2 + ["form"] + ["asks"] * 3  # eager, asks, form, its check, eager, eager


def test_an_operator_that_has_drawn_is_not_begun_anew_and_is_named(
    asking: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="wholestep"):
        ours = equal_calls(lambda x: torch.ops.composed_operators.draws(x))
    assert "form" not in asking
    assert ours.cache_info().traces == 3
    told = [record.message for record in caplog.records if "is a constant" in record.message]
    assert any("composed_operators.draws" in text and "test_composed_operators.py" in text for text in told), told


def test_a_python_form_that_computes_otherwise_is_not_taken(asking: list[str]) -> None:
    assert equal_calls(lambda x: torch.ops.composed_operators.differs(x)).cache_info().traces == 3
    assert "form" in asking


def test_a_size_that_no_trace_can_take_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """An operator that raises for symbols and says nothing of numbers."""

    def refuses(x: Tensor) -> Tensor:
        if isinstance(x.shape[0], torch.SymInt):
            raise RuntimeError("no such sizes here")
        return x * 2

    with torch.library._scoped_library("composed_operators", "DEF") as library:
        library.define("refuses(Tensor x) -> Tensor")
        library.impl("refuses", refuses, "CompositeImplicitAutograd")
        with caplog.at_level(logging.WARNING, logger="wholestep"):
            assert equal_calls(lambda x: torch.ops.composed_operators.refuses(x)).cache_info().traces == 3
    told = [record.getMessage() for record in caplog.records if "can be no input of the graph" in record.getMessage()]
    assert any("test_composed_operators.py" in text and "no such sizes here" in text for text in told), told
