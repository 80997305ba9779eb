"""Collectives of ranks on CPUs that gloo runs slowly as torch asks it to, or breaks memory at: their stand-ins.

gloo has no reduce-scatter of several tensors. torch reduces each of them whole, one after the other: 53 small ones take
25 ms on two processes, and 4 ms as one message. Memory of CPUs is copied quickly, so they are put together here.

[Note: names of more than 15 letters]
A group of gloo has two threads, and each of them notes the name of what it has done last in the same string, without a
lock (`runLoop` in torch's ProcessGroupGloo.cpp, 2.11 and 2.13). A name of more than 15 letters has memory of its own
there, which both may then free: seconds of gathers, 32 at a time, end in "malloc(): unaligned tcache chunk detected".
Of the collectives of a step, functional gathers alone have such a name, ALLGATHER_COALESCED. Here they have another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wholestep.ir import op_info
from wholestep.ir.ops.collectives import ALL_GATHER_INTO, group_named, started


def reduce_scatter_together(tensors: Sequence[Tensor], reduce_op: str, size: int, group: str) -> list[Tensor]:
    """The parts of this rank of the sums of tensors, as ``reduce_scatter_tensor_coalesced`` gives them.

    Args:
        tensors: of shapes (size * rows, ...), each with `rows` of its own.
        reduce_op: as functional collectives write it.
        size: the number of ranks in the group.
        group: its name.

    Tensors of one dtype are one message, and the results are there. Others start as torch has it.
    """
    if len(tensors) < 2 or any(one.dtype is not tensors[0].dtype for one in tensors):
        begun: list[Tensor] = op_info.c10d.reduce_scatter_tensor_coalesced.default(tensors, reduce_op, size, group)
        return begun
    message = torch.cat([one.reshape(size, -1) for one in tensors], 1)
    reduced = op_info.WAIT(op_info.c10d.reduce_scatter_tensor(message.flatten(), reduce_op, size, group))
    parts = reduced.split([one.numel() // size for one in tensors])
    return [
        part.clone().view(one.shape[0] // size, *one.shape[1:]) for part, one in zip(parts, tensors, strict=True)
    ]  # fmt: skip


def all_gather(shard: Tensor, size: int, group: str) -> Tensor:
    """What ``all_gather_into_tensor`` gives: the shards of `size` ranks in the order of their rows."""
    return all_gather_into([shard], [_whole(shard, size)], size, group)[0]


def all_gather_together(shards: Sequence[Tensor], size: int, group: str) -> list[Tensor]:
    """What ``all_gather_into_tensor_coalesced`` gives: `all_gather` of each, in one message."""
    return all_gather_into(shards, [_whole(one, size) for one in shards], size, group)


def all_gather_into(shards: Sequence[Tensor], wholes: Sequence[Tensor], size: int, group: str) -> list[Tensor]:
    """What ``wholestep.all_gather_into`` does: gathers shards of any dtypes, each into memory that is there already.

    Args:
        shards: of shapes (rows, ...), each with `rows` of its own; a shard may lie in its whole tensor.
        wholes: of shapes (size * rows, ...).
        size: the number of ranks in the group.
        group: its name.

    What the wait raises is what gloo raises.
    """
    gather, sent, received = group_named(group)._allgather_base, _bytes(shards), _bytes(wholes)
    if len(shards) == 1:
        return [started(wholes[0], gather(received[0], sent[0]))]
    message = torch.cat(sent)
    gathered = message.new_empty(size * len(message))
    work = _Unpacked(gather(gathered, message), gathered.view(size, -1), received)
    return [started(one, work) for one in wholes]


class _Unpacked(dist.Work):
    """The work of one message for many tensors, which have their rows from it once one of them has been waited for."""

    def __init__(self, work: Any, gathered: Tensor, wholes: Sequence[Tensor]) -> None:
        """`gathered`: a row of each rank; `wholes`: tensors in one dimension, in the order that they have in a row."""
        super().__init__()
        self._work, self._gathered, self._wholes = work, gathered, wholes

    def wait(self, timeout: Any = None) -> bool:
        """Raises what gloo raises."""
        self._work.wait()
        if self._wholes:
            size = len(self._gathered)
            parts = self._gathered.split([len(one) // size for one in self._wholes], 1)
            for whole, rows in zip(self._wholes, parts, strict=True):
                whole.view(rows.shape).copy_(rows)
            self._wholes = ()
        return True


def _bytes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of contiguous tensors; gloo carries bytes of any dtype."""
    return [one.view(-1).view(torch.uint8) for one in tensors]


def _whole(shard: Tensor, size: int) -> Tensor:
    return shard.new_empty(size * shard.shape[0], *shard.shape[1:])


def _on_cpu(operator: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """`stand_in` for tensors on a CPU, `operator` for others. Both take a tensor, or a list of them, first."""

    def run(given: Any, *rest: Any) -> Any:
        first = given if isinstance(given, Tensor) else given[0]
        return (stand_in if first.is_cpu else operator)(given, *rest)

    return run


_STAND_INS: Mapping[Any, Callable[..., Any]] = {
    op_info.c10d.reduce_scatter_tensor_coalesced.default: reduce_scatter_together,
    op_info.c10d.all_gather_into_tensor.default: all_gather,
    op_info.c10d.all_gather_into_tensor_coalesced.default: all_gather_together,
    ALL_GATHER_INTO: all_gather_into,
}
REPLACEMENTS = {operator: _on_cpu(operator, stand_in) for operator, stand_in in _STAND_INS.items()}
"""What runs in the place of an operator, by operator."""
