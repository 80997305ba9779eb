"""Dicts of which Python tells each write (3.12 on), or whose versions are read: the look says the same of both."""

from __future__ import annotations

import ctypes
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.unit.capture.native.looks import (
    Plain,
    look_at,
)

Change = Callable[[Any], object]


def check(module: ModuleType, container: dict[Any, Any], write: Callable[[], object]) -> None:
    """The write is named, and nothing else, at every look until all is renewed."""
    around = [{"a": 1} for _ in range(10)]
    look = look_at(module, *around[:5], container, *around[5:])
    for _ in range(2):
        assert look.changed() == ()
    write()
    for _ in range(2):
        assert look.changed() == (5,)
    look.accept()
    for _ in range(2):
        assert look.changed() == ()
        look.accept()
    around[9]["a"] = 2
    assert look.changed() == (10,)
    container["another"] = object()
    assert sorted(look.changed()) == [5, 10]


python = ctypes.pythonapi
DICT_WRITES: dict[str, Change] = {
    "an item replaced": lambda d: d.__setitem__("a", 2),
    "an item added": lambda d: d.__setitem__("c", 2),
    "an item removed": lambda d: d.__delitem__("a"),
    "update of an item": lambda d: d.update(a=2),
    "update by a new item": lambda d: d.update({"c": 2}),
    "update by pairs": lambda d: d.update([("c", 2)]),
    "|=": lambda d: d.__ior__({"c": 2}),
    "pop": lambda d: d.pop("a"),
    "popitem": lambda d: d.popitem(),
    "clear": lambda d: d.clear(),
    "setdefault": lambda d: d.setdefault("c", 2),
    "__init__": lambda d: d.__init__(c=2),
    "exec": lambda d: exec("a = 2", {}, d),
    "PyDict_SetItemString": lambda d: python.PyDict_SetItemString(ctypes.py_object(d), b"a", ctypes.py_object(2)),
    "PyDict_DelItemString": lambda d: python.PyDict_DelItemString(ctypes.py_object(d), b"a"),
    "PyDict_Update": lambda d: python.PyDict_Update(ctypes.py_object(d), ctypes.py_object({"c": 2})),
    "PyDict_Clear": lambda d: python.PyDict_Clear(ctypes.py_object(d)),
}
EMPTY_WRITES: dict[str, Change] = {
    "an item": lambda d: d.__setitem__("a", 1),
    "update": lambda d: d.update({"a": 1, "b": 2}),
    "update by many": lambda d: d.update({str(number): number for number in range(1000)}),
    "|=": lambda d: d.__ior__({"a": 1}),
    "setdefault": lambda d: d.setdefault("a", 1),
}
KINDS: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "defaultdict": lambda: defaultdict(int),
}


@pytest.mark.parametrize("name", DICT_WRITES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_to_a_dict_is_seen(module: ModuleType, kind: str, name: str) -> None:
    container = KINDS[kind]()
    container.update(a=1, b=2)
    check(module, container, lambda: DICT_WRITES[name](container))


@pytest.mark.parametrize("name", EMPTY_WRITES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_to_an_empty_dict_is_seen(module: ModuleType, kind: str, name: str) -> None:
    container = KINDS[kind]()
    check(module, container, lambda: EMPTY_WRITES[name](container))


def test_a_default_that_is_made_is_seen(module: ModuleType) -> None:
    container = defaultdict[str, int](int)
    check(module, container, lambda: container["c"])


def test_a_read_of_a_dict_is_not_named(module: ModuleType) -> None:
    container, owner = {"a": 1}, Plain()
    look = look_at(module, container, vars(owner))
    other = {**container, **container.copy(), **(container | {"b": 2})}
    assert (container.get("a"), "b" in container, container.setdefault("a", 5), list(container), other["b"]) == (
        1, False, 1, ["a"], 2,
    )  # fmt: skip
    assert (owner.a, owner.b, hasattr(owner, "c"), dir(owner) != []) == (1, 2, False, True)
    assert look.changed() == ()


def test_a_write_after_a_look_outlives_the_renewal(module: ModuleType) -> None:
    one, two = {"a": 1}, {"a": 1}
    look = look_at(module, one, two)
    one["a"] = 2
    assert look.changed() == (0,)
    one["a"] = two["a"] = 3
    look.accept()
    assert sorted(look.changed()) == [0, 1]
    look.accept()
    assert look.changed() == ()


def test_a_look_without_a_renewal_takes_nothing_for_granted(module: ModuleType) -> None:
    one, two = {"a": 1}, {"a": 1}
    look = look_at(module, one, two)
    one["a"] = 2
    assert look.changed() == (0,)
    two["a"] = 2
    assert sorted(look.changed()) == [0, 1] == sorted(look.changed())
    look.accept()
    assert look.changed() == ()


def test_a_dict_under_two_numbers_is_named_by_both(module: ModuleType) -> None:
    container = {"a": 1}
    look = look_at(module, container, {}, container)
    container["a"] = 2
    assert sorted(look.changed()) == [0, 2]
    look.accept()
    assert look.changed() == ()


def test_several_looks_at_one_dict_are_renewed_one_by_one(module: ModuleType) -> None:
    container = {"a": 1}
    looks = [look_at(module, {}, container) for _ in range(3)]
    container["a"] = 2
    assert [look.changed() for look in looks] == [(1,)] * 3
    looks[0].accept()
    assert [look.changed() for look in looks] == [(), (1,), (1,)]
    del looks[1]
    container["a"] = 3
    assert [look.changed() for look in looks] == [(1,)] * 2
    looks[1].accept()
    del looks[0]
    assert looks[0].changed() == ()
    container["a"] = 4
    assert looks[0].changed() == (1,)
