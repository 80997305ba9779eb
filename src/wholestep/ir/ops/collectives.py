"""Collectives for which torch has no functional operator, and process groups by name.

They look like torch's functional collectives: what they return may be read after a wait, they write to nothing
they are given, and the last argument is the name of a process group. Their arithmetic is that of the eager call.
What only some ranks hold does not change the text: `reduce` and `gather` give a value on every rank, which means
nothing away from the root, and `scatter` takes an empty list there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

LIBRARY = torch.library.Library("wholestep", "FRAGMENT")
for _schema in (
    "reduce(Tensor input, str reduce_op, int dst, str group) -> Tensor",
    "reduce_scatter(Tensor[] inputs, str reduce_op, str group) -> Tensor",
    "gather(Tensor input, int dst, int group_size, str group) -> Tensor",
    "scatter(Tensor[] inputs, Tensor like, int src, str group) -> Tensor",
    "exchange(Tensor[] tensors, bool[] sends, SymInt[] peers, int[] tags, str group) -> Tensor[]",
    "barrier(str group) -> ()",
    "all_gather_into(Tensor[] shards, Tensor(a!)[] wholes, int group_size, str group) -> Tensor(a!)[]",
    "all_reduce_by_copies(Tensor input, str reduce_op, str group) -> Tensor",
    "all_reduce_by_copies_(Tensor(a!) input, str reduce_op, str group) -> Tensor(a!)",
    "all_reduce_wide_by_copies(Tensor input, str reduce_op, ScalarType dtype, str group) -> Tensor",
    "all_reduce_rows_by_copies(Tensor input, str reduce_op, str group, *, Tensor? indices=None) -> Tensor",
    "all_reduce_rows_by_copies_(Tensor(a!) input, str reduce_op, str group, *, Tensor? indices=None) -> Tensor(a!)",
):
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

REDUCE_OPS: dict[str, Any] = {
    name: getattr(dist.ReduceOp, name.upper()) for name in "sum avg product min max band bor bxor".split()
}
"""Reductions by the name that functional collectives use."""


def group_named(name: str) -> Any:
    """The process group of that name, as functional collectives write it. Raises RuntimeError for unknown ones."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,attr-defined,unused-ignore]


def averages(name: str, device: torch.device) -> bool:
    """Whether the group of that name averages tensors of a device while it adds them: NCCL does, gloo refuses, and
    virtual ranks have no group."""
    if device.type != "cuda":
        return False
    try:
        group = group_named(name)
    except RuntimeError:
        return False
    return bool(group._get_backend(device).name() == "nccl")


def started(result: torch.Tensor, work: Any) -> torch.Tensor:
    """`result`, of which ``wait_tensor`` knows what to wait for."""
    _distributed_c10d._register_work(result, work)
    return result


def started_on_this_stream(result: torch.Tensor, *held: torch.Tensor) -> torch.Tensor:
    """`result` on a GPU: whoever waits for it waits for what the current stream has been given so far.

    `held` are kept until then.
    """
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[result.device])
    future.set_result([result, *held])
    return started(result, _distributed_c10d._create_work_from_future(future))  # type: ignore[attr-defined,unused-ignore]


def _reduce(input: torch.Tensor, reduce_op: str, dst: int, group: str) -> torch.Tensor:
    result = input.clone(memory_format=torch.contiguous_format)
    op = REDUCE_OPS[reduce_op]
    return started(result, dist.reduce(result, op=op, group=group_named(group), async_op=True, group_dst=dst))


def _reduce_scatter(inputs: Sequence[torch.Tensor], reduce_op: str, group: str) -> torch.Tensor:
    result, op = torch.empty_like(inputs[0]), REDUCE_OPS[reduce_op]
    return started(result, dist.reduce_scatter(result, list(inputs), op=op, group=group_named(group), async_op=True))


def _gather(input: torch.Tensor, dst: int, group_size: int, group: str) -> torch.Tensor:
    result, own = input.new_empty((group_size, *input.shape)), group_named(group)
    parts = list(result.unbind(0)) if own.rank() == dst else None
    return started(result, dist.gather(input, parts, group=own, async_op=True, group_dst=dst))


def _scatter(inputs: Sequence[torch.Tensor], like: torch.Tensor, src: int, group: str) -> torch.Tensor:
    result, own = torch.empty_like(like, memory_format=torch.contiguous_format), group_named(group)
    parts = list(inputs) if own.rank() == src else None
    return started(result, dist.scatter(result, parts, group=own, async_op=True, group_src=src))


def _exchange(
    tensors: Sequence[torch.Tensor], sends: Sequence[bool], peers: Sequence[int], tags: Sequence[int], group: str
) -> list[torch.Tensor]:
    """Sends and receives that start together. A received tensor looks like the one given; a sent one gives a token."""
    own = group_named(group)
    carried = [t if send else torch.empty_like(t, memory_format=torch.contiguous_format)
               for t, send in zip(tensors, sends, strict=True)]  # fmt: skip
    calls = [
        dist.P2POp(dist.isend if send else dist.irecv, tensor, group=own, tag=tag, group_peer=int(peer))
        for tensor, send, peer, tag in zip(carried, sends, peers, tags, strict=True)
    ]
    works = dist.batch_isend_irecv(calls)
    works = works if len(works) == len(calls) else [works[0]] * len(calls)  # NCCL: one handle for all of them
    results = [t.new_empty(0) if send else t for t, send in zip(carried, sends, strict=True)]
    return [started(result, work) for result, work in zip(results, works, strict=True)]


