"""What lives in a tensor of the state besides its values: whether it takes gradients, and its hooks.

A graph writes values and nothing else. So a step that freezes a parameter, or leaves a hook on one, is no graph and
runs live; one that has it as it was at its end may be one.
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
        self._needs_grad = [(slot, slot.tensor.requires_grad) for slot in slots if is_leaf(slot.tensor)]
        self._hooks = [(slot, key, _items(slot.tensor, key)) for slot in slots for key in _HOOKS]

    def check(self) -> None:
        """In the trace, at its end: raises CaptureError for what is another one."""
        for slot, then in self._needs_grad:
            if is_leaf(slot.tensor) and slot.tensor.requires_grad is not then:
                raise CaptureError(
                    f"The step sets requires_grad of {slot.name} to {not then}{self._line('requires_grad')} and leaves "
                    f"it so, which no graph would do. Do it outside the step, or set it back at its end."
                )
        for slot, key, held in self._hooks:
            if _items(slot.tensor, key) != held:
                raise CaptureError(
                    f"The step adds or removes a hook of {slot.name}{self._line('register_hook')} and leaves it so, "
                    f"which no graph would do. Do it outside the step, or remove what it adds: handle.remove()."
                )

    def _line(self, name: str) -> str:
        return user_of({name, f"{name}_", "register_post_accumulate_grad_hook"}, self._codes)

    def restore(self) -> None:
        """All have the hooks that they had."""
        for slot, key, held in self._hooks:
            if _items(slot.tensor, key) != held:
                hooks = getattr(slot.tensor, key)
                hooks.clear()
                hooks.update(held)


def _items(tensor: Tensor, key: str) -> OrderedDict[int, Any]:
    return OrderedDict(getattr(tensor, key) or {})
