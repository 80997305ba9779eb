"""form_segments: what is inside and what stays outside, views, writes of inputs, memory, and the bits."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn

from tests.unit import builders
from tests.unit.builders import aten, c10d
from tests.unit.capture.steps import captured
from wholestep.config import DDP
from wholestep.cost.cost_model import CostModel
from wholestep.ir import node_meta, op_info, printer
from wholestep.ir.ops.packed_scalars import element
from wholestep.ir.program import InputKind, MeshAxis, Output, OutputKind, Program
from wholestep.ir.segment import Segment
from wholestep.lower.base import eager_backend
from wholestep.lower.inductor import segment_compiler
from wholestep.passes.default_passes import passes_of
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import Pass, run_passes
from wholestep.passes.schedule.form_segments import form_segments
from wholestep.passes.schedule.pack_scalars import pack_scalars
from wholestep.place.strategies import place

COST = CostModel.default("cpu+gloo")


def compiles(node: fx.Node) -> bool:
    """A compiler that has every operator of ATen which neither writes nor draws; numbers it does not take."""
    tensors = all(isinstance(node_meta.value(arg), (Tensor, list, tuple)) for arg in node.all_input_nodes)
    known = op_info.is_op(node) and node.target.namespace == "aten" and any(True for _ in node_meta.tensors(node))
    return known and tensors and not op_info.is_random(node.target) and not op_info.mutated_args(node.target)


FORM: Pass = partial(form_segments, compiles=compiles)


def formed(program: Program, *passes: Pass) -> Program:
    return run_passes(program, [*passes, FORM])


def placed(fn: Callable[..., Any], tensors: list[Tensor], **options: Any) -> Program:
    return builders.place(builders.capture(fn, tensors, **options))


def segments(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if isinstance(node.target, Segment)]


def inside(node: fx.Node) -> list[str]:
    """The operators in a segment, views left out."""
    calls = (call for call in node.target.calls if not op_info.is_view(call) and call.target is not operator.getitem)
    return [call.target._schema.name.split("::")[1] for call in calls]


def outside(program: Program) -> list[str]:
    """What runs on its own, in order: operators, functions of the host, and segments by their names."""
    return [
        node.target._schema.name.split("::")[1] if op_info.is_op(node) else node.target.__name__
        for node in program.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem and not op_info.is_view(node)
    ]


def assert_well_formed(program: Program) -> None:
    """No view crosses a border, no memory is an argument twice, and results are tensors that somebody reads."""
    for node in segments(program):
        assert not any(op_info.is_view(arg) for arg in node.args)
        storages = [one.untyped_storage()._cdata for arg in node.args for one in node_meta.tensors(arg)]
        assert len(set(storages)) == len(storages)
        results = node.target.graph.output_node().args[0]
        assert results
        assert not any(op_info.is_view(one) for one in results)
        assert all(isinstance(node_meta.value(one), Tensor) for one in results)
        assert [item.args[1] for item in node.users] == list(range(len(results)))
        assert all(item.users for item in node.users)


def check(program: Program, tensors: list[Tensor], *, hold_updates: bool = True) -> Program:
    """The program with segments; it gives the same bits, also where segments write to inputs."""
    after = formed(program)
    assert_well_formed(after)
    assert same_bits(after, program, tensors)
    assert same_bits(run_passes(after, [partial(reinplace, hold_updates=hold_updates)]), program, tensors)
    return after


def same_bits(one: Program, other: Program, tensors: list[Any]) -> bool:
    results = []
    for program in (one, other):
        torch.manual_seed(1)
        results.append(builders.execute(program, tensors))
    return builders.same(*results)


class Net(nn.Module):
    """A look-up, a tied output, dropout, a norm with statistics, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 6)
        self.up, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.down, self.scale = nn.Linear(8, 6), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.norm(self.up(self.embedding(x)))))
        return self.down(hidden) * self.scale @ self.embedding.weight.t()


