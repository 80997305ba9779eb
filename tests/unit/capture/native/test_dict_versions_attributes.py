"""Writes to attributes of objects, of classes and to globals are seen, whichever way Python writes them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.capture.native.looks import (
    Plain,
    look_at,
)
from wholestep.capture.python.container_views import attribute_dict

python = ctypes.pythonapi
Change = Callable[[Any], object]


class Grown(Plain):
    """Attributes that came in other orders in other objects: names are not shared."""

    def __init__(self) -> None:
        for number in range(40):
            setattr(self, f"name_{number}", number)
        super().__init__()


class Slotted:
    __slots__ = ("__dict__", "own")

    def __init__(self) -> None:
        self.a, self.b = 1, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = 1, 2


def a_function() -> Any:
    def function() -> None: ...

    function.a, function.b = 1, 2  # type: ignore[attr-defined]
    return function


def a_tensor() -> Any:
    tensor = nn.Parameter(torch.zeros(2))
    tensor.a, tensor.b = 1, 2  # type: ignore[attr-defined]
    return tensor


def replace_a(owner: Any) -> None:
    owner.a = 2


def remove_a(owner: Any) -> None:
    del owner.a


def add_c(owner: Any) -> None:
    owner.c = 2


OWNERS: dict[str, Callable[[], Any]] = {
    "plain": Plain, "grown": Grown, "slots": Slotted, "module": Layer, "function": a_function, "tensor": a_tensor,
    "class": lambda: type("Kind", (), {"a": 1, "b": 2}),
}  # fmt: skip
ATTRIBUTE_WRITES: dict[str, Change] = {
    "replaced": replace_a,
    "added": add_c,
    "removed": remove_a,
    "setattr": lambda owner: setattr(owner, "a", 2),
    "delattr": lambda owner: delattr(owner, "a"),
    "PyObject_SetAttrString": lambda owner: python.PyObject_SetAttrString(
        ctypes.py_object(owner), b"a", ctypes.py_object(2)
    ),
}


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("name", ATTRIBUTE_WRITES)
@pytest.mark.parametrize("owner", OWNERS)
def test_a_write_to_an_attribute_is_seen(module: ModuleType, owner: str, name: str, warm: bool) -> None:
    """Python has quicker ways to write, once it has seen a line run often."""
    write = ATTRIBUTE_WRITES[name]
    for _ in range(100 if warm else 0):
        one = OWNERS[owner]()
        vars(one)
        write(one)
        write(OWNERS[owner]())
    thing = OWNERS[owner]()
    attributes = attribute_dict(thing) if isinstance(thing, type) else vars(thing)
    look = look_at(module, {"a": 1}, attributes)
    assert look.changed() == ()
    write(thing)
    assert look.changed() == (1,) == look.changed()
    look.accept()
    assert look.changed() == ()


def test_a_dict_exchanged_for_another_is_seen_where_it_is_written(module: ModuleType) -> None:
    """To exchange the dict of an object writes to neither of the two: who looks at one sees what is written there."""
    owner = Plain()
    old, new = vars(owner), {"a": 3, "b": 4}
    look = look_at(module, old, new)
    owner.__dict__ = new
    assert look.changed() == ()
    owner.a = 5
    assert (look.changed(), old["a"], new["a"]) == ((1,), 1, 5)
    look.accept()
    old["a"] = 6
    assert (look.changed(), owner.a) == ((0,), 5)
    look.accept()
    del owner
    assert (look.changed(), new) == ((), {"a": 5, "b": 4})


class Added(Plain):
    """The attribute is not there when the object is made."""

    def __init__(self) -> None:
        self.other = 0
        self.late = 0
        del self.other
        self.a = 0


def test_every_write_to_a_class_is_seen_and_none_to_its_base(module: ModuleType) -> None:
    base = type("Base", (), {"a": 1})
    kind = type("Kind", (base,), {"a": 1})
    look = look_at(module, attribute_dict(base), attribute_dict(kind))
    writes: list[Callable[[], Any]] = [
        lambda: setattr(kind, "a", 2), lambda: setattr(kind, "b", 1), lambda: delattr(kind, "a"),
        lambda: setattr(kind, "__call__", len), lambda: setattr(kind, "__doc__", "a text"),
    ]  # fmt: skip
    for write in writes:
        assert look.changed() == ()
        write()
        assert look.changed() == (1,) == look.changed()
        look.accept()
    assert (kind.a, kind().b, isinstance(kind(), base), look.changed()) == (1, 1, True, ())  # type: ignore[attr-defined]
    setattr(base, "a", 3)  # noqa: B010
    assert look.changed() == (0,)


@pytest.mark.parametrize("kind", [Plain, Grown, Added, nn.Identity])
@pytest.mark.parametrize("early", [True, False], ids=["dict at once", "dict behind the warming"])
def test_attributes_written_by_warm_code_are_seen(module: ModuleType, kind: type[Any], early: bool) -> None:
    """Python rewrites instructions that run often, and such a one writes into the dict by a way of its own."""
    owner = kind()
    owner.a = 0
    attributes = vars(owner) if early else None

    def write() -> None:
        owner.a += 1

    for _ in range(5000):
        write()
    attributes = vars(owner) if attributes is None else attributes
    look = look_at(module, attributes)
    for _ in range(5000):
        assert look.changed() == ()
        write()
        assert look.changed() == (0,)
        look.accept()
    del owner.a
    assert look.changed() == (0,)


COUNTED = 0


def count_globally() -> None:
    global COUNTED
    COUNTED += 1


def test_a_write_to_a_global_is_seen(module: ModuleType) -> None:
    look = look_at(module, globals(), {"a": 1})
    for _ in range(2000):
        count_globally()
        assert look.changed() == (0,)
        look.accept()
