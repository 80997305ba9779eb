"""What is known about operators is right for the operators that matter, on every supported torch."""

from __future__ import annotations

import operator

import pytest
import torch

from wholestep.ir import op_info

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@pytest.mark.parametrize(
    ("op", "twin"),
    [
        (aten.add.Tensor, aten.add_.Tensor),
        (aten.mul.Scalar, aten.mul_.Scalar),
        (aten.lerp.Scalar, aten.lerp_.Scalar),
        (aten.addcdiv.default, aten.addcdiv_.default),
        (aten.copy.default, aten.copy_.default),
        (aten._foreach_add.List, aten._foreach_add_.List),
        (aten._foreach_addcdiv.ScalarList, aten._foreach_addcdiv_.ScalarList),
        (aten._fused_adamw.default, aten._fused_adamw_.default),
        (aten._fused_sgd.tensor_lr, aten._fused_sgd_.tensor_lr),
        (c10d.all_reduce.default, c10d.all_reduce_.default),
        (c10d.broadcast.default, c10d.broadcast_.default),
        (aten.mm.default, None),
        (aten.sum.default, None),
        (aten.t.default, None),
        (aten.squeeze.default, None),
        (aten.resize.default, None),
        (aten.add_.Tensor, None),
        (aten.bernoulli.p, None),
        (operator.add, None),
    ],
)
def test_in_place_variants(op, twin):
    assert op_info.in_place_variant(op) is twin


def test_what_fused_optimizers_write():
    fused = aten._fused_adamw_.default
    assert op_info.mutated_args(fused) == (0, 1, 2, 3, 4)
    assert op_info.written_by(fused, {}) == (0, 2, 3, 4)
    assert op_info.written_by(fused, {"grad_scale": object()}) == (0, 1, 2, 3, 4)
    assert op_info.written_by(aten.add_.Tensor, {}) == (0,)


@pytest.mark.parametrize(
    ("op", "viewed"),
    [
        (aten.view.default, (0,)),
        (aten._unsafe_view.default, (0,)),
        (aten.split.Tensor, (0,)),
        (op_info.WAIT, (0,)),
        (operator.getitem, (0,)),
        (aten.add.Tensor, ()),
        (aten.clone.default, ()),
        (torch.sym_max, ()),
    ],
)
def test_views(op, viewed):
    assert op_info.viewed_args(op) == viewed


@pytest.mark.parametrize(
    ("op", "gives"),
    [
        (aten.add_.Tensor, True),
        (aten.index_put_.default, True),
        (aten.add.Tensor, False),
        (aten.add.out, False),
        (aten.view.default, False),
        (aten.transpose_.default, False),
        (aten.resize_.default, False),
        (aten._foreach_add_.List, False),
    ],
)
def test_what_gives_its_first_argument_as_it_was_shaped(op, gives):
    assert op_info.gives_first(op) is gives


@pytest.mark.parametrize(
    ("op", "effect"),
    [
        (aten.add.Tensor, False),
        (aten.rand.default, True),
        (aten.bernoulli.p, True),
        (aten.add_.Tensor, True),
        (aten._assert_async.default, True),
        (torch.ops.profiler._record_function_enter_new.default, False),
        (c10d.all_reduce.default, False),
        (operator.mul, False),
    ],
)
def test_effects(op, effect):
    assert op_info.has_effect(op) is effect


@pytest.mark.parametrize(
    ("op", "pure"),
    [
        (aten.add_.Tensor, True),
        (operator.mul, True),
        (op_info.GRADIENT, True),
        (aten.rand.default, False),
        (c10d.all_reduce.default, False),
        (op_info.WAIT, False),
        (torch.ops.profiler._record_function_enter_new.default, False),
    ],
)
def test_what_only_computes(op, pure):
    assert op_info.only_computes(op) is pure
