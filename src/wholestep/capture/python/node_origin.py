"""Records the origin of every traced node: phase of the step, module, the user's line.

A node of the backward takes module and line of the forward operation it differentiates: autograd numbers
its nodes, and the number of the running one leads back to the forward node that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.fx as fx
from torch import nn
from torch.fx.experimental.proxy_tensor import PythonKeyTracer
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from wholestep.capture.python import user_frame
from wholestep.capture.python.tracing_thread import on_this_thread
from wholestep.ir import node_meta
from wholestep.ir.node_meta import Origin, Region


@contextmanager
def node_hook(tag: Callable[[fx.Node], None]) -> Iterator[None]:
    """While open, calls `tag` on every node that a make_fx trace creates."""
    original = PythonKeyTracer.create_node

    def create_node(tracer: PythonKeyTracer, *args: Any, **kwargs: Any) -> fx.Node:
        node = original(tracer, *args, **kwargs)
        tag(node)
        return node

    with patch.object(PythonKeyTracer, "create_node", create_node):
        yield


def _ignore(*args: Any) -> None:
    """What other threads run is not on record."""


class OriginRecorder:
    """Knows phase and module of the step while it is traced."""

    def __init__(self, names: dict[int, str], owners: dict[int, str]) -> None:
        """`names`: id of a module -> its name; `owners`: id of a parameter -> the name of its module."""
        self._names, self._owners = names, owners
        self._stack: list[str] = []
        self._region = Region.FORWARD
        self._forward: dict[int, Origin] = {}
        self.on_optimizer_step: Callable[[torch.optim.Optimizer], None] = lambda opt: None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Installs the hooks for the time of one trace."""
        with ExitStack() as stack:
            handles = (
                register_module_forward_pre_hook(on_this_thread(self._enter_module, _ignore)),
                register_module_forward_hook(on_this_thread(self._leave_module, _ignore), always_call=True),
                register_optimizer_step_pre_hook(on_this_thread(self._enter_optimizer, _ignore)),
                register_optimizer_step_post_hook(on_this_thread(self._leave_optimizer, _ignore)),
            )
            for handle in handles:
                stack.callback(handle.remove)
            stack.enter_context(node_hook(on_this_thread(self._tag, _ignore)))
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Marks the time of one run of the autograd engine."""
        before, self._region = self._region, Region.BACKWARD
        try:
            yield
        finally:
            self._region = Region.OTHER if before is Region.FORWARD else before

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(id(module), type(module).__name__))
        if self._region is Region.OTHER:
            self._region = Region.FORWARD  # a second forward, as in accumulation or a GAN step

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def _enter_optimizer(self, opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The arguments with another closure, if there is one: forward and backward are in it."""
        self._region = Region.OPTIMIZER
        itself, *given = args
        if given and callable(given[0]):
            return (itself, self._closure(opt, given[0]), *given[1:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._closure(opt, kwargs["closure"])}
        self.on_optimizer_step(opt)
        return None

    def _closure(self, opt: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure in the regions that it has. Which parameters have gradients is known after it."""

        def run() -> Any:
            self._region = Region.OTHER
            try:
                return closure()
            finally:
                self._region = Region.OPTIMIZER
                self.on_optimizer_step(opt)

        return run

    def _leave_optimizer(self, opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.on_optimizer_step(opt)  # its step may not have called the closure
        self._region = Region.OTHER

    def _tag(self, node: fx.Node) -> None:
        origin = Origin(self._region, self._stack[-1] if self._stack else "", user_frame.current_line())
        if self._region is Region.BACKWARD:
            running = torch._C._current_autograd_node()
            if self._stack:
                origin = Origin(Region.RECOMPUTE, origin.module, origin.source)
            elif running is not None:
                forward = self._forward.get(running._sequence_nr())
                if forward is not None:
                    origin = Origin(Region.BACKWARD, forward.module, forward.source)
                elif hasattr(running, "variable"):  # the gradient of a parameter is accumulated
                    origin = Origin(Region.BACKWARD, self._owners.get(id(running.variable), ""), origin.source)
        if origin.region in (Region.FORWARD, Region.RECOMPUTE):
            # Autograd numbers its node before it hands the operation on to the tracer.
            self._forward[torch.autograd._get_sequence_nr() - 1] = origin  # type: ignore[attr-defined]
        node_meta.set_origin(node, origin)
