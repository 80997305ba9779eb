"""State that a step comes to through code of libraries: watched from the moment at which that code is entered.

[Note: state behind a library]
What the user's code names is found before a trace (`capture/reach`). A function of Python's own library or of an
installed package has state as well, which no name of the user's leads to: ``logging.getLogger("a").setLevel(10)`` sets
an attribute of an object that only `logging` holds. So while a step is traced, each function of a library that runs on
its behalf is looked through when it is entered: which globals and which attributes of its arguments it reads or writes.
What was there before the trace is watched from then on as everything else is: a change makes the step live, and later
calls compare it. The same goes for containers whose methods are called. Any other object of C may hold anything.
"""

from __future__ import annotations

import dis
import functools
import gc
import sys
import types
from collections import deque
from collections.abc import Iterator, Sized
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from wholestep.capture.effects.c_functions import class_of
from wholestep.capture.python.code_owner import LOOKED_THROUGH, Owner, is_writable, owner_of_class, owner_of_file
from wholestep.capture.python.container_views import BUFFERS, ClassView, ContentView, SlotsView, own_dict, slots
from wholestep.capture.python.snapshot import SCALARS, Snapshot
from wholestep.capture.reach.reachable import Reachable

_CONTAINERS = (dict, list, set, deque, ContextVar, *BUFFERS)
_MAX_ITEMS = 4096
_STEPS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_STORES = frozenset({"STORE_ATTR", "DELETE_ATTR"})
_BETWEEN = frozenset({"COPY", "DUP_TOP", "CACHE", "EXTENDED_ARG"})


@dataclass(frozen=True, slots=True)
class Access:
    """``root.prefix.name`` in a code: an attribute, or a global where both are empty."""

    is_global: bool
    root: str
    prefix: tuple[str, ...]
    name: str
    writes: bool


class LibraryState:
    """What a trace comes to by code of libraries. Made before the trace, with nothing collected until `settle`."""

    def __init__(self, reachable: Reachable) -> None:
        gc.collect(0)  # what is young from now on is the trace's, and so are the lists below, which hold some of it
        self._reachable = reachable
        self._known = {id(sys.modules), *reachable.seen, *_looked_at_otherwise(reachable)}
        self._entered: set[tuple[types.CodeType, int]] = set()
        self._found: list[tuple[Any, Snapshot]] = []
        """Things with a snapshot of each: those that the trace itself has made are among them."""
        self._watched: dict[int, set[str] | None] = {}
        self._alive: list[Any] = []

    def enter(self, frame: types.FrameType) -> None:
        """Watches what the code of a function reads or writes that is about to run."""
        code = frame.f_code
        values = frame.f_locals
        first = values.get(code.co_varnames[0]) if code.co_argcount else None
        if (code, id(first)) in self._entered:
            return
        self._entered.add((code, id(first)))
        self._alive += [code, first]
        by_thing: dict[int, tuple[Any, set[str], bool]] = {}
        for access in accesses(code):
            thing = frame.f_globals if not access.root else _resolved(frame, values, access)
            if thing is not None and (access.writes or _matters(thing, access.name)):
                by_thing.setdefault(id(thing), (thing, set(), access.is_global))[1].add(access.name)
        for thing, names, is_global in by_thing.values():
            self._watch_names(thing, names, code, is_global=is_global)

    def may_be_called_on(self, function: Any) -> bool:
        """Whether the state of the object whose method is to be called is looked at, or none of anybody else."""
        thing = function.__self__
        if isinstance(thing, (*SCALARS, tuple, frozenset)):
            return True
        if isinstance(thing, _CONTAINERS):
            if id(thing) not in self._known:
                self._watch_content(thing)
            return True
        kind = class_of(function)
        if kind.__module__ == "builtins" or owner_of_class(kind) in LOOKED_THROUGH or _never_changes(type(thing)):
            return True
        return gc.is_tracked(thing) and any(one is thing for one in gc.get_objects(0))

    def settle(self) -> None:
        """Hands over what was there before the trace."""
        things = {id(thing): thing for thing, _ in self._found}
        old = _there_before([*things.values()]) if things else set()
        late = [snapshot for thing, snapshot in self._found if id(thing) in old]
        self._reachable.snapshots += late
        self._reachable.late += late

    def _watch_names(self, thing: Any, names: set[str], code: types.CodeType, *, is_global: bool) -> None:
        if id(thing) in self._known or (container := _container_of(thing, names)) is None:
            return
        watched = self._watched.setdefault(id(thing), set())
        new = sorted(names - watched) if watched is not None else []
        if not new:
            return
        self._watched[id(thing)] = {*(watched or ()), *new}
        self._alive.append(thing)
        path = f"{type(thing).__name__} in {code.co_filename.rpartition('/')[2]}"
        self._add(thing, container, path, tuple(new))
        if not is_global:
            for held in (container[name] for name in new if name in container):
                if isinstance(held, _CONTAINERS) and id(held) not in self._known:
                    self._watch_content(held)

    def _watch_content(self, thing: Any) -> None:
        if id(thing) in self._watched or (isinstance(thing, Sized) and len(thing) > _MAX_ITEMS):
            return
        self._watched[id(thing)] = None
        container = thing if isinstance(thing, (dict, list)) else ContentView(thing)
        self._add(thing, container, f"a {type(thing).__name__} of a library", None)

    def _add(self, thing: Any, container: Any, path: str, keys: tuple[str, ...] | None) -> None:
        snapshot = Snapshot(container, path, keys)
        snapshot.held = snapshot.now()
        self._found.append((thing, snapshot))


