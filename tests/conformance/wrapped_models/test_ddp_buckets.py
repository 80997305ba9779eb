"""Gradients of a compiled DistributedDataParallel travel in the buckets that its bounds give. Sizes are in MiB."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.conformance.wrapped_models.against_eager import (
    against_eager,
    bucket_bytes,
    buckets,
    ddp,
    device,
    forward_and_backward,
)
from tests.conformance.wrapped_models.toy_models import OwnBetweenOthers, Within, linear_layers
from tests.harness.rank_pools import Pool

row = functools.partial(pytest.mark.row, "S4")


def layers_of(widths: tuple[int, int, int], bound: float) -> int:
    def build() -> Any:
        return ddp(linear_layers(*widths), bucket_cap_mb=bound)

    compiled = against_eager(build, forward_and_backward, [(torch.rand(20, widths[0], device=device()),)] * 2)
    assert compiled.cache_info().traces == 1
    return len(buckets(compiled))


@pytest.mark.parametrize(
    ("widths", "bound", "count"),
    [
        # A tenth as wide as the wide case, with a hundredth of its bound of 25.
        pytest.param((10, 500, 5), 0.25, 3, marks=row("graph_split")),
        pytest.param((10, 5, 5), 250, 1, marks=row("no_split")),
        pytest.param((10, 500, 5), 250, 1, marks=row("no_split")),
    ],
)
def test_a_bucket_ends_where_its_bound_is_met(
    ranks2: Pool, widths: tuple[int, int, int], bound: float, count: int
) -> None:
    assert ranks2.run(layers_of, widths, bound) == [count, count]


def half() -> AbstractContextManager[object]:
    kind = device().type
    return torch.autocast(kind, torch.float16 if kind == "cuda" else torch.bfloat16)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": half, "enable_grad": torch.enable_grad, "no_grad": torch.no_grad,
}  # fmt: skip


def checked(model: Any, x: Tensor) -> Tensor:
    assert model(x).requires_grad
    return forward_and_backward(model, x)


def checked_inference(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    assert not out.requires_grad
    return out


def layers_within(name: str) -> tuple[list[tuple[str, ...]], list[int], list[int], torch.dtype]:
    """Wide layers in a context of the model's own: buckets, their bytes, those of eager code, the output's type."""

    def build() -> Any:
        return ddp(Within(linear_layers(1000, 1000, 1000), CONTEXTS[name]), bucket_cap_mb=3.5)

    x = torch.rand(20, 1000, device=device())
    # In half precision on a GPU, products are those that take the least time, and round otherwise than eager code's.
    computed = torch.float16 if name == "autocast" and device().type == "cuda" else None
    compiled = against_eager(build, checked_inference if name == "no_grad" else checked, [(x,)], computed=computed)
    eager = build()
    for _ in range(3 if name != "no_grad" else 0):  # buckets follow the order of gradients, and are told later
        eager(x).sum().backward()
    text = eager._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")
    sizes = [int(one) for one in text.split(",") if one.strip()]
    return buckets(compiled), bucket_bytes(compiled), sizes, compiled(build(), x).dtype


@row("graph_split_ctx_manager")
@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_of_the_model_holds_and_leaves_the_buckets(ranks2: Pool, name: str) -> None:
    """No gradients under no_grad, so no buckets. Autocast gives the bias after its weight: the last one is alone.

    On GPUs gradients of products travel in half precision there. Those of biases, which are sums, do not: they share a
    bucket of their own.
    """
    by_type = name == "autocast" and ranks2.backend == "nccl"
    for found, sizes, eager_sizes, dtype in ranks2.run(layers_within, name):
        assert sizes == ([4_000_000] * 4 + [4 * 4_000] if by_type else eager_sizes)
        assert len(sizes) == len(eager_sizes)
        weights = [sum("weight" in member for member in one) for one in found]
        assert weights == {"autocast": [1, 1, 1, 1, 0], "enable_grad": [1, 1, 1, 1], "no_grad": []}[name]
        assert (dtype is torch.float32) == (name != "autocast")


IGNORED = ["layers.2.weight", "layers.4.bias"]


def own_layer(ignored: list[str]) -> list[tuple[str, ...]]:
    """Three layers, each with a weight of 1 MiB."""

    def build() -> Any:
        model = OwnBetweenOthers()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        return ddp(model, bucket_cap_mb=1)

    x = torch.rand(8, 512, device=device())
    return buckets(against_eager(build, forward_and_backward, [(x, x)]))


@row("custom_layer")
def test_a_layer_without_bias_has_a_bucket_of_its_own(ranks2: Pool) -> None:
    for found in ranks2.run(own_layer, []):
        assert len(found) == 3
        assert ("layers.2.weight",) in found


@row("ignored_parameters")
def test_ignored_parameters_are_in_no_bucket(ranks2: Pool) -> None:
    for found in ranks2.run(own_layer, IGNORED):
        assert len(found) == 2
        assert sorted(name for one in found for name in one) == ["layers.0.bias", "layers.0.weight", "layers.4.weight"]