def _all_gather_into(
    shards: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], group_size: int, group: str
) -> list[torch.Tensor]:
    """A shard may be this rank's rows of the whole tensor itself."""
    work = group_named(group).allgather_into_tensor_coalesced(list(wholes), list(shards))
    return [started(whole, work) for whole in wholes]


def _barrier(group: str) -> None:
    dist.barrier(group=group_named(group))


for _run in (_reduce, _reduce_scatter, _gather, _scatter, _exchange, _barrier, _all_gather_into):
    LIBRARY.impl(_run.__name__.removeprefix("_"), _run, "CompositeExplicitAutograd")


@torch.library.register_fake("wholestep::reduce", lib=LIBRARY)  # type: ignore[untyped-decorator,unused-ignore]
def _fake_reduce(input: torch.Tensor, reduce_op: str, dst: int, group: str) -> torch.Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@torch.library.register_fake("wholestep::reduce_scatter", lib=LIBRARY)  # type: ignore[untyped-decorator,unused-ignore]
def _fake_reduce_scatter(inputs: Sequence[torch.Tensor], reduce_op: str, group: str) -> torch.Tensor:
    return torch.empty_like(inputs[0])


@torch.library.register_fake("wholestep::gather", lib=LIBRARY)  # type: ignore[untyped-decorator,unused-ignore]
def _fake_gather(input: torch.Tensor, dst: int, group_size: int, group: str) -> torch.Tensor:
    return input.new_empty((group_size, *input.shape))


@torch.library.register_fake("wholestep::scatter", lib=LIBRARY)  # type: ignore[untyped-decorator,unused-ignore]
def _fake_scatter(inputs: Sequence[torch.Tensor], like: torch.Tensor, src: int, group: str) -> torch.Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


@torch.library.register_fake("wholestep::exchange", lib=LIBRARY)  # type: ignore[untyped-decorator,unused-ignore]
def _fake_exchange(
    tensors: Sequence[torch.Tensor], sends: Sequence[bool], peers: Sequence[int], tags: Sequence[int], group: str
) -> list[torch.Tensor]:
    return [
        t.new_empty(0) if send else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t, send in zip(tensors, sends, strict=True)
    ]


@torch.library.register_fake("wholestep::all_gather_into", lib=LIBRARY)  # type: ignore[untyped-decorator,unused-ignore]
def _fake_all_gather_into(
    shards: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], group_size: int, group: str
) -> list[torch.Tensor]:
    return list(wholes)


@torch.library.register_fake("wholestep::barrier", lib=LIBRARY)  # type: ignore[untyped-decorator,unused-ignore]
def _fake_barrier(group: str) -> None:
    return None


def _define_in_place(name: str) -> None:
    """The operator of that name is done by the one in place on a copy, and what both give looks like the input."""
    on_copy = getattr(torch.ops.wholestep, f"{name}_")
    LIBRARY.impl(name, lambda input, *a, **kw: on_copy(input.clone(), *a, **kw), "CompositeExplicitAutograd")
    torch.library.register_fake(f"wholestep::{name}", lambda input, *_, **__: torch.empty_like(input), lib=LIBRARY)
    torch.library.register_fake(f"wholestep::{name}_", lambda input, *_, **__: input, lib=LIBRARY)


_define_in_place("all_reduce_by_copies")
_define_in_place("all_reduce_rows_by_copies")
torch.library.register_fake(
    "wholestep::all_reduce_wide_by_copies",
    lambda input, reduce_op, dtype, group: torch.empty_like(input, dtype=dtype),
    lib=LIBRARY,
)

REDUCE = torch.ops.wholestep.reduce.default
"""The reduction to the root `dst`, a rank of the group."""
REDUCE_SCATTER = torch.ops.wholestep.reduce_scatter.default
"""The reduction of one tensor per rank, each on its own rank. Rounds as the call with a list of tensors does."""
GATHER = torch.ops.wholestep.gather.default
"""What every rank gives, stacked, on the root `dst`."""
SCATTER = torch.ops.wholestep.scatter.default
"""This rank's one of the tensors that the root `src` gives; `like` has its shape and type."""
EXCHANGE = torch.ops.wholestep.exchange.default
"""Sends and receives that start together; `peers` are ranks of the group."""
ALL_GATHER_INTO = torch.ops.wholestep.all_gather_into.default
"""Gathers shards, each into the memory of a tensor that is there already. One group of messages."""
BARRIER = torch.ops.wholestep.barrier.default
"""Returns when every rank of the group has come."""
ALL_REDUCE_BY_COPIES = torch.ops.wholestep.all_reduce_by_copies.default
"""An all-reduce that leaves the multiprocessors of GPUs to others (`lower/kernels/copy_all_reduce.py`)."""
ALL_REDUCE_BY_COPIES_ = torch.ops.wholestep.all_reduce_by_copies_.default
"""The same, in place."""
ALL_REDUCE_WIDE = torch.ops.wholestep.all_reduce_wide_by_copies.default
"""The same of half precision, added and given in the wider type `dtype`."""
ALL_REDUCE_ROWS = torch.ops.wholestep.all_reduce_rows_by_copies.default
"""The same of a table, of shape (rows, width), of which only the rows `indices` of this rank's are not zero
(`lower/kernels/sparse_all_reduce.py`). Without indices any may be. Which they are is this rank's own affair."""
ALL_REDUCE_ROWS_ = torch.ops.wholestep.all_reduce_rows_by_copies_.default
"""The same, in place."""
