"""Functions of torch that are one record: an optimizer's step, clipping. Whoever holds them calls the redirection.

A name that was imported early, or a scheduler that keeps the function it has wrapped, would escape a replaced
attribute. So the code of the function itself is exchanged, and put back when no live step runs any more. Until then
nothing may compile that code: what was given to torch.compile runs as it was written, in all threads.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch


def _template(free: tuple[str, ...]) -> types.CodeType:
    """The code of a function that calls what stands in the place of the constant "target", with these free variables.

    A function keeps its cells, so its new code must have as many free variables, and say so in its first instruction.
    """
    lines = [
        "def outer():",
        f"    {' = '.join(['_', *free])} = None",
        "    def redirected(*args, **kwargs):",
        f"        if 0: {', '.join(free) or 'pass'}",
        '        target = "target"',
        "        return target(*args, **kwargs)",
        "    return redirected",
    ]
    scope: dict[str, Any] = {}
    exec(compile("\n".join(lines), __file__, "exec"), scope)
    code: types.CodeType = scope["outer"]().__code__
    return code


@dataclass(frozen=True, slots=True)
class Redirection:
    """One function, its own code and the code that calls another one."""

    function: types.FunctionType
    original: types.CodeType
    redirected: types.CodeType


def redirection(
    function: types.FunctionType, target: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Redirection:
    """A redirection to what `target` makes of the function as it is now."""
    code = function.__code__
    plain = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    plain.__kwdefaults__ = function.__kwdefaults__
    template = _template(code.co_freevars)
    constants = tuple(target(plain) if one == "target" else one for one in template.co_consts)
    return Redirection(function, code, template.replace(co_consts=constants))


class Redirections:
    """Those of a process, in place while any live step runs. They ask for the thread's live step themselves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._known: dict[int, Redirection] = {}
        self._uncompiled = ExitStack()
        """Has torch.compile leave functions as they were written, while any live step runs."""

    @contextmanager
    def __call__(self, wanted: Iterable[tuple[types.FunctionType, Any]]) -> Iterator[None]:
        """While open, these functions are redirected, and those of earlier calls. Of pairs for `redirection`."""
        with self._lock:
            if self._open == 0:
                self._uncompiled.enter_context(torch.compiler.set_stance("force_eager"))
            self._open += 1
            for function, target in wanted:
                if id(function) not in self._known:
                    self._known[id(function)] = redirection(function, target)
            for one in self._known.values():
                one.function.__code__ = one.redirected
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if self._open == 0:
                    for one in self._known.values():
                        one.function.__code__ = one.original
                    self._uncompiled.close()
