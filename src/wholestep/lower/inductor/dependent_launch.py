"""Kernels of Inductor that are launched before the previous kernel has ended.

Programmatic dependent launch, of NVIDIA GPUs since Hopper: a kernel gets its multiprocessors while the one before it
drains, and waits there until all that stands before it has been written. A step of many short kernels saves
a part of the microsecond that is between two of them. On the other hand Inductor's own launcher does not know it, and
Triton's has to be compiled for every signature: it is the user's choice.

[Note: where a kernel waits]
Inductor knows the technique and leaves it off. With its option alone a kernel waits only if it reads what the node
before it in the same graph writes, so a wait depends on how well Inductor knows what runs there: of the last
sum of a reduction in two parts, or the parts of a combined kernel, it does not. Here every kernel waits
before its first access to memory. Since it may let the next one in only after its own wait, whoever has waited finds
everything written that any kernel before it writes.

Source: NVIDIA, "CUDA C++ Programming Guide", programmatic dependent launch and synchronization.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.compiler.config
from torch._inductor import config as inductor_config
from torch._inductor.codegen.triton import TritonKernel

_DECIDES = "_handle_pdl_before_access"
_KNOWN = all(hasattr(TritonKernel, name) for name in (_DECIDES, "_filter_pdl", "GDC_WAIT"))


@contextlib.contextmanager
def launch_early() -> Iterator[None]:
    """While it is open, Inductor writes kernels that are launched early, for GPUs that can do that.

    Nothing changes with a torch whose generator of kernels has another form.
    """
    if not _KNOWN or not hasattr(inductor_config.triton, "enable_pdl"):
        yield
        return
    before = getattr(TritonKernel, _DECIDES)
    config: Any = torch.compiler.config
    tag = f"{config.cache_key_tag} wholestep::early".strip()  # the option alone means other kernels
    setattr(TritonKernel, _DECIDES, _wait_always)
    try:
        with inductor_config.patch({"triton.enable_pdl": True}), config.patch(cache_key_tag=tag):
            yield
    finally:
        setattr(TritonKernel, _DECIDES, before)


def _wait_always(kernel: Any, buffer: Any, *names: str, consider_reads: bool = False) -> None:
    """In the place of Inductor's: writes a wait before an access. All of a kernel's but the first are dropped."""
    if not kernel._enable_pdl_codegen():
        return
    in_loop = kernel.inside_reduction and kernel.range_trees[-1].is_loop
    (kernel.body if in_loop else buffer).writeline(kernel.GDC_WAIT)
