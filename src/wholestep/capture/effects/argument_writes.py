"""Dicts, lists and objects among the arguments, to which no step that is one graph may write.

They are data of one call and no state, so nothing else looks at them: ``batch["x"] = batch["x"].float()``,
``labels = batch.pop("labels")``. A step that does so is refused, and they are put back as they were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

from torch.utils import _pytree as pytree

from wholestep.capture.python import tree_util
from wholestep.capture.python.code_lines import writer_of
from wholestep.capture.python.container_views import VIEWS, ContentView, SlotsView, own_dict, slots
from wholestep.capture.python.snapshot import Snapshot, same
from wholestep.capture.reach.arguments import ArgumentPath, path_text
from wholestep.errors import CaptureError


class ArgumentWrites:
    """What the containers among the arguments of one trace held before it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], codes: Sequence[CodeType]) -> None:
        """`codes`: of the step, in which an error names a line."""
        self._codes = codes
        self._watches: list[tuple[ArgumentPath, Snapshot]] = []
        self._foreign: list[tuple[ArgumentPath, Any, list[Any]]] = []
        """Nodes of pytrees of other classes: only these know what is in them."""
        self._fields = tree_util.fields_in((args, kwargs))
        self._seen: set[int] = set()
        """Ids of the objects in which it has been."""
        for start, thing in [*(((0, i), one) for i, one in enumerate(args)), *(((1, k), v) for k, v in kwargs.items())]:
            self._walk(start, thing)

    def _walk(self, path: ArgumentPath, thing: Any) -> None:
        """Down to whatever `tree_util.flatten` takes apart."""
        is_node = type(thing) in pytree.SUPPORTED_NODES
        fields = None if is_node else self._fields.get(id(thing))
        if id(thing) in self._seen or (not is_node and fields is None):
            return
        if not is_node:
            self._seen.add(id(thing))
        for container in _containers(thing):
            is_ordered = isinstance(container, dict) and not isinstance(container, VIEWS)
            watch = Snapshot(container, "", _keys(container), ordered=is_ordered)
            watch.held = watch.now()
            self._watches.append((path, watch))
        if is_node and not isinstance(thing, (dict, list, deque, tuple)):
            self._foreign.append((path, thing, _parts(thing)))
            return
        parts = fields if fields is not None else thing
        for key, part in list(parts.items() if isinstance(parts, dict) else enumerate(parts)):
            self._walk((*path, key), part)

    def check(self) -> None:
        """At the end of the step: raises CaptureError for a container to which it has written."""
        for path, watch in self._watches:
            key = next((key for key, *_ in watch.changed_items()), None)
            if key is not None or any(watch.changes()) or watch.reordered():
                raise self._refusal(path, key)
        for path, thing, before in self._foreign:
            now = _parts(thing)
            if len(before) != len(now) or not all(map(same, before, now)):
                raise self._refusal(path, None)

    def _refusal(self, path: ArgumentPath, key: Any) -> CaptureError:
        way = path if key is None else (*path, key)
        name, line = path_text(way), writer_of(".".join(map(str, way[1:])), self._codes)
        return CaptureError(
            f"The step writes to {name}{f' at {line}' if line else ''}. A graph writes to tensors and to nothing else "
            f"of its arguments: return what you put there, or pass a copy and write to it outside of the step."
        )

    def restore(self) -> None:
        """All hold again what they held, but for nodes of other classes that keep it in C."""
        for _, watch in self._watches:
            if any(watch.changes()) or watch.reordered():
                watch.restore()


def _containers(thing: Any) -> Iterator[Any]:
    """All in which something keeps what it holds."""
    if isinstance(thing, (list, dict)):
        yield thing
    elif isinstance(thing, deque):
        yield ContentView(thing)
    if (own := own_dict(thing)) is not None:
        yield own
    if any(slots(type(thing))):
        yield SlotsView(thing)


def _keys(container: Any) -> tuple[Any, ...] | None:
    return tuple(slots(type(container.thing))) if isinstance(container, SlotsView) else None


def _parts(thing: Any) -> list[Any]:
    return list(pytree.SUPPORTED_NODES[type(thing)].flatten_fn(thing)[0])
