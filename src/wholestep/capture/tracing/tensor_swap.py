"""Exchanges what is inside of tensors for the time of a trace.

[Note: swapping by identity]
The step reaches its parameters, buffers and optimizer state through objects of the user: modules, lists,
closures, keys of ``optimizer.state``. Instead of replacing entries in all those places, the *contents* of
each tensor object and of its fake twin are exchanged for the time of the trace and exchanged back after it.
Whatever holds the object then sees the fake, and nothing is left behind. Attributes that the user has set on a
tensor (``weight.decay = False``) stay in sight, and what the step sets is found on the tensor afterwards.

Source of the technique: ``torch.utils.swap_tensors``, without its check for weak references, which the
tracer itself holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

ENTRY_MARK = "_wholestep_entry"
"""Attribute of a gradient that was there before the call, while it is traced."""


@contextmanager
def swapped(reals: Sequence[torch.Tensor], fakes: Sequence[torch.Tensor]) -> Iterator[None]:
    """While open, each of `reals` is what its fake twin was, and the other way round."""
    done: list[tuple[torch.Tensor, torch.Tensor, set[str]]] = []
    try:
        for real, fake in zip(reals, fakes, strict=True):
            _exchange(real, fake)
            of_fakes = {*vars(real), ENTRY_MARK}
            vars(real).update({key: item for key, item in vars(fake).items() if key not in of_fakes})
            done.append((real, fake, of_fakes))
        yield
    finally:
        with ExitStack() as stack:  # each of them, whatever becomes of the others
            for one in done:
                stack.callback(_put_back, *one)


def _put_back(real: torch.Tensor, fake: torch.Tensor, of_fakes: set[str]) -> None:
    _exchange(real, fake)
    for key in [key for key in vars(real) if key not in vars(fake)]:
        del vars(real)[key]
    vars(real).update({key: item for key, item in vars(fake).items() if key not in of_fakes})


def _exchange(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exchanges class, attributes and implementation of two tensor objects; their identities stay.

    Raises RuntimeError, and exchanges nothing, where C++ holds a weak reference to one of them.
    """
    swap_contents(a, b)
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__


def swap_contents(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exchanges what two tensor objects stand for, and neither their classes nor their attributes."""
    torch._C._swap_tensor_impl(a, b)
