"""Dicts of which Python tells each write (3.12 on), or whose versions are read: the look says the same of both."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import subprocess
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from wholestep.capture.guards import fast_guards
from wholestep.capture.native import self_test
from wholestep.capture.python.container_views import attribute_dict

WATCHED = sys.version_info >= (3, 12)
"""Whether Python tells of writes."""
HAS_VERSIONS = sys.version_info < (3, 14)

Change = Callable[[Any], object]


def look_at(module: ModuleType, *containers: dict[Any, Any]) -> Any:
    return module.StateGuard((), b"", containers, (None,) * len(containers))


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


# ---- ways to write


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


class Plain:
    """Python keeps attributes in the object itself, until somebody asks for its dict."""

    def __init__(self) -> None:
        self.a, self.b = 1, 2


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


def test_the_dict_that_an_object_had(module: ModuleType) -> None:
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


def test_who_reads_is_not_named(module: ModuleType) -> None:
    container, owner = {"a": 1}, Plain()
    look = look_at(module, container, vars(owner))
    other = {**container, **container.copy(), **(container | {"b": 2})}
    assert (container.get("a"), "b" in container, container.setdefault("a", 5), list(container), other["b"]) == (
        1, False, 1, ["a"], 2,
    )  # fmt: skip
    assert (owner.a, owner.b, hasattr(owner, "c"), dir(owner) != []) == (1, 2, False, True)
    assert look.changed() == ()


# ---- what is met, and what comes behind it


def test_what_is_written_behind_a_look_outlives_the_renewal(module: ModuleType) -> None:
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


def test_a_dict_under_two_numbers(module: ModuleType) -> None:
    container = {"a": 1}
    look = look_at(module, container, {}, container)
    container["a"] = 2
    assert sorted(look.changed()) == [0, 2]
    look.accept()
    assert look.changed() == ()


def test_several_looks_at_one_dict(module: ModuleType) -> None:
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


# ---- who watches


def word_of(container: dict[Any, Any]) -> ctypes.c_uint64:
    """The word of a dict that has its version, if there is one, and in its last byte who watches it."""
    return ctypes.c_uint64.from_address(id(container) + 24)


def num_watchers(container: dict[Any, Any]) -> int:
    return (word_of(container).value & 0xFF).bit_count()


NEEDS_WATCHERS = pytest.mark.skipif(not WATCHED, reason="this Python tells nobody of writes")


@NEEDS_WATCHERS
def test_a_dict_is_watched_as_long_as_a_look_lives(module: ModuleType) -> None:
    container = {"a": 1}
    assert num_watchers(container) == 0
    looks = [look_at(module, container, container) for _ in range(2)]
    assert num_watchers(container) == 1
    looks.pop()
    assert num_watchers(container) == 1
    looks.pop()
    assert num_watchers(container) == 0
    with pytest.raises(TypeError, match="neither dict"):
        module.StateGuard((), b"", (container, {1}), (None, None))
    assert num_watchers(container) == 0


@pytest.mark.skipif(not HAS_VERSIONS, reason="no dict has a version")
def test_no_watched_dict_is_read(module: ModuleType) -> None:
    """A version that has moved without a write: only who reads it sees it."""
    container = {"a": 1}
    look = look_at(module, {}, container)
    word_of(container).value += 1 << 40
    assert look.changed() == (() if WATCHED else (1,))


@NEEDS_WATCHERS
def test_the_compiler_of_torch_watches_the_same_dict(module: ModuleType) -> None:
    """It has a watcher of its own, and neither takes the other's away."""
    from torch._C._dynamo.guards import dict_version

    container = {"a": 1}
    look = look_at(module, container)
    before = dict_version(container)
    assert num_watchers(container) == 2
    container["a"] = 2
    assert look.changed() == (0,)
    assert dict_version(container) != before
    del look
    assert num_watchers(container) == 1
    before = dict_version(container)
    container["a"] = 3
    assert dict_version(container) != before
    look = look_at(module, container)
    container["a"] = 4
    assert look.changed() == (0,)


