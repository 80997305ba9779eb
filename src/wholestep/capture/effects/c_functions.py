"""What a C function may do that nobody looks at: by whose function it is, and by what it is called on.

[Note: C functions in a trace]
A C function has no code to look through. What it may read and change is what its module or its object holds, and what
it is given. So there are three kinds:

- A method. The object is all that it has (`library_state.py`).
- A function of a module that has no state of its own: `_COMPUTING`, each with its reason. Modules of settings (`sys`,
  `gc`, `_thread`, `_warnings`, `_decimal`), of clocks and of the system are none.
- A function of torch. Operators stand in namespaces of the dispatcher, and a trace sees them. What stands in
  ``torch._C`` itself asks or sets a switch. A step may ask for those that guards compare at every call, which are
  found by watching how they are read.
"""

from __future__ import annotations

import _thread
import functools
import sys
import threading
import types
from enum import Enum, auto
from typing import Any

import torch

from wholestep.util.torch_switches import torch_modes

_COMPUTING = {
    "builtins": "works on what it is given; `_OUTSIDE` are the others",
    "math": "numbers from numbers",
    "cmath": "numbers from numbers",
    "itertools": "makes iterators, which are looked at as such",
    "collections": "makes containers",
    "array": "makes buffers",
    "numpy": "works on arrays; its settings are context variables, which are objects",
    "optree": "works on nests of containers that are given",
    "operator": "does what operators do",
    "functools": "calls what it is given; caches are looked at as such",
    "bisect": "works on a list that is given",
    "heapq": "works on a list that is given",
    "struct": "bytes from numbers and back",
    "json": "text from text",
    "string": "parts of a format, which is text",
    "statistics": "numbers from numbers",
    "pickle": "bytes from objects and back",
    "hashlib": "digests of bytes",
    "abc": "whether a class counts as another one",
    "weakref": "makes references, which are followed",
    "sre": "makes patterns, which never change",
}
"""Modules of C functions that have no state of their own, by the first part of their names, without underscores; and
why they have none."""
_ASKING = frozenset(
    {
        sys._getframe, sys.exc_info, sys.getrecursionlimit, sys.is_finalizing, sys.getsizeof, sys.getrefcount,
        sys.getdefaultencoding, sys.intern, _thread.get_ident,
        getattr(sys, "_getframemodulename", sys._getframe),  # since Python 3.12
    }
)  # fmt: skip
"""Functions of modules of settings that set none and show nothing but the running code, its thread and its objects.
Python's own library asks them in passing: ``inspect.signature`` how deep code may nest, for one."""
_OUTSIDE = frozenset({print, input, open, breakpoint, _thread.start_new_thread})
"""Functions of these modules that do more; what another thread does is not watched."""


class Kind(Enum):
    """What a C function has besides its arguments."""

    NOTHING = auto()
    AN_OBJECT = auto()
    """The one whose method it is."""
    MORE = auto()


def kind_of(function: Any) -> Kind:
    """What a C function has."""
    if function in _OUTSIDE:
        return Kind.MORE
    owner = getattr(function, "__self__", None)
    if getattr(function, "__module__", None) is None and not isinstance(owner, (type, types.ModuleType, type(None))):
        return Kind.AN_OBJECT
    package = module_of(function).partition(".")[0].strip("_")
    if package == torch.__name__:
        return Kind.NOTHING if owner is not torch._C or function in compared() else Kind.MORE
    return Kind.NOTHING if package in _COMPUTING or function in _ASKING else Kind.MORE


def module_of(function: Any) -> str:
    """The module of a C function, or of the class whose method it is."""
    if module := getattr(function, "__module__", None):  # of functions, and of methods that pybind11 makes
        return str(module)
    return str(class_of(function).__module__)


def class_of(method: Any) -> type:
    """The class that has a method of C. A class below it may have one of its own in Python that calls this one."""
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    kind = owner if isinstance(owner, type) else type(owner)
    bases = (base for base in kind.__mro__ if name in vars(base))
    found: type = next((base for base in bases if not isinstance(vars(base)[name], types.FunctionType)), kind)
    return found


@functools.cache
def compared() -> frozenset[Any]:
    """The functions by which guards read the switches of torch. First asked for while nothing is watched."""
    found: set[Any] = set()

    def note(frame: types.FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            found.add(function)

    def look() -> None:
        sys.setprofile(note)
        torch_modes()
        sys.setprofile(None)

    thread = threading.Thread(target=look)  # which has a profile function of its own: this one's may be somebody's
    thread.start()
    thread.join()
    return frozenset(found - {sys.setprofile})
