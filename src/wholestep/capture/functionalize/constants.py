"""Constants of a trace: tensors of one element that ``torch.tensor`` has made, whose value is known while tracing.

torch computes with the values of constants beside the trace, so that ``torch.tensor(2.0).item()`` is 2.0. It knows them
twice. Fake tensors forget the values of all that lie on memory which is written to, but for writes to lists. Nodes know
no memory: after ``acc[0] = loss`` they still have the old value of ``acc``. Neither knows operators that do more than
compute: a collective on a constant would travel while tracing, and what has arrived would be one more constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

from wholestep.ir import op_info


def known_to_fakes() -> AbstractContextManager[Any]:
    """While open, make_fx knows no values: fake tensors do."""
    return patch.object(proxy_tensor, "CONSTANT_NUMEL_LIMIT", -1)


@contextmanager
def computed_where_pure(
    mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, written: Sequence[FakeTensor]
) -> Iterator[None]:
    """Around an operator that `mode` describes: has it find no constants where torch must not compute with them.

    `written`: what the operator writes to.
    """
    if not mode.fake_tensor_converter.constant_storage_mapping:
        yield
        return
    given = (*args, *kwargs.values())
    fakes = [one for one in pytree.tree_leaves(given) if isinstance(one, FakeTensor)]
    known = [(one, one.constant) for one in fakes if one.constant is not None]
    in_list = len(known) < len(fakes) and written and _writes_to_list(func, given)
    if not known or (op_info.only_computes(func) and not in_list):
        yield
        return
    for one, _ in known:
        one.constant = None
    try:
        yield
    finally:
        for one, value in known:
            one.constant = value
    for one in written:
        if one.constant is not None:
            mode.fake_tensor_converter.invalidate_constant_aliases(one.constant)


def _writes_to_list(func: Any, given: Sequence[Any]) -> bool:
    places = op_info.mutated_args(func)
    return any(isinstance(given[place], (list, tuple)) for place in places if place < len(given))
