"""While operators come to `compose`, the tables of torch are as they were for all others."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import DispatchKey, Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import fake_tensor

import wholestep as ws
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


def test_torch_logs_nothing_of_what_is_tried_in_another_way() -> None:
    weight, told = nn.Parameter(torch.ones(1)), list[str]()

    def step(x: Tensor, dim: int, length: int) -> Tensor:
        loss = (torch.narrow_copy(x, dim, 0, length) * weight).square().mean()
        loss.backward()
        weight.grad = None
        return loss.detach()

    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    fake_tensor.log.addHandler(handler)
    try:
        compiled, x = ws.compile(step, backend="eager"), torch.randn(6, 6)
        for dim, length in ((0, 2), (1, 3), (0, 4)):
            assert torch.equal(compiled(x, dim, length), step(x, dim, length))
    finally:
        fake_tensor.log.removeHandler(handler)
    assert told == []
    assert fake_tensor.log.filters == []
