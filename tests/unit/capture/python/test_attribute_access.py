"""Numbers that a step comes to by ways that its code does not show: moved between calls, they are never stale."""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import enum
import functools
import itertools
import operator
import os
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import wholestep as ws
from tests.harness.training import backward_and_step
from wholestep.capture.python.attribute_access import AttributeAccess, AttributesFound, WatchedObject

WEIGHT, NAME = "wei" + "ght", ["weight"]


class Plain:
    def __init__(self) -> None:
        self.weight = 1.0

    def __getitem__(self, key: str) -> float:
        return getattr(self, key)  # type: ignore[no-any-return]

    def read(self) -> float:
        return self.weight


class Hidden:
    def __init__(self) -> None:
        self._weight = 1.0

    weight = property(lambda self: getattr(self, "_" + WEIGHT), lambda self, new: setattr(self, "_" + WEIGHT, new))


class PrivateSlot:
    __slots__ = ("__own",)

    def __init__(self) -> None:
        self.__own = 1.0

    weight = property(lambda self: self.__own, lambda self, new: setattr(self, "_PrivateSlot__own", new))


class Described:
    def __init__(self) -> None:
        self.held = 1.0

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.held


DESCRIPTION = Described()


class WithDescription:
    description = DESCRIPTION


class Scaled(dict[str, float]):
    weight = 1.0

    def __getitem__(self, key: str) -> float:
        return dict.__getitem__(self, key) * self.weight


class Defaulting(dict[str, float]):
    weight = 1.0

    def __missing__(self, key: str) -> float:
        return self.weight


def _of(kind: type, *parts: Any) -> Any:
    """An object of a class made of `kind`, which has attributes, too."""
    made = type(f"A{kind.__name__}", (kind,), {})(*parts)
    made.weight = 1.0
    return made


class Member(enum.Enum):
    A = 1


class Data(Dataset[Any]):
    weight = 1.0


@dataclasses.dataclass(slots=True)
class Slotted:
    weight: float = 1.0


def _halve(thing: Any) -> None:
    thing.weight = thing.weight / 2


def _halve_item(thing: Any) -> None:
    thing[next(iter(thing))] /= 2


def _member() -> Member:
    Member.A.weight = 1.0  # type: ignore[attr-defined]
    return Member.A


def _described() -> WithDescription:
    DESCRIPTION.held = 1.0
    return WithDescription()


def _function() -> Callable[[], None]:
    def function() -> None: ...

    function.weight = 1.0  # type: ignore[attr-defined]
    return function


def _first(thing: Any) -> float:
    return next(iter(thing.values() if isinstance(thing, dict) else thing))  # type: ignore[no-any-return]


def _move(thing: Any) -> None:
    thing.move_to_end(next(iter(thing)))


def _weak() -> tuple[Any, Any]:
    thing = Plain()
    return weakref.ref(thing), thing


def _proxy() -> tuple[Any, Any]:
    thing = Plain()
    return weakref.proxy(thing), thing


def _weak_values() -> tuple[Any, Any]:
    thing = Plain()
    return weakref.WeakValueDictionary({"x": thing}), thing


def _weak_keys() -> tuple[Any, Any]:
    thing = Plain()
    return weakref.WeakKeyDictionary({thing: 1.0}), thing


def _event() -> threading.Event:
    return threading.Event()


def _bound() -> tuple[Any, Any]:
    held = {"x": 1.0}
    return held.get, held


def _array() -> Any:
    return np.ones(1).view(type("AnArray", (np.ndarray,), {"weight": 1.0}))


def _environment() -> str:
    os.environ["WHOLESTEP_TEST_WEIGHT"] = "1.0"
    return "WHOLESTEP_TEST_WEIGHT"


def _thread_local() -> threading.local:
    made = threading.local()
    made.weight = 1.0
    return made


WEIGHT_OF = operator.attrgetter("weight")
READ = operator.methodcaller("read")

