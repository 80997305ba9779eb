"""Gradients in the memory of graphs: which stay there between calls, and which are copied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.lower.gpu_programs import gpu, scheduled
from tests.unit.lower.replays import (
    GRAD,
    PARAM,
    Replays,
    graphed_of,
    layers,
    leaves,
    parameters,
    same,
    tensors_for,
    trained,
    two_grads,
)
from wholestep.ir.program import Output, OutputKind
from wholestep.lower.cudagraph.graph_runner import WARM_UP_CALLS


def test_gradients_that_nobody_holds_stay_in_the_memory_of_the_graph() -> None:
    pool, params = Replays(), parameters()
    graphed, places = leaves(two_grads, pool), list[list[int]]()
    for call in range(8):
        if call == 7:  # captured again, and the new graph leaves them elsewhere
            params[0].data = params[0].data.clone()
        x = tensors_for([gpu(3, 3)], 10 + call)[0]
        with torch.no_grad():
            others = trained(graphed, params, x)
            wanted = two_grads(*params, x)
        assert same([*(param.grad for param in params), *others], wanted)
        places.append([param.grad.data_ptr() for param in params])
        if call == 5:
            params[0].grad = None
        if call == 6:
            params[1].grad.add_(1)
    assert all(one == places[WARM_UP_CALLS] for one in places[WARM_UP_CALLS:7])
    assert pool.calls.count("capture") == 2


def test_gradients_that_somebody_holds_keep_their_values() -> None:
    """The graph is given up once, and gradients are copied from then on."""
    pool, params = Replays(), parameters()
    graphed, held, wanted = leaves(two_grads, pool), list[Any](), list[Any]()
    for call in range(9):
        x = tensors_for([gpu(3, 3)], 10 + call)[0]
        with torch.no_grad():
            trained(graphed, params, x)
            wanted.append(two_grads(*params, x)[:2])
        if call in (4, 6):
            held.append((wanted[-1], [params[0].grad, params[1].grad[1:]]))
        assert same([param.grad for param in params], wanted[-1])
        assert pool.calls.count("capture") == (0 if call < 2 else 1 if call < 5 else 2)
    for (first, second), (one, other) in held:
        assert same([one, other], [first, second[1:]])


def test_gradients_of_one_signature_stay_in_the_pool() -> None:
    """Graphs from before use the memory that they have, so these are captured again; later ones leave it alone,
    and copy their own."""
    pool, params = Replays(), parameters()
    before, lends, behind = (leaves(two_grads, pool) for _ in range(3))
    (x,) = tensors_for([gpu(3, 3)], 10)
    with torch.no_grad():
        before([*params, x]), before([*params, x])
        before._may_keep_grads = False  # as one that leaves no gradients
        before([*params, x])
        for _ in range(3):
            trained(lends, params, x)
        places = [param.grad.data_ptr() for param in params]
        assert all(piece.graph is None for piece in before._pieces)
        del pool.calls[:]
        for _ in range(4):
            trained(behind, params, x)
            assert [param.grad.data_ptr() for param in params] != places
        assert behind._kept_grads is None
        before([*params, x])
        assert pool.calls.count("capture") == 2
        trained(lends, params, x)
        assert [param.grad.data_ptr() for param in params] == places
        assert pool.calls.count("capture") == 2


def test_a_signature_whose_gradients_cannot_stay_leaves_the_pool_to_others() -> None:
    """Neither are their graphs given up for it, nor may they not leave gradients."""
    pool, params = Replays(), parameters()
    (x,) = tensors_for([gpu(3, 3)], 10)
    before, copies, lends = leaves(grad_twice, pool), leaves(grad_twice, pool), leaves(two_grads, pool)
    with torch.no_grad():
        for _ in range(4):
            trained(before, params, x)
        graphs = [piece.graph for piece in before._pieces]
        for _ in range(4):
            trained(copies, params, x)
        assert [piece.graph for piece in before._pieces] == graphs
        for _ in range(4):
            trained(lends, params, x)
    assert lends._kept_grads is not None
    assert sorted(lends._kept_grads.fresh()) == [0, 1]


def grad_twice(v: Tensor, w: Tensor, x: Tensor) -> tuple[Any, ...]:
    y = layers(x)
    return y, y, y.sum()


def grad_of_argument(v: Tensor, w: Tensor, x: Tensor) -> tuple[Any, ...]:
    return x.view(3, 3), layers(x), x.sum()


def grad_expanded(v: Tensor, w: Tensor, x: Tensor) -> tuple[Any, ...]:
    return layers(x).sum().expand(3, 3), layers(x), x.sum()


def grad_returned(v: Tensor, w: Tensor, x: Tensor) -> tuple[Any, ...]:
    y = layers(x)
    return y, layers(y), y.select(0, 0), x.sum()


@pytest.mark.parametrize(
    ("fn", "stays"), [(grad_twice, []), (grad_of_argument, [1]), (grad_expanded, [1]), (grad_returned, [1])]
)
def test_gradients_with_memory_of_something_else_are_copied(fn: Callable[..., Any], stays: list[int]) -> None:
    pool, params = Replays(), parameters()
    graphed = leaves(fn, pool)
    for call in range(6):
        x = tensors_for([gpu(3, 3)], 10 + call)[0]
        with torch.no_grad():
            trained(graphed, params, x)
            assert same([param.grad for param in params], fn(*params, x)[:2])
            assert params[0].grad.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or call < WARM_UP_CALLS
            params[0].grad = params[0].grad.clone().add_(1)
            assert same([params[1].grad], fn(*params, x)[1:2])
    assert graphed._kept_grads is not None
    assert sorted(graphed._kept_grads.fresh()) == stays


def test_results_share_what_they_share_without_a_graph() -> None:
    """With each other, with gradients and with inputs; and with nothing of the next call."""

    def step(v: Tensor, w: Tensor, x: Tensor) -> tuple[Any, ...]:
        y = layers(x)
        return y, layers(y), y, y.select(0, 1), v.t(), x, x.select(0, 0), w

    pool, params = Replays(), parameters()
    graphed, kept, wanted = leaves(step, pool), list[Any](), list[Any]()
    for call in range(6):
        (x,) = tensors_for([gpu(3, 3)], 10 + call)
        with torch.no_grad():
            results = trained(graphed, params, x)
            assert same([param.grad for param in params], step(*params, x)[:2])
            assert same(results, step(*params, x)[2:])
            grad, row, turned, given, first, weight = results
            assert grad is params[0].grad
            assert given is x
            assert weight is params[1]
            grad[1], x[0], params[0].data[2] = 5.0, 6.0, float(call)
            assert row.tolist() == [5] * 3
            assert first.tolist() == [6] * 3
            assert turned[:, 2].tolist() == [call] * 3
            kept += [grad, row]
            wanted += [grad.clone(), row.clone()]
    assert pool.calls.count("capture") == 1
    assert same(kept, wanted)


def test_gradients_of_a_step_that_reads_them_are_copied() -> None:
    def step(w: Tensor, grad: Tensor, x: Tensor) -> tuple[Any, ...]:
        return grad @ layers(w @ x), x.sum()

    pool, specs = Replays(), [gpu(3, 3, kind=PARAM), gpu(3, 3, kind=GRAD), gpu(3, 3)]
    program = scheduled(step, *specs, segments=False)
    grad = Output(kind=OutputKind.GRAD, name="x0", target=0)
    graphed = graphed_of(replace(program, outputs=(grad, *program.outputs[1:])), pool)
    (param,), x = parameters(1), tensors_for([gpu(3, 3)], 3)[0]
    param.grad = torch.eye(3)
    with torch.no_grad():
        for _ in range(9):
            wanted = step(param, param.grad, x)[:1]
            param.grad = graphed([param, param.grad, x])[0]
            assert same([param.grad], wanted)
    assert graphed._kept_grads is not None
    assert not graphed._kept_grads.fresh()


def test_gradients_from_before_give_their_memory_to_those_that_replace_them() -> None:
    """They are gone before results are copied, and stay where a call is no replay, which may fail."""
    pool, params = Replays(), parameters()
    graphed, (x,) = leaves(two_grads, pool), tensors_for([gpu(3, 3)], 3)
    for call in range(5):
        for param in params:
            param.grad = torch.ones(3, 3)
        with torch.no_grad():
            graphed([*params, x])
        assert [param.grad is None for param in params] == [call >= WARM_UP_CALLS] * 2
