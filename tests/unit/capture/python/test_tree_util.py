"""Arguments and results come apart into leaves and back, whatever classes hold them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.capture.python import tree_util


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    tag: str = "t"


@dataclass(slots=True)
class Slotted:
    x: Tensor
    factor: float = 2.0


class Pair(NamedTuple):
    first: Tensor
    second: Any


Old = namedtuple("Old", "a b")


class Plain:
    """An object that refuses to be made anew: fields come back without ``__init__``."""

    def __init__(self, x: Tensor, inner: Any, *, secret: str) -> None:
        self.x, self.inner, self.secret = x, inner, secret


class Batch(UserDict[str, Any]):
    """A mapping that is no dict, as tokenizers return."""

    def __init__(self, data: dict[str, Any], *, source: str) -> None:
        super().__init__(data)
        self.source = source


class NoTensors:
    def __init__(self) -> None:
        self.name = "n"


X, Y = torch.ones(2), torch.zeros(3)


def round_trip(thing: Any) -> Any:
    leaves, spec = tree_util.flatten(thing)
    return tree_util.unflatten(list(leaves), spec)


def tensors(thing: Any) -> list[Tensor]:
    return [leaf for leaf in tree_util.flatten(thing)[0] if isinstance(leaf, Tensor)]


TREES: dict[str, tuple[Any, list[Tensor]]] = {
    "tensor": (X, [X]),
    "number": (3.5, []),
    "none": (None, []),
    "dict": ({"a": [X, (Y, 1)]}, [X, Y]),
    "ordered": (OrderedDict(b=X, a=Y), [X, Y]),
    "named_tuple": (Pair(X, {"k": Y}), [X, Y]),
    "old_named_tuple": (Old(1, X), [X]),
    "frozen_dataclass": (Frozen(X), [X]),
    "slotted_dataclass": (Slotted(X), [X]),
    "object_in_object": (Plain(X, Plain(Y, None, secret="in"), secret="out"), [X, Y]),
    "object_in_list": ([Frozen(X), 1, Frozen(Y, "u")], [X, Y]),
    "user_dict": (Batch({"ids": X, "mask": Y}, source="file"), [X, Y]),
}


@pytest.mark.parametrize("name", TREES)
def test_every_tensor_is_a_leaf(name: str) -> None:
    thing, wanted = TREES[name]
    assert [id(tensor) for tensor in tensors(thing)] == [id(tensor) for tensor in wanted]


def spell(thing: Any) -> Any:
    """A tree with its classes, tensors by identity."""
    if isinstance(thing, Tensor):
        return id(thing)
    if isinstance(thing, (list, tuple)):
        return type(thing), [spell(one) for one in thing]
    if isinstance(thing, dict):
        return type(thing), [(key, spell(one)) for key, one in thing.items()]
    names = getattr(thing, "__slots__", None) or sorted(getattr(thing, "__dict__", ()))
    return (type(thing), [(name, spell(getattr(thing, name))) for name in names]) if names else thing


@pytest.mark.parametrize("name", TREES)
def test_a_round_trip_gives_the_same_tree(name: str) -> None:
    thing, _ = TREES[name]
    came = round_trip(thing)
    assert spell(came) == spell(thing)


def test_the_original_is_left_alone() -> None:
    inner = Plain(Y, None, secret="in")
    thing = Plain(X, inner, secret="out")
    leaves, spec = tree_util.flatten(thing)
    came = tree_util.unflatten([leaf * 2 if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
    assert thing.x is X
    assert thing.inner is inner
    assert torch.equal(came.x, 2 * X)
    assert came.inner is not inner


@pytest.mark.parametrize("leaf", [NoTensors(), nn.Linear(2, 2), torch.nn.functional.relu, Frozen, object()])
def test_what_holds_no_tensor_is_one_leaf(leaf: Any) -> None:
    assert tree_util.flatten([leaf])[0] == [leaf]
    assert round_trip([leaf])[0] is leaf


def test_an_object_with_a_module_is_one_leaf() -> None:
    holder = Plain(X, nn.Linear(2, 2), secret="s")
    assert tree_util.flatten((holder,))[0] == [holder]


def test_structures_are_equal_only_with_equal_classes_and_keys() -> None:
    assert tree_util.flatten(Frozen(X))[1] == tree_util.flatten(Frozen(Y))[1]
    assert tree_util.flatten(Frozen(X))[1] != tree_util.flatten(Slotted(X))[1]
    assert tree_util.flatten({"a": X})[1] != tree_util.flatten({"b": X})[1]


def test_leaves_come_with_their_keys() -> None:
    assert tree_util.leaves_with_keys({"step": X, "parts": [Y, 1]}) == [
        (("step",), X),
        (("parts", 0), Y),
        (("parts", 1), 1),
    ]


class Rows:
    """A batch that holds its tensors in a list."""

    def __init__(self, rows: list[Tensor]) -> None:
        self.rows = rows


BATCHES: dict[str, tuple[Any, Any]] = {  # how one is made of a tensor, and how a step reads it
    "dict": (lambda x: {"x": x}, lambda b: b["x"]),
    "named_tuple": (lambda x: Pair(x, 1), lambda b: b.first),
    "dataclass": (Frozen, lambda b: b.x),
    "slotted_dataclass": (Slotted, lambda b: b.x),
    "user_dict": (lambda x: Batch({"x": x}, source="file"), lambda b: b["x"]),
    "object_in_object": (lambda x: Plain(1, Frozen(x), secret="s"), lambda b: b.inner.x),
    "list_in_object": (lambda x: Rows([x]), lambda b: b.rows[0]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_of_any_class_is_data_of_the_call(name: str) -> None:
    make, read = BATCHES[name]
    model = nn.Linear(2, 1)
    step = ws.compile(lambda batch: model(read(batch)), backend="eager")
    kept = []
    for call in range(3):
        x = torch.full((1, 2), float(call))
        kept.append(batch := make(x))
        assert torch.equal(step(batch), model(x))
    assert step.cache_info().traces == 1, step.cache_info().reasons


def test_results_of_any_class_are_returned() -> None:
    model = nn.Linear(2, 1)

    @ws.compile
    def step(x: Tensor) -> Plain:
        out = model(x)
        return Plain(out, Frozen(out.sum(), "result"), secret="s")

    for call in range(2):
        x = torch.full((1, 2), float(call))
        came = step(x)
        assert type(came) is Plain
        assert torch.equal(came.x, model(x))
        assert torch.equal(came.inner.x, model(x).sum())
        assert (came.inner.tag, came.secret) == ("result", "s")
