"""The text of a program runs, says what there is to say, and spells every kind of argument."""

from __future__ import annotations

import ast
import math
import operator
from dataclasses import replace

import pytest
import torch
import torch.fx as fx

from tests.unit import builders
from tests.unit.builders import aten, c10d
from wholestep.errors import InternalError
from wholestep.ir import graph_edit, node_meta, op_info, printer
from wholestep.ir.program import InputKind, Program


def linear(w, x):
    return (x @ w).relu()


TENSORS = [torch.randn(4, 3), torch.randn(2, 4)]


def run(program: Program, tensors: list[torch.Tensor], *, comments: bool) -> tuple:
    namespace = printer.namespace(program)
    exec(printer.source(program, comments=comments), namespace)
    return namespace["step"](tensors)


@pytest.mark.parametrize("comments", [True, False])
def test_the_text_runs(comments):
    program = builders.capture(linear, TENSORS)
    assert builders.same(run(program, TENSORS, comments=comments), (linear(*TENSORS),))


def test_what_the_text_says():
    program = builders.capture(
        linear, TENSORS, names=["net.0.weight", "args.0"], kinds=[InputKind.PARAM, InputKind.USER]
    )
    (mm,) = program.graph.find_nodes(op="call_function", target=aten.mm.default)
    node_meta.set_origin(mm, node_meta.Origin(node_meta.Region.FORWARD, "net.0", "train.py:12"))
    assert printer.source(program).splitlines() == [
        "def step(inputs):",
        "    (",
        "        arg0_1,  # param net.0.weight float32[4, 3]",
        "        arg1_1,  # user args.0 float32[2, 4]",
        "    ) = inputs",
        "    mm = torch.ops.aten.mm.default(arg1_1, arg0_1)  # float32[2, 3] 24 B, forward, net.0, train.py:12",
        "    del arg1_1, arg0_1",
        "    relu = torch.ops.aten.relu.default(mm)  # float32[2, 3] 24 B, other",
        "    del mm",
        "    return (",
        "        relu,  # user out0",
        "    )",
    ]


def test_names_are_deleted_after_their_last_reader_and_results_are_not():
    text = printer.source(builders.capture(lambda x: (x + 1, (x + 2) * 2), [torch.ones(2)]), comments=False)
    function = ast.parse(text).body[0]
    deleted = [target.id for node in ast.walk(function) if isinstance(node, ast.Delete) for target in node.targets]
    assert deleted == ["arg0_1", "add_1"]


def test_a_temporary_is_freed_while_the_step_runs():
    def chain(x):
        for _ in range(10):
            x = x.cumsum(0)
        return x.sum()

    x = torch.zeros(1000)
    program = builders.capture(chain, [x])
    namespace = printer.namespace(program)
    exec(printer.source(program, comments=False), namespace)
    with builders.live_bytes() as live:
        live.know([x])
        namespace["step"]([x])
    assert live.peak <= 2 * 4000 + 8


def test_many_inputs_stand_in_rows():
    tensors = [torch.tensor(float(i)) for i in range(20)]
    program = builders.capture(lambda *xs: sum(xs), tensors)
    assert max(map(len, printer.source(program, comments=False).splitlines())) < 120
    assert run(program, tensors, comments=False)[0] == 190


