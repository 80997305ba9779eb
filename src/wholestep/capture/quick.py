"""Two native checks that torch keeps for Dynamo's guards, behind one door, each with a plain fallback."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

_TensorGuards: Any = None
_native_dict_version: Any = None
with suppress(ImportError, AttributeError):  # every supported release has both
    from torch._C._dynamo import guards as _native

    _TensorGuards, _native_dict_version = _native.TensorGuards, _native.dict_version

VERSIONED: tuple[type, ...] = (dict, defaultdict, OrderedDict)
"""Kinds of dict whose version tells of every write. A subclass in Python may read from elsewhere."""

_never_the_same = iter(range(-1, -(2**62), -1))


def plain_dict_version(container: dict[Any, Any]) -> int:
    """A negative number that differs at every call: says "compare in full"."""
    return next(_never_the_same)


_WRITES: tuple[Callable[[Any], Any], ...] = (
    lambda d: d.update(a=2), lambda d: d.__setitem__("b", 3), lambda d: d.pop("b"), lambda d: d.clear(),
)  # fmt: skip


def _works() -> bool:
    """Whether the native version stays while a dict is read, and changes with every way to write to it."""
    try:
        for kind in VERSIONED:
            probe: Any = kind()
            probe["a"] = 1
            seen = [_native_dict_version(probe)]
            if probe["a"] != 1 or seen[0] != _native_dict_version(probe):
                return False
            for write in _WRITES:
                write(probe)
                seen.append(_native_dict_version(probe))
            if len(set(seen)) != len(seen):
                return False
    except Exception:
        return False
    return True


dict_version = _native_dict_version if _native_dict_version is not None and _works() else plain_dict_version
"""A number that changes whenever something else is written into the dict."""


class TensorCheck:
    """Whether tensors have the type, dtype, device, shape, strides and ``requires_grad`` of those it was made of.

    ``holds`` being False means "compare in full", not "they differ".
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._native: Any = None
        self._empty = not tensors
        self.renew(tensors)

    def renew(self, tensors: Sequence[torch.Tensor]) -> None:
        """Takes the tensors as they are now for what is wanted."""
        self._native = None
        if _TensorGuards is None or not tensors:
            return
        try:
            native = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            if native(*tensors):
                self._native = native
        except (TypeError, RuntimeError, SystemError):
            return

    def holds(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """True only if nothing changed. A tuple is handed over without a copy."""
        return self._empty if self._native is None else bool(self._native(*tensors))
