"""Method of a process group -> what it is in a graph. The table `RULES` of `wholestep.capture.tracing.process_groups`.

A rule takes what the method is given. ``torch.distributed`` passes lists of tensors and an options object; code that
calls a group itself may leave out either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from wholestep.capture.python import user_frame
from wholestep.capture.tracing.process_groups import Handle, Message, Part, ProcessGroupRecorder, Write
from wholestep.errors import CaptureError
from wholestep.ir.op_info import c10d
from wholestep.ir.ops.collectives import BARRIER, EXCHANGE, GATHER, REDUCE, REDUCE_OPS, REDUCE_SCATTER, SCATTER

Tensors = Sequence[torch.Tensor]
_NAMES = {op: name for name, op in REDUCE_OPS.items()}
_ASKS_TO_BROADCAST = torch.torch_version.TorchVersion(torch.__version__) < "2.13"
"""Before 2.13 a traced copy asks whether a size that is data is 1. It is told no, which the real copy does not need."""


def _refuse(what: str, instead: str) -> NoReturn:
    raise CaptureError(f"The step could not be captured at {user_frame.current_line()}\n{what} {instead}")


def _name_of(options: Any) -> str:
    """The reduction in an options object, or given as itself; a sum where none is given."""
    op = getattr(options, "reduceOp", options)
    op = dist.ReduceOp.SUM if op is None else getattr(op, "op", op)
    if op not in _NAMES:
        _refuse(f"The reduction {op} has no functional form.", "Multiply the tensor before a SUM.")
    return _NAMES[op]


def _root_of(options: Any) -> int:
    return int(getattr(options, "rootRank", options or 0))


def _listed(tensors: Any) -> list[Any]:
    if isinstance(tensors, torch.Tensor):
        _refuse("Methods of a process group take tensors in a list; a tensor is a list of its rows.", "Give [tensor].")
    return list(tensors)


def _sent(tensor: torch.Tensor) -> torch.Tensor:
    """What a functional collective takes: dense, and apart from autograd."""
    return tensor.detach().contiguous()


def _to(target: torch.Tensor) -> Callable[[torch.Tensor], Sequence[Write]]:
    return lambda arrived: [(target, arrived)]


def _split_to(targets: Tensors) -> Callable[[torch.Tensor], Sequence[Write]]:
    """One slice of the first dimension per target."""
    return lambda arrived: list(zip(targets, arrived.unbind(0), strict=True))


def _same_shapes(tensors: Tensors, shape: torch.Size, name: str) -> None:
    for tensor in tensors:
        if tensor.shape != shape:
            _refuse(
                f"{name} over tensors of the shapes {list(tensor.shape)} and {list(shape)}.",
                "A graph has one shape for all of them: pad them, or use all_to_all_single with split sizes.",
            )


@torch.no_grad()
def _all_reduce(
    comm: ProcessGroupRecorder, group: Any, tensors: Any, options: Any = None, *rest: Any, **kwargs: Any
) -> Handle:
    name, targets = _name_of(options if options is not None else kwargs.get("opts", kwargs.get("op"))), _listed(tensors)
    parts = [(c10d.all_reduce(_sent(t), name, group.group_name), _to(t)) for t in targets]
    return comm.handle("all_reduce", group, parts, targets)


@torch.no_grad()
def _all_reduce_coalesced(comm: ProcessGroupRecorder, group: Any, tensors: Tensors, options: Any = None) -> Handle:
    started = c10d.all_reduce_coalesced([_sent(t) for t in tensors], _name_of(options), group.group_name)
    return comm.handle("all_reduce_coalesced", group, list(zip(started, map(_to, tensors), strict=True)), tensors)


@torch.no_grad()
def _broadcast(
    comm: ProcessGroupRecorder, group: Any, tensors: Any, options: Any = None, *rest: Any, **kwargs: Any
) -> Handle:
    given = options if options is not None else kwargs.get("opts", kwargs.get("root"))
    root, targets = _root_of(given), _listed(tensors)
    parts = [(c10d.broadcast(_sent(t), root, group.group_name), _to(t)) for t in targets]
    return comm.handle("broadcast", group, parts, targets)


@torch.no_grad()
def _reduce(comm: ProcessGroupRecorder, group: Any, tensors: Any, options: Any = None, *rest: Any) -> Handle:
    op = _name_of(getattr(options, "reduceOp", rest[0] if rest else None))
    parts = [(REDUCE(_sent(t), op, _root_of(options), group.group_name), _to(t)) for t in _listed(tensors)]
    return comm.handle("reduce", group, parts, _listed(tensors))


@torch.no_grad()
def _all_gather(
    comm: ProcessGroupRecorder, group: Any, outputs: Sequence[Tensors], inputs: Tensors, options: Any = None
) -> Handle:
    if outputs and isinstance(outputs[0], torch.Tensor):
        outputs, inputs = [outputs], _listed(inputs)
    parts: list[Part] = []
    for targets, tensor in zip(outputs, inputs, strict=True):
        _same_shapes(targets, tensor.shape, "all_gather")
        started = c10d.all_gather_into_tensor(_sent(tensor).unsqueeze(0), group.size(), group.group_name)
        parts.append((started, _split_to(targets)))
    return comm.handle("all_gather", group, parts, [t for targets in outputs for t in targets])


@torch.no_grad()
def _all_gather_lists(
    comm: ProcessGroupRecorder, group: Any, outputs: Sequence[Tensors], inputs: Tensors, options: Any = None
) -> Handle:
    sent = [_sent(t).unsqueeze(0) for t in inputs]
    started = c10d.all_gather_into_tensor_coalesced(sent, group.size(), group.group_name)
    parts = [(one, _split_to([row[i] for row in outputs])) for i, one in enumerate(started)]
    return comm.handle("all_gather_coalesced", group, parts, [t for row in outputs for t in row])


@torch.no_grad()
def _all_gather_single(
    comm: ProcessGroupRecorder, group: Any, output: Any, input: torch.Tensor, options: Any = None
) -> Handle:
    started = c10d.all_gather_into_tensor(_rows(_sent(input)), group.size(), group.group_name)
    return comm.handle("all_gather_into_tensor", group, [(started, _to(output))], [output])


@torch.no_grad()
def _all_gather_coalesced(
    comm: ProcessGroupRecorder, group: Any, outputs: Tensors, inputs: Tensors, options: Any = None
) -> Handle:
    sent = [_rows(_sent(t)) for t in inputs]
    started = c10d.all_gather_into_tensor_coalesced(sent, group.size(), group.group_name)
    parts = list(zip(started, map(_to, outputs), strict=True))
    return comm.handle("all_gather_into_tensor_coalesced", group, parts, outputs)


@torch.no_grad()
def _reduce_scatter(
    comm: ProcessGroupRecorder, group: Any, outputs: Any, inputs: Sequence[Tensors], options: Any = None, *rest: Any
) -> Handle:
    targets = _listed(outputs)
    if inputs and isinstance(inputs[0], torch.Tensor):
        inputs = [inputs]
    parts: list[Part] = []
    for target, tensors in zip(targets, inputs, strict=True):
        _same_shapes(tensors, target.shape, "reduce_scatter")
        started = REDUCE_SCATTER([_sent(t) for t in tensors], _name_of(options), group.group_name)
        parts.append((started, _to(target)))
    return comm.handle("reduce_scatter", group, parts, targets)


@torch.no_grad()
def _reduce_scatter_single(
    comm: ProcessGroupRecorder, group: Any, output: Any, input: torch.Tensor, options: Any = None
) -> Handle:
    sent = _divisible(_sent(input), group.size())
    started = c10d.reduce_scatter_tensor(sent, _name_of(options), group.size(), group.group_name)
    return comm.handle("reduce_scatter_tensor", group, [(started, _to(output))], [output])


@torch.no_grad()
def _reduce_scatter_coalesced(
    comm: ProcessGroupRecorder, group: Any, outputs: Tensors, inputs: Tensors, options: Any = None
) -> Handle:
    sent, size = [_divisible(_sent(t), group.size()) for t in inputs], group.size()
    started = c10d.reduce_scatter_tensor_coalesced(sent, _name_of(options), size, group.group_name)
    parts = list(zip(started, map(_to, outputs), strict=True))
    return comm.handle("reduce_scatter_tensor_coalesced", group, parts, outputs)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() else tensor.reshape(1)


def _divisible(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """A tensor that can be cut along its first dimension: where that does not go, the elements in a row."""
    return tensor if tensor.dim() and tensor.shape[0] % size == 0 else tensor.reshape(-1)


@torch.no_grad()
def _all_to_all_single(
    comm: ProcessGroupRecorder, group: Any, output: torch.Tensor, input: torch.Tensor, *rest: Any
) -> Handle:
    output_sizes, input_sizes = rest[:2]
    received, given = _sizes(output_sizes, output, group.size()), _sizes(input_sizes, input, group.size())
    started = c10d.all_to_all_single(_sent(input), received, given, group.group_name)
    return comm.handle("all_to_all_single", group, [(started, _to(output))], [output])


def _sizes(sizes: Sequence[Any], tensor: torch.Tensor, ranks: int) -> list[Any]:
    """How many rows go to, or come from, each rank. Sizes that are data are promised to be sizes."""
    if not sizes:
        if tensor.shape[0] % ranks:
            _refuse(f"all_to_all_single cannot cut {list(tensor.shape)} into {ranks} equal parts.", "Give split sizes.")
        return [tensor.shape[0] // ranks] * ranks
    for size in sizes:
        if isinstance(size, torch.SymInt):
            torch._check(size >= 0)
    rows = tensor.shape[0]
    torch._check(sum(sizes) == rows, lambda: f"the split sizes do not add up to {rows} rows")
    if _ASKS_TO_BROADCAST and isinstance(rows, torch.SymInt):
        torch._check(rows != 1)
    return list(sizes)


@torch.no_grad()
def _all_to_all(
    comm: ProcessGroupRecorder, group: Any, outputs: Tensors, inputs: Tensors, options: Any = None
) -> Handle:
    flat = torch.cat([_sent(t).reshape(-1) for t in inputs])
    received, given = [t.numel() for t in outputs], [t.numel() for t in inputs]
    started = c10d.all_to_all_single(flat, received, given, group.group_name)

    def writes(arrived: torch.Tensor) -> Sequence[Write]:
        return list(zip(outputs, arrived.split(received), strict=True))

    return comm.handle("all_to_all", group, [(started, writes)], outputs)


@torch.no_grad()
def _gather(
    comm: ProcessGroupRecorder, group: Any, outputs: Sequence[Tensors], inputs: Tensors, options: Any = None
) -> Handle:
    (tensor,), targets = inputs, [t for row in outputs for t in row]
    _same_shapes(targets, tensor.shape, "gather")
    started = GATHER(_sent(tensor), _root_of(options), group.size(), group.group_name)
    return comm.handle("gather", group, [(started, _split_to(targets) if targets else lambda arrived: [])], targets)


@torch.no_grad()
def _scatter(
    comm: ProcessGroupRecorder, group: Any, outputs: Tensors, inputs: Sequence[Tensors], options: Any = None
) -> Handle:
    (target,), tensors = outputs, [t for row in inputs for t in row]
    _same_shapes(tensors, target.shape, "scatter")
    started = SCATTER([_sent(t) for t in tensors], target.detach(), _root_of(options), group.group_name)
    return comm.handle("scatter", group, [(started, _to(target))], [target])


def _send(comm: ProcessGroupRecorder, group: Any, tensors: Any, peer: Any, tag: int = 0) -> Handle | None:
    return comm.message(group, Message(_listed(tensors)[0], True, peer, tag), _exchange)


def _receive(comm: ProcessGroupRecorder, group: Any, tensors: Any, peer: Any, tag: int = 0) -> Handle | None:
    return comm.message(group, Message(_listed(tensors)[0], False, peer, tag), _exchange)


@torch.no_grad()
def _exchange(comm: ProcessGroupRecorder, group: Any, messages: Sequence[Message]) -> Handle:
    started = EXCHANGE(
        [_sent(m.tensor) if m.is_send else m.tensor.detach() for m in messages], [m.is_send for m in messages],
        [m.peer for m in messages], [m.tag for m in messages], group.group_name,
    )  # fmt: skip
    parts: list[Part] = [
        (one, (lambda arrived: []) if m.is_send else _to(m.tensor)) for one, m in zip(started, messages, strict=True)
    ]
    name = "batch_isend_irecv" if len(messages) > 1 else "isend" if messages[0].is_send else "irecv"
    return comm.handle(name, group, parts, [m.tensor for m in messages])


def _barrier(comm: ProcessGroupRecorder, group: Any, *args: Any, **kwargs: Any) -> Handle:
    BARRIER(group.group_name)
    return comm.handle("barrier", group, [])


def _start_coalescing(comm: ProcessGroupRecorder, group: Any, *args: Any) -> None:
    comm.open_batch(group)


def _end_coalescing(comm: ProcessGroupRecorder, group: Any, *args: Any) -> Handle:
    return comm.close_batch(group, _exchange)


def _refused(what: str, instead: str, comm: ProcessGroupRecorder, group: Any, *args: Any, **kwargs: Any) -> NoReturn:
    _refuse(what, instead)


RULES: dict[str, Callable[..., Any]] = {
    "allreduce": _all_reduce,
    "allreduce_coalesced": _all_reduce_coalesced,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "allgather": _all_gather,
    "allgather_coalesced": _all_gather_lists,
    "_allgather_base": _all_gather_single,
    "all_gather_single": _all_gather_single,
    "allgather_into_tensor_coalesced": _all_gather_coalesced,
    "all_gather_single_coalesced": _all_gather_coalesced,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_single,
    "reduce_scatter_single": _reduce_scatter_single,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_coalesced,
    "reduce_scatter_single_coalesced": _reduce_scatter_coalesced,
    "alltoall": _all_to_all,
    "alltoall_base": _all_to_all_single,
    "all_to_all_single": _all_to_all_single,
    "gather": _gather,
    "scatter": _scatter,
    "send": _send,
    "recv": _receive,
    "barrier": _barrier,
    "_start_coalescing": _start_coalescing,
    "_end_coalescing": _end_coalescing,
    "recv_anysource": partial(
        _refused, "A receive from any source has no place in a schedule that all ranks agree on.", "Name the source."
    ),
    "monitored_barrier": partial(
        _refused,
        "monitored_barrier talks to the ranks one by one, which a graph cannot.",
        "Use dist.barrier() here, or call it outside the step (ws.World.barrier names who is missing).",
    ),
}
"""2.13 renamed some of the methods; names that a version of torch does not have are left out."""
