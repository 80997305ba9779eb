"""``x.data = y`` in a trace: the tensor object stands for another value from there on.

It is no operator, so a trace would lose it: each object has the node that it was made by. A tensor that the step has
made, and through which no gradient goes, is given the node of `y`. Others are refused: an input has a place in memory
which the graph cannot exchange, and a backward would read what is there by then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot, set_proxy_slot

from wholestep.capture.python.tracing_thread import on_this_thread
from wholestep.capture.python.user_frame import current_line
from wholestep.capture.scalars.host_scalars import running_tracer
from wholestep.errors import CaptureError


@contextmanager
def data_assignments(inputs: Collection[int], raised: list[Exception]) -> Iterator[None]:
    """While open, assignments to ``.data`` by this thread are part of the trace.

    Args:
        inputs: ids of the tensors from outside.
        raised: gets the CaptureError of one that is refused, since a handler of the user's may catch it.
    """
    slot: Any = torch.Tensor.data

    def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
        tracer = running_tracer()
        if tracer is not None and isinstance(tensor, FakeTensor) and not _is_same(tensor, value):
            node = _node_of(value, tracer)
            if node is None or id(tensor) in inputs or tensor.requires_grad or tensor.constant is not None:
                raised.append(_refused(tensor))
                raise raised[-1]
            slot.__set__(tensor, value)
            set_proxy_slot(tensor, tracer, node)
        else:
            slot.__set__(tensor, value)

    attribute = property(slot.__get__, on_this_thread(assign, slot.__set__))
    with patch.object(torch.Tensor, "data", attribute, create=True):
        yield


def _node_of(value: torch.Tensor, tracer: Any) -> Any:
    """What makes a value that the trace has computed; None for any other."""
    if not isinstance(value, FakeTensor) or value.constant is not None:
        return None
    return get_proxy_slot(value, tracer, None)


def _is_same(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a tensor is given the memory that it has."""
    if not isinstance(value, FakeTensor) or tensor.layout is not torch.strided or value.layout is not torch.strided:
        return False
    places = (
        (one.untyped_storage()._cdata, one.storage_offset(), one.shape, one.stride(), one.dtype)
        for one in (tensor, value)
    )
    return next(places) == next(places)


def _refused(tensor: torch.Tensor) -> CaptureError:
    return CaptureError(
        f"The step could not be captured at {current_line()}\nIt gives a {list(tensor.shape)} other storage or "
        f"another shape (an assignment to .data). A graph can only write values: copy_() into it under torch.no_grad()."
    )
