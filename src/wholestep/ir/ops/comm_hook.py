"""An operator that calls a function of the user's on a bucket of gradients, as it is, at every run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import ClassVar
from weakref import WeakValueDictionary

import torch

from wholestep.ir.ops.library import LIBRARY


class BucketFunction:
    """A function on a bucket, of one dimension, under the number by which a graph calls it while this object lives."""

    _known: ClassVar[WeakValueDictionary[int, BucketFunction]] = WeakValueDictionary()
    _numbers = itertools.count()

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.call, self.number = call, next(self._numbers)
        self._known[self.number] = self


LIBRARY.define("call_on_bucket(Tensor bucket, int function) -> Tensor")


def _call_on_bucket(bucket: torch.Tensor, function: int) -> torch.Tensor:
    result = BucketFunction._known[function].call(bucket.clone())
    return result.clone() if result.data_ptr() == bucket.data_ptr() else result


LIBRARY.impl("call_on_bucket", _call_on_bucket, "CompositeExplicitAutograd")


@torch.library.register_fake("wholestep::call_on_bucket", lib=LIBRARY)  # type: ignore[untyped-decorator,unused-ignore]
def _fake_call_on_bucket(bucket: torch.Tensor, function: int) -> torch.Tensor:
    return torch.empty_like(bucket)


CALL_ON_BUCKET = torch.ops.wholestep.call_on_bucket.default
"""The bucket as a `BucketFunction` gives it: reduced over the ranks, by what the function itself starts."""
