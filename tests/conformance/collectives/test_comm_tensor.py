"""Collectives in place on a CommTensor: awaited by their first reader, in eager code, in traces, in compiled steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from wholestep.runtime.distributed.world import init
from wholestep.spmd import CommTensor, _wait_comm

row = pytest.mark.row

Communicated = tuple[dist.Work, Any]
"""A work handle and what the collective wrote: a tensor or a list of them."""


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Communicated:
    return dist.all_reduce(tensor, group=group, async_op=True), tensor


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Communicated:
    outputs = [torch.zeros_like(tensor) for _ in range(group.size())]
    work = dist.all_gather(outputs, tensor, group=group, async_op=True)
    work.wait()
    return work, sum(outputs)


def all_gather_into_tensor(tensor: Tensor, group: dist.ProcessGroup) -> Communicated:
    output = torch.cat([torch.zeros_like(tensor) for _ in range(group.size())])
    work = dist.all_gather_into_tensor(output, tensor, group=group, async_op=True)
    work.wait()
    return work, output


def reduce_scatter(tensor: Tensor, group: dist.ProcessGroup) -> Communicated:
    inputs = [tensor.clone() + i for i in range(group.size())]
    output = torch.zeros_like(tensor)
    return dist.reduce_scatter(output, inputs, group=group, async_op=True), output


def reduce_scatter_tensor(tensor: Tensor, group: dist.ProcessGroup) -> Communicated:
    output = torch.zeros_like(tensor).chunk(group.size())[group.rank()]
    return dist.reduce_scatter_tensor(output, tensor, group=group, async_op=True), output


def broadcast(tensor: Tensor, group: dist.ProcessGroup) -> Communicated:
    return dist.broadcast(tensor, src=0, group=group, async_op=True), tensor


def scatter(tensor: Tensor, group: dist.ProcessGroup) -> Communicated:
    inputs = [tensor + i for i in range(group.size())] if group.rank() == 0 else None
    output = torch.zeros_like(tensor)
    return dist.scatter(output, inputs, src=0, group=group, async_op=True), output


def all_to_all(tensor: Tensor, group: dist.ProcessGroup) -> Communicated:
    outputs = [torch.zeros_like(tensor) for _ in range(group.size())]
    inputs = [tensor for _ in range(group.size())]
    return dist.all_to_all(outputs, inputs, group=group, async_op=True), outputs


def nested(tensor: Tensor, group: dist.ProcessGroup) -> Communicated:
    return dist.all_reduce(CommTensor(tensor), group=group, async_op=True), tensor


def consecutive(tensor: Tensor, group: dist.ProcessGroup) -> Communicated:
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    return dist.all_reduce(tensor, group=group, async_op=True), tensor


COLLECTIVES: dict[str, Callable[..., Communicated]] = {
    "allreduce_work_wait": all_reduce,
    "allgather_work_wait": all_gather,
    "allgather_into_tensor_work_wait": all_gather_into_tensor,
    "reduce_scatter_work_wait": reduce_scatter,
    "reduce_scatter_tensor_work_wait": reduce_scatter_tensor,
    "broadcast_work_wait": broadcast,
    "scatter_work_wait": scatter,
    "alltoall_work_wait": all_to_all,
    "nested_comm_tensor_wrapping": nested,
    "consecutive_comm_work_wait": consecutive,
}
collectives = pytest.mark.parametrize("name", [pytest.param(name, marks=row("S3", name)) for name in COLLECTIVES])


def doubled(name: str, wrap: Callable[[Tensor], Tensor], await_handle: bool = True) -> Callable[[Tensor], list[Tensor]]:
    """A function that communicates twice its argument and doubles what came."""

    def run(x: Tensor) -> list[Tensor]:
        work, result = COLLECTIVES[name](wrap(x + x), dist.group.WORLD)
        if await_handle:
            work.wait()
        return [one * 2 for one in (result if isinstance(result, list) else [result])]

    return run


def argument() -> Tensor:
    """Different on every rank."""
    world = init()
    return torch.arange(8.0, device=world.device).reshape(4, 2) + 10 * world.rank


def wanted(name: str, x: Tensor) -> list[Tensor]:
    """What plain eager code gives, on a tensor of its own."""
    if name == "alltoall_work_wait":  # gloo has it since 2.13; here every rank gives the same to all
        gathered = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, x)
        return [one * 4 for one in gathered]
    return doubled(name, lambda tensor: tensor)(x)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    plain = all(type(one) is Tensor for one in ours)
    return plain and len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


# ---- in eager code -----------------------------------------------------------------------------------------------


def supported(name: str) -> bool:
    """Whether the backend itself can do it in eager code."""
    try:
        doubled(name, lambda tensor: tensor)(argument())
    except RuntimeError as error:
        if "does not support alltoall" not in str(error):
            raise
        return False
    return True


def eager(name: str) -> list[bool]:
    x = argument()
    if not supported(name):
        with pytest.raises(RuntimeError, match="does not support alltoall"):
            doubled(name, CommTensor)(x)
        return [True, True]
    return [same(doubled(name, CommTensor, waits)(x), wanted(name, x)) for waits in (True, False)]


@collectives
def test_eager_readers_wait(ranks2: Any, name: str) -> None:
    """Reading waits, so it does not matter whether the handle was awaited."""
    assert ranks2.run(eager, name) == [[True, True]] * 2


# ---- under make_fx alone -----------------------------------------------------------------------------------------


def chain_to_collective(node: fx.Node) -> list[Any]:
    """Targets from what `node` reads first back to the collective, or to an input if there is none."""
    chain: list[Any] = []
    while isinstance(node.args[0], fx.Node) and not (chain and CommTensor._is_supported(chain[-1].__name__)):
        node = node.args[0]
        if node.op == "placeholder":
            break
        chain.append(node.target)
    return chain


def traced(name: str) -> list[str]:
    run, x = doubled(name, CommTensor), argument()
    graph = make_fx(run)(x)
    graph.graph.lint()
    graph.graph.eliminate_dead_code()
    graph.recompile()
    faults = []
    products = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    for product in products:
        chain = chain_to_collective(product)
        if not (chain and CommTensor._is_supported(chain[-1].__name__) and _wait_comm in chain):
            faults.append(f"{product} reads {chain}")
    if not products:
        faults.append("nothing was doubled")
    if any("c10d::" in str(node.target) for node in graph.graph.nodes):
        faults.append("a collective with a work handle is in the graph")
    for shift in (1, 2):
        if not same(graph(x + shift), wanted(name, x + shift)):
            faults.append(f"wrong result when run with another input, shifted by {shift}")
    if same(graph(x + 1), wanted(name, x + 2)):
        faults.append("the input does not matter")
    return faults


@collectives
def test_traced_readers_wait(ranks2: Any, name: str) -> None:
    assert ranks2.run(traced, name) == [[], []]


# ---- inside of a compiled step -----------------------------------------------------------------------------------


def compiled(name: str) -> list[bool]:
    step, x = ws.compile(doubled(name, CommTensor), strategy=ws.DDP(), fullgraph=True), argument()
    return [same(step(one), wanted(name, one)) for one in (x, x + 1)] + [step.cache_info().traces == 1]


@collectives
def test_a_compiled_step_equals_eager_code(ranks2: Any, name: str) -> None:
    assert ranks2.run(compiled, name) == [[True] * 3] * 2
