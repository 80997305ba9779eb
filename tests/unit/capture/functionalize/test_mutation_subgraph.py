"""What is traced again to be made functional is what writes concern, and the whole is as if all of it had been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.harness.training import backward_and_step
from tests.unit.capture.steps import calls, program_of
from wholestep.capture.functionalize import mutation_subgraph
from wholestep.capture.functionalize.functionalize import Functional, functionalize
from wholestep.ir import graph_edit, node_meta, op_info


def nothing_is_written(x: Tensor, y: Tensor) -> Any:
    return (x @ y).relu() + 1


def an_input_at_the_end(x: Tensor, y: Tensor) -> Any:
    z = x @ y
    x.copy_(z.t() + x)
    return z.sum()


def an_input_and_later_readers(x: Tensor, y: Tensor) -> Any:
    before = x * 2
    x.add_(y)
    return before + x, x @ y


def a_view_made_before_and_read_after(x: Tensor, y: Tensor) -> Any:
    row = x[0]
    twice = row * 2
    x.mul_(y)
    return row + 1, twice


def a_view_is_written_to(x: Tensor, y: Tensor) -> Any:
    z = x @ y
    first = z[0]
    first.add_(1)
    return z.exp(), first


def a_value_between(x: Tensor, y: Tensor) -> Any:
    z = x @ y
    early = z.sin()
    z.relu_()
    return early, z, z.view(-1)


def a_chain_of_writes(x: Tensor, y: Tensor) -> Any:
    z = (x @ y).exp_().mul_(2)
    w = z.view(-1)
    w.sub_(1)
    x.copy_(z)
    return w.sum(), y.neg()


def items_of_a_list(x: Tensor, y: Tensor) -> Any:
    a, b = (x @ y).unbind(0)
    c = a * 3
    a.add_(b)
    return c, a + b, x.unbind(1)


def lists_in_place(x: Tensor, y: Tensor) -> Any:
    z = x @ y
    torch._foreach_add_([x, z], 1)
    return z.cos(), y.cos()


def the_result_of_a_write_is_read(x: Tensor, y: Tensor) -> Any:
    made = x.add_(y)
    return made * 2, y.view(-1) * 2


def an_out_argument(x: Tensor, y: Tensor) -> Any:
    z = torch.empty_like(x)
    torch.mm(x, y, out=z)
    return z + 1


def another_shape_in_place(x: Tensor, y: Tensor) -> Any:
    z = torch.cat([x, y])
    z.t_()
    return z.contiguous(), y.sin()


def written_to_and_returned(x: Tensor, y: Tensor) -> Any:
    z = x @ y
    w = z.t()
    z.add_(1)
    return z, w, x


def several_results(x: Tensor, y: Tensor) -> Any:
    values, _ = (x @ y).max(dim=0)
    normed, mean, _ = torch.native_layer_norm(x, [2], None, None, 1e-5)
    mean.add_(1)
    return values, normed, mean


def a_view_of_what_the_part_makes(x: Tensor, y: Tensor) -> Any:
    x.add_(y)
    z = x * 2
    return z.view(-1)[1:].exp(), z


def results_that_nobody_reads(x: Tensor, y: Tensor) -> Any:
    highest, _ = (x @ y).max(dim=0)
    _, lowest = (x @ y).min(dim=0)
    return highest, lowest


STEPS: list[Callable[..., Any]] = [
    nothing_is_written, an_input_at_the_end, an_input_and_later_readers, a_view_made_before_and_read_after,
    a_view_is_written_to, a_value_between, a_chain_of_writes, items_of_a_list, lists_in_place,
    the_result_of_a_write_is_read, an_out_argument, another_shape_in_place, written_to_and_returned, several_results,
    a_view_of_what_the_part_makes, results_that_nobody_reads,
]  # fmt: skip


@pytest.fixture
def never_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else most of these steps need no second trace."""
    monkeypatch.setattr("wholestep.capture.functionalize.functionalize.to_out_of_place", lambda whole, inputs: None)


