"""Version counters of inputs that a step reads and sets, as values of the graph.

Autograd counts the writes to a tensor, and refuses a backward that needs what was overwritten since. A step may
write behind its back: it reads ``t._version``, writes, and sets the counter back (`_unsafe_preserve_version_counter`
does just that). While tracing, the counter of an input is a symbol, since it is another number at every call, and what
the step leaves in it becomes an operation of the graph. Counters that nobody sets are not kept as eager code has them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.fx as fx
from torch.autograd.graph import increment_version

from wholestep.capture.python.code_owner import library_frame
from wholestep.capture.scalars.host_scalars import running_tracer
from wholestep.errors import CaptureError
from wholestep.ir import op_info

_PRESERVES = torch.autograd.grad_mode.__file__
"""Where torch itself reads a counter to set it back."""

_plain: Any = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]


class VersionRecorder:
    """The version counters of one trace."""

    def __init__(self, reals: list[torch.Tensor]) -> None:
        self._reals = reals
        self._index: dict[int, int] = {}
        self._storages: set[int] = set()
        self._entry: list[int] = []
        self._symbols: dict[int, torch.SymInt] = {}
        self._known: dict[Any, int] = {}
        """Symbol -> the number that the fake counter had at entry."""
        self._pins: dict[int, tuple[Any, int]] = {}
        """Input -> what its counter was set to, and that number while tracing."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While open, counters of inputs are symbols. The inputs must be fake by now."""
        self._index = {id(tensor): index for index, tensor in enumerate(self._reals)}
        self._storages = {t.untyped_storage()._cdata for t in self._reals if t.layout is torch.strided}
        self._entry = [_plain(tensor) for tensor in self._reals]
        self._set_plainly = torch._C._autograd._unsafe_set_version_counter
        with (
            patch.object(torch.Tensor, "_version", property(self._read)),
            patch.object(torch._C._autograd, "_unsafe_set_version_counter", self._set),
        ):
            yield

    def at_exit(self) -> tuple[list[int], list[Any]]:
        """Inputs whose counter the step has set, and per input what it is at the end."""
        values = [_plus(value, _plain(self._reals[index]) - then) for index, (value, then) in self._pins.items()]
        return list(self._pins), values

    def _read(self, tensor: torch.Tensor) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        plain = _plain(tensor)
        tracer = running_tracer()
        if tracer is None or (library_frame(caller) and caller != _PRESERVES):
            return plain
        index = self._index.get(id(tensor))
        if index is not None:
            return _plus(self._symbol(index, tracer.graph), plain - self._entry[index])
        if tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._storages:
            raise CaptureError(
                f"The step reads the version counter of a view {list(tensor.shape)} of one of its inputs. Read it from "
                f"the tensor itself."
            )
        return plain

    def _symbol(self, index: int, graph: fx.Graph) -> torch.SymInt:
        if index not in self._symbols:
            symbol = self._symbols[index] = op_info.VERSION(self._reals[index])
            self._known[symbol.node.expr] = self._entry[index]
            placeholders = graph.find_nodes(op="placeholder")
            node = next(reversed(graph.find_nodes(op="call_function", target=op_info.VERSION)))
            node.args = (placeholders[index],)  # the counter at entry, whatever was written since
            placeholders[-1].append(node)
        return self._symbols[index]

    def _set(self, tensors: Any, versions: Any) -> None:
        tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        versions = (versions,) if isinstance(versions, (int, torch.SymInt)) else tuple(versions)
        for tensor, value in zip(tensors, versions, strict=True):
            index = self._index.get(id(tensor))
            number = value
            if isinstance(value, torch.SymInt):
                number = value.node.expr.xreplace(self._known)
            elif index is not None:
                raise CaptureError(
                    f"The step sets the version counter of a tensor {list(tensor.shape)} to {value}, a number that is "
                    f"not counted from the counter itself. Read t._version before the write and set that, or use "
                    f"torch.autograd._unsafe_preserve_version_counter."
                )
            self._set_plainly((tensor,), (int(number),))
            if index is not None:
                self._pins[index] = value, int(number)


@contextmanager
def lists_counted(func: Any, written: Iterable[torch.Tensor]) -> Iterator[None]:
    """Around an operator that a dispatch mode runs: kernels over lists count their writes, which torch stops there."""
    counted = written if func.__name__.startswith("_foreach_") else ()
    before = [(one, one._version) for one in counted if not one.is_inference()]
    yield
    for one, version in before:
        if one._version == version:
            increment_version(one)


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a call of an operator writes to."""
    if not func._schema.is_mutable:
        return []
    places = op_info.mutated_args(func)
    named = (func._schema.arguments[place].name for place in places)
    values = [args[place] if place < len(args) else kwargs.get(name) for place, name in zip(places, named, strict=True)]
    flat = (one for value in values for one in (value if isinstance(value, (list, tuple)) else [value]))
    return [one for one in flat if isinstance(one, torch.Tensor)]


def _plus(symbol: torch.SymInt, number: int) -> torch.SymInt:
    return symbol + number if number else symbol


def keep_versions(graph: fx.Graph, versions: Sequence[tuple[int, Any]], written: Collection[int]) -> None:
    """Adds what sets counters, for inputs that are written or whose counter is to change."""
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_before(graph.output_node()):
        for index, value in versions:
            if index in written or not (isinstance(value, fx.Node) and value.target is op_info.VERSION):
                graph.call_function(op_info.SET_VERSION, (placeholders[index], value))
