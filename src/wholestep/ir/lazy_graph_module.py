"""GraphModules whose Python is generated when it is first run or read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.fx as fx
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module


def module_of(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A GraphModule of `graph`; `root`, a module or a dict, holds the constants that it reads."""
    return _LazyGraphModule(root, graph)


def function_of(module: fx.GraphModule) -> Callable[..., Any]:
    """What a GraphModule computes, without the hooks that the user runs on every module."""
    if isinstance(module, _LazyGraphModule):  # its `forward` calls the module, and so the hooks
        module.real_recompile()
    return module.forward


def unwritten() -> AbstractContextManager[None]:
    """While open, what make_fx traces is such a module."""
    return _use_lazy_graph_module(True)
