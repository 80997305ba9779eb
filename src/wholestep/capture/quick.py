"""Two native checks that torch keeps for Dynamo's guards, behind one door, each with a plain fallback."""

from __future__ import annotations

from typing import Any

import torch

try:
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
    from torch._C._dynamo.guards import dict_version as _native_dict_version
except ImportError:  # pragma: no cover - every supported release has both
    _TensorGuards = None
    _native_dict_version = None

_never_the_same = iter(range(-1, -(2**62), -1))


def _plain_dict_version(container: dict[Any, Any]) -> int:
    """A negative number that differs at every call: says "compare in full"."""
    return next(_never_the_same)


def _works() -> bool:
    try:
        probe = {"a": 1}
        before = _native_dict_version(probe)
        steady = before == _native_dict_version(probe)
        probe["a"] = 2
        return steady and before != _native_dict_version(probe)
    except Exception:
        return False


dict_version = _native_dict_version if _native_dict_version is not None and _works() else _plain_dict_version
"""A number that changes whenever the dict is written to."""


class TensorCheck:
    """Whether tensors still have the type, dtype, device, shape, strides and ``requires_grad`` they had when made.

    ``holds()`` being False means "compare in full", not "they differ".
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._native = None
        if _TensorGuards is not None and tensors:
            try:
                self._native = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
                if not self._native.check(*tensors):
                    self._native = None
            except (TypeError, RuntimeError, SystemError):
                self._native = None

    def holds(self) -> bool:
        """True only if nothing changed."""
        if not self._tensors:
            return True
        return self._native is not None and bool(self._native.check(*self._tensors))
