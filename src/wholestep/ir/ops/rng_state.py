"""Reading and setting RNG states as operations of the graph, for checkpointed dropout.

Activation checkpointing saves the generator's state and sets it back for the recompute. As plain Python
that happens once, while tracing, and every replay would draw different masks in forward and recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from wholestep.ir.ops.library import LIBRARY

LIBRARY.define("rng_get(str device) -> Tensor", tags=())
LIBRARY.define("rng_set(Tensor state, str device) -> ()")


def _generator_module(device: str) -> Any:
    return torch.cuda if device.startswith("cuda") else torch.random


_Ways = tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], object]]
_instead: ContextVar[_Ways | None] = ContextVar("_instead", default=None)


@contextmanager
def redirected(get: Callable[[], torch.Tensor], set_: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Meanwhile a graph that this thread runs reads and sets the state of a GPU's generator by these."""
    before = _instead.set((get, set_))
    try:
        yield
    finally:
        _instead.reset(before)


def _get(device: str) -> torch.Tensor:
    if (ways := _instead.get()) is not None and device.startswith("cuda"):
        return ways[0]()
    module = _generator_module(device)
    return module.get_rng_state(device) if module is torch.cuda else module.get_rng_state()  # type: ignore[no-any-return]


def _set(state: torch.Tensor, device: str) -> None:
    if (ways := _instead.get()) is not None and device.startswith("cuda"):
        ways[1](state)
        return
    module = _generator_module(device)
    if module is torch.cuda:
        module.set_rng_state(state, device)
    else:
        module.set_rng_state(state)


LIBRARY.impl("rng_get", _get, "CompositeExplicitAutograd")
LIBRARY.impl("rng_set", _set, "CompositeExplicitAutograd")


GET, SET = torch.ops.wholestep.rng_get.default, torch.ops.wholestep.rng_set.default
"""Reads and sets the state of the generator of a device."""


def state_bytes(device: torch.device) -> int:
    """Bytes of the state of a generator."""
    return 5056 if device.type == "cpu" else 16


@torch.library.register_fake("wholestep::rng_get", lib=LIBRARY)  # type: ignore[untyped-decorator,unused-ignore]
def _fake_get(device: str) -> torch.Tensor:
    return torch.empty(state_bytes(torch.device(device)), dtype=torch.uint8, device="cpu")


@torch.library.register_fake("wholestep::rng_set", lib=LIBRARY)  # type: ignore[untyped-decorator,unused-ignore]
def _fake_set(state: torch.Tensor, device: str) -> None:
    return None


for _op in (GET, SET):
    torch.fx.node.has_side_effect(_op)  # else the trace itself would drop a set that nobody reads
