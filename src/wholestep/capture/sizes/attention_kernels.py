"""Attention over sizes that move, by kernels that take any.

cuDNN builds a plan of its attention for each new size: 4 ms of the host for each call on an H100, 100 ms for the 24 of
a GPT-2 step, as often as a batch has a length that none had before. torch prefers it on such GPUs. Where sizes move the
other kernels are asked, which compute the same in another order of additions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_plans() -> Iterator[None]:
    """While open, torch does not choose cuDNN's attention where another kernel may be chosen.

    A step that asks for cuDNN's itself (``torch.nn.attention.sdpa_kernel``) has it.
    """
    cuda = torch.backends.cuda
    chooses = cuda.cudnn_sdp_enabled() and (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled())
    if chooses:
        cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        if chooses:
            cuda.enable_cudnn_sdp(True)
