"""Gradients of linear interpolation, gathered: the numbers are those of ATen's kernels, which scatter."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.decomposition import select_decomp_table

from wholestep.lower.decompositions import interpolate

KERNELS = {
    1: torch.ops.aten.upsample_linear1d_backward,
    2: torch.ops.aten.upsample_bilinear2d_backward,
    3: torch.ops.aten.upsample_trilinear3d_backward,
}
SIZES = st.integers(1, 3).flatmap(lambda dims: st.lists(st.integers(1, 9), min_size=dims, max_size=dims))
SCALES = st.sampled_from([0.5, 0.7, 1.0, 1.3, 2.0, 2.5, 3.0, 4.0, 8.0])


def differs(large: list[int], small: list[int], *options: Any, dtype: torch.dtype = torch.float64) -> float:
    """By how much of the largest number."""
    gradient = torch.randn(2, 3, *large, dtype=dtype)
    wanted = KERNELS[len(small)](gradient, large, [2, 3, *small], *options)
    found = interpolate.gradient_of_linear(gradient, large, [2, 3, *small], *options)
    assert (found.shape, found.dtype) == (wanted.shape, dtype)
    return float((found - wanted).abs().max() / wanted.abs().max())


@settings(max_examples=200, deadline=None)
@given(small=SIZES, data=st.data(), corners=st.booleans())
def test_any_sizes(small: list[int], data: st.DataObject, corners: bool) -> None:
    large = [data.draw(st.integers(1, 40)) for _ in small]
    assert differs(large, small, corners, *[None] * len(small)) < 1e-5


@settings(max_examples=200, deadline=None)
@given(small=SIZES, data=st.data(), corners=st.booleans())
def test_scales_that_the_user_gave(small: list[int], data: st.DataObject, corners: bool) -> None:
    scales = [data.draw(SCALES) for _ in small]
    large = [int(size * scale) for size, scale in zip(small, scales, strict=True)]
    if min(large) < 1 or any(a == b and scale != 1 for a, b, scale in zip(large, small, scales, strict=True)):
        return
    assert differs(large, small, corners, *scales) < 1e-5


def test_a_scale_that_changes_no_size_is_left_to_the_kernel() -> None:
    gradient = torch.randn(1, 1, 3, 6)
    assert interpolate.gradient_of_linear(gradient, [3, 6], [1, 1, 3, 3], False, 1.3, 2.0) is NotImplemented


def test_halves_are_added_up_in_float32() -> None:
    gradient = torch.full((1, 1, 512), 1.0, dtype=torch.bfloat16)
    found = interpolate.gradient_of_linear(gradient, [512], [1, 1, 1], False, None)
    assert found.item() == 512  # in bfloat16 the sum would stay at 256


def test_gpus_alone_are_given_another_way() -> None:
    table = select_decomp_table() | interpolate.rules(torch.device("cuda"))
    assert interpolate.rules(torch.device("cpu")) == {}
    assert all(table[kernel.default] is interpolate.gradient_of_linear for kernel in KERNELS.values())
    forward = table[torch.ops.aten.upsample_bilinear2d.default]
    x = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(forward(x, [8, 11], False), torch.ops.aten.upsample_bilinear2d(x, [8, 11], False))
