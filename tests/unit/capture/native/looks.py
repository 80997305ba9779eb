"""What tests of the native look share: looks at a few things, and who watches a dict."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from wholestep.capture.native import self_test

WATCHED = sys.version_info >= (3, 12)
"""Whether Python tells of writes."""


def look_at(module: ModuleType, *containers: dict[Any, Any]) -> Any:
    return module.StateGuard((), b"", containers, (None,) * len(containers))


def look_at_tensor(module: ModuleType, tensor: Tensor, want: int = self_test.PARAMETER) -> Any:
    return module.StateGuard((tensor,), bytes([want]), (), ())


def word_of(container: dict[Any, Any]) -> ctypes.c_uint64:
    """The word of a dict that has its version, if there is one, and in its last byte who watches it."""
    return ctypes.c_uint64.from_address(id(container) + 24)


def num_watchers(container: dict[Any, Any]) -> int:
    return (word_of(container).value & 0xFF).bit_count()


NEEDS_WATCHERS = pytest.mark.skipif(not WATCHED, reason="this Python tells nobody of writes")


class Plain:
    """Python keeps attributes in the object itself, until somebody asks for its dict."""

    def __init__(self) -> None:
        self.a, self.b = 1, 2
