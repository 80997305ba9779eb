"""Virtual ranks: the arithmetic of collectives, what is under way, random numbers, groups and memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor

from tests.unit import builders
from tests.unit.builders import aten, c10d
from wholestep.errors import ConfigError, VerificationError
from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.ops.collectives import EXCHANGE, GATHER, REDUCE, REDUCE_SCATTER, SCATTER
from wholestep.ir.program import InputKind, MeshAxis, Program
from wholestep.passes.memory.reinplace import reinplace
from wholestep.runtime.verify.collective_semantics import RULES
from wholestep.runtime.verify.rank_simulator import RankGenerators, rank_blocks, run

GROUP = "virtual"
CPU = torch.device("cpu")


def of_ranks(num_ranks: int, *shape: int) -> list[Tensor]:
    """A tensor per rank; whole numbers, so that no order of additions matters."""
    count = torch.Size(shape).numel()
    return [(torch.arange(count) + 10.0**rank).reshape(shape) for rank in range(num_ranks)]


def ran(program: Program, inputs: list[list[Any]], blocks: list[list[int]] | None = None) -> list[tuple[Any, ...]]:
    num_ranks = len(inputs)
    return run(program, inputs, {GROUP: blocks or [list(range(num_ranks))]}, RankGenerators(range(num_ranks), CPU))


def captured(fn: Callable[..., Any], inputs: list[Any], **options: Any) -> Program:
    return builders.without_gradients(builders.capture(fn, inputs, **options))


def step_run(fn: Callable[..., Any], inputs: list[list[Any]], blocks: list[list[int]] | None = None) -> list[Any]:
    """The first result of `fn` on each virtual rank, which gets `inputs[rank]`."""
    program = captured(fn, inputs[0])
    return [results[0] for results in ran(program, inputs, blocks)]


def waited(started: Any) -> Any:
    return [op_info.WAIT(one) for one in started] if isinstance(started, (list, tuple)) else op_info.WAIT(started)


# ---- arithmetic --------------------------------------------------------------------------------------------------


def test_every_collective_has_its_arithmetic() -> None:
    assert set(RULES) == op_info.COLLECTIVES


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("sum", 111.0), ("avg", 37.0), ("product", 1000.0), ("min", 1.0), ("max", 100.0)],
)
def test_a_reduction_is_over_all_ranks(name: str, wanted: float) -> None:
    found = step_run(lambda x: waited(c10d.all_reduce(x, name, GROUP)), [[x] for x in of_ranks(3, 1)])
    assert [one.item() for one in found] == [wanted] * 3


@pytest.mark.parametrize(("ranks", "wanted"), [((256.0, 1.0, 1.0), 256.0), ((1.0, 1.0, 256.0), 258.0)], ids=str)
def test_a_sum_goes_in_rank_order_with_a_rounding_per_rank(ranks: tuple[float, ...], wanted: float) -> None:
    values = [torch.tensor([one], dtype=torch.bfloat16) for one in ranks]  # 256 + 1 rounds back to 256
    found = step_run(lambda x: waited(c10d.all_reduce(x, "sum", GROUP)), [[x] for x in values])
    assert [one.item() for one in found] == [wanted] * 3


def test_groups_reduce_apart() -> None:
    found = step_run(
        lambda x: waited(c10d.all_reduce(x, "sum", GROUP)), [[x] for x in of_ranks(4, 1)], [[0, 2], [1, 3]]
    )
    assert [one.item() for one in found] == [101.0, 1010.0, 101.0, 1010.0]


def many_collectives(x: Tensor, y: Tensor, group: str = GROUP) -> list[Tensor]:
    """Each collective once, on two tensors [4, 2] of whole numbers; four ranks."""
    results: list[Any] = [
        c10d.all_reduce(x.t(), "max", group),
        c10d.all_gather_into_tensor(x, 4, group),
        c10d.reduce_scatter_tensor(x, "sum", 4, group),
        c10d.all_to_all_single(x, [1, 1, 1, 1], [1, 1, 1, 1], group),
        c10d.broadcast(x, 2, group),
        c10d.all_reduce_coalesced([x, y], "sum", group),
        c10d.all_gather_into_tensor_coalesced([x, y], 4, group),
        c10d.reduce_scatter_tensor_coalesced([x, y], "sum", 4, group),
        REDUCE_SCATTER([x, y, x, y], "sum", group),
        SCATTER([x, y, x + 1, y + 1], x, 1, group),
    ]
    flat = [one for result in results for one in (result if isinstance(result, (list, tuple)) else [result])]
    return [op_info.WAIT(one) for one in flat]


def at_the_root(x: Tensor, group: str = GROUP) -> list[Tensor]:
    return waited([REDUCE(x, "sum", 3, group), GATHER(x, 3, 4, group)])


def on_a_real_rank() -> tuple[list[Tensor], list[Tensor]]:
    rank, group = dist.get_rank(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    x = of_ranks(4, 4, 2)[rank]
    return many_collectives(x, x * 3, group), at_the_root(x, group)


@pytest.mark.ranks
def test_collectives_give_what_four_gloo_processes_get(pool4: Any) -> None:
    real = pool4.run(on_a_real_rank)
    pairs = [[x, x * 3] for x in of_ranks(4, 4, 2)]
    program = captured(lambda *xs: tuple(many_collectives(*xs)), pairs[0])
    rooted = captured(lambda x: tuple(at_the_root(x)), pairs[0][:1])
    for rank, found in enumerate(ran(program, pairs)):
        assert builders.same(list(found), real[rank][0]), rank
    assert builders.same(list(ran(rooted, [[x] for x, _ in pairs])[3]), real[3][1])


def ring(lefts: list[int]) -> list[Any]:
    """Every rank sends to its right and receives from ``lefts[rank]``; both numbers are inputs, as ranks are."""

    def send_on(x: Tensor) -> Tensor:
        return waited(EXCHANGE([x, x], [True, False], [0, 0], [7, 7], GROUP))[1]

    values = of_ranks(len(lefts), 2)
    program = captured(send_on, values[:1])
    node = only(program, EXCHANGE)
    with program.graph.inserting_before(node):
        numbers = [program.graph.placeholder(name) for name in ("right", "left")]
    node.update_arg(2, numbers)
    inputs = [[x, (rank + 1) % len(lefts), lefts[rank]] for rank, x in enumerate(values)]
    return [results[0] for results in ran(program, inputs)]


def test_messages_arrive_at_the_rank_they_are_sent_to() -> None:
    found = ring([2, 0, 1])
    assert [one[0].item() for one in found] == [100.0, 1.0, 10.0]


def test_a_receive_without_a_send_is_named() -> None:
    with pytest.raises(VerificationError, match=r"rank 1 receives a tensor .* from rank 2, which sends it none"):
        ring([2, 2, 1])


# ---- under way ---------------------------------------------------------------------------------------------------


def summed(x: Tensor) -> Tensor:
    return op_info.WAIT(c10d.all_reduce.default(x * 2, "sum", GROUP)).exp() + 1


def in_place() -> Program:
    """``y = x * 2; all_reduce_(y); wait; exp; add``, as the last pass leaves it."""
    program = captured(summed, of_ranks(1, 3))
    program = reinplace(graph_edit.copy(program))
    assert builders.count(program, c10d.all_reduce_.default) == 1
    return program


def only(program: Program, target: Any) -> Any:
    (node,) = program.graph.find_nodes(op="call_function", target=target)
    return node


def test_a_sound_order_runs() -> None:
    found = ran(in_place(), [[x / 100] for x in of_ranks(2, 3)])
    total = sum(x / 100 * 2 for x in of_ranks(2, 3))
    assert torch.equal(found[0][0], total.exp() + 1)


@pytest.mark.parametrize("target", [aten.exp.default, aten.mul_.Scalar], ids=["read", "write"])
def test_memory_of_a_collective_in_place_is_left_alone_until_the_wait(target: Any) -> None:
    program = in_place()
    start, wait = only(program, c10d.all_reduce_.default), only(program, op_info.WAIT)
    node_meta.set_origin(start, node_meta.Origin(node_meta.Region.BACKWARD, "body", "train.py:5"))
    args = () if target is aten.exp.default else (3.0,)
    with program.graph.inserting_before(wait):
        view = graph_edit.emit(program.graph, aten.view.default, start.args[0], [-1])  # looks at no value
        early = graph_edit.emit(program.graph, target, view, *args)
    node_meta.set_origin(early, node_meta.Origin(node_meta.Region.OPTIMIZER, "", "train.py:9"))
    does = "reads" if target is aten.exp.default else "writes to"
    with pytest.raises(VerificationError) as raised:
        ran(program, [[x] for x in of_ranks(2, 3)])
    assert f"{does} the result of {start.name} before the wait for it" in str(raised.value)
    assert "train.py:9" in str(raised.value)
    assert "train.py:5" in str(raised.value)


def test_a_result_is_not_there_before_the_wait() -> None:
    program = captured(summed, of_ranks(1, 3))
    start, wait, exp = (only(program, one) for one in (c10d.all_reduce.default, op_info.WAIT, aten.exp.default))
    exp.args = (start,)
    exp.append(wait)
    with pytest.raises(VerificationError, match=r"exp \(aten.exp.default.* reads the result of all_reduce before"):
        ran(program, [[x] for x in of_ranks(2, 3)])


def gathered(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    everyone = op_info.WAIT(c10d.all_gather_into_tensor.default(y, 2, GROUP))
    return everyone + 1, y * 3


@pytest.mark.parametrize("after_wait", [False, True], ids=["before the wait", "behind the wait"])
def test_what_a_gather_sends_is_not_overwritten_before_the_wait(after_wait: bool) -> None:
    program = captured(gathered, of_ranks(1, 3))
    wait, triple = only(program, op_info.WAIT), program.results[1]
    triple.target = aten.mul_.Tensor
    if not after_wait:
        wait.prepend(triple)
        with pytest.raises(VerificationError, match="writes to what is sent by all_gather_into_tensor"):
            ran(program, [[x] for x in of_ranks(2, 3)])
    else:
        found = ran(program, [[x] for x in of_ranks(2, 3)])
        assert torch.equal(found[1][0], torch.cat(of_ranks(2, 3)) * 2 + 1)


def test_what_a_gather_sends_keeps_its_memory_until_the_wait() -> None:
    """Else another value could get that memory, and a write to it would count as one to what is sent."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        everyone = c10d.all_gather_into_tensor.default(x * 2, 2, GROUP)  # nothing else reads what is sent
        other = x * 3
        return op_info.WAIT(everyone) + 1, other

    sent: list[weakref.ref[Tensor]] = []
    alive: dict[Any, bool] = {}

    def observe(node: fx.Node, args: list[Any], found: list[Any]) -> None:
        if op_info.is_collective(node):
            sent.append(weakref.ref(args[0][0]))
        elif sent:
            alive[node.target] = sent[0]() is not None

    inputs = [[x] for x in of_ranks(2, 3)]
    run(captured(fn, of_ranks(1, 3)), inputs, {GROUP: [[0, 1]]}, RankGenerators([0, 1], CPU), observe)
    assert alive == {aten.mul.Tensor: True, op_info.WAIT: False, aten.add.Tensor: False}


