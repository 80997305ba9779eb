"""The inputs of a run and the signature of a call, in native code and in Python."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wholestep.capture.guards import fast_guards
from wholestep.capture.guards.tensor_layout import describe, first_aliases
from wholestep.capture.native import build
from wholestep.capture.python import tree_util


@pytest.fixture(params=["native", "plain"])
def inputs(request: pytest.FixtureRequest) -> Callable[..., fast_guards.InputFiller]:
    """Makes inputs of: tensors, numbers, user, grads."""
    assert build.wait() == ""

    def make(tensors: list[Any], numbers: Any = (), user: Any = (), grads: Any = ()) -> fast_guards.InputFiller:
        made = fast_guards.PythonInputFiller(tensors, numbers, user, grads)
        return made.native() if request.param == "native" else made

    return make


Make = Callable[..., fast_guards.InputFiller]


@pytest.mark.parametrize("before", [True, False])
def test_gradients_are_off_in_a_run_and_as_they_were_after_it(inputs: Make, before: bool) -> None:
    def fails(inputs: list[Any]) -> None:
        raise ValueError(torch.is_grad_enabled())

    with torch.set_grad_enabled(before):
        assert inputs([1, 2]).run(lambda flat: (torch.is_grad_enabled(), *flat), []) == (False, 1, 2)
        assert torch.is_grad_enabled() == before
        with pytest.raises(ValueError, match="False"):
            inputs([]).run(fails, [])
        assert torch.is_grad_enabled() == before


@pytest.mark.parametrize("before", [True, False])
def test_autocast_is_off_in_a_run_and_as_it_was_after_it(inputs: Make, before: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=before):
        ran = inputs([torch.ones(2, 2)]).run(lambda flat: (flat[0] @ flat[0]).dtype, [])
        assert torch.is_autocast_enabled("cpu") == before
    assert ran is torch.float32


def test_inputs_are_as_they_are_now(inputs: Make) -> None:
    parameter, lives = nn.Parameter(torch.zeros(2)), object()
    group: dict[str, Any] = {"lr": 0.5, "betas": (0.9, 0.99)}
    made = inputs(
        [None, None, lives, None, None, None],
        [(0, group, "lr", None), (1, group, "betas", 1)],
        [(3, 1), (4, 0)],
        [(5, parameter)],
    )
    assert made.run(list, ["a", "b"]) == [0.5, 0.99, lives, "b", "a", None]
    group.update(lr=2, betas=[0.1, True])  # integers enter as floats
    parameter.grad = torch.ones(2)
    found = made.run(list, ["c", "d"])
    assert found == [2.0, 1.0, lives, "d", "c", parameter.grad]
    assert [type(one) for one in found[:2]] == [float, float]


def test_inputs_that_are_not_there_are_the_errors_of_python(inputs: Make) -> None:
    for numbers, error in (([(0, {}, "lr", None)], KeyError), ([(0, {"lr": "x"}, "lr", None)], ValueError)):
        with pytest.raises(error):
            inputs([None], numbers).run(list, [])
    with pytest.raises(IndexError):
        inputs([None], user=[(0, 3)]).run(list, [1])
    with pytest.raises(IndexError):
        inputs([None], user=[(4, 0)]).run(list, [1])


def test_what_belongs_to_a_call_is_let_go_and_the_list_serves_again(inputs: Make) -> None:
    class Batch:
        pass

    seen: list[list[Any]] = []
    made = inputs([1, None, 2, None], user=[(1, 0), (3, 0)])
    gone = []
    for _ in range(3):
        batch = Batch()
        gone.append(weakref.ref(batch))
        assert made.run(lambda flat: seen.append(flat) or flat[1] is flat[3] is not None, [batch]) is True
        del batch
        assert seen[-1] == [1, None, 2, None]
        assert gone[-1]() is None
    assert seen[0] is seen[1] is seen[2]


def test_a_call_within_a_call_has_a_list_of_its_own(inputs: Make) -> None:
    made = inputs([None], user=[(0, 0)])

    def function(flat: list[Any]) -> list[Any]:
        inner = made.run(list, ["inner"]) if flat == ["outer"] else []
        return [*flat, *inner]

    assert made.run(function, ["outer"]) == ["outer", "inner"]


def test_inputs_in_a_cycle_are_collected(inputs: Make) -> None:
    class Owner:
        pass

    owner: Any = Owner()
    owner.inputs = inputs([owner])
    assert owner.inputs.run(len, []) == 1
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None


def matcher(
    args: tuple[Any, ...], kwargs: dict[str, Any], state: tuple[Tensor, ...] = ()
) -> fast_guards.SignatureGuard | None:
    leaves, spec = tree_util.flatten((args, kwargs))
    data = [isinstance(leaf, torch.Tensor) and all(leaf is not one for one in state) for leaf in leaves]
    described = [describe(leaf) if is_data else leaf for leaf, is_data in zip(leaves, data, strict=True)]
    return fast_guards.signature_guard(spec, described, data, first_aliases(leaves, data), state)


def same_as_flatten(made: fast_guards.SignatureGuard, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    found = made.match((args, kwargs))
    wanted = tree_util.flatten((args, kwargs))[0]
    return found is not None and len(found) == len(wanted) and all(a is b for a, b in zip(found, wanted, strict=True))


def test_leaves_are_those_of_flatten(module: ModuleType) -> None:
    model = nn.Linear(2, 2)
    x, y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    args, kwargs = (model, {"x": x, "more": [y, (x, None)]}), {"scale": 2.5, "name": "a b", "on": True, "n": 10**20}
    made = matcher(args, kwargs)
    assert made is not None
    assert same_as_flatten(made, args, kwargs)
    u, v = torch.ones(2, 3), torch.ones(2, dtype=torch.int64)
    others = {"scale": float("2.5"), "name": " ".join("ab"), "on": True, "n": int("1" + "0" * 20)}
    assert same_as_flatten(made, (model, {"x": u, "more": [v, (u, None)]}), others)


X, Y = torch.zeros(2, 3), torch.zeros(2, 3)
OTHER_CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "shape": ((torch.zeros(3, 3), [Y, 1]), {"k": 1.0}),
    "strides": ((torch.zeros(3, 2).t(), [Y, 1]), {"k": 1.0}),
    "dtype": ((X.double(), [Y, 1]), {"k": 1.0}),
    "device": ((torch.zeros(2, 3, device="meta"), [Y, 1]), {"k": 1.0}),
    "requires_grad": ((torch.zeros(2, 3, requires_grad=True), [Y, 1]), {"k": 1.0}),
    "negative": ((torch._neg_view(X), [Y, 1]), {"k": 1.0}),
    "class": ((nn.Parameter(X, requires_grad=False), [Y, 1]), {"k": 1.0}),
    "layout": ((X.to_sparse(), [Y, 1]), {"k": 1.0}),
    "no tensor": ((None, [Y, 1]), {"k": 1.0}),
    "the same tensor twice": ((X, [X, 1]), {"k": 1.0}),
    "a number": ((X, [Y, 2]), {"k": 1.0}),
    "type of a number": ((X, [Y, True]), {"k": 1.0}),
    "a keyword's number": ((X, [Y, 1]), {"k": 1.5}),
    "another keyword": ((X, [Y, 1]), {"j": 1.0}),
    "one keyword more": ((X, [Y, 1]), {"k": 1.0, "j": 1.0}),
    "one argument more": ((X, [Y, 1], 1), {"k": 1.0}),
    "a longer list": ((X, [Y, 1, 1]), {"k": 1.0}),
    "a tuple": ((X, (Y, 1)), {"k": 1.0}),
    "nothing": ((), {}),
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_another_call_does_not_match(module: ModuleType, name: str) -> None:
    made = matcher((X, [Y, 1]), {"k": 1.0})
    assert made is not None
    assert made.match(OTHER_CALLS[name]) is None
    assert made.match(((torch.ones(2, 3), [torch.ones(2, 3), 1]), {"k": 1.0})) is not None


def test_a_conjugate_is_another_call(module: ModuleType) -> None:
    z = torch.zeros(2, 3, dtype=torch.complex64)
    made = matcher((z,), {})
    assert made is not None
    assert made.match(((z.conj(),), {})) is None
    assert made.match(((z.clone(),), {})) is not None


def test_another_order_of_names_or_another_tensor_given_twice_does_not_match(module: ModuleType) -> None:
    made = matcher(({"a": X, "b": Y},), {})
    assert made is not None
    assert made.match((({"b": Y, "a": X},), {})) is None
    twice = matcher((X, Y, X), {})
    assert twice is not None
    assert twice.match(((Y, X, Y), {})) is not None
    assert twice.match(((X, Y, Y), {})) is None
    assert twice.match(((X, X, X), {})) is None


def test_a_tensor_of_the_state_is_no_data(module: ModuleType) -> None:
    state = torch.zeros(2, 3)
    made = matcher((X,), {}, state=(state,))
    assert made is not None
    assert made.match(((state,), {})) is None


@pytest.mark.parametrize("thing", [SimpleNamespace(), {1: X}, OrderedDict(a=X), object(), {1, 2}])
def test_other_arguments_are_left_to_python(module: ModuleType, thing: Any) -> None:
    assert matcher((X, thing), {}) is None
