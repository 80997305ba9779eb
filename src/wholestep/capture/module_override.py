"""Modules that stand in for others while a step is captured, and for no longer.

The step is traced with the stand-ins in place. Afterwards the user's module is as it was, so the guards, which
remember what the trace saw, must take the originals for the stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from wholestep.capture.guards.guards import Guards
from wholestep.capture.guards.state_guards import ContainerGuard

Replace = Callable[[str, nn.Module], nn.Module]
"""Gives the module that stands in for the child with this fully qualified name: the child itself for most of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """One child of a module, and what stands in for it."""

    parent: nn.Module
    name: str
    original: nn.Module
    replacement: nn.Module


def choose(roots: Iterable[nn.Module], replace: Replace) -> list[Replacement]:
    """Asks `replace` for every submodule of `roots`, parents first. What is replaced is not looked into.

    Names are relative to their root.
    """
    chosen: list[Replacement] = []

    def visit(parent: nn.Module, prefix: str) -> None:
        for name, child in parent._modules.items():
            if child is None:
                continue
            fqn = f"{prefix}{name}"
            replacement = replace(fqn, child)
            if replacement is child:
                visit(child, f"{fqn}.")
            else:
                chosen.append(Replacement(parent=parent, name=name, original=child, replacement=replacement))

    for root in roots:
        visit(root, "")
    return chosen


@contextmanager
def overridden(stand_ins: Sequence[Replacement]) -> Iterator[None]:
    """While open, the replacements are where the originals were."""
    try:
        for one in stand_ins:
            one.parent._modules[one.name] = one.replacement
        yield
    finally:
        for one in stand_ins:
            one.parent._modules[one.name] = one.original


def expect_originals(guards: Guards, stand_ins: Sequence[Replacement]) -> None:
    """Makes guards that were built with the stand-ins in place hold for the originals."""
    for watch in (one for guard in guards.state if isinstance(guard, ContainerGuard) for one in guard.snapshots):
        for one in stand_ins:
            if watch.container is one.parent._modules:
                watch.held[one.name] = one.original
