"""Arguments and results come apart into leaves and back, whatever classes hold them."""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
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


class Part:
    """Of a whole, to which it refers in some way."""

    def __init__(self, x: Tensor, to_whole: Any) -> None:
        self.x, self.to_whole = x, to_whole


class Whole:
    """A graph of torch_geometric is such an object: its store knows it."""

    def __init__(self, x: Tensor, refer: Callable[[Whole], Any]) -> None:
        self.part = Part(x, None)
        self.part.to_whole = refer(self)

    def total(self) -> Tensor:
        return self.part.x.sum()


REFERENCES: dict[str, tuple[Callable[[Whole], Any], Callable[[Any], Any]]] = {  # how it is made, and followed
    "itself": (lambda whole: whole, lambda one: one),
    "weakly": (weakref.ref, lambda one: one()),
    "proxy": (weakref.proxy, tree_util.behind_proxy),
    "method": (lambda whole: whole.total, lambda one: one.__self__),
    "method_of_no_function": (lambda whole: types.MethodType(print, whole), lambda one: one.__self__),
    "in_list": (lambda whole: [weakref.ref(whole)], lambda one: one[0]()),
    "in_tuple": (lambda whole: (1, {"whole": whole}), lambda one: one[1]["whole"]),
}


@pytest.mark.parametrize("way", REFERENCES)
def test_a_part_that_comes_back_refers_to_the_whole_that_comes_back(way: str) -> None:
    refer, follow = REFERENCES[way]
    thing = Whole(X, refer)
    leaves, spec = tree_util.flatten([thing])
    assert [one for one in leaves if not isinstance(one, int)] == [X]
    assert spec == tree_util.flatten([Whole(Y, refer)])[1]
    (came,) = tree_util.unflatten(leaves, spec)
    assert came is not thing
    assert type(came.part.to_whole) is type(thing.part.to_whole)
    assert follow(came.part.to_whole) is came
    assert follow(thing.part.to_whole) is thing


@pytest.mark.parametrize("way", REFERENCES)
def test_a_batch_whose_parts_refer_to_it_is_data_of_the_call(way: str) -> None:
    refer, follow = REFERENCES[way]
    model = nn.Linear(2, 1)
    step = ws.compile(lambda batch: model(follow(batch.part.to_whole).part.x).detach(), backend="eager")
    for call in range(4):
        x = torch.full((1 + call, 2), float(call))
        assert torch.equal(step(Whole(x, refer)), model(x))
    assert step.cache_info().traces == 2, step.cache_info().reasons  # a row, and any number of them


@pytest.mark.parametrize("end", [X, NoTensors()], ids=["data", "no data"])
def test_objects_that_many_others_hold_are_looked_at_once(end: Any) -> None:
    thing = end
    for _ in range(40):  # there are 2**40 ways to the end
        thing = Plain(thing, thing, secret="s")
    leaves, spec = tree_util.flatten([thing])
    assert len(tensors([thing])) == (2 if end is X else 0)
    (came,) = tree_util.unflatten(leaves, spec)
    assert (came is thing) is (end is not X)
    assert came.x is came.inner


def test_what_two_arguments_share_they_share_in_a_trace() -> None:
    """A number moves, so that the arguments of a trace are made anew."""

    def step(one: Plain, other: Plain) -> Tensor:
        assert one.inner is other.inner
        return one.inner.x * one.x + other.x

    compiled = ws.compile(step, backend="eager", fullgraph=True)
    for call in range(4):
        inner = Frozen(torch.full((2,), float(call)))
        pair = Plain(1.0 + call, inner, secret="one"), Plain(2.0 * call, inner, secret="other")
        assert torch.equal(compiled(*pair), step(*pair))
    assert compiled.cache_info().traces == 2, compiled.cache_info().reasons


def test_a_number_that_moves_is_seen_through_another_argument() -> None:
    def step(one: Plain, other: Plain) -> Tensor:
        return other.x * other.inner.inner

    compiled = ws.compile(step, backend="eager", fullgraph=True)
    for call in range(5):
        one = Plain(torch.ones(2), 1.0 + call, secret="one")
        other = Plain(torch.full((2,), 2.0), one, secret="other")
        assert torch.equal(compiled(one, other), step(one, other)), call
    assert compiled.cache_info().traces == 2, compiled.cache_info().reasons


def test_a_batch_in_a_long_chain_runs() -> None:
    model = nn.Linear(2, 1)

    def step(node: Any) -> Tensor:
        total = model.bias.detach()
        while node is not None:
            total, node = total + model(node.x).detach().sum(), node.inner
        return total

    compiled = ws.compile(step, backend="eager")
    for call in range(2):
        chain = None
        for length in range(300):
            chain = Plain(torch.full((1, 2), float(call + length)), chain, secret="s")
        assert torch.equal(compiled(chain), step(chain))


def test_what_refers_to_something_else_is_a_leaf() -> None:
    other = Whole(X, lambda whole: None)
    thing = Part(Y, weakref.ref(other))
    assert tree_util.flatten([thing])[0] == [Y, thing.to_whole]
    assert round_trip([thing])[0].to_whole is thing.to_whole


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
    step = ws.compile(lambda batch: model(read(batch)).detach(), backend="eager")
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
        out = model(x).detach()
        return Plain(out, Frozen(out.sum(), "result"), secret="s")

    for call in range(2):
        x = torch.full((1, 2), float(call))
        came = step(x)
        assert type(came) is Plain
        assert torch.equal(came.x, model(x))
        assert torch.equal(came.inner.x, model(x).sum())
        assert (came.inner.tag, came.secret) == ("result", "s")