NO_WATCHER_LEFT = """
import ctypes, sys
import torch  # which takes its own

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
def hear(*_):
    return 0

def take():
    try:
        return ctypes.pythonapi.PyDict_AddWatcher(hear) >= 0
    except RuntimeError:
        return False

while take():
    pass
from wholestep.capture.guards import fast_guards
from wholestep.capture.native import build
from wholestep.capture.native.self_test import PARAMETER
if sys.version_info >= (3, 14):  # no versions to read either, so there is no native look
    assert "fails its test" in build.wait()
    sys.exit()
assert build.wait() == "", build.why_not()
one, two = {"a": 1}, {"a": 1}
param = torch.nn.Parameter(torch.zeros(2))
param.register_hook(len)
look = build.module().Look((), b"", (one, two), (None, None))
hooks = build.module().Look((param,), bytes([PARAMETER]), (), ())
assert look.moved() == ()
one["a"] = 2
assert look.changed() == (0,) == look.changed()
two["a"] = 2
look.accept()
assert look.changed() == (1,)
look.accept()
assert look.changed() == ()
ctypes.c_uint64.from_address(id(one) + 24).value += 1 << 40
assert look.changed() == (0,), "read after all"
for _ in range(3):
    assert hooks.changed() == ()
    param.register_hook(len)
    assert hooks.changed() == (fast_guards.TENSORS,) == hooks.changed()
    hooks.accept()
param._backward_hooks = None
assert hooks.changed() == (fast_guards.TENSORS,)
"""


@NEEDS_WATCHERS
def test_without_a_watcher_versions_are_read(module: ModuleType) -> None:
    """Others may hold all that Python has."""
    run(NO_WATCHER_LEFT)


AT_THE_END = """
import atexit, builtins, sys
from wholestep.capture.native import build
assert build.wait() == "", build.why_not()
look = lambda *dicts: build.module().Look((), b"", dicts, (None,) * len(dicts))

class Owner:
    def __del__(self):
        vars(self)["written"] = shared["written"] = 2

shared = {}
one, two = Owner(), Owner()
one.look, one.other = look(vars(one), vars(two), globals(), shared), two
two.look, two.other = look(vars(one), vars(two), vars(sys)), one
builtins.held = [look(vars(builtins), vars(sys), vars(Owner) | {}, shared), Owner()]
atexit.register(globals().update, late=1)
sys.held = look(shared)
"""


def test_a_process_may_end_with_looks(module: ModuleType) -> None:
    run(AT_THE_END)


