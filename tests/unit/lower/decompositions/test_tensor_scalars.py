"""The arithmetic of packed numbers: each rule against the operator of ATen with the number itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit import builders
from tests.unit.builders import aten
from wholestep.ir import op_info
from wholestep.ir.ops.packed_scalars import pack
from wholestep.lower.decompositions.tensor_scalars import _RULES, Numbers, by_rule, takes_numbers
from wholestep.lower.inductor import segment_compiler
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.rewrites.dead_code import eliminate_dead_code
from wholestep.passes.schedule.pack_scalars import pack_scalars

X, Y, Z = "X", "Y", "Z"  # tensors, or lists of them in a foreach call
N, NS = "N", "NS"  # a number, and a list of numbers

SAME_ARITHMETIC = {
    "mul": [(aten.mul.Tensor, (X, N), {})],
    "div": [(aten.div.Tensor, (X, N), {}), (aten.div.Tensor_mode, (X, N), {"rounding_mode": "floor"})],
    "add": [(aten.add.Tensor, (X, N), {})],
    "sub": [(aten.sub.Tensor, (X, N), {})],
    "clamp": [(aten.clamp.default, (X, N), {}), (aten.clamp.default, (X, None, N), {}),
              (aten.clamp.default, (X, 0.6, N), {}), (aten.clamp.default, (X, N, 1.2), {})],
    "clamp_min": [(aten.clamp_min.default, (X, N), {})],
    "clamp_max": [(aten.clamp_max.default, (X, N), {})],
    "foreach": [
        (aten._foreach_mul.Scalar, (X, N), {}), (aten._foreach_mul.ScalarList, (X, NS), {}),
        (aten._foreach_div.Scalar, (X, N), {}), (aten._foreach_div.ScalarList, (X, NS), {}),
        (aten._foreach_add.Scalar, (X, N), {}), (aten._foreach_sub.ScalarList, (X, NS), {}),
        (aten._foreach_clamp_min.Scalar, (X, N), {}), (aten._foreach_clamp_max.ScalarList, (X, NS), {}),
        (aten._foreach_maximum.Scalar, (X, N), {}), (aten._foreach_minimum.ScalarList, (X, NS), {}),
    ],
}  # fmt: skip
"""Rule -> calls that round once, as the rule does: the same bits in float32 and float64."""

SEVERAL_ROUNDINGS = {
    "add with alpha": [(aten.add.Tensor, (X, Y), {"alpha": N}), (aten._foreach_add.List, (X, Y), {"alpha": N})],
    "sub with alpha": [(aten.sub.Tensor, (X, Y), {"alpha": N}), (aten._foreach_sub.List, (X, Y), {"alpha": N})],
    "pow": [(aten.pow.Tensor_Scalar, (X, N), {}), (aten.pow.Scalar, (N, X), {}), (aten._foreach_pow.Scalar, (X, N), {}),
            (aten._foreach_pow.ScalarList, (X, NS), {}), (aten._foreach_pow.ScalarAndTensor, (N, X), {})],
    "addcmul": [(aten.addcmul.default, (X, Y, Z), {"value": N}), (aten._foreach_addcmul.Scalar, (X, Y, Z, N), {}),
                (aten._foreach_addcmul.ScalarList, (X, Y, Z, NS), {})],
    "addcdiv": [(aten.addcdiv.default, (X, Y, Z), {"value": N}), (aten._foreach_addcdiv.Scalar, (X, Y, Z, N), {}),
                (aten._foreach_addcdiv.ScalarList, (X, Y, Z, NS), {})],
    "lerp": [(aten.lerp.Scalar, (X, Y, N), {}), (aten._foreach_lerp.Scalar, (X, Y, N), {})],
}  # fmt: skip
"""Calls that round in between, where kernels for different devices differ in the order."""

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-9}
LARGEST = 8.0
"""Tensors are in [0.5, 2), numbers in [0.1, 1.5): no intermediate value of a rule is larger."""


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(*case, id=f"{case[0]} {case[2] or ''}{place}") for rows in table.values() for place, case in
            enumerate(rows)]  # fmt: skip


def values(op: Any, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    many = op._schema.name.startswith("aten::_foreach_")

    def tensor(shape: tuple[int, ...]) -> Tensor:
        return (0.5 + 1.5 * torch.rand(shape, generator=generator, dtype=torch.float64)).to(dtype)

    shapes = [(37,), (2, 3), ()] if many else [(5, 37)]
    found: dict[str, Any] = {}
    for name in (X, Y, Z):
        found[name] = list(map(tensor, shapes)) if many else tensor(shapes[0])
    numbers = (0.1 + 1.4 * torch.rand(3, generator=generator, dtype=torch.float64)).tolist()
    return found | {N: numbers[0], NS: numbers}


def both(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Any]) -> tuple[Any, Any]:
    """What ATen gives for the numbers, and what the rule gives for tensors that hold them."""

    def bound(arg: Any, *, packed: bool) -> Any:
        found = given[arg] if isinstance(arg, str) and arg in given else arg
        if packed and arg == N:
            return torch.tensor(found, dtype=torch.float64)
        return list(torch.tensor(found, dtype=torch.float64).unbind()) if packed and arg == NS else found

    wanted = op(*(bound(arg, packed=False) for arg in args), **{k: bound(v, packed=False) for k, v in kwargs.items()})
    tensors = {k: bound(v, packed=True) for k, v in kwargs.items()}
    return wanted, by_rule(op, tuple(bound(arg, packed=True) for arg in args), tensors, wanted)


def raised(value: Any) -> Any:
    return (
        [one.float() for one in value]
        if isinstance(value, list) and isinstance(value[0], Tensor)
        else (value.float() if isinstance(value, Tensor) else value)
    )


def listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


@settings(max_examples=5, derandomize=True)
@given(seed=st.integers(0, 10**6))
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(("op", "args", "kwargs"), cases(SAME_ARITHMETIC))
def test_one_rounding_gives_the_same_bits(op, args, kwargs, dtype, seed):
    given = values(op, dtype, seed)
    wanted, came = both(op, args, kwargs, given)
    if dtype is torch.bfloat16:  # computed in float32, as on a GPU; on the CPU some kernels round the number, too
        wanted = both(op, args, kwargs, {key: raised(value) for key, value in given.items()})[0]
    for one, other in zip(listed(wanted), listed(came), strict=True):
        assert (other.dtype, other.shape) == (dtype, one.shape)
        if one.ndim:
            assert torch.equal(one.to(dtype), other)
        else:  # two tensors without dimensions: the rule computes in float64 and rounds twice
            torch.testing.assert_close(other, one.to(dtype), rtol=2 * UNIT[dtype], atol=0.0)


@settings(max_examples=5, derandomize=True)
@given(seed=st.integers(0, 10**6))
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(("op", "args", "kwargs"), cases(SEVERAL_ROUNDINGS))
def test_several_roundings_stay_within_them(op, args, kwargs, dtype, seed):
    wanted, came = both(op, args, kwargs, values(op, dtype, seed))
    for one, other in zip(listed(wanted), listed(came), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        # At most four roundings each of a value no larger than LARGEST.
        torch.testing.assert_close(other, one, rtol=0.0, atol=8 * UNIT[dtype] * LARGEST)


def test_every_rule_is_held_against_its_operator():
    tables = [*SAME_ARITHMETIC.values(), *SEVERAL_ROUNDINGS.values()]
    covered = {op._schema.name.removeprefix("aten::").removeprefix("_foreach_") for rows in tables for op, _, _ in rows}
    assert covered == set(_RULES)


def test_half_sized_types_are_computed_in_float32():
    """1 + 2 ** -9 rounds to 1 in bfloat16; times 256 the difference shows if the sum was rounded in between."""
    x = torch.ones(4, dtype=torch.bfloat16)
    number = torch.tensor(2.0**-9, dtype=torch.float64)
    came = by_rule(aten.addcmul.default, (-x, x + 0, x), {"value": 1 + number}, x)
    assert came.dtype is torch.bfloat16
    assert torch.equal(came.float(), torch.full((4,), 2.0**-9))


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [(aten.mul.Tensor, (X, N), {}), (aten.clamp.default, (X, N), {}), (aten.clamp.default, (X, None, N), {}),
     (aten.add.Tensor, (X, N), {}), (aten.pow.Tensor_Scalar, (X, N), {})],
)  # fmt: skip
def test_integers_become_floats_as_with_the_number(op, args, kwargs):
    wanted, came = both(op, args, kwargs, {X: torch.tensor([0, 1, 2, 3]), N: 1.5})
    assert wanted.dtype is came.dtype is torch.float32
    torch.testing.assert_close(came, wanted, rtol=2 * UNIT[torch.float32], atol=0.0)


def test_not_a_number_stays_one():
    x = torch.tensor([math.nan, 1.0, 3.0])
    for op in (aten.clamp_min.default, aten.clamp_max.default, aten.mul.Tensor):
        wanted, came = both(op, (X, N), {}, {X: x, N: 2.0})
        assert torch.allclose(came, wanted, rtol=0.0, atol=0.0, equal_nan=True)
        assert came[0].isnan()


def packed_program() -> tuple[Any, list[Tensor]]:
    def fn(x: Tensor, y: Tensor, rate: Tensor) -> tuple[Tensor, ...]:
        number = rate.item()
        a, b = torch._foreach_mul([x, y], number)
        return torch.addcdiv(a, x, x + 1, value=number * 2), torch._foreach_add([b, y], [y, b], alpha=number)[0]

    tensors = [torch.rand(3, 4), torch.rand(3, 4), torch.tensor(0.3, dtype=torch.float64)]
    program = run_passes(builders.without_gradients(builders.capture(fn, tensors)), [eliminate_dead_code])
    return run_passes(program, [lambda one: pack_scalars(one, reads=segment_compiler.reads_packed)]), tensors


def test_a_graph_runs_on_tensors_in_the_place_of_numbers():
    program, tensors = packed_program()
    wanted = builders.execute(program, tensors)[0]
    with torch.no_grad():
        came = list(Numbers(program.module).run(*tensors))
    for one, other in zip(wanted, came, strict=True):
        torch.testing.assert_close(other, one, rtol=0.0, atol=8 * UNIT[torch.float32] * LARGEST)


def test_calls_without_a_rule_take_no_numbers():
    program, _ = packed_program()
    calls = [node for node in program.graph.nodes if op_info.is_op(node)]
    assert any(map(takes_numbers, calls))
    elu = program.graph.call_function(aten.elu.default, (calls[0], 2.0))
    getitem = next(
        node for node in program.graph.nodes if node.target.__class__.__name__ == "builtin_function_or_method"
    )
    assert not takes_numbers(elu)
    assert not takes_numbers(getitem)
    assert pack([0.5], torch.device("cpu")).ndim == 1
