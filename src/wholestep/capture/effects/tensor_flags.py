"""What lives in a tensor of the state besides its values: whether it takes gradients, and its hooks.

A graph writes values and nothing else. What a step freezes or thaws is set after it has run. A step that leaves a hook
on a parameter is no graph and runs live; one that has its hooks as they were at its end may be one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from types import CodeType
from typing import Any

from torch import Tensor

from wholestep.capture.python.code_lines import user_of
from wholestep.capture.reach.train_state import Slot
from wholestep.errors import CaptureError
from wholestep.util.gradient_node import is_leaf

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class TensorFlags:
    """Those that tensors have when it is made."""

    def __init__(self, slots: Sequence[Slot], codes: Sequence[CodeType]) -> None:
        """`codes`: of the step, in which an error names a line."""
        self._codes = codes
        tensors = ((number, slot.tensor) for number, slot in enumerate(slots))
        self._needs_grad = [(number, one, one.requires_grad) for number, one in tensors if is_leaf(one)]
        self._hooks = [(slot, key, _items(slot.tensor, key)) for slot in slots for key in _HOOKS]

    def changed(self) -> tuple[tuple[int, bool], ...]:
        """In the trace, at its end: the slots whose ``requires_grad`` is another one, with what it is. A buffer
        that has come into a graph, since a loss was written to it, takes gradients by that and is not among them."""
        leaves = ((number, one, then) for number, one, then in self._needs_grad if is_leaf(one))
        return tuple((number, not then) for number, one, then in leaves if one.requires_grad is not then)

    def check_hooks(self) -> None:
        """In the trace, at its end: raises CaptureError for hooks that are others."""
        for slot, key, held in self._hooks:
            if _items(slot.tensor, key) != held:
                raise CaptureError(
                    f"The step adds or removes a hook of {slot.name}{self._line()} and leaves it so, "
                    f"which no graph would do. Do it outside the step, or remove what it adds: handle.remove()."
                )

    def _line(self) -> str:
        return user_of({"register_hook", "register_post_accumulate_grad_hook"}, self._codes)

    def restore(self) -> None:
        """All have the hooks that they had."""
        for slot, key, held in self._hooks:
            if _items(slot.tensor, key) != held:
                hooks = getattr(slot.tensor, key)
                hooks.clear()
                hooks.update(held)


def _items(tensor: Tensor, key: str) -> OrderedDict[int, Any]:
    return OrderedDict(getattr(tensor, key) or {})
