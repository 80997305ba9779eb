"""Dicts, lists and objects among the arguments, to which a step writes: ``batch["x"] = batch["x"].float()``,
``labels = batch.pop("labels")``, ``batch.loss = loss``.

They are others in every call, so they are known by the way to them from the arguments. What the step leaves in them it
gives as results of its own, behind those that it returns; while it is traced they are put back as they were, and behind
every call what was left is written to those of that call.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from wholestep.capture.python import tree_util
from wholestep.capture.python.container_views import SlotsView
from wholestep.capture.python.snapshot import same
from wholestep.capture.reach.arguments import ArgumentPath, Arguments, path_text
from wholestep.errors import CaptureError

_PLAIN_DICTS = (dict, OrderedDict, defaultdict)


@dataclass(frozen=True, slots=True)
class ContainerWrite:
    """What one container holds behind a call, in order."""

    way: ArgumentPath
    items: tuple[tuple[Any, Any, bool], ...]
    """(key, the key under which this stood before the call, False); for what is new, (key, None, True)."""


def container_paths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ArgumentPath]:
    """The ways to all that can be written to. Asked before a trace, in which objects that hold numbers hold symbols."""
    starts = [((0, i), one) for i, one in enumerate(args)] + [((1, key), one) for key, one in kwargs.items()]
    return [way for start, thing in starts for way in _ways(start, thing)]


class ArgumentContainers:
    """Those among the arguments of one call, as they are now. Nobody knows how to write to nodes of pytrees that other
    classes have registered: these are *foreign*."""

    def __init__(self, call: Any, ways: Sequence[ArgumentPath]) -> None:
        found = [(way, _at(call, way)) for way in ways]
        self._found = [(way, one, _content(one)) for way, one in found if not _is_foreign(one)]
        self._foreign = [(way, one, _parts(one)) for way, one in found if _is_foreign(one)]

    def written(self) -> tuple[list[ContainerWrite], list[Any]]:
        """What was written to them since, and the things that are new there, in order.

        Raises CaptureError for a container that is given twice.
        """
        found: list[ContainerWrite] = []
        things: list[Any] = []
        for way, container, before in self._found:
            now = _content(container)
            if _is_as_before(before, now):
                continue
            if sum(_identity_of(other) is _identity_of(container) for _, other, _ in self._found) > 1:
                raise CaptureError(
                    f"The step writes to {path_text(way)}, which is given to it in two places. Pass a copy."
                )
            items = []
            for key, one in now:
                old = _standing(one, key, before)
                items.append((key, old[0], False) if old else (key, None, True))
                things += [] if old else [one]
            found.append(ContainerWrite(way, tuple(items)))
        return found, things

    def put_back(self) -> None:
        """All of them hold again what they held. Raises CaptureError if something else was written to."""
        for _, container, before in self._found:
            if not _is_as_before(before, _content(container)):
                _fill(container, before)
        for way, thing, parts in self._foreign:
            if not same(tuple(parts), tuple(_parts(thing))):
                raise CaptureError(
                    f"The step writes to {path_text(way)}, a {type(thing).__name__}, which says itself how it is taken "
                    f"apart (a pytree node). That would happen once, while capturing, and never again. Return what "
                    f"you keep there."
                )


class ArgumentEffects:
    """What one trace writes to containers among its arguments."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments, self._ways = arguments, container_paths(arguments.args, arguments.kwargs)
        self._containers: ArgumentContainers | None = None
        self.written: tuple[ContainerWrite, ...] = ()
        """To which of them the step writes, once `call` has run."""

    def call(self, step: Callable[..., Any]) -> Any:
        """What the step gives; with what is new in containers among the arguments, if it writes to some.

        Until `splice` these are as the step has left them.
        """
        args, kwargs = self._arguments.traced()
        self._containers = ArgumentContainers((args, kwargs), self._ways)
        result = step(*args, **kwargs)
        written, things = self._containers.written()
        self.written = tuple(written)
        return (result, things) if written else result

    def put_back(self) -> None:
        """The arguments are as they were. Raises CaptureError if that cannot be."""
        containers, self._containers = self._containers, None
        if containers is not None:
            containers.put_back()


