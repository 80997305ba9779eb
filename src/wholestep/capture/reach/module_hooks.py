"""The hooks that run around the forward and backward of modules, and those of all modules and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import optimizer

_OWN = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs"
)  # fmt: skip

GLOBAL_HOOKS = {
    name: hooks
    for module in (nn.modules.module, optimizer)
    for name, hooks in vars(module).items()
    if name.startswith("_global_") and "hooks" in name
}
"""By name the dicts of hooks that run on every module, or at every step of an optimizer."""


def of(module: nn.Module) -> Iterator[tuple[str, Any, bool]]:
    """Each dict of hooks of a module with its name, and whether a call reads it."""
    for name in _OWN:
        # Which hooks take keywords: looked up for hooks that are there, by nobody else.
        yield name, getattr(module, name), name != "_forward_hooks_with_kwargs" or bool(module._forward_hooks)
