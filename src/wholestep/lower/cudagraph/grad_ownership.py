"""Gradients kept in the memory of a CUDA graph: the only file that asks torch who holds a tensor.

A result is copied out of a graph's memory, since the next replay writes there. The gradients of a step that begins
with ``zero_grad()`` are as large as the parameters, and mostly nobody looks at them before the next one replaces them.
So parameters have tensors in the graph's own memory as ``.grad``, new ones in every call. Before every replay they are
looked at: where somebody else holds one, or a view of it, the graph is given up, whose memory stays with who holds it,
and one that is captured anew has its gradients copied from then on.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from wholestep.lower.cudagraph.output_copies import storage_of


def is_supported() -> bool:
    """Whether this version of torch counts the holders of tensors and storages."""
    return hasattr(torch._C, "_storage_Use_Count") and hasattr(torch.Tensor, "_use_count")


def keepable(grads: Mapping[int, torch.Tensor], taken: Collection[int]) -> dict[int, torch.Tensor]:
    """The gradients that are dense and lie in storages that do not begin at an address in `taken`."""
    return {n: grad for n, grad in grads.items() if _is_dense(grad) and storage_of(grad) not in taken}


class GradOwnership:
    """Gradients that stay in the memory of graphs, as long as only parameters hold them."""

    def __init__(self, grads: Mapping[int, torch.Tensor]) -> None:
        """`grads`: by the number of the input that is the parameter."""
        self._grads = dict(grads)
        self._storages = {_key(grad): grad.untyped_storage() for grad in self._grads.values()}
        self._counts = {key: _uses(key) for key in self._storages}

    def fresh(self) -> dict[int, torch.Tensor]:
        """New tensors for ``.grad`` until the next replay, by the number of the parameter."""
        return {number: grad.detach() for number, grad in self._grads.items()}

    def are_unshared(self, inputs: Sequence[Any]) -> bool:
        """Whether only parameters hold these gradients."""
        by_params: Counter[int] = Counter()
        for number in self._grads:
            grad = inputs[number].grad
            if grad is not None and (key := _key(grad)) in self._counts:
                if _holders(grad) != _usual_holders():
                    return False
                by_params[key] += 1
        return all(_uses(key) == count + by_params[key] for key, count in self._counts.items())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements have different places, with no other ones in between."""
    wanted = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != wanted:
            return False
        wanted *= size
    return True


def _key(tensor: torch.Tensor) -> int:
    """Which storage a tensor has."""
    return int(tensor.untyped_storage()._cdata)


def _uses(key: int) -> int:
    """How many hold a storage that is alive."""
    return int(torch._C._storage_Use_Count(key))


def _holders(grad: torch.Tensor) -> tuple[int, int]:
    """How many hold a tensor in Python, this call and its caller among them, and how many all in all."""
    return sys.getrefcount(grad), grad._use_count()  # type: ignore[attr-defined,unused-ignore]


@cache
def _usual_holders() -> tuple[int, int]:
    """The holders of a tensor that is a parameter's gradient and nothing else."""
    param = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    param.grad = torch.zeros(1, device="cpu").detach()
    grad = param.grad
    return _holders(grad)