def write_containers(found: Iterable[ContainerWrite], call: Any, things: Sequence[Any]) -> None:
    """Behind a call: writes to the containers among its arguments what the step has left in them."""
    new = iter(things)
    resolved = [(one, _at(call, one.way)) for one in found]
    contents = [(one, container, dict(_content(container))) for one, container in resolved]
    for one, container, before in contents:
        _fill(container, [(key, next(new) if is_new else before[old]) for key, old, is_new in one.items])


def _ways(way: ArgumentPath, thing: Any, around: frozenset[int] = frozenset()) -> Iterator[ArgumentPath]:
    """The ways to what can be written to in an argument, as `tree.flatten` takes it apart."""
    if isinstance(thing, tree_util.CLOSED) or id(thing) in around:
        return
    if type(thing) in pytree.SUPPORTED_NODES:
        if not isinstance(thing, tuple):
            yield way
        if _is_foreign(thing):
            return
        parts = thing.items() if isinstance(thing, dict) else enumerate(thing)
    elif (fields := tree_util.fields_of(thing)) is not None:
        yield way
        parts = fields.items()
    else:
        return
    for key, part in list(parts):
        yield from _ways((*way, key), part, around | {id(thing)})


def _is_foreign(thing: Any) -> bool:
    """Whether only its class knows what is in it."""
    return type(thing) in pytree.SUPPORTED_NODES and not isinstance(thing, (dict, list, deque, tuple))


def _parts(thing: Any) -> list[Any]:
    return list(pytree.SUPPORTED_NODES[type(thing)].flatten_fn(thing)[0])


def _attributes(thing: Any) -> Any:
    return vars(thing) if hasattr(thing, "__dict__") else SlotsView(thing)


def _at(call: Any, way: ArgumentPath) -> Any:
    """The container to which a way leads."""
    thing = call
    for key in way:
        thing = thing[key] if isinstance(thing, (dict, list, deque, tuple)) else getattr(thing, key)
    return thing if isinstance(thing, (dict, list, deque)) or _is_foreign(thing) else _attributes(thing)


def _identity_of(container: Any) -> Any:
    return container.thing if isinstance(container, SlotsView) else container


def _content(container: Any) -> list[tuple[Any, Any]]:
    if isinstance(container, SlotsView):
        return [(name, container[name]) for name in tree_util.fields_of(container.thing) or ()]
    return list(container.items() if isinstance(container, dict) else enumerate(container))


def _is_as_before(before: Sequence[tuple[Any, Any]], now: Sequence[tuple[Any, Any]]) -> bool:
    if len(before) != len(now):
        return False
    return all(key == own and same(then, one) for (key, then), (own, one) in zip(before, now, strict=True))


def _standing(thing: Any, key: Any, before: Sequence[tuple[Any, Any]]) -> tuple[Any] | None:
    """The key under which a thing stood before, if it did."""
    if any(known == key and same(one, thing) for known, one in before):
        return (key,)
    return next(((known,) for known, one in before if one is thing and not isinstance(thing, tree_util.SCALARS)), None)


def _fill(container: Any, items: Sequence[tuple[Any, Any]]) -> None:
    """Has a container hold these and nothing else, in this order."""
    if isinstance(container, (list, deque)):
        container.clear()
        container.extend(one for _, one in items)
    elif type(container) in _PLAIN_DICTS:
        container.clear()
        container.update(items)
    else:
        _fill_by_key(container, dict(items))


def _fill_by_key(container: Any, items: dict[Any, Any]) -> None:
    """The same for what has ways of its own to write: slots, and dicts of the user's or a library's class."""
    held = dict(_content(container))
    delete: Callable[[Any, Any], None] = type(container).__delitem__
    if isinstance(container, dict) and not isinstance(container, SlotsView):  # a class may refuse to
        delete = OrderedDict.__delitem__ if isinstance(container, OrderedDict) else dict.__delitem__
    for key in held.keys() - items.keys():
        delete(container, key)
    for key, one in items.items():
        if key not in held or held[key] is not one:
            if isinstance(container, SlotsView):
                container.update({key: one})
            else:
                container[key] = one
