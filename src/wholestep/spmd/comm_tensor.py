"""CommTensor: in-place collectives whose result is awaited by whoever reads it first, in eager code and in traces.

[Note: three situations]
- *Eager code.* The collective is launched as always; its work handle is remembered, and the first operation that
  reads the tensor waits for it.
- *Under ``make_fx`` alone.* A call such as ``dist.all_reduce(y)`` would put an operator into the graph whose work
  handle is a constant of the trace. The rules that capture uses for process groups
  (`wholestep.capture.tracing.process_group_rules`) put the functional collective there; the first reader puts the wait
  right before itself and reads the wait's result.
- *Inside of a compiled step.* Capture sees every collective anyway, so the wrapper is the tensor it was made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

from wholestep.capture.python.tracing_thread import is_capturing
from wholestep.capture.tracing.process_group_rules import RULES
from wholestep.capture.tracing.process_groups import ProcessGroupRecorder
from wholestep.errors import ConfigError
from wholestep.ir import op_info

_wait_comm = op_info.WAIT
"""The operator between a collective and its readers in a traced graph."""

_COPY = torch.ops.aten.copy_.default
_METHODS = {
    "allreduce_": "allreduce",
    "broadcast_": "broadcast",
    "allgather_": "allgather",
    "_allgather_base_": "_allgather_base",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "_reduce_scatter_base",
    "scatter_": "scatter",
    "alltoall_": "alltoall",
    "alltoall_base_": "alltoall_base",
}
"""Operator of the namespace ``c10d`` -> method of a process group, as the rules are called."""


class _PendingWork:
    """A collective that was launched and may not be over."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait: Callable[[], object] | None = wait
        self.is_writing = False
        """Whether its results are being written at this moment."""

    def wait_once(self) -> None:
        """Waits, once."""
        wait, self._wait = self._wait, None
        if wait is not None:
            self.is_writing = True
            try:
                wait()
            finally:
                self.is_writing = False


class _SharedTensor:
    """The state that the wrappers of one tensor share."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.base = self.latest = tensor
        """The tensor that was wrapped, and the one that readers get: what has arrived for it, if anything has."""
        self.pending: _PendingWork | None = None

    def read(self) -> torch.Tensor:
        """The tensor, after the collective that writes to it."""
        if self.pending is not None:
            self.pending.wait_once()
        return self.latest

    def write(self) -> torch.Tensor:
        """The wrapped tensor itself, for an operation that writes to it."""
        self.read()
        self.latest = self.base
        return self.base

    def set_result(self, value: torch.Tensor) -> None:
        """Takes the result of a collective. Readers get `value`, so that they read the wait itself in a trace."""
        self.base.copy_(value)
        self.latest = value


class CommTensor(torch.Tensor):
    """Wraps a tensor that collectives read or write in place, so that its readers wait for them.

    Works in eager code, under ``make_fx``, and inside of a compiled step. What is computed from a wrapper before any
    collective has written to it is a wrapper, too; what is computed afterwards is a plain tensor. Gradients do not
    flow through it.

    Supported collectives: all_reduce, broadcast, all_gather (list), all_gather_into_tensor, reduce_scatter (list),
    reduce_scatter_tensor, scatter, all_to_all (lists), all_to_all_single.
    """

    _shared: _SharedTensor

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> Any:
        """A wrapper; the tensor itself while a step is captured. Wrappers of a wrapper share its tensor."""
        if is_capturing():
            return tensor
        shared = tensor._shared if isinstance(tensor, CommTensor) else _SharedTensor(tensor)
        like = shared.latest
        made = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), storage_offset=like.storage_offset(),
            dtype=like.dtype, layout=like.layout, device=like.device,
        )  # fmt: skip
        made._shared = shared
        return made

    def __repr__(self, **options: Any) -> str:  # type: ignore[override,unused-ignore]
        return f"CommTensor({self._shared.latest!r}{', communicated' if self._shared.pending else ''})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def _is_supported(op_name: str) -> bool:
        """Whether an operator of this name (``all_reduce.default``) is a collective, as it stands in a traced graph."""
        return op_name in {op.__name__ for op in op_info.COLLECTIVES}

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return _collective(func, args, kwargs)
        if func is _COPY and isinstance(args[0], CommTensor):
            shared = args[0]._shared
            if shared.pending is not None and shared.pending.is_writing:
                shared.set_result(_read(args[1]))
                return args[0]
        written = [one for index in op_info.mutated_args(func) if index < len(args) for one in _wrappers(args[index])]
        for one in written:
            one._shared.write()
        involved = list(_wrappers((args, kwargs)))
        result = func(*_read(args), **_read(kwargs))
        same = {id(one._shared.base): one for one in written}
        untouched = all(one._shared.pending is None for one in involved)

        def wrapped(tensor: torch.Tensor) -> torch.Tensor:
            return same.get(id(tensor), CommTensor(tensor) if untouched else tensor)

        return pytree.tree_map_only(torch.Tensor, wrapped, result)


def _wrappers(tree: Any) -> Iterator[CommTensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, CommTensor))


def _read(tree: Any) -> Any:
    return pytree.tree_map_only(CommTensor, lambda one: one._shared.read(), tree)


def _collective(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A collective of torch.distributed: launched, and remembered by the wrappers that it writes to."""
    schema = func._schema
    given = op_info.by_name(func, args, kwargs)
    targets = pytree.tree_leaves(args[0])
    if get_proxy_mode() is None:
        result = func(*_read(args), **_read(kwargs))
        work = result[-1] if isinstance(result, tuple) else result
        pending = _PendingWork(dist.Work.unbox(work).wait)
    else:
        pending = _traced(func, given)
        work = _distributed_c10d.PythonCallbackWork(lambda timeout: _settled(pending)).boxed()
    for target in targets:
        if isinstance(target, CommTensor):
            target._shared.pending = pending
    if not given.get("async_op", True) or not all(isinstance(one, CommTensor) for one in targets):
        pending.wait_once()
    return (args[0], work) if len(schema.returns) > 1 else work


def _settled(pending: _PendingWork) -> bool:
    pending.wait_once()
    return True


def _traced(func: Any, given: dict[str, Any]) -> _PendingWork:
    """Puts the functional collective into the traced graph; `wait_once` puts the wait and the writes there.

    Raises ConfigError for collectives without a rule.
    """
    method = _METHODS.get(func._schema.name.partition("::")[2])
    if method is None:
        raise ConfigError(
            f"CommTensor knows no functional form of {func}. It knows {', '.join(_METHODS.values())}; "
            f"inside of a compiled step more are known."
        )
    group = dist.ProcessGroup.unbox(given["process_group"])
    names = list(given)
    place = names.index("process_group")
    tensors = [given[name] if position == 0 else _read(given[name]) for position, name in enumerate(names[:place])]
    options = [_plain(given[name]) for name in names[place + 1 :] if name not in _LEFT_OUT]
    handle = RULES[method](ProcessGroupRecorder(), group, *tensors, *options)
    return _PendingWork(handle.wait)


_LEFT_OUT = ("async_op", "timeout", "sparse_indices", "root_tensor")


def _plain(option: Any) -> Any:
    """A reduction comes as an object of TorchScript; the rules take it as `dist.ReduceOp`."""
    return dist.ReduceOp(dist.ReduceOp.RedOpType(option.op())) if hasattr(option, "op") else option
