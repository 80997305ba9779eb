"""Questions about a tensor that its handle answers: they depend on its shape and type, never on its numbers.

This is a list of the allowed. What is not on it is recorded if it gives tensors, else the recorded calls run first.
"""

from __future__ import annotations

import torch

_T = torch.Tensor
_ATTRIBUTES = (
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta",
    "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_mps", "is_xpu",
)  # fmt: skip
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_complex", "is_signed",
    "element_size", "get_device", "is_contiguous", "is_conj", "is_neg", "is_same_size", "__len__", "__hash__",
)  # fmt: skip

METADATA = frozenset(
    [getattr(_T, name).__get__ for name in _ATTRIBUTES if hasattr(_T, name)]
    + [getattr(_T, name) for name in _METHODS]
    + [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size, torch.is_signed]
)
"""Functions as they arrive in ``__torch_function__``."""