Way = tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], object]]
WAYS: dict[str, Way] = {  # what makes it, what reads it in the step, what moves it between calls
    "an attribute": (Plain, lambda it: it.weight, _halve),
    "a name out of a list": (Plain, lambda it: getattr(it, NAME[0]), _halve),
    "a name put together": (Plain, lambda it: getattr(it, "wei" + "ght"), _halve),
    "vars": (Plain, lambda it: sum(vars(it).values()), _halve),
    "its dict": (Plain, lambda it: it.__dict__["wei" + "ght"], _halve),
    "an attrgetter made before": (Plain, lambda it: WEIGHT_OF(it), _halve),
    "a methodcaller made before": (Plain, lambda it: READ(it), _halve),
    "an item that is an attribute": (Plain, lambda it: it[NAME[0]], _halve),
    "a property that computes its name": (Hidden, lambda it: it.weight, _halve),
    "a private slot": (PrivateSlot, lambda it: it.weight, _halve),
    "a dataclass with slots": (Slotted, lambda it: it.weight, _halve),
    "a descriptor": (_described, lambda it: it.description, lambda _: setattr(DESCRIPTION, "held", 0.5)),
    "a member of an enumeration": (_member, lambda it: it.weight, _halve),
    "a data set": (Data, lambda it: it.weight, _halve),
    "a function": (_function, lambda it: it.weight, _halve),
    "a partial": (lambda: _of(functools.partial, len), lambda it: it.weight, _halve),
    "a dict that scales": (lambda: Scaled(x=1.0), lambda it: it["x"], _halve),
    "a dict with defaults": (Defaulting, lambda it: it["x"], _halve),
    "an attribute of a list": (lambda: _of(list, [1.0]), lambda it: it[0] * it.weight, _halve),
    "an attribute of a tuple": (lambda: _of(tuple, [1.0]), lambda it: it[0] * it.weight, _halve),
    "an attribute of a set": (lambda: _of(set, [1.0]), lambda it: len(it) * it.weight, _halve),
    "an attribute of a deque": (lambda: _of(collections.deque, [1.0]), lambda it: it[0] * it.weight, _halve),
    "an attribute of a float": (lambda: _of(float, 1.0), lambda it: it * it.weight, _halve),
    "an attribute of text": (lambda: _of(str, "x"), lambda it: len(it) * it.weight, _halve),
    "an attribute of an array": (_array, lambda it: float(it[0]) * it.weight, _halve),
    "a default dict": (lambda: collections.defaultdict(float, x=1.0), lambda it: it["x"], _halve_item),
    "a chain of maps": (lambda: collections.ChainMap({"x": 1.0}), lambda it: it["x"], _halve_item),
    "the order of a dict": (lambda: {"a": 1.0, "b": 3.0}, _first, lambda it: it.update(a=it.pop("a"))),
    "the order of an ordered dict": (lambda: collections.OrderedDict(a=1.0, b=3.0), _first, _move),
    "a counter of hashables": (lambda: collections.Counter("aab"), lambda it: it["a"], lambda it: it.update("a")),
    "an array of Python's": (lambda: array.array("d", [1.0]), _first, lambda it: it.__setitem__(0, it[0] / 2)),
    "a namespace": (lambda: types.SimpleNamespace(weight=1.0), lambda it: it.weight, _halve),
    "a weak reference": (_weak, lambda it: it[0]().weight, lambda it: _halve(it[1])),
    "a proxy": (_proxy, lambda it: it[0].weight, lambda it: _halve(it[1])),
    "a dict of weak values": (_weak_values, lambda it: it[0]["x"].weight, lambda it: _halve(it[1])),
    "a dict of weak keys": (_weak_keys, lambda it: it[0][it[1]], lambda it: it[0].update({it[1]: it[0][it[1]] / 2})),
    "a method of a dict": (_bound, lambda it: it[0]("x"), lambda it: _halve_item(it[1])),
    "an event": (_event, lambda it: 2.0 if it.is_set() else 1.0, lambda it: it.set()),
    "what belongs to a thread": (_thread_local, lambda it: it.weight, _halve),
    "the environment": (_environment, lambda it: float(os.environ[it]), lambda it: os.environ.update({it: "0.5"})),
}  # fmt: skip


def _training(way: Way) -> tuple[Callable[[Tensor], Tensor], Any]:
    make, read, _ = way
    torch.manual_seed(0)
    model, thing = nn.Linear(3, 3), make()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    return lambda x: backward_and_step((model(x) * read(thing)).square().mean(), opt), thing


@pytest.mark.parametrize("name", WAYS)
def test_what_moves_between_calls_is_read_at_every_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_TEST_WEIGHT", "1.0")
    losses = []
    for compile_ in (lambda step: step, functools.partial(ws.compile, backend="eager", fullgraph=True)):
        update, thing = _training(WAYS[name])
        step = compile_(update)
        losses.append([])
        for call in range(4):
            losses[-1].append(step(torch.full((2, 3), 0.5)).item())
            if call % 2:
                WAYS[name][2](thing)
    assert losses[1] == losses[0]
    assert losses[0][2] > losses[0][1] or losses[0][2] < losses[0][1] / 1.5  # it did matter


def _writes(thing: Any) -> None:
    setattr(thing, "count" + "er", getattr(thing, "count" + "er", 0) + 1)


def _leaves(thing: Any) -> None:
    setattr(thing, "".join(["la", "st"]), torch.ones(2) * 2)


@pytest.mark.parametrize(("write", "name"), [(_writes, "counter"), (_leaves, "last")])
def test_what_is_written_under_a_computed_name_is_seen_and_undone(write: Callable[[Any], None], name: str) -> None:
    model, thing = nn.Linear(3, 3), Plain()

    @ws.compile(backend="eager", fullgraph=True)
    def step(x: Tensor) -> Tensor:
        write(thing)
        return model(x).sum()  # type: ignore[no-any-return]

    with pytest.raises(ws.CaptureError, match=rf"thing\.{name} was nothing"):
        step(torch.ones(2, 3))
    assert not hasattr(thing, name)


