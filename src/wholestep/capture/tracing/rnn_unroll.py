"""Recurrent layers on a GPU, step by step: cuDNN's kernel for a whole sequence has no place in a graph.

It wants the weights of all layers as one storage, for which there is no argument, and its backward has no fake kernel.
ATen computes the same with a product and a kernel per step of the sequence. Thousands of launches are what a CUDA graph
is good at; long sequences take long to compile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from wholestep.capture.python.tracing_thread import on_this_thread

log = logging.getLogger("wholestep")

_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextmanager
def unrolled_rnns() -> Iterator[None]:
    """While open, recurrent layers on a GPU are computed by ATen, and the first one is told."""
    told: list[str] = []

    def of(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not x.is_cuda or not torch.backends.cudnn.enabled:
                return original(x, *args, **kwargs)
            if not told:
                told.append(kind)
                log.warning("%s: no graph can hold cuDNN's kernel for sequences; ATen computes it step by step", kind)
            with torch.backends.cudnn.flags(enabled=False):
                return original(x, *args, **kwargs)

        return run

    with ExitStack() as stack:
        for kind in _KINDS:
            original = getattr(torch._VF, kind)
            stack.enter_context(patch.object(torch._VF, kind, on_this_thread(of(kind, original), original)))
        yield
