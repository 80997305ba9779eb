"""Kernels that are launched before the previous one has ended: they wait for what it writes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache, run_and_get_code

import wholestep as ws

pytestmark = pytest.mark.gpu

_WAIT, _LET_GO = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"
_ACCESS = re.compile(r"tl\.(load|store|atomic_\w+)\(")


def _mixed(x: Tensor) -> Tensor:
    """60 short kernels, each of which reads most of what the one before it has written. All values are small
    whole numbers, so that eager code gives the very same."""
    for turn in range(20):
        x = (x + x.flip(0).cumsum(0) + turn) % 251
        x = (x.t().contiguous() + x.amax(1, keepdim=True)) % 253
        x = (x + x.sum(0)) % 255
    return x


@torch.no_grad()
def _step(x: Tensor) -> Tensor:
    return _mixed(x)


@pytest.mark.skipif("torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9")
def test_every_kernel_waits_in_front_of_its_first_access_and_reads_what_was_written() -> None:
    step = ws.compile(_step, backend=ws.Inductor(early_launches=True))
    draw = torch.Generator(device="cuda").manual_seed(0)
    inputs = [torch.randint(200, (128, 128), generator=draw, device="cuda").float() for _ in range(30)]
    with fresh_cache():
        _, texts = run_and_get_code(step, inputs[0])
    kernels = [part.split("''',")[0] for text in texts for part in text.split("async_compile.triton(")[1:]]
    assert len(kernels) > 20, len(kernels)
    for kernel in kernels:
        assert "'launch_pdl': True" in kernel
        assert -1 < kernel.find(_WAIT) < min(found.start() for found in _ACCESS.finditer(kernel)), kernel
        assert _LET_GO not in kernel or kernel.find(_WAIT) < kernel.find(_LET_GO), kernel
    found = [step(x) for x in inputs]  # from the second call on, one CUDA graph
    for x, result in zip(inputs, found, strict=True):
        assert torch.equal(result, _mixed(x))
