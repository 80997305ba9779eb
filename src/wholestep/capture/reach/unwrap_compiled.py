"""Traces through modules and functions that were given to torch.compile, and keeps it out of our own code.

A step that was trained with ``torch.compile(model)`` before, or with an optimizer that has a compiled function in it,
so needs no change. Whoever put it there is told that it has no part in the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from wholestep.capture.python.container_views import own_dict
from wholestep.capture.python.tracing_thread import on_this_thread
from wholestep.util.lazy_import import lazy_import
from wholestep.util.log_once import log_once

if TYPE_CHECKING:
    from torch._dynamo import config, eval_frame
else:
    config, eval_frame = lazy_import("torch._dynamo.config"), lazy_import("torch._dynamo.eval_frame")

F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def compile_unwrapped() -> Iterator[None]:
    """While open, tracing goes through what torch.compile gives to what it was given."""
    compiled = eval_frame.OptimizedModule
    plain = on_this_thread(nn.Module.__call__, compiled.__call__)  # its own warns of the hooks of a trace
    with config.patch(error_on_nested_fx_trace=False), patch.object(compiled, "__call__", plain):
        yield


def left_alone(function: F) -> F:
    """The function, into which torch.compile does not look, nor into what it calls: a step in a compiled loop."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


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
