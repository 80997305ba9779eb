"""fuse_activations: which activations and gradients become products, the same bits, and what it does not touch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch.nn import functional as F

from tests.unit import builders
from tests.unit.builders import aten
from tests.unit.capture.steps import captured
from wholestep.cli.suite.workloads import autocast_step
from wholestep.cli.workloads.reference_lm import LanguageModelSize, build
from wholestep.config import DDP
from wholestep.cost.cost_model import CostModel
from wholestep.ir import node_meta, op_info, printer
from wholestep.ir.program import MeshAxis, Program
from wholestep.ir.segment import Segment
from wholestep.lower.inductor import segment_compiler
from wholestep.lower.inductor_passes import form_inductor_segments
from wholestep.passes.comm.fold_mean import fold_mean
from wholestep.passes.default_passes import passes_of
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import Pass, run_passes
from wholestep.passes.rewrites.dead_code import eliminate_dead_code
from wholestep.passes.rewrites.fuse_cross_entropy import fuse_cross_entropy
from wholestep.passes.rewrites.fuse_gelu import PRODUCT_GELU, PRODUCT_GELU_BACKWARD, fuse_gelu
from wholestep.passes.rewrites.matmul_out_dtype import widen_matmul_out_dtype
from wholestep.passes.schedule.form_segments import form_segments
from wholestep.place.strategies import place

FUSE: Pass = partial(fuse_gelu, fuses=lambda product: True)
FORM: Pass = partial(form_segments, compiles=segment_compiler.compiles, may_postpone=segment_compiler.may_follow)
LAYERS = 3
GELUS = (aten.gelu.default, aten.gelu_backward.default)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    """Both operators in the words of ATen, so with the bits of eager code."""
    library = torch.library.Library("wholestep", "IMPL")
    library.impl("product_gelu", product_gelu, "CPU")
    library.impl("product_gelu_backward", product_gelu_backward, "CPU")
    yield
    library._destroy()


def product_gelu(bias: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    pre = torch.addmm(bias, a, b)
    return F.gelu(pre, approximate="tanh"), pre


def product_gelu_backward(a: Tensor, b: Tensor, pre: Tensor) -> Tensor:
    return aten.gelu_backward(torch.mm(a, b), pre, approximate="tanh")


def both(fn: Callable[..., Any], given: list[Tensor]) -> tuple[Program, Program]:
    """The program of `fn`, and what the pass makes of it."""
    before = run_passes(builders.without_gradients(builders.capture(fn, given)), [eliminate_dead_code])
    return before, run_passes(before, [FUSE])


def counts(program: Program) -> tuple[int, int]:
    """How many activations and how many gradients products compute."""
    return builders.count(program, PRODUCT_GELU), builders.count(program, PRODUCT_GELU_BACKWARD)


def same_bits(before: Program, after: Program, given: list[Any]) -> bool:
    return builders.same(builders.execute(before, given), builders.execute(after, given))


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def layers(
    x: Tensor, up: Tensor, bias: Tensor, down: Tensor, *, approximate: str = "tanh", shift: bool = True
) -> tuple[Tensor, ...]:
    """Two linear layers, an activation, and the gradients of all."""
    leaves = [one.detach().requires_grad_() for one in (x, up, bias, down)]
    x, up, bias, down = leaves
    hidden = F.gelu(F.linear(x, up, bias if shift else None), approximate=approximate)
    out = F.linear(hidden, down)
    return out.detach(), *torch.autograd.grad(out.square().sum(), leaves if shift else [x, up, down])


ROWS = {"in two dimensions": (6, 8), "in three": (2, 3, 8), "in four": (2, 1, 3, 8)}
REST = ((12, 8), (12,), (5, 12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_both_directions_with_the_same_bits(rows, dtype):
    given = drawn(ROWS[rows], *REST, dtype=dtype)
    before, after = both(layers, given)
    assert builders.count(before, *GELUS) == 2
    assert builders.count(after, *GELUS, aten.addmm.default) == 0
    assert counts(after) == (1, 1)
    assert builders.count(after, aten.mm.default) == builders.count(before, aten.mm.default) - 1
    assert after.history[-1].notes == (
        "1 activations and 1 of their gradients are computed by the products before them",
    )
    assert same_bits(before, after, given)


def test_readers_see_the_same_layouts_in_memory_that_is_theirs():
    given = drawn(ROWS["in three"], *REST)
    before, after = both(layers, given)
    for one, other in zip(before.results, after.results, strict=True):
        assert (node_meta.tensor(one).shape, node_meta.tensor(one).stride()) == (
            node_meta.tensor(other).shape, node_meta.tensor(other).stride()
        )  # fmt: skip
    views = [node for node in after.graph.nodes if op_info.is_view(node)]
    assert len(views) > 4
    for view in views:
        storages = {node_meta.tensor(one).untyped_storage()._cdata for one in (view, *view.all_input_nodes)}
        assert len(storages) == 1
    products = after.graph.find_nodes(op="call_function", target=PRODUCT_GELU_BACKWARD)
    found = [value for node in products for value in node_meta.tensors(node)]
    assert [(tuple(value.shape), value.is_contiguous()) for value in found] == [((6, 12), True)]


def test_matrices_are_read_without_views():
    _, after = both(layers, drawn(ROWS["in two dimensions"], *REST))
    assert builders.count(after, aten.view.default) == 1  # of the gradient of the bias


def test_where_nodes_come_from():
    size = LanguageModelSize(num_layers=1, width=16, num_heads=2, vocabulary=32, length=8, rows=2)
    before, _, _ = language_model(size)
    after = run_passes(before, [FUSE])

    def origin(program: Program, target: Any) -> node_meta.Origin:
        (node,) = program.graph.find_nodes(op="call_function", target=target)
        return node_meta.origin(node)

    (call,) = after.graph.find_nodes(op="call_function", target=PRODUCT_GELU)
    hidden, pre = call.users
    assert {node_meta.origin(one).module for one in (call, pre)} == {"blocks.0.up"}
    assert node_meta.origin(hidden) == origin(before, aten.gelu.default)
    assert origin(after, PRODUCT_GELU_BACKWARD) == origin(before, aten.gelu_backward.default)
    assert node_meta.origin(call).region is node_meta.Region.FORWARD
    assert origin(after, PRODUCT_GELU_BACKWARD).region is node_meta.Region.BACKWARD


def language_model(size: LanguageModelSize) -> tuple[Program, list[Any], Program]:
    """The step of a language model under autocast: for one process, its inputs, and as it was captured."""
    torch.manual_seed(0)
    model = build(size, torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    batch = [torch.randint(size.vocabulary, (size.rows, size.length)) for _ in range(2)]
    found = captured(partial(autocast_step, model, optimizer), *batch)
    before = run_passes(builders.without_gradients(found.program), [eliminate_dead_code])
    return before, [*found.binding.fill(batch)], found.program


@pytest.fixture(scope="module")
def trained() -> tuple[Program, list[Any], Program]:
    return language_model(LanguageModelSize(num_layers=LAYERS, width=32, num_heads=2, vocabulary=64, length=8, rows=2))


def test_a_language_model_has_no_activations_left_and_the_same_bits(trained):
    before, inputs, _ = trained
    assert builders.count(before, *GELUS) == 2 * LAYERS
    after = run_passes(before, [FUSE])
    assert builders.count(after, *GELUS) == 0
    assert counts(after) == (LAYERS, LAYERS)
    assert same_bits(before, after, inputs)
    assert same_bits(before, run_passes(after, [FORM, reinplace]), inputs)


def planned(program: Program, *lowering: Pass) -> Program:
    """The plan for two ranks, with segments as a GPU has them."""
    placed = place(program, DDP(), (MeshAxis(name="data", size=2, group="0"),))
    passes = [
        *lowering,
        partial(fold_mean, averages=lambda group, device: True),
        partial(widen_matmul_out_dtype, widens=lambda node: True),
        partial(form_inductor_segments("cuda"), compiles=segment_compiler.compiles),
    ]
    return run_passes(placed, passes_of(cost=CostModel.default("h200+nvlink"), lowering=passes))


def test_layers_stay_alike_and_other_passes_find_what_they_found(trained):
    _, _, program = trained
    before, after = planned(program, fuse_cross_entropy), planned(program, fuse_cross_entropy, FUSE)
    assert counts(after) == (LAYERS, LAYERS)
    told = []
    for plan in (before, after):
        likenesses = [node.target.likeness for node in plan.graph.nodes if isinstance(node.target, Segment)]
        notes = {record.name: record.notes for record in plan.history}
        told.append((
            len(likenesses), len(set(likenesses)),
            *(notes[name] for name in ("fuse_cross_entropy", "fold_mean", "widen_matmul_out_dtype")),
            builders.count(plan, aten.mm.dtype_out),
        ))  # fmt: skip
    assert told[0] == told[1]
    assert told[0][-1] == 4 * LAYERS + 1  # every weight's gradient but those of tables
    assert told[0][0] > told[0][1]


def test_one_direction_without_the_other():
    given = drawn(ROWS["in three"], *REST)
    for wanted, target in (((1, 0), aten.addmm.default), ((0, 1), aten.mm.default)):
        asked: list[Any] = []

        def fuses(product: fx.Node, target: Any = target, asked: list[Any] = asked) -> bool:
            asked.append(product.target)
            return product.target is target

        before, _ = both(layers, given)
        after = run_passes(before, [partial(fuse_gelu, fuses=fuses)])
        assert asked == [aten.addmm.default, aten.mm.default]
        assert counts(after) == wanted
        assert same_bits(before, after, given)


def test_without_a_bias_only_the_gradient_is_computed_by_a_product():
    given = drawn(ROWS["in three"], *REST)
    before, after = both(partial(layers, shift=False), given)
    assert counts(after) == (0, 1)
    assert same_bits(before, after, given)


def test_without_a_product_behind_it_only_the_activation_is_computed_by_one():
    def fn(x: Tensor, up: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        out = F.gelu(F.linear(x, up, bias), approximate="tanh").square().sum()
        return out.detach(), *torch.autograd.grad(out, x)

    given = drawn(ROWS["in three"], (12, 8), (12,))
    before, after = both(fn, given)
    assert counts(after) == (1, 0)
    assert same_bits(before, after, given)


def gelu(pre: Tensor) -> Tensor:
    return aten.gelu(pre, approximate="tanh")


def gelu_backward(grad: Tensor, pre: Tensor) -> Tensor:
    return aten.gelu_backward(grad, pre, approximate="tanh")


FORWARD: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "another form": lambda bias, a, b: aten.gelu(torch.addmm(bias, a, b)),
    "no bias": lambda bias, a, b: gelu(a @ b),
    "no product": lambda bias, a, b: gelu(torch.addcmul(bias, a[:, :1], b[:1])),
    "a share of the bias": lambda bias, a, b: gelu(torch.addmm(bias, a, b, beta=0.5)),
    "a share of the product": lambda bias, a, b: gelu(torch.addmm(bias, a, b, alpha=2)),
    "a bias per row": lambda bias, a, b: gelu(torch.addmm(a[:, :1], a, b)),
    "a bias of two dimensions": lambda bias, a, b: gelu(torch.addmm(bias[None], a, b)),
    "one number as the bias": lambda bias, a, b: gelu(torch.addmm(bias[:1], a, b)),
    "turned around": lambda bias, a, b: gelu(torch.addmm(bias, a, b).t()),
    "a part": lambda bias, a, b: gelu(torch.addmm(bias, a, b)[:, :3]),
    "returned": lambda bias, a, b: (gelu(pre := torch.addmm(bias, a, b)), pre),
    "read by another one": lambda bias, a, b: (gelu(pre := torch.addmm(bias, a, b)), pre * 2),
    "a view is read by another one": lambda bias, a, b: (gelu(pre := torch.addmm(bias, a, b)), pre.view(3, 14) * 2),
    "activated twice": lambda bias, a, b: (gelu(pre := torch.addmm(bias, a, b)), gelu(pre.view(3, 14))),
    "two forms": lambda bias, a, b: (gelu(pre := torch.addmm(bias, a, b)), aten.gelu(pre.view(3, 14))),
    "a gradient itself": lambda bias, a, b: (gelu(pre := torch.addmm(bias, a, b)), gelu_backward(pre, pre + 0)),
    "a gradient by itself": lambda bias, a, b: (gelu(pre := torch.addmm(bias, a, b)), gelu_backward(pre, pre)),
}
BACKWARD: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Any]] = {
    "another form": lambda pre, bias, a, b: aten.gelu_backward(a @ b, pre),
    "with a bias": lambda pre, bias, a, b: gelu_backward(torch.addmm(bias, a, b), pre),
    "turned around": lambda pre, bias, a, b: gelu_backward((a @ b).t(), pre.t()),
    "a part": lambda pre, bias, a, b: gelu_backward((a @ b)[:, :3], pre[:, :3]),
    "the product returned": lambda pre, bias, a, b: (gelu_backward(grad := a @ b, pre), grad),
    "a view returned": lambda pre, bias, a, b: (gelu_backward(grad := (a @ b).view(3, 14), pre.view(3, 14)), grad),
    "a view of a view returned": lambda pre, bias, a, b: (
        gelu_backward((grad := (a @ b).view(3, 14)).view(42), pre.view(42)),
        grad,
    ),
    "the product is what was activated": lambda pre, bias, a, b: gelu_backward(pre, a @ b),
    "activated in another order": lambda pre, bias, a, b: gelu_backward(a @ b, (pre.view(7, 6) * 2).t()),
    "activated in three dimensions": lambda pre, bias, a, b: gelu_backward(
        (a @ b).view(3, 2, 7), pre.view(3, 2, 7) * 2
    ),
    "activated in another type": lambda pre, bias, a, b: gelu_backward(a @ b, pre.double()),
    "one activated number per row": lambda pre, bias, a, b: gelu_backward((a @ b).view(6, 7), pre[:, :1]),
    "activated in another shape": lambda pre, bias, a, b: gelu_backward((a @ b).view(1, 42), pre.view(42, 1)),
}


@pytest.mark.parametrize("name", FORWARD)
def test_activations_that_stay(name):
    before, after = both(FORWARD[name], drawn((7,), (6, 4), (4, 7)))
    assert counts(after) == (0, 0)
    assert printer.diff(before, after) == ""


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_that_stay(name):
    before, after = both(BACKWARD[name], drawn((6, 7), (7,), (6, 4), (4, 7)))
    assert counts(after) == (0, 0)
    assert printer.diff(before, after) == ""


def test_what_would_be_taken_of_them():
    """What the two tables vary is taken as it is, where it stands."""
    given = drawn((7,), (6, 4), (4, 7))
    before, after = both(lambda bias, a, b: gelu(torch.addmm(bias, a, b)), given)
    assert counts(after) == (1, 0)
    assert same_bits(before, after, given)
    given = drawn((6, 7), (6, 4), (4, 7))
    before, after = both(lambda pre, a, b: gelu_backward((a @ b).view(3, 14), (pre * 2).view(3, 14)), given)
    assert counts(after) == (0, 1)
    assert same_bits(before, after, given)


def rows_forward(x: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    rows = x.nonzero()[:, 0]
    return gelu(F.linear(x[rows][None], up, bias))


def rows_backward(x: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    rows = x[x.nonzero()[:, 0]]
    return gelu_backward((rows @ up.t()).view(1, -1, 12), (rows[:, :1] + bias).view(1, -1, 12))


@pytest.mark.parametrize("fn", [rows_forward, rows_backward])
def test_sizes_that_are_data_stay(fn):
    before, after = both(fn, drawn((6, 8), (12, 8), (12,)))
    assert builders.count(before, *GELUS) == 1
    assert builders.count(before, aten.addmm.default, aten.mm.default) == 1
    assert printer.diff(before, after) == ""


def test_a_second_time_changes_nothing_and_a_scheduled_program_stays():
    before, once = both(layers, drawn(ROWS["in three"], *REST))
    assert printer.diff(run_passes(once, [FUSE]), once) == ""
    scheduled = run_passes(before, [reinplace])
    assert builders.count(scheduled, aten.gelu.default) == 1
    assert printer.diff(run_passes(scheduled, [FUSE]), scheduled) == ""
