"""Fused optimizers written out: against ATen's own fused kernels on the CPU, and which calls they stand in for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.unit.builders import aten
from wholestep.capture.functionalize.functionalize import functional_twin
from wholestep.ir import node_meta, op_info
from wholestep.lower.decompositions.optimizers import is_written_out, written_out
from wholestep.lower.inductor import segment_compiler

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-9}
SHAPES = [(40, 30), (17,), (1,)]
LARGEST = 4.0
"""Of every intermediate value of a test; see `tensors`."""
ROUNDINGS = 16
"""More than any of the formulas has on the way to one result."""


def twin(name: str, overload: str = "default") -> Any:
    op = getattr(getattr(aten, name), overload)
    return functional_twin(op, op_info.mutated_args(op))


def tensors(dtype: torch.dtype, *, steps: tuple[float, ...]) -> dict[str, list[Tensor]]:
    """Weights, gradients and means in [-1, 1), squares in [0.25, 1): no quotient of two of them is beyond 4."""
    generator = torch.Generator().manual_seed(0)

    def some(low: float, high: float) -> list[Tensor]:
        made = [torch.rand(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
        return [(low + (high - low) * one).to(dtype) for one in made]

    return {
        "self": some(-1, 1), "grads": some(-1, 1), "exp_avgs": some(-1, 1), "exp_avg_sqs": some(0.25, 1),
        "max_exp_avg_sqs": some(0.25, 1), "state_steps": [torch.tensor(one) for one in steps],
    }  # fmt: skip


def assert_close(name: str, wanted: list[Tensor], came: list[Tensor]) -> None:
    assert len(wanted) == len(came)
    for one, other in zip(wanted, came, strict=True):
        assert one.shape == other.shape, name
        if other.dtype is torch.bfloat16:
            # Both compute in float32 and round once at the end: where the float32 values lie on two sides of a border,
            # they are neighbours. That is rare: ROUNDINGS * LARGEST * 2 ** -24 of every 2 ** -8, twice.
            one = one.to(other.dtype)
            torch.testing.assert_close(other, one, rtol=2.0**-7, atol=2.0**-20, msg=name.__add__)
            assert (one != other).sum().item() <= max(1, 2.0**-6 * one.numel()), name
        else:
            torch.testing.assert_close(
                other, one, rtol=0.0, atol=ROUNDINGS * UNIT[one.dtype] * LARGEST, msg=name.__add__
            )


def compare(op: Any, lists: list[list[Tensor]], options: dict[str, Any]) -> None:
    before = [[one.clone() for one in row] for row in lists]
    half = lists[0][0].dtype is torch.bfloat16
    # ATen's fused SGD on the CPU is wrong for bfloat16 (torch 2.11 and 2.13), so that for float32 stands in.
    wanted = op(*([one.float() for one in row] if half else row for row in lists), **options)
    came = written_out(op, tuple(lists), options)
    assert len(wanted) == len(came) == len(op._schema.returns)
    for place, (one, other) in enumerate(zip(wanted, came, strict=True)):
        assert_close(f"result {place}: ", list(one), list(other))
    for one, other in zip(before, lists, strict=True):  # nothing was written to
        assert all(map(torch.equal, one, other))


STEPS = {"first step": (1.0, 1.0, 1.0), "many steps": (50.0, 3.0, 200.0)}


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.0}], ids=str)
@pytest.mark.parametrize("name", ["_fused_adam_", "_fused_adamw_"])
def test_adam_is_what_the_fused_kernel_computes(name, options, steps, dtype):
    given = tensors(dtype, steps=STEPS[steps])
    plain = {
        "lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False,
    }  # fmt: skip
    options = plain | options
    if not options["amsgrad"]:
        given["max_exp_avg_sqs"] = []
    compare(twin(name), list(given.values()), options)


@pytest.mark.parametrize("as_tensors", [False, True])
def test_the_first_step_has_the_moments_of_the_fused_kernel(as_tensors):
    """They are small shares of the gradients, which the kernel takes of betas in float64."""
    given = tensors(torch.float32, steps=STEPS["first step"]) | {"max_exp_avg_sqs": []}
    given |= {key: [torch.zeros_like(one) for one in given[key]] for key in ("exp_avgs", "exp_avg_sqs")}
    options = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
    rest = {"amsgrad": False, "maximize": False}
    op, lists = twin("_fused_adamw_"), tuple(given.values())
    own = {key: torch.tensor(value, dtype=torch.float64) for key, value in options.items()} if as_tensors else options
    wanted, came = op(*lists, **options, **rest), written_out(op, lists, own | rest)
    for place in (2, 3):  # exp_avgs, exp_avg_sqs
        for one, other in zip(wanted[place], came[place], strict=True):
            torch.testing.assert_close(other, one, rtol=2.0**-22, atol=0.0)


def test_a_rate_that_is_a_tensor():
    given = tensors(torch.float32, steps=STEPS["many steps"]) | {"max_exp_avg_sqs": []}
    options = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
    compare(twin("_fused_adamw_", "tensor_lr"), list(given.values()), {"lr": torch.tensor(0.01)} | options)


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "is_first_step": True}, {"momentum": 0.9, "nesterov": True},
     {"momentum": 0.9, "dampening": 0.3}, {"maximize": True, "momentum": 0.9}, {"weight_decay": 0.0},
     {"momentum": 0.9, "nesterov": True, "is_first_step": True}],
    ids=str,
)  # fmt: skip
def test_sgd_is_what_the_fused_kernel_computes(options, dtype):
    given = tensors(dtype, steps=(1.0,))
    plain = {
        "weight_decay": 0.1, "momentum": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False,
        "is_first_step": False,
    }  # fmt: skip
    buffers = given["exp_avgs"] if "momentum" in options else []
    compare(twin("_fused_sgd_"), [given["self"], given["grads"], buffers], plain | options)


@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
@pytest.mark.parametrize("scale", [None, 8.0, 3.0])
@pytest.mark.parametrize(
    ("name", "dtype"),  # ATen's fused SGD is wrong for bfloat16
    [("_fused_adamw_", torch.float32), ("_fused_adamw_", torch.bfloat16), ("_fused_sgd_", torch.float32)],
)
def test_a_grad_scaler_unscales_gradients_and_stops_updates(dtype, name, scale, found_inf):
    given = tensors(dtype, steps=STEPS["many steps"])
    plain = {"weight_decay": 0.1, "lr": 0.1, "maximize": False}
    if name == "_fused_sgd_":
        options = plain | {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": False}
        lists = [given["self"], given["grads"], given["exp_avgs"]]
    else:
        options = plain | {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False}
        lists = list((given | {"max_exp_avg_sqs": []}).values())
    scaler = {"grad_scale": scale, "found_inf": found_inf}
    scaler = {key: torch.tensor(value) for key, value in scaler.items() if value is not None}
    compare(twin(name), lists, options | scaler)
    if found_inf == 1:
        came = written_out(twin(name), tuple(lists), options | scaler)
        assert all(map(torch.equal, came[0], lists[0]))
        assert all(map(torch.equal, came[1], lists[1]))


@pytest.mark.parametrize("as_tensors", [False, True])
def test_numbers_may_be_tensors(as_tensors):
    """Packed numbers are float64 tensors without dimensions: the same bits as with the numbers themselves."""
    given = list((tensors(torch.float32, steps=STEPS["many steps"]) | {"max_exp_avg_sqs": []}).values())
    numbers = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    packed = {key: torch.tensor(value, dtype=torch.float64) for key, value in numbers.items()}
    op, flags = twin("_fused_adamw_"), {"amsgrad": False, "maximize": False}
    wanted = written_out(op, tuple(given), numbers | flags)
    came = written_out(op, tuple(given), (packed if as_tensors else numbers) | flags)
    assert all(torch.equal(one, other) for row, again in zip(wanted, came, strict=True) for one, other in
               zip(row, again, strict=True))  # fmt: skip


def call(device: str, **options: Any) -> fx.Node:
    """A node that calls the functional form of the fused AdamW, with fake values of a device."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def node(name: str, shape: tuple[int, ...]) -> fx.Node:
        made = graph.placeholder(name)
        with mode:
            node_meta.set_value(made, torch.empty(shape, device=device))
        return made

    lists = [[node(f"{name}_{place}", (3,)) for place in range(2)] for name in ("w", "g", "m", "v")]
    steps = [node(f"step_{place}", ()) for place in range(2)]
    made = graph.call_function(twin("_fused_adamw_"), (*lists, [], steps), options)
    node_meta.set_value(made, tuple([node_meta.value(one) for one in row] for row in lists))
    return made


def test_only_calls_on_a_gpu_are_written_out():
    """On the CPU ATen's kernel stays: it goes through memory once as well."""
    assert is_written_out(call("cuda"))
    assert segment_compiler.compiles(call("cuda"))
    assert not is_written_out(call("cpu"))
    assert not segment_compiler.compiles(call("cpu"))
    other = fx.Graph().call_function(aten.mul.Tensor)
    node_meta.set_value(other, node_meta.value(call("cuda")))
    assert not is_written_out(other)
