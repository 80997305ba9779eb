"""While operators come to `compose`, the tables of torch are as they were for all others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import DispatchKey
from torch._dispatch.python import enable_python_dispatcher

from wholestep.capture.sizes.python_forms import PythonForms

KEY = DispatchKey.AutogradCPU
aten = torch.ops.aten


def kernel_of(func: Any, key: DispatchKey = KEY) -> Any:
    """What torch's Python dispatcher runs."""
    found = func._dispatch_cache.get(key)
    return func._get_dispatch(key) if found is None else found


def test_other_threads_and_later_calls_get_the_kernels_of_torch() -> None:
    with enable_python_dispatcher():
        torch.ones(2, 3) @ torch.ones(3)
    own = aten.matmul.default.py_kernels[DispatchKey.CompositeImplicitAutograd]
    assert kernel_of(aten.matmul.default) is own
    with PythonForms().composing(), ThreadPoolExecutor(1) as beside:
        assert kernel_of(aten.matmul.default) is not own
        assert beside.submit(kernel_of, aten.matmul.default).result() is own
        assert kernel_of(aten.matmul.default) is not own
    assert kernel_of(aten.matmul.default) is own


def test_operators_that_torch_would_take_apart_keep_their_kernels() -> None:
    func = aten.upsample_bilinear2d.default
    assert callable(kernel_of(func))
    with PythonForms().composing():
        assert isinstance(kernel_of(func), DispatchKey)
        assert torch.equal(aten.dropout(torch.ones(3), 0.0, True), torch.ones(3))
    assert callable(kernel_of(func))
