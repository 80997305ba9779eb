"""GradScaler: its scale and counter as state of the step, its notes on optimizers restored.

A scaler makes both tensors when it first scales a loss, on that loss's device. They are made before the trace, as the
state of optimizers is, or every call would start from the scale that the first one began with. What it notes of each
optimizer (that its gradients are unscaled, where there was an infinity) is forgotten by ``update()``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

NOTES = frozenset({"_per_optimizer_states"})
"""Attributes in which a scaler keeps what it notes."""


def tensors(scaler: GradScaler) -> list[tuple[str, Tensor]]:
    """The tensors of a scaler with the names of their attributes, made if it has none yet. None of one that is off."""
    if not scaler.is_enabled():
        return []
    if scaler._scale is None:
        where = f"cuda:{torch.cuda.current_device()}" if scaler._device == "cuda" else scaler._device
        scaler._lazy_init_scale_growth_tracker(torch.device(where))
    return [(key, getattr(scaler, key)) for key in ("_scale", "_growth_tracker")]


class ScalerState:
    """What scalers have noted of their optimizers before a trace."""

    def __init__(self, scalers: list[tuple[str, GradScaler]]) -> None:
        self._held = [(name, one, _notes(one)) for name, one in scalers if one.is_enabled()]

    def restore(self) -> str:
        """Has scalers forget what they have noted in a trace. Gives what is wrong with the step, if anything is."""
        problem = ""
        for name, scaler, held in self._held:
            if _notes(scaler).keys() != held.keys():
                problem = (
                    f"{name}, a GradScaler, has unscaled gradients or stepped in the step, and its update() is not "
                    f"called there. Whether an optimizer's step was left out is known to the graph alone: call "
                    f"{name}.update() at the end of the step."
                )
            notes = scaler._per_optimizer_states
            notes.clear()
            notes.update(held)
        return problem


def _notes(scaler: GradScaler) -> dict[int, dict[str, Any]]:
    return {key: dict(held) for key, held in scaler._per_optimizer_states.items()}
