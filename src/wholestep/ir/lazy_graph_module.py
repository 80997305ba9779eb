"""GraphModules whose Python is generated when it is first run or read."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.fx as fx
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module


def module_of(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A GraphModule of `graph`; `root`, a module or a dict, holds the constants that it reads."""
    return _LazyGraphModule(root, graph)


def unwritten() -> AbstractContextManager[None]:
    """While open, what make_fx traces is such a module."""
    return _use_lazy_graph_module(True)
