"""Reduce operations can be copied, pickled and compared."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

row = pytest.mark.row
on_gpu = pytest.mark.gpu
KINDS = [getattr(dist.ReduceOp, name) for name in "SUM AVG PRODUCT MIN MAX BAND BOR BXOR".split()]


def scaled() -> list[dist.ReduceOp]:
    """Sums with a factor, which only a torch with NCCL has."""
    return [dist._make_nccl_premul_sum(factor) for factor in (2.0, torch.tensor(1.0))]


@row("S10", "op_isinstance_of_reduceop")
def test_kinds_are_reduce_operations() -> None:
    assert all(isinstance(kind, dist.ReduceOp) for kind in KINDS)


@row("S10", "reduceop_copyable")
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_reduce_operations_can_be_copied(duplicate: Callable[[Any], Any]) -> None:
    for kind in KINDS:
        assert duplicate(kind) == kind
        assert duplicate(dist.ReduceOp(kind)) == kind


@row("S10", "reduceop_pickle")
def test_reduce_operations_can_be_pickled() -> None:
    for kind in KINDS:
        whole = dist.ReduceOp(kind)
        assert pickle.loads(pickle.dumps(whole)) == whole
        assert dist.ReduceOp(pickle.loads(pickle.dumps(kind))) == kind


@row("S10", "op_isinstance_of_reduceop")
@row("S10", "reduceop_copyable")
@row("S10", "reduceop_pickle")
@on_gpu
def test_scaled_sums_are_reduce_operations_too() -> None:
    for op in scaled():
        assert isinstance(op, dist.ReduceOp)
        assert copy.copy(op) == op == copy.deepcopy(op)
        assert pickle.loads(pickle.dumps(op)) == op


@row("S10", "reduceop_equal")
def test_reduce_operations_are_equal_only_to_their_kind() -> None:
    for kind in KINDS:
        whole = dist.ReduceOp(kind)
        assert whole == dist.ReduceOp(kind)
        assert whole == kind
        for other in ("abc", None):
            assert whole != other
            assert kind != other
            assert other not in (kind, whole)
        assert [dist.ReduceOp(other) == kind for other in KINDS].count(True) == 1
