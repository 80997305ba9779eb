"""lazy_import(name): a module that is imported when it is first used.

A compiler takes seconds to import. A step that another process has compiled needs none, nor does one that nobody
compiles. Where such a module is used, `lazy_import` stands for it at run time, and type checkers and the rules of the
house see an import as any other::

    if TYPE_CHECKING:
        from wholestep.lower import compiler
    else:
        compiler = later("wholestep.lower.inductor.compile_fx")
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class _Later(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def lazy_import(name: str) -> ModuleType:
    """The module of this full name, imported with the first look at an attribute of it, which may raise ImportError."""
    return _Later(name)