def run(program: str) -> None:
    """In a process of its own, in which memory that was freed holds nothing that could be taken for what it was."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "MALLOC_PERTURB_": "165"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


# ---- lives


def test_a_look_and_its_dicts_are_collected_together(module: ModuleType) -> None:
    gone = []
    for _ in range(20):
        owners = [Plain() for _ in range(3)]
        for owner in owners:
            owner.look = look_at(module, *map(vars, owners))  # type: ignore[attr-defined]
            owner.others = owners  # type: ignore[attr-defined]
        gone += [weakref.ref(owner) for owner in owners]
    del owners, owner
    gc.collect()
    assert not any(one() for one in gone)
    fresh = [{"a": number} for number in range(1000)]  # at the addresses of those that are gone
    for one in fresh:
        one["a"] = 0
    look = look_at(module, *fresh)
    fresh[-1]["a"] = 1
    assert look.changed() == (999,)


@contextmanager
def no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", range(5))
def test_a_long_life(module: ModuleType, seed: int) -> None:
    """Dicts and looks come and go, are written, looked at and renewed in any order: every look says what it must."""
    choose = random.Random(seed)
    dicts: list[dict[str, int]] = [{"a": 0} for _ in range(30)]
    looks: list[tuple[Any, list[dict[str, int]], set[int], set[int]]] = []  # with what was written since, and met

    def write() -> None:
        one = choose.choice(dicts)
        one[choose.choice("abc")] = choose.randrange(10**6, 10**9)
        for _, watched, since, _ in looks:
            since.update(number for number, other in enumerate(watched) if other is one)

    def begin() -> None:
        watched = choose.choices(dicts, k=choose.randrange(1, 20))
        looks.append((look_at(module, *watched), watched, set(), set()))

    def end() -> None:
        if looks:
            looks.pop(choose.randrange(len(looks)))

    def exchange() -> None:
        dicts[choose.randrange(len(dicts))] = {"a": 0}

    def look(renew: bool) -> None:
        if looks:
            one, _, since, met = choose.choice(looks)
            met |= since
            since.clear()
            assert sorted(one.changed()) == sorted(met)
            if renew:
                one.accept()
                met.clear()

    def renew_late() -> None:
        if looks:
            one, _, since, met = choose.choice(looks)
            one.changed()
            met |= since
            since.clear()
            write()
            one.accept()
            met.clear()

    actions = [write, write, begin, end, exchange, lambda: look(True), lambda: look(False), renew_late, write]
    with no_collector():
        for _ in range(4000):
            choose.choice(actions)()
            if len(looks) > 12:
                end()


# ---- hooks of tensors


def hooked() -> nn.Parameter:
    param = nn.Parameter(torch.zeros(2))
    param.register_hook(lambda grad: None)
    param.register_post_accumulate_grad_hook(lambda t: None)
    return param


def look_at_tensor(module: ModuleType, param: nn.Parameter) -> Any:
    return module.StateGuard((param,), bytes([self_test.PARAMETER]), (), ())


HOOK_CHANGES: dict[str, Change] = {
    "one more": lambda t: t.register_hook(lambda grad: None),
    "one more behind the gradient": lambda t: t.register_post_accumulate_grad_hook(lambda t: None),
    "another function": lambda t: t._backward_hooks.update(dict.fromkeys(t._backward_hooks, len)),
    "none left": lambda t: t._backward_hooks.clear(),
    "none left behind the gradient": lambda t: t._post_accumulate_grad_hooks.popitem(),
    "another dict": lambda t: setattr(t, "_backward_hooks", t._backward_hooks.copy()),
    "none": lambda t: setattr(t, "_backward_hooks", None),
}


@pytest.mark.parametrize("name", HOOK_CHANGES)
def test_a_change_among_hooks_is_seen(module: ModuleType, name: str) -> None:
    param = hooked()
    look = look_at_tensor(module, param)
    assert look.changed() == () == look.changed()
    HOOK_CHANGES[name](param)
    assert look.changed() == (fast_guards.TENSORS,) == look.changed()
    look.accept()
    assert look.changed() == () == look.changed()
    param.register_hook(lambda grad: None)
    assert look.changed() == (fast_guards.TENSORS,)


@NEEDS_WATCHERS
def test_hooks_are_watched_as_long_as_a_look_lives(module: ModuleType) -> None:
    param = hooked()
    first: Any = param._backward_hooks
    look = look_at_tensor(module, param)
    assert num_watchers(first) == 1
    param._backward_hooks = second = OrderedDict(first)
    assert look.changed() == (fast_guards.TENSORS,)
    look.accept()
    assert (num_watchers(first), num_watchers(second)) == (0, 1)
    look = None
    assert num_watchers(second) == 0


def test_hooks_that_are_gone_leave_their_address_to_others(module: ModuleType) -> None:
    """Nobody but the tensor owns the dict of its hooks, and a new one may lie where the old one lay."""
    param = hooked()
    look = look_at_tensor(module, param)
    place, others = id(param._backward_hooks), []
    param._backward_hooks = None
    while not others or id(others[-1]) != place:
        assert len(others) < 10_000, "the case that this test is about"
        others.append(OrderedDict({0: 1}))
    other = look_at(module, others[-1])
    others[-1].clear()
    assert (look.changed(), other.changed()) == ((fast_guards.TENSORS,), (0,))
    del other
    assert not WATCHED or num_watchers(others[-1]) == 0
    param._backward_hooks = OrderedDict({0: lambda grad: None})
    look.accept()
    assert look.changed() == ()
    param._backward_hooks.clear()  # type: ignore[attr-defined]
    assert look.changed() == (fast_guards.TENSORS,)
    look.accept()
    gone = weakref.ref(param)
    del param
    assert gone() is not None, "the look owns the tensor"
    del look
    assert gone() is None