def traced(step: Callable[..., Any]) -> tuple[fx.GraphModule, list[Tensor], FakeTensorMode]:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    inputs = [mode.from_tensor(torch.ones(2, 2), static_shapes=True) for _ in range(2)]

    def flat(*args: Tensor) -> list[Any]:
        out = step(*args)
        return [leaf for one in (out if isinstance(out, tuple) else (out,)) for leaf in _leaves(one)]

    with mode, torch.no_grad():
        return make_fx(flat)(*inputs), inputs, mode


def _leaves(one: Any) -> list[Any]:
    return list(one) if isinstance(one, (list, tuple)) else [one]


def made_functional(step: Callable[..., Any]) -> Functional:
    module, inputs, mode = traced(step)
    made = functionalize(module, inputs, mode, [None] * len(inputs), {})
    graph_edit.set_results(made.module.graph, [*made.results, *made.writes.values()])
    graph_edit.remove_dead_code(made.module.graph)
    made.module.recompile()
    return made


def described(made: Functional) -> list[str]:
    """Calls, layouts, and who shares memory with whom; names of nodes included."""
    storages: dict[int, int] = {}
    lines = [f"writes {dict(made.writes)}, results {made.results}"]
    for node in made.module.graph.nodes:
        tensors = [] if node.op == "output" else list(node_meta.tensors(node))
        places = [storages.setdefault(one.untyped_storage()._cdata, len(storages)) for one in tensors]
        layouts = [(one.shape, one.stride(), one.dtype, one.requires_grad) for one in tensors]
        lines.append(f"{node.name} {node.target} {node.args} {node.kwargs} {layouts} {places}")
    return lines


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_the_graph_is_the_one_that_a_trace_of_everything_gives(
    step: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, never_directly: None
) -> None:
    ours = made_functional(step)

    class Everything(mutation_subgraph._TouchedCalls):
        def __init__(self, graph: fx.Graph) -> None:
            super().__init__(graph)
            self.calls = {node for node in graph.nodes if node.op not in ("placeholder", "output")}

    monkeypatch.setattr(mutation_subgraph, "_TouchedCalls", Everything)
    assert described(ours) == described(made_functional(step))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_it_computes_what_the_step_does(step: Callable[..., Any], never_directly: None) -> None:
    assert_it_computes_what_the_step_does(step)


def assert_it_computes_what_the_step_does(step: Callable[..., Any]) -> None:
    made = made_functional(step)
    assert not [node for node in made.module.graph.nodes if op_info.mutated_args(node.target)]
    eager, ours = ([torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[7.0, 1.0], [2.0, 3.0]])] for _ in range(2))
    out = step(*eager)
    wanted = [leaf for one in (out if isinstance(out, tuple) else (out,)) for leaf in _leaves(one)]
    found = made.module(*ours)
    for place, value in zip(made.writes, found[len(made.results) :], strict=True):
        ours[place] = value
    for one, other in zip((*wanted, *eager), (*found[: len(made.results)], *ours), strict=True):
        assert torch.equal(one, other)


def test_forward_and_backward_are_not_traced_again(monkeypatch: pytest.MonkeyPatch, never_directly: None) -> None:
    """Of an ordinary training, what updates parameters alone is."""
    seen: list[list[Any]] = []
    original = mutation_subgraph.mutation_subgraph

    def watched(whole: fx.GraphModule) -> mutation_subgraph.MutationSubgraph:
        made = original(whole)
        seen.append([node.target for node in made.stands_for])
        return made

    monkeypatch.setattr("wholestep.capture.functionalize.functionalize.mutation_subgraph", watched)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def train(x: Tensor) -> Tensor:
        return backward_and_step(model(x).relu().square().mean(), opt).detach()

    program = program_of(train, torch.ones(3, 4))
    forward = {torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.aten.native_layer_norm.default}
    assert forward <= {node.target for node in calls(program)}
    assert forward.isdisjoint(seen[0])
    assert torch.ops.aten.copy_.default in seen[0]
