"""Models of ``fully_shard`` equal eager code: attributes set in the forward, checkpoints, tensors with two names."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import wholestep as ws
from tests.conformance.wrapped_models.against_eager import (
    Step,
    against_eager,
    device,
    forward_and_backward,
    inference,
    rank_seed,
)
from tests.conformance.wrapped_models.toy_models import linear_layers
from tests.harness.rank_pools import Pool

row = functools.partial(pytest.mark.row, "S5")


class SetsAttribute(nn.Module):
    """Sets a number in its forward, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.factor = linear_layers(10, 50, 5), 1

    def forward(self, x: Tensor) -> Tensor:
        self.factor = 2
        out: Tensor = self.layers(x) * self.factor
        return out


class SameTensorTwice(nn.Module):
    """A buffer and a plain tensor, each read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10))
        self.register_buffer("buffer", torch.randn(10))
        self.plain = torch.randn(10, device=device())

    def forward(self, x: Tensor) -> Tensor:
        z = (x + self.buffer + self.buffer) * self.weight
        z += self.plain + self.plain
        return z


class HasBuffer(nn.Module):
    """Adds a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.randn(10))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.buffer  # type: ignore[operator] # register_buffer has no type


class SameBufferByTwoNames(nn.Module):
    """A buffer of its child under a name of its own, written in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.child = nn.Parameter(torch.randn(10)), HasBuffer()
        self.register_buffer("buffer", self.child.buffer)

    def forward(self, x: Tensor) -> Tensor:
        self.buffer.mul_(2)  # type: ignore[operator] # register_buffer has no type
        z: Tensor = self.child(x + self.buffer)  # type: ignore[operator]
        z += self.weight
        return z


class StaticMethod(nn.Module):
    """Calls a static method through its class, or through itself."""

    def __init__(self, through_self: bool) -> None:
        super().__init__()
        self.through_self, self.weight = through_self, nn.Parameter(torch.randn(10))

    @staticmethod
    def add(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def forward(self, x: Tensor) -> Tensor:
        z = self.add(x, self.weight) if self.through_self else StaticMethod.add(x, self.weight)
        z *= 2
        return z


MODELS: dict[str, Any] = {
    "linears": lambda: linear_layers(10, 50, 5),
    "sets_attribute": SetsAttribute,
    "same_tensor_twice": SameTensorTwice,
    "same_buffer_by_two_names": SameBufferByTwoNames,
    "static_by_class": lambda: StaticMethod(False),
    "static_by_self": lambda: StaticMethod(True),
}


def sharded(name: str, by_layer: bool = False) -> Any:
    model = MODELS[name]().to(device())
    for layer in model.modules() if by_layer else ():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def one_graph(name: str, step: Step, by_layer: bool = False, calls: int = 2) -> int:
    rank_seed(7)
    batches = [(torch.rand(20, 10, device=device()),) for _ in range(calls)]
    compiled = against_eager(lambda: sharded(name, by_layer), step, batches)
    return compiled.cache_info().traces


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("step", [forward_and_backward, inference])
@row("fsdp_aot_eager")
def test_linear_layers_equal_eager_code(ranks2: Pool, step: Step, by_layer: bool) -> None:
    assert ranks2.run(one_graph, "linears", step, by_layer) == [1, 1]


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        pytest.param("sets_attribute", 3, marks=row("fsdp_setattr")),
        pytest.param("same_tensor_twice", 3, marks=row("fsdp_dup_tensors_same_source")),
        pytest.param("same_buffer_by_two_names", 15, marks=row("fsdp_dup_tensors_diff_source")),
        pytest.param("static_by_class", 2, marks=row("fsdp_staticmethod")),
        pytest.param("static_by_self", 2, marks=row("fsdp_staticmethod")),
    ],
)
def test_a_model_compiles_once_and_equals_eager_code(ranks2: Pool, name: str, calls: int) -> None:
    assert ranks2.run(one_graph, name, forward_and_backward, False, calls) == [1, 1]


def arguments_that_wait() -> int:
    """How often a step is compiled whose argument waits for its collective, in two sizes and again."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3).to(device())
    compiled = ws.compile(forward_and_backward, backend="eager", dynamic=True, fullgraph=True, strategy=ws.DDP())
    for rows in (10, 12, 10, 10):
        sent = torch.rand(rows, 4, device=device())
        waits = funcol.all_reduce(sent, "sum", dist.group.WORLD)
        assert type(waits) is funcol.AsyncCollectiveTensor
        wanted = layer(funcol.all_reduce(sent, "sum", dist.group.WORLD))
        assert torch.equal(compiled(layer, waits), wanted)
        layer.zero_grad()
    return compiled.cache_info().traces


