"""Indexing of tensors, replaced for a while, so that a tensor is no sequence meanwhile or afterwards.

A class whose ``__getitem__`` is set gets two slots in C: the one of mappings, which tensors have, and the one of
sequences, which they have not. Python leaves both when the attribute goes. ``torch.tensor([a])`` asks a tensor that is
a sequence for its length, which a tensor of no dimensions has not. So the second one is emptied again.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)
_AS_SEQUENCE = object.__basicsize__ + 11 * _POINTER_BYTES
"""Where a type has the address of its methods as a sequence: after its size and ten other fields."""
_ITEM = 3 * _POINTER_BYTES
"""Where those have the one that gives an item."""


def _slot(kind: type) -> ctypes.c_void_p:
    methods = ctypes.c_void_p.from_address(id(kind) + _AS_SEQUENCE).value
    assert methods is not None  # every class that is made in Python has them
    return ctypes.c_void_p.from_address(methods + _ITEM)


def is_sequence(thing: Any) -> bool:
    """Whether C takes an object for a sequence."""
    return bool(ctypes.pythonapi.PySequence_Check(ctypes.py_object(thing)))


@functools.cache
def is_supported() -> bool:
    """Whether this Python has the slot of sequences where we think: tried on a class of our own."""
    plain: Any = type("Plain", (), {})
    if _slot(plain).value is not None:
        return False
    plain.__getitem__ = lambda self, index: index
    if _slot(plain).value is None or not is_sequence(plain()):
        return False
    _slot(plain).value = None
    return not is_sequence(plain()) and plain()[3] == 3


def _kinds(kind: type) -> set[type]:
    """A class and all that are made of it: Python fills the slots of each."""
    return {kind}.union(*map(_kinds, type.__subclasses__(kind)))


@contextmanager
def indexing_replaced(replacement: Callable[[torch.Tensor, Any], Any]) -> Iterator[None]:
    """While open, ``tensor[index]`` is `replacement`, on all threads; nothing is replaced unless `is_supported`."""
    if not is_supported():
        yield
        return
    sequences = {kind for kind in _kinds(torch.Tensor) if _slot(kind).value is not None}

    def empty_slots() -> None:
        for kind in _kinds(torch.Tensor) - sequences:
            _slot(kind).value = None

    torch.Tensor.__getitem__ = replacement  # type: ignore[method-assign, assignment, unused-ignore]
    empty_slots()
    try:
        yield
    finally:
        del torch.Tensor.__getitem__
        empty_slots()  # of classes that were made meanwhile