def _there_before(things: list[Any]) -> set[int]:
    """By id those of some things that are older than what is young. The collector does not know the age of things that
    refer to nothing: data is old where something old refers to it, and a context variable, which C may hold, always."""
    data = {id(one): one for one in things if isinstance(one, (dict, *BUFFERS)) and not gc.is_tracked(one)}
    young = set(map(id, gc.get_objects(0)))  # `things` and `data`, which hold them too, are among it
    old = {id(one) for one in things if id(one) not in young and id(one) not in data}
    if data:
        holders = [one for one in gc.get_referrers(*data.values()) if id(one) not in young]
        old |= {id(one) for holder in holders for one in gc.get_referents(holder)} & data.keys()
    return old


def _looked_at_otherwise(reachable: Reachable) -> Iterator[int]:
    """Ids of containers that other parts of a capture look at."""
    for snapshot in reachable.snapshots:
        yield id(snapshot.container)
    for _, opt in reachable.optimizers.values():
        yield from map(id, (vars(opt), opt.state, opt.param_groups, *opt.state.values(), *opt.param_groups))


def _never_changes(kind: type) -> bool:
    """Whether objects of a class compare by value and have a hash: by Python's data model they stay what they are."""
    plain: Any = object
    return kind.__eq__ is not plain.__eq__ and kind.__hash__ is not None and kind.__hash__ is not plain.__hash__


class _NamedAttributes(ClassView):
    """What a class has under some names. Its special methods may be those of the trace at this moment."""

    def content(self) -> dict[str, Any]:
        return {key: item for key, item in vars(self.kind).copy().items() if key in self._names}


def _container_of(thing: Any, names: set[str]) -> Any:
    """A dict, or a view like one, of the attributes of a thing; None where it has none that can be looked at."""
    if isinstance(thing, dict):  # globals
        return thing
    if isinstance(thing, type):
        return _NamedAttributes(thing, frozenset(names)) if is_writable(thing) else None
    if not names.isdisjoint(slots(type(thing))):
        return SlotsView(thing)
    return own_dict(thing)


def _resolved(frame: types.FrameType, values: dict[str, Any], access: Access) -> Any:
    """The thing of which an attribute is read or written, if it can be told before the code runs."""
    scope = frame.f_globals if access.is_global else values
    thing = scope.get(access.root)
    for name in access.prefix:
        own = own_dict(thing)
        thing = None if own is None else own.get(name)
    kind = thing if isinstance(thing, type) else type(thing)
    looked_through = owner_of_class(kind) in LOOKED_THROUGH and not access.writes
    return None if thing is None or isinstance(thing, SCALARS) or looked_through else thing


def _matters(thing: Any, name: str) -> bool:
    """Whether what is read of a thing is compared: of what is global only plain values, the rest being its code."""
    held = thing if isinstance(thing, dict) else vars(thing) if isinstance(thing, (types.ModuleType, type)) else None
    return held is None or isinstance(held.get(name), SCALARS)


@functools.cache
def accesses(code: types.CodeType) -> tuple[Access, ...]:
    """What a code reads and writes of its globals, and of things that it is given or finds there.

    Of torch's code only what it writes to globals: it reads its own all the time, and `torch_modes` are compared.
    """
    found = dict.fromkeys(_accesses(code))
    owner = owner_of_file(code.co_filename)
    if owner in (Owner.PYTHON, Owner.INSTALLED):
        return tuple(found)
    return tuple(one for one in found if one.writes and one.is_global) if owner is Owner.TORCH else ()


def _accesses(code: types.CodeType) -> Iterator[Access]:
    root: tuple[bool, str] | None = None
    chain: tuple[str, ...] = ()
    for one in dis.get_instructions(code):
        if (loaded := _loaded(one)) is not None:
            root, chain = loaded, ()
            if root[0]:
                yield Access(True, "", (), one.argval, writes=False)
        elif one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            yield Access(True, "", (), one.argval, writes=True)
            root = None
        elif root is not None and (one.opname in _STEPS or one.opname in _STORES):
            yield Access(root[0], root[1], chain, one.argval, writes=one.opname in _STORES)
            root, chain = (root, (*chain, one.argval)) if one.opname in _STEPS else (None, ())
        elif one.opname not in _BETWEEN:
            root = None


def _loaded(one: dis.Instruction) -> tuple[bool, str] | None:
    """What an instruction loads last: whether it is a global, and its name; None if it loads no name."""
    if one.opname == "LOAD_GLOBAL":
        return True, one.argval
    if one.opname != "LOAD_DEREF" and "LOAD_FAST" not in one.opname:
        return None
    return False, one.argval[-1] if isinstance(one.argval, tuple) else one.argval  # since Python 3.13 it may load two
