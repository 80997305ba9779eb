"""Models in a compiled DistributedDataParallel equal eager code: one graph, in training and in inference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.conformance.wrapped_models.against_eager import (
    Step,
    against_eager,
    ddp,
    device,
    forward_and_backward,
    inference,
    rank_seed,
)
from tests.conformance.wrapped_models.toy_models import (
    AttentionByForward,
    CheckpointedPairs,
    Doubled,
    NoInputs,
    NoParameters,
    TransposedLinear,
    linear_layers,
)
from tests.harness.rank_pools import Pool

row = functools.partial(pytest.mark.row, "S4")


def convolutions() -> nn.Sequential:
    """More than 64 channels: from there on Inductor prefers channels-last."""
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Conv2d(72, 72, 1, bias=False), nn.ReLU())))


def wrapped_linears() -> nn.Module:
    """Each layer in a wrapper of its own that computes it again in the backward, without reentering."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16), nn.Linear(16, 8))
    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: isinstance(module, nn.Linear)
    )
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    # name: (a model, the shapes of its batches)
    "linears": (lambda: linear_layers(10, 500, 5), [(20, 10)] * 2),
    "convolutions": (convolutions, [(2, 72, 16, 8)] * 2),
    "transposed": (TransposedLinear, [(10, 30, 10), (20, 30, 10), (30, 30, 10)]),
    "doubled": (Doubled, [(20, 16), (7, 16), (20, 16)]),
    "attention": (AttentionByForward, [(2, 9, 10, 96)] * 2),
    "checkpointed_pairs": (CheckpointedPairs, [(8, 32)] * 2),
    "checkpointed_linears": (wrapped_linears, [(10, 64)] * 2),
    "no_inputs": (NoInputs, []),
}


def one_graph(name: str, step: Step, backend: Any = "auto", **settings: Any) -> int:
    build, shapes = MODELS[name]
    rank_seed(7)
    batches = [(torch.rand(shape, device=device()),) for shape in shapes] or [()] * 3
    compiled = against_eager(lambda: ddp(build(), **settings), step, batches, backend)
    return compiled.cache_info().traces


@row("aot_autograd")
@row("ddp_baseline")
def test_linear_layers_equal_eager_code(ranks2: Pool) -> None:
    assert ranks2.run(one_graph, "linears", forward_and_backward) == [1, 1]


@row("ddp_baseline")
def test_inference_equals_eager_code(ranks2: Pool) -> None:
    assert ranks2.run(one_graph, "linears", inference) == [1, 1]


def close_to_eager() -> None:
    """Another order of additions than eager code has."""
    torch.manual_seed(0)
    eager, ours = (ddp(linear_layers(10, 16, 5)) for _ in range(2))
    ours.load_state_dict(eager.state_dict())
    compiled = ws.compile(forward_and_backward, backend="inductor", fullgraph=True)
    x = torch.rand(20, 10, device=device())
    for _ in range(2):
        torch.testing.assert_close(forward_and_backward(eager, x), compiled(ours, x))
        for one, other in zip(eager.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.slow  # the first kernel compiles the headers of torch
@row("ddp_baseline_inductor")
def test_linear_layers_compiled_by_inductor_are_close_to_eager_code(ranks2: Pool) -> None:
    ranks2.run(close_to_eager)


@row("graph_split_inductor_layout_optimizations_training")
def test_convolutions_in_training_equal_eager_code(ranks2: Pool) -> None:
    assert ranks2.run(one_graph, "convolutions", forward_and_backward) == [1, 1]


@row("graph_split_inductor_layout_optimizations_inference")
def test_convolutions_in_inference_equal_eager_code(ranks2: Pool) -> None:
    assert ranks2.run(one_graph, "convolutions", inference) == [1, 1]


@pytest.mark.parametrize(
    ("name", "traces"),
    [
        pytest.param("transposed", 2, marks=row("graph_split_inductor_transpose")),  # of the first size, of others
        pytest.param(
            "doubled", 2, marks=row("symbol_splitting")
        ),  # likewise; the third batch has the size of the first
        pytest.param("attention", 1, marks=row("call_method_forward")),
        pytest.param("checkpointed_pairs", 1, marks=row("higher_order_op")),
        pytest.param("checkpointed_linears", 1, marks=row("ddp_activation_checkpointing")),
        pytest.param("no_inputs", 1, marks=row("issue90375")),
    ],
)
def test_a_model_equals_eager_code(ranks2: Pool, name: str, traces: int) -> None:
    assert ranks2.run(one_graph, name, forward_and_backward) == [traces, traces]


def without_parameters() -> None:
    """DistributedDataParallel refuses such a module, so that it comes as it is."""
    with pytest.raises(RuntimeError, match="any parameter that requires a gradient"):
        DistributedDataParallel(NoParameters())
    compiled = against_eager(NoParameters, lambda model: model(), [()] * 2)
    assert compiled.cache_info().traces == 1


@row("issue90375")
def test_a_model_without_parameters_and_inputs_equals_eager_code(ranks2: Pool) -> None:
    ranks2.run(without_parameters)


def sizes() -> tuple[int, int]:
    return dist.get_world_size(), dist.get_rank()


def empty_graph() -> tuple[Any, int, int]:
    compiled = ws.compile(sizes, fullgraph=True)
    assert compiled() == compiled()
    calls = [node for node in compiled.graph.graph.nodes if node.op == "call_function"]
    return compiled(), compiled.cache_info().traces, len(calls)


@row("empty_graph")
def test_a_step_that_computes_nothing_with_tensors(ranks2: Pool) -> None:
    assert ranks2.run(empty_graph) == [((2, 0), 1, 0), ((2, 1), 1, 0)]
