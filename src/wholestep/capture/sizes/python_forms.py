"""Operators whose C++ asks for sizes as numbers are described by their Python form, which takes symbols.

torch answers such a question with the number of the traced call, and the dim is a constant from then on. Which
operators ask differs by version and device. So whoever asks is stopped, and described anew by torch's decomposition of
it; one that has none gets its number (`SizeEnv.constant` says who it was).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._decomp import decomposition_table
from torch._subclasses import fake_tensor
from torch.utils import _pytree as pytree

_SIZES = tuple(getattr(torch.ops.aten, name).default for name in ("size", "stride"))
"""What C++ calls where it asks for numbers."""


class _AsksForNumbers(BaseException):
    """Raised into C++ that asks, and caught where the operator was called: no error, so that nobody reports it."""


class PythonForms:
    """Describes the operators of one trace."""

    def __init__(self) -> None:
        self._refuses = False

    def describe(self, run: Callable[[], Any], mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """What `run()` gives: the operator on fake tensors of `mode`, by its Python form where C++ asks for numbers."""
        form = decomposition_table.get(func)
        if form is None or not any(map(_is_symbolic, pytree.tree_leaves((args, kwargs)))):
            return run()
        refused, self._refuses = self._refuses, True
        try:
            return run()
        except _AsksForNumbers:
            self._refuses = False
            with mode:
                return form(*args, **kwargs)
        finally:
            self._refuses = refused

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While open, C++ that asks for sizes inside of `describe` is stopped."""
        handlers: dict[Any, Callable[[Any], Any]] = fake_tensor._DISPATCH_META_HANDLERS

        def asked(answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def numbers(args: Any) -> Any:
                if self._refuses and _is_symbolic(args[0]):
                    raise _AsksForNumbers
                return answer(args)

            return numbers

        with patch.dict(handlers, {one: asked(handlers[one]) for one in _SIZES if one in handlers}):
            yield


def _is_symbolic(one: Any) -> bool:
    if isinstance(one, torch.SymInt):
        return True
    if not isinstance(one, torch.Tensor) or one.layout is not torch.strided:
        return False
    return not all(isinstance(size, int) for size in (*one.shape, *one.stride()))