def arguments(*args: object, **kwargs: object) -> str:
    """How a call with these arguments is spelled."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    node_meta.set_value(x, torch.ones(2))
    graph.call_function(aten.add.Tensor, (x,))
    graph.output(())
    template = builders.capture(lambda x: x, [torch.ones(2)])
    program = replace(template, module=fx.GraphModule(torch.nn.Module(), graph), outputs=())
    (call,) = program.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    call.args, call.kwargs = (*call.args, *args), kwargs
    return printer.source(program, comments=False).splitlines()[4].strip()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        (-2.5, "-2.5"),
        (True, "True"),
        (None, "None"),
        ("a'b", '"a\'b"'),
        (math.inf, "math.inf"),
        (-math.inf, "-math.inf"),
        (math.nan, "math.nan"),
        (1e-8, "1e-08"),
        (complex(1, -math.inf), "complex(1.0, -math.inf)"),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.device("cuda", 1), "torch.device('cuda:1')"),
        (torch.device("cpu"), "torch.device('cpu')"),
        (torch.strided, "torch.strided"),
        (torch.channels_last, "torch.channels_last"),
        (slice(None, 3, None), "slice(None, 3, None)"),
        ([1, [2.0, None]], "[1, [2.0, None]]"),
        ((1,), "(1,)"),
        ((), "()"),
        ({"a": [1]}, "{'a': [1]}"),
    ],
)
def test_arguments(value, text):
    if isinstance(value, (slice, dict, complex)):
        assert arguments(value) == f"torch.ops.aten.add.Tensor(x, {text})"
    assert arguments(alpha=value) == f"torch.ops.aten.add.Tensor(x, alpha={text})"
    assert repr(eval(text, {"torch": torch, "math": math})) == repr(value)


def test_a_thing_without_a_spelling_gets_a_name():
    generator = torch.Generator()
    text = arguments(alpha=generator)
    assert text.startswith("torch.ops.aten.add.Tensor(x, alpha=_Generator_")


def test_symbolic_numbers_are_nodes():
    def fn(x, lr):
        rate = lr.item()
        n = x.max().item()
        return x * (1 - 0.9**n) / -rate, torch.sym_max(n, 3.0) + 1

    tensors = [torch.tensor([1.0, 2.0]), torch.tensor(0.5, dtype=torch.float64)]
    program = builders.capture(fn, tensors)
    text = printer.source(program, comments=False)
    assert "0.9 ** " in text
    assert "torch.sym_max(" in text
    assert builders.same(run(program, tensors, comments=False), (tensors[0] * (1 - 0.9**2) / -0.5, 4.0))


def test_a_minus_in_front_of_a_power_has_parentheses():
    graph = fx.Graph()
    x = graph.placeholder("x")
    node_meta.set_value(x, torch.ones(()))
    number = graph.call_function(aten._local_scalar_dense.default, (x,))
    power = graph.call_function(operator.pow, (-2.0, number))
    graph.output((graph.call_function(operator.neg, (power,)),))
    template = builders.capture(lambda x: x, [torch.ones(())])
    program = replace(template, module=fx.GraphModule(torch.nn.Module(), graph))
    assert run(program, [torch.tensor(2.0)], comments=False) == (-4.0,)


def test_a_symbolic_number_that_is_no_node_is_an_internal_error():
    program = builders.capture(lambda x: x * x.sum().item(), [torch.ones(2)])
    (scalar,) = program.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    (mul,) = scalar.users
    mul.args = (mul.args[0], node_meta.value(scalar))
    with pytest.raises(InternalError, match="not as a node"):
        printer.source(program)


def test_constants_are_names_of_the_namespace():
    constant = torch.tensor([1.0, 2.0])
    program = builders.capture(lambda x: x + constant, [torch.ones(2)])
    assert any(value is constant for value in printer.namespace(program).values())
    assert builders.same(run(program, [torch.ones(2)], comments=False), (torch.tensor([2.0, 3.0]),))


def test_names_that_the_text_needs_are_not_taken_by_nodes():
    program = builders.capture(lambda x: (x + 1) * 2, [torch.ones(2)])
    for node, name in zip(list(program.graph.nodes), ["torch", "inputs", "step"], strict=False):
        node.name = name
    assert builders.same(run(program, [torch.ones(2)], comments=True), (torch.full((2,), 4.0),))


def test_short_names_of_different_operators_differ():
    program = builders.capture(lambda x: (x + 1).clamp(0).clamp(torch.ones(2)), [torch.ones(2)])
    rendered = printer.render(program, short_names=True)
    assert "aten_clamp_default(" in rendered.text
    assert "aten_clamp_Tensor(" in rendered.text
    assert "torch.ops" not in rendered.text


def test_lines_know_their_nodes():
    program = builders.capture(linear, TENSORS)
    rendered = printer.render(program)
    lines = rendered.text.splitlines()
    assert {node.name: lines[line - 1].split()[0] for line, node in rendered.nodes.items()} == {
        "mm": "mm",
        "relu": "relu",
    }


def test_diff():
    program = builders.capture(linear, TENSORS)
    assert printer.diff(program, graph_edit.copy(program)) == ""
    other = graph_edit.copy(program)
    (relu,) = other.graph.find_nodes(op="call_function", target=aten.relu.default)
    relu.target = aten.sigmoid.default
    changed = [
        line for line in printer.diff(program, other).splitlines() if line[0] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert len(changed) == 2
    assert "relu" in changed[0]
    assert "sigmoid" in changed[1]


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**40, "5120.0 GiB")])
def test_bytes(size, text):
    assert printer.bytes_text(size) == text


def gathers(x, y):
    group = builders.world_group()
    a = op_info.WAIT(c10d.all_gather_into_tensor.default(x, 1, group))
    b = c10d.broadcast.default(y, 0, group)
    return a, op_info.WAIT(b), op_info.WAIT(c10d.reduce_scatter_tensor.default(x, "avg", 1, group))


def test_the_plan():
    tensors = [torch.randn(4, 2), torch.randn(3).double()]
    program = builders.place(builders.capture(gathers, tensors))
    assert printer.plan_text(program).splitlines() == [
        f"torch {torch.__version__}",
        "mesh data=2",
        "#0 all_gather_into_tensor float32[8] 1 axis=data size=2",
        "#1 broadcast float64[3] 0 axis=data size=2",
        "#2 reduce_scatter_tensor float32[8] avg 1 axis=data size=2",
    ]


def test_the_plan_names_the_gradients_and_no_process_group():
    program = builders.capture(lambda g: builders.gradient(g * 2, "net.weight"), [torch.randn(3)])
    texts = []
    for group in ("0", "mesh_7"):
        placed = builders.place(program, group=group)
        texts.append(printer.plan_text(placed))
    assert texts[0] == texts[1]
    assert "#0 all_reduce float32[3] sum axis=data size=2 members: net.weight" in texts[0]


def test_the_plan_of_one_process_is_its_header():
    program = builders.capture(linear, TENSORS)
    assert printer.plan_text(program) == f"torch {torch.__version__}\nmesh none\n"
