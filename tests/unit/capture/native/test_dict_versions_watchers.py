"""Who watches a dict, as long as whom, and until the end of the process."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from tests.unit.capture.native.looks import (
    NEEDS_WATCHERS,
    WATCHED,
    Plain,
    look_at,
    num_watchers,
    word_of,
)

HAS_VERSIONS = sys.version_info < (3, 14)


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
look = build.module().StateGuard((), b"", (one, two), (None, None))
hooks = build.module().StateGuard((param,), bytes([PARAMETER]), (), ())
assert look.changed() == ()
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
look = lambda *dicts: build.module().StateGuard((), b"", dicts, (None,) * len(dicts))

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
def test_looks_in_any_order_of_writes_and_renewals_say_what_they_must(module: ModuleType, seed: int) -> None:
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
