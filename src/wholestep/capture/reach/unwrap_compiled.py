"""Traces through modules and functions that were given to torch.compile.

A step that was trained with ``torch.compile(model)`` before, or with an optimizer that has a compiled function in it,
so needs no change. Whoever put it there is told that it has no part in the step.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from wholestep.capture.python.container_views import own_dict
from wholestep.util.lazy_import import lazy_import
from wholestep.util.log_once import log_once

if TYPE_CHECKING:
    from torch._dynamo import config
else:
    config = lazy_import("torch._dynamo.config")


@contextmanager
def compile_unwrapped() -> Iterator[None]:
    """While open, tracing goes through what torch.compile gives to what it was given."""
    with config.patch(error_on_nested_fx_trace=False):
        yield


def is_compiled(thing: Any) -> bool:
    """Whether torch.compile gave a module or function, or a module compiles itself."""
    if isinstance(thing, nn.Module):
        return "_orig_mod" in thing._modules or getattr(thing, "_compiled_call_impl", None) is not None
    own = own_dict(thing) or {}
    return "_torchdynamo_orig_callable" in own and not own.get("_torchdynamo_disable", False)


def log_unwrapped(paths: Collection[str]) -> None:
    """Says once of each that it has no part in the step."""
    for path in paths:
        name = path.removesuffix("._compiled_call_impl").removesuffix(".forward")
        log_once(
            logging.WARNING, f"torch.compile of {name} has no part in the step, which wholestep compiles as a whole"
        )
