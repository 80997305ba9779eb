"""Finds the attributes of classes that a step may read.

[Note: attributes of classes]
Whatever an object does not have itself it has from its class, or from a base of it: methods, properties, and numbers
that stand in the body of the class. So classes are looked at like objects. Every class keeps its attributes in a dict,
and that dict is watched like any other: by its version, and compared only when something was written to it.
- Which names matter is settled while tracing. Of classes of modules that is whatever they or their bases have, and
  what code names; of others only what code names, so a counter that the training loop moves there does not retrace.
- What anybody hangs on a class besides (caches of ``copy``, ``abc``, of test frameworks) has none of these names.
  Descriptions in double underscores (``__doc__``, ``__annotations__``) do not matter; special methods do.
- Classes of torch and of Python itself are left out: their methods are theirs to exchange, and they do while tracing.
- Constructors run in a step where it makes an object: ``criterion = FocalLoss()``. Those of a class are looked at that
  code comes to as a thing, which it may call. They give a new object all that it has; what they store counts for none.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from wholestep.capture.python.code_owner import is_library_class
from wholestep.capture.python.container_views import ClassView, is_dunder, is_special_method

CALLED_BY_TORCH = frozenset({"forward", "backward", "setup_context", "jvp", "vmap"})
"""Methods of modules and of autograd functions that run without being named in the user's code."""

CONSTRUCTORS = frozenset({"__new__", "__init__", "__post_init__"})
"""Special methods that run where a class is called."""

NOT_IN_A_STEP = CONSTRUCTORS | frozenset({
    "__init_subclass__", "__set_name__", "__class_getitem__", "__del__",
    "__repr__", "__str__", "__format__", "__dir__", "__sizeof__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__",
    "__ge__", "__hash__", "__copy__", "__deepcopy__", "__replace__", "__getstate__", "__setstate__", "__reduce__",
    "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__",
})  # fmt: skip
"""Special methods that are not read for the names in them: they name everything that an object has. (Constructors are
where the class may be called.)"""


class ClassAttributes:
    """The classes that a walk has met."""

    def __init__(self) -> None:
        self._classes: dict[type, bool] = {}
        """Whether each is looked at whole, not only under names that code uses."""
        self._called: set[type] = set()
        """Those that code may call, and their bases."""
        self._yielded: set[tuple[type, str]] = set()

    def add(self, kind: type, *, whole: bool = False, called: bool = False) -> None:
        """Adds a class, its bases, and its metaclass if that is the user's."""
        self._called.update(kind.__mro__ if called else ())
        above = [base for base in inspect.getmro(type(kind)) if not is_library_class(base)]
        for base in (*kind.__mro__, *above):
            self._classes[base] = self._classes.get(base, False) or (whole and base not in above)

    def values_under(self, names: set[str]) -> Iterator[tuple[str, Any]]:
        """Values of attributes with these names, with their paths, each once."""
        for kind, whole in list(self._classes.items()):
            foreign = is_library_class(kind)
            for key, item in vars(kind).copy().items():
                functions = functions_in(item)
                named = key in names or key == "__call__"
                unread = NOT_IN_A_STEP - CONSTRUCTORS if kind in self._called else NOT_IN_A_STEP
                called = is_special_method(key, item) and key not in unread
                value = whole and not functions and not is_dunder(key)
                if (kind, key) in self._yielded or not (named or (not foreign and (called or value))):
                    continue
                self._yielded.add((kind, key))
                things = functions if functions or foreign else (item,)
                yield from ((f"{kind.__name__}.{key}", thing) for thing in things)

    def views(self, names: set[str]) -> Iterator[tuple[str, ClassView]]:
        """(name, view) pairs of the classes whose attributes are compared at each call."""
        of_modules = {key for kind, whole in self._classes.items() if whole for key in vars(kind).copy()}
        plain = {key for key in of_modules if not is_dunder(key) and not key.startswith("_abc_")}
        by_name, all_names = frozenset(names), frozenset(names | plain)
        for kind, whole in self._classes.items():
            if not is_library_class(kind):
                yield kind.__name__, ClassView(kind, all_names if whole else by_name)


def functions_in(item: Any) -> tuple[Any, ...]:
    """The functions in an attribute of a class; none if it holds something else."""
    if isinstance(item, types.FunctionType):
        return (item,)
    if isinstance(item, (staticmethod, classmethod)):
        return (item.__func__,)
    if isinstance(item, property):
        return tuple(one for one in (item.fget, item.fset) if one is not None)
    return (item.func,) if isinstance(item, (functools.cached_property, functools.partialmethod)) else ()
