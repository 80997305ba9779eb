"""Which updates may run beside the backward: graphs alone, no GPU is asked for."""

from __future__ import annotations

from collections.abc import Callable
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
from wholestep.cost.model import CostModel
from wholestep.lower import inductor
from wholestep.lower.streams import begin_beside, end_beside, join_beside, run_updates_beside, updates_beside
from wholestep.passes.alias import span_of
from wholestep.passes.default import default_passes
from wholestep.passes.pipeline import run_passes
from wholestep.passes.scalars import pack_scalars
from wholestep.passes.segments import form_segments, is_view
from wholestep.place.strategies import place
from wholestep.program import edit, meta, ops, show
from wholestep.program.meta import Origin, Region
from wholestep.program.program import MeshAxis, Program
from wholestep.program.segment import Segment

LOWERING = [
    partial(pack_scalars, reads=inductor.reads_packed),
    partial(form_segments, compiles=inductor.compiles),
]


def scheduled(make: Callable[[Any], torch.optim.Optimizer], *, lowering: list[Any] = LOWERING) -> Program:
    """A step of three layers for two ranks, a bucket per layer, whose updates need not wait for the last of them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    opt = make(model.parameters())

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    batch = torch.randn(64, 32)
    step(batch)
    axis = MeshAxis(name="data", size=2, group=builders.world_group())
    program = place(captured(step, batch).program, DDP(), axis)
    cost = CostModel.default("h200+nvlink")
    return run_passes(program, default_passes(cost=cost, bucket_bytes=4096, lowering=lowering))


OPTIMIZERS = {
    "adam": lambda params: torch.optim.Adam(params, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
}


def storages(nodes: Any) -> set[int]:
    return {span_of(one).storage for node in nodes for one in meta.tensors(node)}


def written(node: fx.Node) -> set[int]:
    return storages(edit.nodes_of([node.args[at] for at in ops.written_by(node.target, node.kwargs)]))


def assert_apart(graph: fx.Graph, beside: set[fx.Node]) -> None:
    """No call that stands behind one of `beside` touches what that writes, or writes to what that reads."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    for at, node in enumerate(calls):
        if node not in beside:
            continue
        for later in (one for one in calls[at + 1 :] if one not in beside):
            assert storages(later.all_input_nodes).isdisjoint(written(node))
            assert written(later).isdisjoint(storages(node.all_input_nodes))
            assert node not in later.all_input_nodes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_of_a_step_run_beside_and_nothing_meets_them(name):
    program = scheduled(OPTIMIZERS[name])
    beside = updates_beside(program.graph)
    assert_apart(program.graph, beside)
    updates = [node for node in beside if not is_view(node) and node.target is not ops.WAIT]
    assert updates
    assert all(meta.origin(node).region is Region.OPTIMIZER and written(node) for node in updates)
    if name != "fused":  # a fused call on the CPU is no segment
        assert all(isinstance(node.target, Segment) for node in updates)


def test_waits_that_only_updates_read_are_waited_for_beside():
    program = scheduled(OPTIMIZERS["adamw"])
    beside = updates_beside(program.graph)
    waits = [node for node in beside if node.target is ops.WAIT]
    assert waits
    for wait in waits:
        assert all(user in beside for user in wait.users)


def test_the_text_begins_and_ends_around_them_and_meets_at_the_end():
    program = scheduled(OPTIMIZERS["adamw"])
    beside = {node.name for node in updates_beside(program.graph)}
    before = show.source(program)
    after = run_updates_beside(program)
    assert show.source(program) == before  # a copy was edited
    on_main, inside = [], False
    for node in after.graph.nodes:
        if node.target is begin_beside:
            assert not inside
            inside = True
        elif node.target is end_beside:
            assert inside
            inside = False
        elif node.op == "call_function":
            assert (node.name in beside) == inside
            on_main += [] if inside else [node]
    assert not inside
    (join,) = after.graph.find_nodes(op="call_function", target=join_beside)
    assert on_main[-1] is join
    # What they read stays alive until both streams meet: else later kernels of the main stream get its memory.
    read = {arg for node in after.graph.nodes if node.name in beside for arg in node.all_input_nodes}
    assert set(join.args[0]) == {arg for arg in read if arg.op == "call_function"}
    assert [node.name for node in after.graph.nodes if node.target not in (begin_beside, end_beside, join_beside)] == [
        node.name for node in program.graph.nodes
    ]


def test_a_program_without_updates_stays_as_it_is():
    program = builders.capture(lambda x: (x * 2).exp(), [torch.rand(3)])
    assert show.diff(run_updates_beside(program), program) == ""


class Hand:
    """A graph made by hand: an input `w`, a gradient `g`, an update of `w` by `g`, and what a test puts behind."""

    def __init__(self) -> None:
        def fn(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            g = x.exp()
            return w + g, (x * 2).tanh()  # `add` becomes the update; `tanh` is computed behind it

        self.program = builders.capture(fn, [torch.rand(3), torch.rand(3)])
        self.graph = self.program.graph
        self.w, self.x = self.program.placeholders
        (self.g,) = self.graph.find_nodes(op="call_function", target=aten.exp.default)
        (add,) = self.graph.find_nodes(op="call_function", target=aten.add.Tensor)
        with self.graph.inserting_before(add):
            self.update = edit.emit(self.graph, aten.add_.Tensor, self.w, self.g)
        meta.set_origin(self.update, Origin(Region.OPTIMIZER))
        (self.tanh,) = self.graph.find_nodes(op="call_function", target=aten.tanh.default)
        edit.set_results(self.graph, (self.tanh,))
        self.graph.erase_node(add)

    def behind(self, target: Any, *args: Any, before: fx.Node | None = None) -> fx.Node:
        with self.graph.inserting_before(before or self.graph.output_node()):
            return edit.emit(self.graph, target, *args)

    @property
    def chosen(self) -> bool:
        found = updates_beside(self.graph)
        assert_apart(self.graph, found)
        return self.update in found


def test_an_update_that_nothing_meets_is_taken():
    assert Hand().chosen


def test_an_update_whose_memory_is_read_later_is_not():
    hand = Hand()
    hand.behind(aten.sin.default, hand.w)
    assert not hand.chosen


def test_nor_one_that_a_view_of_its_memory_is_read_of():
    hand = Hand()
    view = hand.behind(aten.view.default, hand.w, [3, 1], before=hand.g)
    hand.behind(aten.sin.default, view)
    assert not hand.chosen


def test_nor_one_whose_gradient_is_overwritten_later():
    """On two streams the update might read what is written behind it."""
    hand = Hand()
    hand.behind(aten.mul_.Tensor, hand.g, 0.0)
    assert not hand.chosen


def test_one_whose_gradient_is_read_later_is_taken():
    hand = Hand()
    hand.behind(aten.sin.default, hand.g)
    assert hand.chosen


def test_an_update_that_is_read_is_not():
    hand = Hand()
    hand.behind(aten.sin.default, hand.update)
    assert not hand.chosen


def test_what_is_no_update_of_an_optimizer_is_not():
    hand = Hand()
    meta.set_origin(hand.update, Origin(Region.FORWARD))
    assert not hand.chosen


def test_an_update_behind_the_last_computation_is_not():
    """There is nothing left that it could run beside; a wait is no computation."""
    hand = Hand()
    hand.tanh.append(hand.update)
    assert not hand.chosen
    start = hand.behind(c10d.all_reduce.default, hand.x, "sum", builders.world_group(), before=hand.g)
    hand.behind(ops.WAIT, start)
    assert not hand.chosen
    hand.behind(aten.sin.default, hand.x)
    assert hand.chosen