def training(make: Callable[[Any], torch.optim.Optimizer], *, ranks: int = 2) -> tuple[Program, list[Any]]:
    """A step with clipping for so many ranks, planned up to the pass before the backend's; and inputs to run it on."""
    torch.manual_seed(0)
    model = Net()
    opt = make(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    batch = torch.randint(5, (7,)), torch.randint(5, (7,))
    step(*batch)  # the state of the optimizer is there
    found = captured(step, *batch)
    axis = MeshAxis(name="data", size=ranks, group=builders.world_group())
    program = place(found.program, DDP(), (axis,))
    planned = run_passes(program, passes_of(cost=COST, bucket_bytes=100)[:-2])
    return planned, [*found.binding.fill(list(batch))]


OPTIMIZERS = {
    "foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "single": lambda params: torch.optim.AdamW(params, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
}


@pytest.fixture(scope="module", params=OPTIMIZERS)
def step(request: pytest.FixtureRequest) -> tuple[Program, list[Any]]:
    return training(OPTIMIZERS[request.param])


def communication(program: Program) -> list[str]:
    return [
        str(node.target)
        for node in program.graph.nodes
        if node.op == "call_function" and op_info.needs_peers(node.target)
    ]


def test_a_training_step_keeps_its_bits_and_the_order_of_communication(step):
    program, inputs = step
    after = check(program, inputs)
    assert communication(after) == communication(program)
    assert len(communication(program)) >= 6
    assert printer.plan_text(after) == printer.plan_text(program)
    assert len(segments(after)) >= 4
    assert {"mm", "addmm", "embedding", "nll_loss_forward"}.isdisjoint(outside(after))


def test_nothing_moves_across_communication(step):
    """Between two collectives or waits there are the same calls before and after."""

    def spans(program: Program) -> list[list[str]]:
        found: list[list[str]] = [[]]
        for node in program.graph.nodes:
            if node.op != "call_function":
                continue
            if op_info.needs_peers(node.target):
                found.append([])
            elif isinstance(node.target, Segment):
                found[-1] += [f"{call.target}" for call in node.target.calls if not free(call)]
            elif not free(node):
                found[-1].append(f"{node.target}")
        return [sorted(names) for names in found]

    def free(node: fx.Node) -> bool:
        return op_info.is_view(node) or node.target is operator.getitem

    program, _ = step
    assert spans(formed(program)) == spans(program)


def test_a_second_time_changes_nothing(step):
    once = formed(step[0])
    assert printer.diff(formed(once), once) == ""


def test_the_program_that_went_in_is_not_touched(step):
    text = printer.source(step[0])
    formed(step[0])
    assert printer.source(step[0]) == text


def test_a_scheduled_program_stays_as_it_is(step):
    program = run_passes(step[0], [reinplace])
    assert printer.diff(formed(program), program) == ""


def test_the_note_counts_what_is_inside_and_lists_what_is_not():
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(x @ x) * 2
        reduced = op_info.WAIT(c10d.all_reduce.default(y, "sum", builders.world_group()))
        return reduced, (torch.rand(3, 3) + 1).exp()

    after = check(placed(fn, [torch.rand(3, 3)]), [torch.rand(3, 3)])
    (note,) = after.history[-1].notes
    assert note == "5 calls in 2 segments, 3 on their own (all_reduce 1, rand 1, wait_tensor 1)"
    assert list(map(inside, segments(after))) == [["mm", "relu", "mul"], ["add", "exp"]]


def test_one_call_alone_is_no_segment():
    after = check(placed(lambda x: x.view(-1).exp().t(), [torch.rand(3, 3)]), [torch.rand(3, 3)])
    assert segments(after) == []
    assert after.history[-1].notes == ("0 calls in 0 segments, 1 on their own (exp 1)",)


def test_random_numbers_stay_outside_in_their_order():
    def fn(x: Tensor) -> Tensor:
        a = (x * 2).exp()
        drawn = torch.rand(3, 3)
        b = (a + 1).sin()
        again = torch.bernoulli(b.sigmoid())  # depends on what is inside
        return (b * drawn).tanh() + again

    after = check(placed(fn, [torch.rand(3, 3)]), [torch.rand(3, 3)])
    # A draw ends the segment that is being filled, also one that it does not depend on: draws do not change places.
    assert outside(after) == ["run_segment_0", "rand", "run_segment_1", "bernoulli", "run_segment_2"]


def test_what_the_compiler_has_no_kernel_for_stays_outside():
    def fn(x: Tensor) -> Tensor:
        a = (x * 2).exp()
        other = (x + 0.5).cos()
        return a.sin() * other

    without_cos = partial(form_segments, compiles=lambda node: compiles(node) and node.target is not aten.cos.default)
    tensors = [torch.rand(3)]
    program = placed(fn, tensors)
    after = run_passes(program, [without_cos])
    # `cos` reads what is inside, so a segment ends before it; what follows is another one.
    assert outside(after) == ["run_segment_0", "cos", "run_segment_1"]
    assert list(map(inside, segments(after))) == [["mul", "exp", "add"], ["sin", "mul"]]
    assert same_bits(after, program, tensors)


def test_what_does_not_depend_on_a_segment_does_not_end_it():
    def fn(x: Tensor, y: Tensor) -> Tensor:
        a = (x * 2).exp()
        other = y.cos()
        return a.sin() * other

    without_cos = partial(form_segments, compiles=lambda node: compiles(node) and node.target is not aten.cos.default)
    tensors = [torch.rand(3), torch.rand(3)]
    program = placed(fn, tensors)
    after = run_passes(program, [without_cos])
    assert outside(after) == ["cos", "run_segment_0"]
    assert same_bits(after, program, tensors)


def test_numbers_and_counters_of_the_host_stay_outside():
    def fn(x: Tensor, count: Tensor, rate: Tensor) -> Tensor:
        count.add_(1).mul_(2)
        scale = rate.item() / (1 - 0.9 ** count.item())
        return (x.exp() * scale).sin() + count

    tensors = [torch.rand(3), torch.tensor(2.0), torch.tensor(0.1, dtype=torch.float64)]
    after = check(placed(fn, tensors), tensors)
    names = outside(after)
    assert names.count("_local_scalar_dense") == 2
    assert (
        names.count("mul") == 2
    )  # of the counter, a tensor of the host; of a number, which this compiler does not take
    assert "add" in names  # the counter
    (one,) = segments(after)
    assert inside(one) == ["sin", "add"]


def test_views_are_taken_inside_and_never_given_back():
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a = (x @ w).exp()
        view = a.t()[1:]  # read in the first segment, in the second, and returned
        b = view.contiguous().sin()
        reduced = op_info.WAIT(c10d.all_reduce.default(b, "sum", builders.world_group()))
        return view.cos() + w[1:, :2], view, reduced.view(-1)

    tensors = [torch.rand(2, 4), torch.rand(4, 4)]
    after = check(placed(fn, tensors), tensors)
    first, second = segments(after)
    assert inside(first)[:2] == ["mm", "exp"]
    assert first.args == tuple(after.placeholders)
    # The second one gets what is viewed, `exp` and `w`, and views it itself.
    assert [node_meta.tensor(arg).ndim for arg in second.args] == [2, 2]
    assert after.placeholders[1] in second.args
    assert any(op_info.is_view(call) for call in second.target.calls)


def test_a_view_of_an_argument_alone_is_not_copied():
    """Two segments that look at halves of one tensor both take the whole, and one of them may overwrite nothing."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = x.chunk(2)
        a = left.exp() * right.sin()
        torch.rand(1)
        drawn = torch.rand(3)
        return a, left.cos().tanh() * drawn

    tensors = [torch.rand(6)]
    after = check(placed(fn, tensors), tensors)
    assert [node.args[0] for node in segments(after)] == [after.placeholders[0]] * 2


def test_calls_that_give_several_tensors_stay_whole():
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        values, places = x.exp().max(dim=1)
        sums = torch._foreach_mul([values, values.sin()], 2.0)
        mean = torch.var_mean(x * sums[0])
        reduced = op_info.WAIT(c10d.all_reduce.default(sums[1], "sum", builders.world_group()))
        return places, mean[1], reduced * 1.5 + sums[0]

    after = check(placed(fn, [torch.rand(4, 4)]), [torch.rand(4, 4)])
    assert [name for node in segments(after) for name in inside(node)].count("_foreach_mul") == 1
    lists = [
        node for node in after.graph.nodes if op_info.is_op(node) and not isinstance(node_meta.value(node), Tensor)
    ]
    assert lists == []  # none of them is outside


def test_several_tensors_made_of_what_has_arrived_stay_whole():
    """The norms of clipping: their call reads what has arrived, the items that are taken from it do not."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        reduced = [op_info.WAIT(c10d.all_reduce.default(one, "sum", builders.world_group())) for one in (x, y)]
        scaled = [one * 0.5 for one in reduced]
        norms = torch._foreach_norm([scaled[0], reduced[1]])
        return torch.stack(norms).norm(), *scaled

    tensors = [torch.rand(4), torch.rand(3)]
    after = check(placed(fn, tensors), tensors)
    assert "_foreach_norm" not in outside(after)


def test_what_has_arrived_starts_a_segment_of_its_own():
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        arrived = op_info.WAIT(c10d.all_reduce.default(x, "sum", builders.world_group())).view(-1)
        a = (x * 2).exp()
        return arrived * 3, arrived.sin(), a.tanh(), (a + 1).cos()

    after = check(placed(fn, [torch.rand(3)]), [torch.rand(3)])
    assert list(map(inside, segments(after))) == [["mul", "exp"], ["mul", "sin"], ["tanh", "add", "cos"]]


def test_what_a_segment_has_kept_apart_stays_apart():
    """Two calls with a segment between them: a second run of the pass does not join them."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        arrived = op_info.WAIT(c10d.all_reduce.default(x, "sum", builders.world_group()))
        a = x.exp()
        return a, arrived * 3, arrived.sin(), x.cos()

    once = check(placed(fn, [torch.rand(3)]), [torch.rand(3)])
    assert outside(once)[2:] == ["exp", "run_segment_0", "cos"]
    assert printer.diff(formed(once), once) == ""


def is_kept_apart(call: fx.Node) -> bool:
    """Whether a call belongs to an optimizer or reads what has arrived."""
    reads = list(call.all_input_nodes)
    while any(op_info.is_view(arg) for arg in reads):
        reads = [one for arg in reads for one in (arg.all_input_nodes if op_info.is_view(arg) else [arg])]
    return node_meta.origin(call).region is node_meta.Region.OPTIMIZER or any(
        arg.target is op_info.WAIT for arg in reads
    )


def test_updates_are_segments_of_their_own(step):
    """No computation of the model waits for what only updates read: a segment has either of both, or what follows."""
    program, kinds = step[0], set()
    apart = {node.name for node in program.graph.nodes if node.op == "call_function" and is_kept_apart(node)}
    for node in segments(formed(program)):
        inside = list(node.target.calls)
        behind = {call for call in inside if call.name in apart}
        kinds.add(bool(behind))
        for call in inside:  # a norm of what has arrived has items, which are added up
            if behind and not op_info.is_view(call) and not any(arg in behind for arg in call.all_input_nodes):
                assert call.name in apart
            elif any(arg in behind for arg in call.all_input_nodes):
                behind.add(call)
    assert kinds == {True, False} or not any("_foreach" in one for one in outside(program))


def updates_behind_a_look_up(w: Tensor, index: Tensor, avg: Tensor) -> Tensor:
    """A look-up that may fail, in the middle of what else would be one segment, then an update of inputs."""
    rows = torch.nn.functional.embedding(index, w * 2)
    grad = (rows.sum(0) + w).exp()
    avg.mul_(0.9).add_(grad, alpha=0.1)
    w.sub_(avg * 0.01)
    return rows.sum()


def test_an_update_behind_a_call_that_may_fail_is_stored_in_place():
    tensors = [torch.rand(5, 4), torch.tensor([1, 4, 2]), torch.rand(5, 4)]
    program = placed(updates_behind_a_look_up, tensors)
    after = check(program, tensors)
    first, *others = segments(after)
    assert "embedding" in inside(first)
    assert "sub" not in inside(first)
    scheduled = run_passes(after, [reinplace])
    stored = {node.args[place].name for node in segments(scheduled) for place, _ in node.target.stored}
    assert stored == {scheduled.placeholders[0].name, scheduled.placeholders[2].name}
    assert scheduled.history[-1].notes[1] == "0 B of inputs are copied at the end of the step"
    assert builders.count(scheduled, aten.copy_.default, aten._foreach_copy_.default, aten.clone.default) == 0
    assert not first.target.stored
    assert others


def test_a_look_up_that_fails_leaves_inputs_as_they_were():
    tensors = [torch.rand(5, 4), torch.tensor([1, 4, 2]), torch.rand(5, 4)]
    scheduled = run_passes(placed(updates_behind_a_look_up, tensors), [FORM, reinplace])
    tensors[1] = torch.tensor([1, 5, 2])
    before = [one.clone() for one in tensors]
    with torch.no_grad(), pytest.raises(IndexError):
        eager_backend.lower(scheduled)(list(tensors))
    assert builders.same(tensors, before)


@pytest.mark.parametrize("optimizer", ["foreach", "single", "sgd"])
def test_every_parameter_and_state_is_written_by_the_segment_that_makes_it(optimizer):
    program, inputs = training(OPTIMIZERS[optimizer], ranks=1)
    pack = partial(pack_scalars, reads=segment_compiler.reads_packed)
    form = partial(form_segments, compiles=segment_compiler.compiles)
    scheduled = run_passes(program, [pack, form, partial(reinplace, hold_updates=False)])
    stored = [node.args[at].name for node in segments(scheduled) for at, _ in node.target.stored]
    pairs = zip(scheduled.placeholders, scheduled.inputs, strict=True)
    # Without dimensions they are numbers of the host, which stay outside.
    state = {
        node.name
        for node, one in pairs
        if one.kind in (InputKind.PARAM, InputKind.OPTIMIZER) and math.prod(one.shape) > 1
    }
    assert len(state) >= 2 * 7
    assert len(stored) == len(set(stored))
    assert state <= set(stored)
    assert same_bits(scheduled, program, inputs)


def on_lists(node: fx.Node) -> bool:
    return op_info.is_indexwise(node.target) and "norm" not in str(node.target)


def lists_of(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if on_lists(node)]


@pytest.mark.parametrize(("optimizer", "ranks"), [("foreach", 2), ("sgd", 1)])
def test_calls_apart_are_among_themselves(optimizer, ranks):
    """Each segment is of one kind; the calls of a kind keep their order, communication its own, and all its bits."""
    program, inputs = training(OPTIMIZERS[optimizer], ranks=ranks)
    program = run_passes(program, [partial(pack_scalars, reads=segment_compiler.reads_packed)])
    form = partial(form_segments, compiles=segment_compiler.compiles, separate_nodes=lists_of)
    after = run_passes(program, [form])
    assert_well_formed(after)
    found: list[str] = []
    for node in segments(after):
        calls = [
            call for call in node.target.calls if not op_info.is_view(call) and call.target is not operator.getitem
        ]
        assert len({on_lists(call) for call in calls}) == 1
        found += [call.name for call in calls if on_lists(call)]
    lists = {node.name: node for node in program.graph.nodes if node.op == "call_function" and on_lists(node)}
    assert found == [name for name in lists if name in found]
    # Counters are the host's; a call that is alone and reads no number of the host is no segment.
    left = {str(node.target) for name, node in lists.items() if name not in found}
    assert left <= {"aten._foreach_add.Tensor", "aten._foreach_mul.Tensor"}
    assert len(found) >= 4
    assert printer.plan_text(after) == printer.plan_text(program)
    assert same_bits(after, program, inputs)
    assert same_bits(run_passes(after, [partial(reinplace, hold_updates=False)]), program, inputs)


def test_the_clipping_of_gradients_is_in_the_segment_of_their_update():
    """Elsewhere what is outside of an optimizer and inside are two segments."""
    program, _ = training(OPTIMIZERS["sgd"], ranks=1)
    pack = partial(pack_scalars, reads=segment_compiler.reads_packed)
    after = run_passes(
        program, [pack, partial(form_segments, compiles=segment_compiler.compiles, separate_nodes=lists_of)]
    )
    updating = [inside(node) for node in segments(after) if any(map(on_lists, node.target.calls))]
    assert [calls[0] for calls in updating] == ["_foreach_mul"]
    assert "_foreach_add" in updating[0]


def test_a_segment_does_not_write_to_what_is_read_later():
    def fn(w: Tensor) -> tuple[Tensor, ...]:
        new = (w * 2).exp()
        reduced = op_info.WAIT(c10d.all_reduce.default(new, "sum", builders.world_group()))
        return new, reduced, w.sin().cos()

    tensors = [torch.rand(3)]
    program = placed(fn, tensors)
    write = Output(kind=OutputKind.WRITE, name="x0", target=0)
    program = replace(program, outputs=(write, *program.outputs[1:]))
    scheduled = run_passes(program, [FORM, partial(reinplace, hold_updates=False)])
    assert [node.target.stored for node in segments(scheduled)] == [(), ()]
    assert same_bits(scheduled, program, tensors)


def test_one_value_for_two_inputs_is_not_stored():
    def fn(a: Tensor, b: Tensor) -> None:
        new = (a * 2).exp() + b
        a.copy_(new)
        b.copy_(new)

    tensors = [torch.rand(3), torch.rand(3)]
    check(placed(fn, tensors), tensors)


def test_inputs_that_change_places_are_stored_from_values_made_before():
    def fn(a: Tensor, b: Tensor) -> None:
        one, other = (a * 2).exp(), (b * 3).sin()
        a.copy_(other)
        b.copy_(one)

    tensors = [torch.rand(3), torch.rand(3)]
    after = check(placed(fn, tensors), tensors)
    scheduled = run_passes(after, [reinplace])
    (node,) = segments(scheduled)
    assert sorted(node.target.stored) == [(0, 1), (1, 0)] or sorted(node.target.stored) == [(0, 0), (1, 1)]


def test_a_segment_alone_runs_what_its_nodes_ran():
    tensors = [torch.rand(3, 4), torch.rand(4, 3)]
    program = placed(lambda x, w: ((x @ w).exp() + 1, (x * 2).sum(0)), tensors)
    (node,) = segments(formed(program))
    results = node.target(list(tensors))
    assert builders.same(results, [(tensors[0] @ tensors[1]).exp() + 1, (tensors[0] * 2).sum(0)])
    assert node.target.__name__ == "run_segment_0"


def test_an_argument_that_only_the_list_holds_is_freed_inside():
    """The product is dead after `exp`: while `sin` runs its memory is free."""
    program = placed(lambda x, w: (x.exp() @ w).sin(), [torch.rand(3, 3), torch.rand(3, 3)])
    (node,) = segments(formed(program))
    arguments = [torch.rand(3, 3), torch.rand(3, 3)]
    freed = [weakref.ref(one) for one in arguments]
    seen: list[list[bool]] = []

    class Look(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append([one() is None for one in freed])
            return func(*args, **(kwargs or {}))

    with Look():
        node.target(arguments)
    assert arguments == []
    # exp sees both; after it x is gone; after the product the matrix is gone, too.
    assert seen == [[False, False], [True, False], [True, True]]


def test_the_text_lets_go_of_what_dies_in_a_segment():
    def fn(x: Tensor) -> Tensor:
        a = (x * 2).exp()
        drawn = torch.rand(3, 3)
        return (a.sin() * drawn).cos()

    after = formed(placed(fn, [torch.rand(3, 3)]))
    text = printer.source(after, comments=False)
    last = segments(after)[-1]
    lines = text.splitlines()
    at = next(index for index, line in enumerate(lines) if f"= {last.target.name}(boxed)" in line)
    assert lines[at - 2].startswith("    boxed = [")
    assert sorted(lines[at - 1].removeprefix("    del ").split(", ")) == sorted(arg.name for arg in last.args)


def test_packed_numbers_are_read_inside():
    """Also by a call that is alone: outside, the host would wait for the number."""

    def fn(x: Tensor, rate: Tensor) -> Tensor:
        return x * rate.item()

    tensors = [torch.rand(3), torch.tensor(0.5, dtype=torch.float64)]
    program = run_passes(placed(fn, tensors), [partial(pack_scalars, reads=segment_compiler.reads_packed)])
    after = run_passes(program, [partial(form_segments, compiles=segment_compiler.compiles)])
    (node,) = segments(after)
    assert {arg.name for arg in node.args} == {"arg0_1", "packed"}
    assert not after.graph.find_nodes(op="call_function", target=element)
    assert same_bits(after, program, tensors)


def test_a_function_never_has_the_name_of_a_node():
    """``element = element(packed, 0)`` would read what it is about to define."""
    program = placed(lambda x, rate: x * rate.item(), [torch.rand(3), torch.tensor(0.5, dtype=torch.float64)])
    program = run_passes(program, [partial(pack_scalars, reads=segment_compiler.reads_packed)])
    (read,) = program.graph.find_nodes(op="call_function", target=element)
    assert read.name == "element"
    tensors = [torch.rand(3), torch.tensor(0.5, dtype=torch.float64)]
    assert builders.same(builders.execute(program, tensors)[0], [tensors[0] * 0.5])
