"""Host numbers as tensors: one packed buffer per call, from which kernels read elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pack(numbers: Sequence[float], device: torch.device) -> Tensor:
    """The numbers as float64 on `device`, one dimension. To a GPU they travel in one asynchronous copy."""
    held = torch.tensor(numbers, dtype=torch.float64, device="cpu", pin_memory=device.type == "cuda")
    return held.to(device, non_blocking=True)


def element(packed: Tensor, index: int) -> float:
    """One of the numbers. Compiled code reads it as a tensor, where it lies; run as it is, it waits for the device."""
    return float(packed[index])
