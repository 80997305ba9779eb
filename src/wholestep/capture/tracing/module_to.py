"""Modules that a step moves to where they are, or converts to the type they have: ``self.head.to(x.device)``.

In eager code that changes nothing. On fake tensors torch exchanges what is inside parameters instead of assigning
``.data``, which fails for parameters that a trace holds. So it is asked first whether there is anything to convert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import nn

from wholestep.capture.python.tracing_thread import on_this_thread


@contextmanager
def module_to_is_identity() -> Iterator[None]:
    """While open, a conversion that gives every parameter, gradient and buffer back as it was does nothing else."""
    original: Callable[..., nn.Module] = nn.Module._apply

    def convert(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        params = list(module.parameters(recurse))
        held = [*params, *(p.grad for p in params if p.grad is not None), *module.buffers(recurse)]
        with torch.no_grad():
            if all(fn(tensor) is tensor for tensor in held):
                return module
        return original(module, fn, recurse)

    with patch.object(nn.Module, "_apply", on_this_thread(convert, original)):
        yield