def test_a_collective_that_is_never_waited_for_is_named() -> None:
    program = in_place()
    start = only(program, c10d.all_reduce_.default)
    graph_edit.set_results(program.graph, [])
    for node in reversed(list(program.graph.nodes)):
        if node.op == "call_function" and node > start:
            program.graph.erase_node(node)
    with pytest.raises(VerificationError, match=f"{start.name} .* is never waited for"):
        ran(program, [[x] for x in of_ranks(2, 3)])


def test_a_result_that_is_returned_may_be_under_way() -> None:
    found = step_run(lambda x: c10d.all_reduce(x, "sum", GROUP), [[x] for x in of_ranks(2, 1)])
    assert found[0].item() == 11.0


# ---- random numbers, groups, ranks, memory -----------------------------------------------------------------------


def drawing(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.nn.functional.dropout(x, 0.5, True), torch.randn(3)


def test_each_rank_draws_what_a_process_with_its_seed_draws() -> None:
    program = captured(drawing, [torch.ones(64)])
    torch.manual_seed(123)
    before, streams = torch.get_rng_state(), RankGenerators([5, 6], CPU)
    assert not streams.have_advanced
    inputs = [[torch.ones(64)] for _ in range(2)]
    found = [run(program, inputs, {}, streams) for _ in range(2)]
    assert streams.have_advanced
    assert torch.equal(torch.get_rng_state(), before)
    for rank, seed in enumerate([5, 6]):
        torch.manual_seed(seed)
        for call in found:
            assert builders.same(list(call[rank]), list(drawing(torch.ones(64))))
    assert not torch.equal(found[0][0][0], found[0][1][0])


def test_a_copy_of_streams_goes_on_from_the_same_place_by_itself() -> None:
    program = captured(drawing, [torch.ones(64)])
    streams, inputs = RankGenerators([5, 6], CPU), [[torch.ones(64)] for _ in range(2)]
    run(program, inputs, {}, streams)
    twin = streams.copy()
    assert builders.same(run(program, inputs, {}, streams), run(program, inputs, {}, twin))


@pytest.mark.parametrize(
    ("axis", "wanted"),
    [
        (MeshAxis(name="data", size=8, group=GROUP), [list(range(8))]),
        (MeshAxis(name="stride 1", size=2, group=GROUP), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (MeshAxis(name="stride 4", size=2, group=GROUP), [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (MeshAxis(name="stride 2 #2", size=2, group=GROUP), [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
    ids=lambda one: one.name if isinstance(one, MeshAxis) else "",
)
def test_a_name_says_how_a_group_divides_the_ranks(axis: MeshAxis, wanted: list[list[int]]) -> None:
    assert rank_blocks(axis, 8) == wanted


@pytest.mark.parametrize(
    "axis",
    [
        MeshAxis(name="world", size=4, group=GROUP),
        MeshAxis(name="stride 3", size=2, group=GROUP),
        MeshAxis(name="ranks 0+3", size=2, group=GROUP, ranks=(0, 3)),
    ],
    ids=lambda axis: axis.name,
)
def test_a_group_that_virtual_ranks_cannot_have_is_refused(axis: MeshAxis) -> None:
    with pytest.raises(ConfigError, match=f"over the group '{axis.name}' of {axis.size} ranks".replace("+", r"\+")):
        rank_blocks(axis, 8)


def test_a_value_is_freed_behind_its_last_reader() -> None:
    def chain(x: Tensor) -> Tensor:
        for _ in range(10):
            x = x + 1
        return x

    x = torch.zeros(1000)
    program = captured(chain, [x], kinds=[InputKind.TENSOR])
    inputs = [[x], [x]]
    with builders.live_bytes() as live:
        live.know([x])
        ran(program, inputs)
    assert live.peak <= 2 * 2 * x.nbytes  # on each rank: what is read, and what is made of it


def test_an_error_of_an_operator_names_the_rank_and_the_node() -> None:
    def look_up(x: Tensor) -> Tensor:
        return torch.arange(3.0)[x]

    program = captured(look_up, [torch.tensor([1])])
    with pytest.raises(IndexError) as raised:
        ran(program, [[torch.tensor([1])], [torch.tensor([9])]])
    assert "on virtual rank 1, while running index" in "".join(raised.value.__notes__)