@row("async_subclass_no_specialize")
def test_an_argument_that_waits_for_its_collective_compiles_once(ranks2: Pool) -> None:
    assert ranks2.run(arguments_that_wait) == [1, 1]


def close_to_eager(by_layer: bool) -> None:
    """Another order of additions than eager code has."""
    torch.manual_seed(0)
    eager, ours = sharded("linears", by_layer), sharded("linears", by_layer)
    ours.load_state_dict(eager.state_dict())
    compiled = ws.compile(forward_and_backward, backend="inductor", fullgraph=True)
    x = torch.rand(20, 10, device=device())
    for _ in range(2):
        torch.testing.assert_close(forward_and_backward(eager, x), compiled(ours, x))
        for one, other in zip(eager.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(one.grad.to_local(), other.grad.to_local())


@pytest.mark.slow  # Inductor compiles kernels
@pytest.mark.parametrize("by_layer", [False, True])
@row("fsdp_inductor")
def test_linear_layers_compiled_by_inductor_are_close_to_eager_code(ranks2: Pool, by_layer: bool) -> None:
    ranks2.run(close_to_eager, by_layer)


def pairs(checkpointed: bool) -> Any:
    """Two units of two layers; checkpointed, each unit is computed again in the backward."""
    units = [nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)) for _ in range(2)]
    model = nn.Sequential(units[0], nn.ReLU(), units[1], nn.ReLU()).to(device())
    for unit in units:
        fully_shard(unit)
    fully_shard(model)
    if checkpointed:
        wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: any(module is unit for unit in units)
        )
    return model


def products(checkpointed: bool) -> tuple[int, int]:
    x = torch.rand(20, 10, device=device())
    compiled = against_eager(lambda: pairs(checkpointed), forward_and_backward, [(x,)] * 2, "eager")
    calls = [str(node.target) for node in compiled.graph.graph.nodes if node.op == "call_function"]
    return compiled.cache_info().traces, sum("addmm" in call for call in calls)


@row("fsdp_activation_checkpointing")
def test_checkpointed_units_are_computed_again_in_the_graph(ranks2: Pool) -> None:
    for (traces, plain), (again_traces, again) in zip(
        ranks2.run(products, False), ranks2.run(products, True), strict=True
    ):
        assert traces == again_traces == 1
        assert plain == 4
        assert again == 4 + 2  # the first layer of each unit: nobody reads what the second would give


def old_wrapper(use_orig_params: bool) -> None:
    wrapper = FullyShardedDataParallel(linear_layers(10, 50, 5), use_orig_params=use_orig_params)
    with pytest.raises(ws.ConfigError, match=r"Use torch\.distributed\.fsdp\.fully_shard"):
        ws.compile(forward_and_backward)(wrapper, torch.rand(20, 10, device=device()))


@pytest.mark.gpu  # it has no CPU training
@pytest.mark.parametrize("use_orig_params", [True, False])
@row("fsdp_orig_params_assert")
def test_the_older_wrapper_is_refused_by_name(nccl2: Pool, use_orig_params: bool) -> None:
    nccl2.run(old_wrapper, use_orig_params)
