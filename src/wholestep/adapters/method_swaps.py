"""Methods of one object that are exchanged for a while, and put back as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MISSING = object()


class MethodSwaps:
    """The methods that an adapter has exchanged on objects of a library. None of them twice."""

    def __init__(self) -> None:
        self._own: list[tuple[Any, str, Any]] = []
        """Object, name, and what the object itself had under it."""

    def put(self, thing: Any, name: str, method: Callable[..., Any]) -> None:
        """Has `thing` find `method` under `name`."""
        self._own.append((thing, name, vars(thing).get(name, _MISSING)))
        setattr(thing, name, method)

    def undo(self) -> None:
        """Every object has again what it had."""
        while self._own:
            thing, name, own = self._own.pop()
            if own is _MISSING:
                delattr(thing, name)
            else:
                setattr(thing, name, own)