class Counting(itertools.count):  # type: ignore[type-arg]
    """What is written in C, under another name."""


class Watched(Counting):
    """The same behind a method of Python."""

    def __next__(self) -> Any:
        return super().__next__()


def _nest() -> list[Any]:
    return functools.reduce(lambda inner, _: [inner], range(20), [1.0])  # type: ignore[return-value]


def _innermost(nest: Any) -> float:
    while isinstance(nest, list):
        (nest,) = nest
    return nest  # type: ignore[no-any-return]


HIDDEN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "for": (lambda: iter([1.0, 2.0]), lambda it: next(one for one in it), "reaches thing, a list_iterator"),
    "zip": (lambda: iter([1.0, 2.0]), lambda it: next(zip([1], it, strict=True))[1], "reaches thing, a list_iterator"),
    "__next__": (lambda: itertools.count(1), lambda it: it.__next__(), "reaches thing, a count"),
    "of a class": (lambda: Counting(1), lambda it: it.__next__(), "reaches thing, a Counting"),
    "its method": (lambda: Watched(1), lambda it: it.__next__(), "reaches thing, a Watched"),
    "a generator": (lambda: (one for one in (1.0, 2.0)), lambda it: it.send(None), "reaches thing, a generator"),
    "a context": (lambda: contextvars.ContextVar("weight", default=1.0), lambda it: it.get(), "a ContextVar"),
    "a large array": (lambda: np.ones(1 << 18), lambda it: float(it[0]), "2,097,152 bytes, too many"),
    "a long list": (lambda: [[1.0]] * 5000, lambda it: it[0][0], "of 5,000 things, too many"),
    "a deep nest": (_nest, _innermost, "too deep"),
    "globals": (lambda: 1.0, lambda it: globals()["WAYS"] and it, "calls globals at .*no code names"),
    "eval": (lambda: 1.0, lambda it: eval("it"), "calls eval at .*no code names"),
    "lru_cache": (lambda: functools.lru_cache(lambda: torch.ones(3)), lambda it: it(), "keeps what it gives"),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_what_nobody_can_see_is_refused_before_anything_is_taken(name: str) -> None:
    make, read, said = HIDDEN[name]
    model, thing = nn.Linear(3, 3), make()

    @ws.compile(backend="eager", fullgraph=True)
    def step(x: Tensor) -> Tensor:
        return (model(x) * read(thing)).sum()  # type: ignore[no-any-return]

    with pytest.raises(ws.CaptureError, match=said):
        step(torch.ones(2, 3))
    if name in ("for", "zip", "__next__", "of a class", "its method", "a generator"):
        assert next(thing) == 1.0
    if name == "lru_cache":
        assert type(thing()) is Tensor


def test_classes_are_as_before_behind_a_trace() -> None:
    class Own(Plain):
        def __setattr__(self, name: str, item: Any) -> None:
            object.__setattr__(self, name, item)

    thing = Own()
    before = dict(vars(Own)), dict(vars(Plain))
    access = AttributeAccess({id(thing): WatchedObject(thing, {"weight"})})
    with access.observed():
        assert thing.read() == 1.0
        assert Own().read() == 1.0
        thing.__class__ = Own
        with pytest.raises(AttributesFound):
            thing.other = 1
        with pytest.raises(AttributesFound):
            vars(thing)
        assert getattr(thing, "third", 3) == 3
    assert (dict(vars(Own)), dict(vars(Plain))) == before
    assert access.found == {"other", "third", Own}
    assert not hasattr(thing, "other")


def test_other_threads_are_not_observed() -> None:
    thing = Plain()
    access = AttributeAccess({id(thing): WatchedObject(thing, ())})
    with access.observed():
        other = threading.Thread(target=lambda: setattr(thing, "weight", 2.0))
        other.start()
        other.join()
    assert thing.weight == 2.0
    assert access.found == set()


class Answering(dict[str, float]):
    """A dict that is asked for whatever attribute it has not, and has no ``__dict__``."""

    __slots__ = ()
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("may_go_live", [True])
def test_an_object_that_answers_for_every_name_is_asked_for_none(may_go_live: bool) -> None:
    model, box, array = nn.Linear(2, 1), Answering(weight=1.0), np.ones(1, np.float32)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []

    def update(x: Tensor) -> None:
        box["weight"] *= 0.5
        loss = model(x).mean() * box.weight * torch.from_numpy(array).mean()
        backward_and_step(loss, opt)
        seen.append(loss.item())

    step = ws.compile(update, backend="eager")
    for call in range(4):
        step(torch.ones(2, 2))
        assert box == {"weight": 0.5 ** (call + 1)}
    assert len(seen) == 4
