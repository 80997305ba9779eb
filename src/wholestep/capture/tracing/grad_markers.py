"""Marks the gradient that a parameter ends up with, where the backward leaves it.

[Note: hooks of the user and the marker]
DistributedDataParallel reduces a gradient after the post-accumulate hooks of its parameter have run, so such
hooks see the local gradient, and what they leave is reduced (measured on torch 2.11 and 2.13). The marker
therefore comes after them. A hook that leaves no gradient has used it up, as an optimizer that steps inside
of the backward does; there DistributedDataParallel would train every rank on its own data in silence. So the
gradient is marked before the hooks too, and this first marker is withdrawn when they leave a gradient.

Of a parameter that its user gave to ``fully_shard``, torch calls these hooks with the reduced gradient, and hooks for
gradients not at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.fx as fx

from wholestep.capture.python.tracing_thread import on_this_thread
from wholestep.capture.wrappers import ddp
from wholestep.ir import graph_edit, op_info


class GradMarkers:
    """The markers of one trace. While it runs, a marker carries a number before the parameter's name."""

    def __init__(self) -> None:
        self._count = 0
        self._withdrawn: set[int] = set()

    def mark(self, grad: torch.Tensor, name: str) -> torch.Tensor:
        """The gradient of the parameter `name`, marked."""
        marked: torch.Tensor = op_info.GRADIENT(grad, f"{self._count}:{name}")
        self._count += 1
        return marked

    def settle(self, graph: fx.Graph) -> None:
        """Removes the markers that were withdrawn from the traced graph; the others keep the name alone."""
        withdrawn = {}
        for node in graph.find_nodes(op="call_function", target=op_info.GRADIENT):
            grad, numbered = node.args
            number, _, name = numbered.partition(":")
            if int(number) in self._withdrawn:
                withdrawn[node] = grad
            else:
                node.args = (grad, name)
        graph_edit.replace_nodes(withdrawn)

    @contextmanager
    def on(self, params: dict[int, tuple[str, torch.Tensor]], unhooked: frozenset[int] = frozenset()) -> Iterator[None]:
        """While open, every accumulated ``.grad`` of these parameters carries a marker with the parameter's name.

        Not where a DistributedDataParallel keeps it local, as in ``no_sync()``.

        Hooks live on the tensor's implementation, which tracing swaps: setting them again puts them, and hooks
        on the gradient, on the one in place now. Those of `unhooked`, by id, are left out, and their
        post-accumulate hooks see reduced gradients.
        """
        saved: list[tuple[torch.Tensor, Any]] = []
        for name, param in params.values():
            if param._backward_hooks and id(param) not in unhooked:
                param._backward_hooks = param._backward_hooks
            if not param.is_leaf:  # one that is frozen now may take gradients later in the step
                continue
            theirs = param._post_accumulate_grad_hooks
            saved.append((param, theirs))
            own = self._hook(name, list((theirs or {}).values()), see_reduced=id(param) in unhooked)
            hooks = OrderedDict({"wholestep": own})
            param._post_accumulate_grad_hooks = hooks
        try:
            yield
        finally:
            for param, theirs in saved:
                param._post_accumulate_grad_hooks = theirs

    def _hook(
        self, name: str, theirs: list[Callable[[torch.Tensor], None]], *, see_reduced: bool
    ) -> Callable[[torch.Tensor], None]:
        def mark_and_call(param: torch.Tensor) -> None:
            if ddp.stays_local(param):
                for hook in theirs:
                    hook(param)
                return
            ddp.note_gradient(param)
            number = self._count
            self._mark_grad(param, name)
            for hook in theirs:
                hook(param)
            if theirs and param.grad is not None and not see_reduced:
                self._withdrawn.add(number)
                self._mark_grad(param, name)

        return mark_and_call

    def _mark_grad(self, param: torch.Tensor, name: str) -> None:
        grad = param.grad
        if grad is None:
            return
        marked = self.mark(grad, name)
        if getattr(grad, "_wholestep_entry", False):
            # The gradient was there before the call: others may hold it, so it is written, not replaced.
            with torch.no_grad():
                grad.copy_(marked)
        else:
            param.grad = marked


@contextmanager
def gradients_watched(note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """While open, `note` is called with a tensor whose ``.grad`` Python of this thread reads, sets or deletes.

    torch has no hook for it, and a mode of torch's functions would have `nn.MultiheadAttention` leave its fast path.
    """
    slot: Any = torch.Tensor.grad

    def noted(access: Callable[..., Any]) -> Callable[..., Any]:
        def noting(tensor: torch.Tensor, *args: Any) -> Any:
            note(tensor)
            return access(tensor, *args)

        return on_this_thread(noting, access)

    attribute = property(noted(slot.__get__), noted(slot.__set__), noted(slot.__delete__))
    with patch.object(torch.Tensor, "grad", attribute, create=True):
        yield
