"""The results of every collective, computed from the values of all its ranks, without communication.

A rule takes the arguments of every rank of one group, in rank order, and gives the result of each. Reductions go in
rank order, one rounding per rank in the dtype of the tensors: ``((x0 + x1) + x2) + x3``. For two ranks those are the
bits of gloo and NCCL; for more, their order depends on ring, tree and message size, so theirs differ by rounding.
An average is that sum divided by the number of ranks. No result shares memory with an argument, unless the collective
works in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from wholestep.errors import VerificationError
from wholestep.ir.op_info import c10d
from wholestep.ir.ops.collectives import (
    ALL_GATHER_INTO,
    ALL_REDUCE_BY_COPIES,
    ALL_REDUCE_BY_COPIES_,
    ALL_REDUCE_ROWS,
    ALL_REDUCE_ROWS_,
    ALL_REDUCE_WIDE,
    EXCHANGE,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
)

Calls = Sequence[tuple[Any, ...]]
"""The arguments of the ranks of one group, in rank order."""

_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip


def reduced(values: Sequence[torch.Tensor], reduce_op: str) -> torch.Tensor:
    """The reduction of equal-shaped tensors, one per rank, in rank order. Contiguous, of the same shape and dtype."""
    total = _copy(values[0])
    for one in values[1:]:
        total = _COMBINE[reduce_op](total, one)
    return total.div_(len(values)) if reduce_op == "avg" else total


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _all_reduce(calls: Calls) -> list[torch.Tensor]:
    total = reduced([call[0] for call in calls], calls[0][1])
    return [total.clone() for _ in calls]


def _all_reduce_wide(calls: Calls) -> list[torch.Tensor]:
    return _all_reduce([(values.to(dtype), reduce_op, group) for values, reduce_op, dtype, group in calls])


def _all_gather(calls: Calls) -> list[torch.Tensor]:
    return [torch.cat([call[0] for call in calls]) for _ in calls]


def _all_gather_into(calls: Calls) -> list[list[torch.Tensor]]:
    for call, results in zip(calls, _each(_all_gather)(calls), strict=True):
        for whole, result in zip(call[1], results, strict=True):
            whole.copy_(result)
    return [list(call[1]) for call in calls]


def _reduce_scatter(calls: Calls) -> list[torch.Tensor]:
    total = reduced([call[0] for call in calls], calls[0][1])
    return [_copy(part) for part in total.chunk(len(calls))]


def _broadcast(calls: Calls) -> list[torch.Tensor]:
    return [_copy(calls[calls[0][1]][0]) for _ in calls]


def _all_to_all(calls: Calls) -> list[torch.Tensor]:
    sent = [call[0].split(list(call[2])) for call in calls]
    for source, parts in enumerate(sent):
        for target, part in enumerate(parts):
            if part.shape[0] != calls[target][1][source]:
                raise VerificationError(
                    f"all_to_all_single: rank {source} sends {part.shape[0]} rows to rank {target}, which expects "
                    f"{calls[target][1][source]}. Give every rank the sizes that the others send it."
                )
    return [torch.cat([parts[target] for parts in sent]) for target in range(len(calls))]


def _reduce_to_root(calls: Calls) -> list[torch.Tensor]:
    root = calls[0][2]  # what the others hold means nothing; theirs stays what they gave
    return [_all_reduce(calls)[0] if rank == root else _copy(call[0]) for rank, call in enumerate(calls)]


def _reduce_scatter_list(calls: Calls) -> list[torch.Tensor]:
    return [reduced([call[0][rank] for call in calls], calls[0][1]) for rank in range(len(calls))]


def _gather(calls: Calls) -> list[torch.Tensor]:
    stacked, root = torch.stack([call[0] for call in calls]), calls[0][1]
    return [stacked if rank == root else torch.zeros_like(stacked) for rank in range(len(calls))]


def _scatter(calls: Calls) -> list[torch.Tensor]:
    return [_copy(one) for one in calls[calls[0][2]][0]]


def _exchange(calls: Calls) -> list[list[torch.Tensor]]:
    """Messages between two ranks with one tag arrive in the order in which they are sent."""
    under_way: dict[tuple[int, int, int], list[torch.Tensor]] = {}
    for source, (tensors, sends, peers, tags, _) in enumerate(calls):
        for tensor, send, peer, tag in zip(tensors, sends, peers, tags, strict=True):
            if send:
                under_way.setdefault((source, int(peer), tag), []).append(tensor)
    results = []
    for target, (tensors, sends, peers, tags, _) in enumerate(calls):
        mine = []
        for tensor, send, peer, tag in zip(tensors, sends, peers, tags, strict=True):
            arrived = [tensor.new_empty(0)] if send else under_way.get((int(peer), target, tag), [])
            if not arrived:
                raise VerificationError(
                    f"rank {target} receives a tensor {list(tensor.shape)} with tag {tag} from rank {int(peer)}, "
                    f"which sends it none. Every receive needs a send on the other rank."
                )
            mine.append(_copy(arrived.pop(0)))
        results.append(mine)
    return results


def _each(rule: Callable[[Calls], list[torch.Tensor]]) -> Callable[[Calls], list[list[torch.Tensor]]]:
    """The coalesced form: the rule for every tensor of the list that each rank gives."""

    def rules(calls: Calls) -> list[list[torch.Tensor]]:
        by_tensor = [rule([(call[0][i], *call[1:]) for call in calls]) for i in range(len(calls[0][0]))]
        return [list(of_rank) for of_rank in zip(*by_tensor, strict=True)]

    return rules


def _in_place(rule: Callable[[Calls], list[Any]]) -> Callable[[Calls], list[Any]]:
    """The form that leaves its results in the arguments."""

    def rules(calls: Calls) -> list[Any]:
        for call, result in zip(calls, rule(calls), strict=True):
            targets, values = (call[0], result) if isinstance(result, list) else ([call[0]], [result])
            for target, value in zip(targets, values, strict=True):
                target.copy_(value)
        return [call[0] for call in calls]

    return rules


RULES: dict[Any, Callable[[Calls], list[Any]]] = {
    c10d.all_reduce.default: _all_reduce,
    c10d.all_reduce_.default: _in_place(_all_reduce),
    ALL_REDUCE_BY_COPIES: _all_reduce,
    ALL_REDUCE_BY_COPIES_: _in_place(_all_reduce),
    ALL_REDUCE_WIDE: _all_reduce_wide,
    ALL_REDUCE_ROWS: _all_reduce,
    ALL_REDUCE_ROWS_: _in_place(_all_reduce),
    c10d.all_reduce_coalesced.default: _each(_all_reduce),
    c10d.all_reduce_coalesced_.default: _in_place(_each(_all_reduce)),
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.all_gather_into_tensor_coalesced.default: _each(_all_gather),
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.reduce_scatter_tensor_coalesced.default: _each(_reduce_scatter),
    c10d.all_to_all_single.default: _all_to_all,
    c10d.broadcast.default: _broadcast,
    c10d.broadcast_.default: _in_place(_broadcast),
    ALL_GATHER_INTO: _all_gather_into,
    REDUCE: _reduce_to_root,
    REDUCE_SCATTER: _reduce_scatter_list,
    GATHER: _gather,
    SCATTER: _scatter,
    EXCHANGE: _exchange,
}
"""One rule per collective of `wholestep.ir.op_info.COLLECTIVES`."""
