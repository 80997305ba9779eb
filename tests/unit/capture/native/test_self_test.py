"""The test of the native library finds a library that sees less than it must."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from wholestep.capture.guards import fast_guards
from wholestep.capture.native import self_test


class Blind:
    """A look that sees nothing, for the test of the library."""

    TENSORS, MODES = fast_guards.TENSORS, fast_guards.MODES

    class StateGuard:
        def __init__(self, *args: Any) -> None:
            pass

        def changed(self) -> tuple[int, ...]:
            return ()


class BlindFor:
    """A look that sees everything but what is written to some things: ``things(tensors, dicts)`` says which."""

    def __init__(self, module: ModuleType, things: Callable[[Any, Any], bool]) -> None:
        self._module, self._things = module, things
        self.TENSORS, self.MODES = fast_guards.TENSORS, fast_guards.MODES

    def StateGuard(self, tensors: Any, wants: Any, containers: Any, held: Any, slots: Any) -> Any:
        made = Blind.StateGuard if self._things(tensors, containers) else self._module.StateGuard
        return made(tensors, wants, containers, held, slots)


BLIND_FOR: dict[str, Callable[[Any, Any], bool]] = {
    "class: an attribute replaced": lambda _, dicts: any("__module__" in one for one in dicts),
    "dict: an attribute written": lambda _, dicts: any(one.get("a", 0) > self_test._WARM for one in dicts),
    "dict: an attribute replaced": lambda _, dicts: {"a": 1, "b": 1} in dicts,
    "parameter: a hook beside another": lambda tensors, _: any(one._backward_hooks for one in tensors),
}  # fmt: skip


@pytest.mark.parametrize("fault", BLIND_FOR)
def test_the_test_of_the_library_can_fail(module: ModuleType, fault: str) -> None:
    assert self_test.fault(BlindFor(module, BLIND_FOR[fault])) == fault  # type: ignore[arg-type]


def test_the_library_passes_its_test(module: ModuleType) -> None:
    assert self_test.fault(module) == ""
    assert self_test.fault(Blind) == "dict: a value replaced"  # type: ignore[arg-type]
