"""Triton's interpreter, which runs kernels on the CPU, with what it lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def prepare(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The interpreter's module, fit for kernels of ours. Skips the test where there is no Triton."""
    pytest.importorskip("triton")
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    def power(a: Any, b: Any) -> Any:
        return tl.tensor(interpreter.TensorHandle(np.power(a.handle.data, b.handle.data), a.handle.dtype), a.type)

    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # numpy 2.4 wants the item

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor)
    monkeypatch.setattr(libdevice, "pow", power)  # it knows no libraries of the device
    # Nor functions of Triton that are kernels themselves.
    monkeypatch.setattr(tl, "sum", lambda x, axis: tl.reduce(x, axis, tl.standard._sum_combine))
    monkeypatch.setattr(tl, "max", lambda x, axis: tl.reduce(x, axis, tl.standard._elementwise_max))
    return interpreter
