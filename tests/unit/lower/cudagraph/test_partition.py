"""A step in parts, the host's and the device's, and why some calls cannot be captured. On fake tensors of a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit import builders
from tests.unit.builders import aten
from tests.unit.lower.gpu_programs import Spec, captured, devices, gpu, host, scheduled, targets
from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.ops.packed_scalars import element, pack
from wholestep.ir.ops.rng_state import GET, SET
from wholestep.ir.program import InputKind, Output, OutputKind, Program
from wholestep.ir.segment import Segment
from wholestep.lower.base import eager_backend
from wholestep.lower.cudagraph import rng_replay
from wholestep.lower.cudagraph.partition import MOST_GRAPHS, Partition, partition
from wholestep.lower.inductor import segment_compiler
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.schedule.pack_scalars import pack_scalars


def parts_of(fn: Callable[..., Any], *specs: Spec, segments: bool = True) -> Partition:
    parts = partition(scheduled(fn, *specs, segments=segments))
    assert isinstance(parts, Partition), parts
    return parts


def body_of(parts: Partition) -> Program:
    """What is captured of a step that is one graph."""
    (piece,) = parts.pieces
    assert piece.captured
    assert parts.description == "one CUDA graph"
    return piece.program


def reason_of(fn: Callable[..., Any], *specs: Spec) -> str:
    reason = partition(scheduled(fn, *specs))
    assert isinstance(reason, str)
    return reason


def update(w: Tensor, g: Tensor, step: Tensor, rate: Tensor) -> tuple[Tensor, ...]:
    """What an optimizer does: a counter on the host, a number made of it, a parameter on the device."""
    step.add_(1)
    number = rate.item() / (1 - 0.9 ** step.item())
    w.add_(g * number)
    return w.sum(), step * 2


UPDATE = (gpu(3, kind=InputKind.PARAM), gpu(3), host(kind=InputKind.OPTIMIZER, dtype=torch.float32), host())


def test_numbers_are_the_hosts_and_all_else_is_the_body():
    program = scheduled(update, *UPDATE, writes=True)
    parts = partition(program)
    assert isinstance(parts, Partition)
    host_calls, body_calls = targets(parts.host), targets(body_of(parts))
    assert pack in host_calls
    assert pack not in body_calls
    assert not any(isinstance(one, Segment) for one in host_calls)
    assert any(isinstance(one, Segment) for one in body_calls)
    kept = (Segment, type(None))
    assert all(isinstance(one, kept) or one in (element, *body_calls) for one in body_calls)
    # The body reads and makes tensors of the device alone; the host reads none of them.
    for node in body_of(parts).graph.nodes:
        assert devices(node) <= {"cuda"}
    for node in parts.host.graph.nodes:
        if node.op == "call_function" and node.target is not pack:
            assert devices(node) <= {"cpu"}
    assert len(host_calls) + len(body_calls) == len(targets(program))


def test_inputs_and_results_go_where_they_belong():
    program = scheduled(update, *UPDATE, writes=True)
    parts = partition(program)
    assert isinstance(parts, Partition)
    # Inputs on the device, then the packed numbers.
    assert parts.inputs == (0, 1)
    assert parts.num_host_values == 1
    assert [record.name for record in body_of(parts).inputs] == ["x0", "x1", "packed"]
    assert [record.kind for record in body_of(parts).inputs][:2] == [InputKind.PARAM, InputKind.USER]
    assert parts.host.inputs == program.inputs
    # USER w.sum(): the first value after those three; USER step * 2: the first result of the host's.
    assert parts.result_places[:2] == ((True, 3), (False, 0))
    assert len(parts.result_places) == len(program.outputs)
    assert len(parts.host.results) + len(body_of(parts).results) == len(program.outputs) + parts.num_host_values


def test_the_host_part_computes_the_numbers_of_each_call():
    """It runs on the CPU as it is, once what it packs stays there."""
    parts = partition(scheduled(update, *UPDATE, writes=True))
    assert isinstance(parts, Partition)
    (node,) = parts.host.graph.find_nodes(op="call_function", target=pack)
    node.args = (node.args[0], torch.device("cpu"))
    run, step = eager_backend.lower(parts.host), torch.tensor(0.0)
    for call in (1, 2, 3):
        with torch.no_grad():
            packed, doubled = run([None, None, step, torch.tensor(0.1 * call, dtype=torch.float64)])[:2]
        assert packed.tolist() == [(0.1 * call) / (1 - 0.9**call)] or math.isclose(
            packed.item(), 0.1 * call / (1 - 0.9**call), rel_tol=1e-15
        )
        assert doubled.item() == 2 * call
        assert step.item() == call  # the counter is written by the host


def test_a_step_without_numbers_has_nothing_on_the_host():
    parts = parts_of(lambda w, x: (w @ x).exp(), gpu(3, 3), gpu(3, 3))
    assert targets(parts.host) == []
    assert parts.num_host_values == 0
    assert parts.result_places == ((True, 2),)


def test_constants_among_the_results():
    parts = parts_of(lambda x: (3, x.exp() * 2, None), gpu(3))
    assert parts.result_places == ((False, 0), (True, 1), (False, 1))
    assert parts.host.results == (3, None)
    assert len(body_of(parts).results) == 1


def test_a_tensor_of_the_host_may_travel_to_the_device():
    """What the host makes and gives to the device is copied to it before every replay."""
    parts = parts_of(
        lambda x, count: x * aten._to_copy.default(count + 1, device=torch.device("cuda")),
        gpu(3),
        host(kind=InputKind.TENSOR),
    )
    assert parts.num_host_values == 1
    assert aten._to_copy.default in targets(parts.host)
    assert aten._to_copy.default not in targets(body_of(parts))


def test_tensors_made_on_the_cpu_are_the_hosts():
    parts = parts_of(
        lambda x: x * aten._to_copy.default(torch.full((), 2.0).add(1), device=torch.device("cuda")), gpu(3)
    )
    assert aten.full.default in targets(parts.host)
    assert parts.num_host_values == 1


def test_tensors_made_on_the_device_are_the_bodys():
    parts = parts_of(lambda x: x * torch.full((3,), 2.0, device="cuda"), gpu(3))
    assert targets(parts.host) == []


def test_random_numbers_of_the_device_are_captured():
    parts = parts_of(lambda x: torch.nn.functional.dropout(x, 0.5, True) * 2, gpu(3))
    assert targets(parts.host) == []


def test_numbers_that_the_host_draws_and_nobody_reads():
    """As models do that ask in every layer whether to skip it: drawn before every replay, in their order."""

    def skipping(x: Tensor) -> Tensor:
        for _ in range(2):
            torch.rand([])
            x = torch.nn.functional.dropout(x * 2, 0.5, True)
        torch.rand(2)
        return x

    parts = parts_of(skipping, gpu(3))
    assert targets(parts.host) == [aten.rand.default] * 3
    assert [node.args[0] for node in parts.host.graph.nodes if node.op == "call_function"] == [[], [], [2]]
    assert aten.rand.default not in targets(body_of(parts))
    assert parts.num_host_values == 0
    with torch.random.fork_rng():
        state = torch.get_rng_state()
        eager_backend.lower(parts.host)([None])
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        torch.rand([]), torch.rand([]), torch.rand(2)
        assert torch.equal(torch.get_rng_state(), after)


REFUSED: dict[str, tuple[Callable[..., Any], list[Spec], str]] = {
    "a size that is data": (
        lambda x: aten.nonzero.default(x), [gpu(3)],
        "the size of what aten.nonzero.default of train.py:7 gives depends on data",
    ),
    "a tensor of the device on the CPU": (
        lambda x: aten._to_copy.default(x.exp(), device=torch.device("cpu")) + 1, [gpu(3)],
        "aten._to_copy.default of train.py:7 gives a tensor on the CPU that depends on the GPU",
    ),
    "a number that depends on the device": (
        lambda x: x * x.sum().item(), [gpu(3)],
        "aten._local_scalar_dense.default of train.py:7 gives a number of the GPU, for which the host would wait",
    ),
    "a number of the host that a call takes as it is": (
        lambda x, rate: torch.nn.functional.elu(x, rate.item()), [gpu(3), host()],
        "aten.elu.default of train.py:7 takes _local_scalar_dense, which the host computes for every call",
    ),
    "a tensor of the host that a call takes as it is": (
        lambda x, rate: torch.atan2(x, rate), [gpu(3), host(dtype=torch.float32)],
        "aten.atan2.default of train.py:7 takes arg1_1, which the host computes for every call",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_reason_names_the_call_and_the_users_line(name):
    fn, specs, reason = REFUSED[name]
    assert reason_of(fn, *specs) == reason


def test_a_number_packed_for_a_call_that_is_in_no_segment():
    """It is read as it is, which waits for the device."""
    program = builders.without_gradients(captured(lambda x, rate: x * rate.item(), [gpu(3), host()]))
    passes = [partial(pack_scalars, reads=segment_compiler.reads_packed), reinplace]
    assert partition(run_passes(program, passes)) == (
        "element of train.py:7 gives a number of the GPU, for which the host would wait"
    )
    assert isinstance(partition(scheduled(lambda x, rate: x * rate.item(), gpu(3), host())), Partition)


def with_generator(target: Any, *args: Any) -> Program:
    """A step that draws on the device, and a call that reads or sets a generator after that."""
    program = scheduled(
        lambda x, state: torch.rand_like(x) * 2, gpu(3), host(16, kind=InputKind.RNG, dtype=torch.uint8)
    )
    with program.graph.inserting_before(program.graph.output_node()):
        given = [program.placeholders[1]] if target is SET else []
        node = graph_edit.emit(program.graph, target, *given, *args)
        if target is GET:
            graph_edit.emit(
                program.graph, aten.bernoulli.default, graph_edit.emit(program.graph, aten.clone.default, node)
            )
    node_meta.set_origin(node, node_meta.Origin(node_meta.Region.FORWARD, "", "train.py:9"))
    return program


@pytest.mark.parametrize("target", [GET, SET])
def test_the_generator_of_the_device_is_not_touched_in_a_graph(target):
    """Where somebody else looks at a state, or one is set that was there before the step. Others: `test_rng_replay`."""
    reason = partition(with_generator(target, "cuda:0"))
    assert reason == f"{target} of train.py:9 reads or sets the state of a random generator on the host"


def test_the_generator_of_the_host_is_the_hosts():
    parts = partition(with_generator(SET, "cpu"))
    assert isinstance(parts, Partition)
    assert targets(parts.host) == [SET]


FREES = "the step frees the memory of its inputs or fills it"


def ended(*outputs: Output, kind: InputKind = InputKind.PARAM, freed: bool = False) -> str | Partition:
    program = scheduled(lambda w: (w * 2).exp(), gpu(3, kind=kind))
    inputs = (replace(program.inputs[0], freed=freed),)
    return partition(replace(program, outputs=outputs or program.outputs, inputs=inputs))


def test_what_the_step_does_to_things_outside_is_a_reason_too():
    state = Output(kind=OutputKind.STATE, name="opt.exp_avg.w")
    assert ended(state) == "the step creates the state opt.exp_avg.w; the calls after it can be captured"
    write = Output(kind=OutputKind.WRITE, name="x0", target=0)
    assert isinstance(ended(write, kind=InputKind.GRAD), Partition)
    assert isinstance(ended(write), Partition)
    assert ended(freed=True) == FREES


@pytest.mark.parametrize("call", [op_info.RESIZE_STORAGE, op_info.RESIZE_STORAGE_])
def test_memory_that_is_gone_behind_the_step_cannot_be_written_back(call):
    program = scheduled(lambda w: (w * 2).exp(), gpu(3, kind=InputKind.USER))
    with program.graph.inserting_before(program.graph.output_node()):
        program.graph.call_function(call, (program.placeholders[0], 0))
    assert partition(program) == FREES


def test_the_program_that_went_in_is_not_touched():
    program = scheduled(update, *UPDATE, writes=True)
    before = [node.format_node() for node in program.graph.nodes]
    partition(program)
    assert [node.format_node() for node in program.graph.nodes] == before


# ---- pieces --------------------------------------------------------------------------------------------------------


def layers(x: Tensor, count: int = 4) -> Tensor:
    """So many calls, of which no two are one."""
    for _ in range(count):
        x = x @ x
    return x


def kinds(parts: Partition) -> list[tuple[bool, list[Any]]]:
    return [(piece.captured, targets(piece.program)) for piece in parts.pieces]


ITEM, MM = aten._local_scalar_dense.default, aten.mm.default


def test_a_number_at_the_end_leaves_one_graph():
    parts = parts_of(lambda x: layers(x).sum().item(), gpu(3, 3), segments=False)
    assert kinds(parts) == [(True, [MM] * 4 + [aten.sum.default]), (False, [ITEM])]
    assert parts.description == (
        "one CUDA graph, cut where aten._local_scalar_dense.default of train.py:7 gives a number of the GPU, "
        "for which the host would wait"
    )
    # x; the sum; the number, which is a result.
    assert [(piece.inputs, piece.outputs, piece.frees) for piece in parts.pieces] == [
        ((0,), (1,), ()),
        ((1,), (2,), (1,)),
    ]
    assert parts.result_places == ((True, 2),)
    assert parts.on_host == {2}


def test_a_number_in_the_middle_leaves_two():
    def step(x: Tensor) -> Tensor:
        y = layers(x)
        return layers(torch.nn.functional.elu(y, y.sum().item()) + x)

    parts = parts_of(step, gpu(3, 3), segments=False)
    assert [is_graph for is_graph, _ in kinds(parts)] == [True, False, True]
    # What takes the number runs as it is, and no more.
    assert kinds(parts)[1][1] == [ITEM, aten.elu_.default]
    assert kinds(parts)[2][1][1:] == [MM] * 4
    assert parts.description.startswith("2 CUDA graphs, cut where aten._local_scalar_dense.default of train.py:7 gives")
    assert parts.description.endswith(", for which the host would wait, and 1 more")
    assert "which the host computes for every call" not in parts.cuts[1]
    assert parts.cuts[1].endswith("takes _local_scalar_dense, for which the host waits")


def test_a_number_that_is_read_where_it_lies_goes_back_to_the_gpu():
    """And what reads it is captured."""

    def step(x: Tensor) -> Tensor:
        y = layers(x)
        return layers(y * (1 / y.sum().item()) + x)

    parts = parts_of(step, gpu(3, 3))
    assert [is_graph for is_graph, _ in kinds(parts)] == [True, False, True]
    found = kinds(parts)[1][1]
    assert found[0] is ITEM
    assert found[-1] is pack
    assert not any(isinstance(one, (Segment, torch._ops.OpOverload)) for one in found[1:])
    assert parts.cuts[-1].startswith("pack of train.py:7 takes ")


def test_a_size_that_is_data_leaves_two():
    def step(x: Tensor) -> Tensor:
        y = layers(x)
        found = aten.nonzero.default(y)
        return layers(y + found.sum())

    parts = parts_of(step, gpu(3, 3), segments=False)
    assert [is_graph for is_graph, _ in kinds(parts)] == [True, False, True]
    assert kinds(parts)[1][1] == [aten.nonzero.default, aten.sum.default]
    assert parts.cuts[1] == "the size of what aten.sum.default of train.py:7 takes depends on data"


def test_few_calls_between_two_reads_run_as_they_are():
    def step(x: Tensor, count: int) -> tuple[Any, ...]:
        y = layers(x)
        y = layers(y * y.sum().item(), count)
        return y * y.sum().item(), layers(y, 8)

    for count, more in (2, 0), (4, 1):
        parts = parts_of(partial(step, count=count), gpu(3, 3), segments=False)
        assert sum(piece.captured for piece in parts.pieces) == 2 + more


@pytest.mark.parametrize("segments", [False, True])
def test_a_step_that_launches_nothing_has_no_graph(segments: bool):
    """A graph of nothing gains nothing, and torch warns of each."""
    program = scheduled(lambda x: x.view(-1).unsqueeze(0), gpu(3, 3), segments=segments)
    assert partition(program) == "it launches nothing on the GPU"
    assert body_of(parts_of(lambda x: (x + 1).view(-1), gpu(3, 3), segments=segments))


def test_a_step_has_only_so_many_graphs():
    """The longest ones that there are."""
    counts = [4, *range(5, 5 + MOST_GRAPHS), 4]

    def step(x: Tensor) -> Tensor:
        for count in counts:
            x = layers(x * x.sum().item(), count)
        return x

    parts = parts_of(step, gpu(3, 3), segments=False)
    found = [targets(piece.program).count(MM) for piece in parts.pieces if piece.captured]
    assert found == counts[1:-1]
    assert parts.description.startswith(f"{MOST_GRAPHS} CUDA graphs, cut where ")


def test_every_call_is_somewhere_once_and_has_what_it_takes():
    def step(x: Tensor, rate: Tensor) -> tuple[Any, ...]:
        y = layers(x)
        number = y.sum().item()
        z = layers(y * number * rate.item())
        return y, layers(z + x).sum(), number * 2, rate * 2

    program = scheduled(step, gpu(3, 3), host(), segments=False)
    parts = partition(program)
    assert isinstance(parts, Partition)
    found = [*targets(parts.host), *(one for piece in parts.pieces for one in targets(piece.program))]
    assert sorted(map(str, found)) == sorted(map(str, targets(program)))
    known = set(range(len(parts.inputs) + parts.num_host_values))
    for piece in parts.pieces:
        assert known.issuperset(piece.inputs)
        assert known.isdisjoint(piece.outputs)
        known = (known | {*piece.outputs}) - {*piece.frees}
    assert known.issuperset(place for is_value, place in parts.result_places if is_value)
    assert max(known) < parts.num_values


def test_a_wait_goes_where_its_collective_begins():
    """A graph cannot wait for what was begun outside of it."""

    def step(x: Tensor) -> tuple[Any, ...]:
        y = layers(x)
        return y, y * y.sum().item(), layers(y)

    program = scheduled(step, gpu(3, 3), segments=False)
    graph = program.graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    first, last = calls[3], calls[-1]
    with graph.inserting_after(first):
        begun = graph_edit.emit(graph, op_info.c10d.all_reduce.default, first, "sum", "0")
    with graph.inserting_after(last):
        wait = graph_edit.emit(graph, op_info.WAIT, begun)
    program = replace(program, outputs=(*program.outputs, Output(kind=OutputKind.USER, name="out3")))
    end = graph.output_node()
    end.args = ((*end.args[0], wait),)
    parts = partition(program)
    assert isinstance(parts, Partition)
    where = [number for number, (_, found) in enumerate(kinds(parts)) for one in found if one is op_info.WAIT]
    assert where == [0]
    assert op_info.c10d.all_reduce.default in kinds(parts)[0][1]
    assert kinds(parts)[2] == (True, [MM] * 4)


def rewinding(*, apart: bool) -> Program:
    """A step that draws the same again; with a number that is read in between, if `apart`."""

    def step(x: Tensor) -> tuple[Any, ...]:
        y = layers(torch.rand_like(x))
        z = y * y.sum().item() if apart else y * 2
        return y, layers(z * torch.rand_like(x), 5)

    program = scheduled(step, gpu(3, 3), segments=False)
    graph = program.graph
    draws = [node for node in graph.nodes if node.target is aten.rand_like.default]
    with graph.inserting_before(draws[0]):
        state = graph_edit.emit(graph, GET, "cuda:0")
    with graph.inserting_before(draws[1]):
        now, again = graph_edit.emit(graph, GET, "cuda:0"), graph_edit.emit(graph, SET, state, "cuda:0")
    with graph.inserting_after(draws[1]):
        then = graph_edit.emit(graph, SET, now, "cuda:0")
    for node in state, now, again, then:
        node_meta.set_origin(node, node_meta.Origin(node_meta.Region.BACKWARD, "", "train.py:9"))
    return program


def test_a_generator_is_rewound_in_one_piece(monkeypatch):
    monkeypatch.setattr(rng_replay, "is_supported", lambda: True)
    parts = partition(rewinding(apart=False))
    assert isinstance(parts, Partition)
    assert {GET, SET} <= {*targets(body_of(parts))}


def test_a_generator_is_not_rewound_across_pieces(monkeypatch):
    monkeypatch.setattr(rng_replay, "is_supported", lambda: True)
    parts = partition(rewinding(apart=True))
    assert isinstance(parts, Partition)
    assert [is_graph for is_graph, _ in kinds(parts)] == [False, True, False, True]
    for is_graph, found in kinds(parts):
        assert not is_graph or not {GET, SET} & {*found}
    assert (
        "wholestep.rng_get.default of train.py:9 reads or sets the state of a random generator on the host"
        in parts.cuts
    )


def test_a_state_that_somebody_looks_at_is_read_in_its_place():
    """Not before the step, as what takes nothing of the GPU."""

    def step(x: Tensor) -> tuple[Any, ...]:
        return layers(torch.rand_like(x)), torch.rand_like(x)

    program = scheduled(step, gpu(3, 3), segments=False)
    graph = program.graph
    draws = [node for node in graph.nodes if node.target is aten.rand_like.default]
    with graph.inserting_before(draws[1]):
        state = graph_edit.emit(graph, aten.clone.default, graph_edit.emit(graph, GET, "cuda:0"))
    end = graph.output_node()
    end.args = ((*end.args[0], state),)
    parts = partition(replace(program, outputs=(*program.outputs, Output(kind=OutputKind.USER, name="out2"))))
    assert isinstance(parts, Partition)
    assert targets(parts.host) == []
    assert kinds(parts) == [
        (True, [aten.rand_like.default, MM, MM, MM, MM]), (False, [GET, aten.clone.default, aten.rand_like.default]),
    ]  # fmt: skip


ORDER: dict[str, tuple[Callable[..., Any], list[Spec], str]] = {
    "a tensor of the host that is written behind the wait": (
        lambda x, total: (layers(x), total.add_(aten._to_copy.default(x.sum(), device=torch.device("cpu"))), total * 1),
        [gpu(3, 3), host(kind=InputKind.TENSOR, dtype=torch.float32)], "",
    ),
    "one that is written before it, and read there": (
        lambda x, total: (total.add_(1), layers(x), aten._to_copy.default(x, device=torch.device("cpu")) * total),
        [gpu(3, 3), host(kind=InputKind.TENSOR, dtype=torch.float32)],
        "arg1_1 is written on the host beside calls that wait for the GPU",
    ),
    "draws of the host": (
        lambda x: (layers(x), torch.bernoulli(aten._to_copy.default(x, device=torch.device("cpu"))), torch.rand(2)),
        [gpu(3, 3)],
        "aten.bernoulli.default of train.py:7 draws on the host what depends on the GPU, "
        "and other calls draw there, too",
    ),
    "draws that depend on the GPU": (
        lambda x: (layers(x), torch.bernoulli(aten._to_copy.default(x, device=torch.device("cpu")))), [gpu(3, 3)], "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDER)
def test_what_the_host_does_keeps_its_order(name):
    fn, specs, reason = ORDER[name]
    parts = partition(scheduled(fn, *specs, writes=True, segments=False))
    assert (parts == reason) if reason else isinstance(parts, Partition), parts


def test_a_segment_stands_for_the_calls_in_it():
    def step(x: Tensor, count: int) -> tuple[Any, ...]:
        return x.sum().item(), layers(x, count)

    assert partition(scheduled(partial(step, count=3), gpu(3, 3))) == (
        "aten._local_scalar_dense.default of train.py:7 gives a number of the GPU, for which the host would wait"
    )
    parts = partition(scheduled(partial(step, count=4), gpu(3, 3)))
    assert isinstance(parts, Partition)
    assert [piece.captured for piece in parts.pieces] == [False, True]
    assert isinstance(kinds(parts)[1][1][0], Segment)
