"""pad_matmul: which products get whole sizes, what the numbers become, who reads a part, and what stays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit import builders
from tests.unit.builders import aten
from tests.unit.capture.steps import captured
from wholestep.config import DDP
from wholestep.cost.cost_model import CostModel
from wholestep.ir import node_meta, op_info, printer
from wholestep.ir.program import MeshAxis, Program
from wholestep.lower.inductor import segment_compiler
from wholestep.passes.comm.fold_mean import fold_mean
from wholestep.passes.default_passes import passes_of
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import Pass, run_passes
from wholestep.passes.rewrites.dead_code import eliminate_dead_code
from wholestep.passes.rewrites.fuse_gelu import fuse_gelu
from wholestep.passes.rewrites.matmul_out_dtype import widen_matmul_out_dtype
from wholestep.passes.rewrites.pad_matmul import Rates, pad_matmul
from wholestep.passes.schedule.form_segments import form_segments
from wholestep.place.strategies import place

FOR_NOTHING = Rates(num_bytes=1e30, launch_s=0.0)
"""Of a device to which zeros are no work, so that small products are padded, too."""
ALWAYS: Pass = partial(pad_matmul, pads=lambda product: True, rates=FOR_NOTHING)
DEFAULT: Pass = partial(pad_matmul, pads=lambda product: True)
PRODUCTS = (aten.mm.default, aten.addmm.default)
COST = CostModel.default("cpu+gloo")


def cleaned(fn: Callable[..., Any], given: list[Tensor]) -> Program:
    return run_passes(builders.without_gradients(builders.capture(fn, given)), [eliminate_dead_code])


def padded(fn: Callable[..., Any], given: list[Tensor]) -> tuple[Program, Program]:
    """The program of `fn`, and what the pass makes of it; nodes give what they are said to."""
    before = cleaned(fn, given)
    after = run_passes(before, [ALWAYS])
    builders.Layouts(after.module).run(*given)
    return before, after


def sizes(program: Program) -> list[tuple[int, int, int]]:
    """M, K and N of all products."""
    products = [node for node in program.graph.nodes if node.target in PRODUCTS]
    shapes = [[node_meta.tensor(arg).shape for arg in node.args[-2:]] for node in products]
    return sorted((a[0], a[1], b[1]) for a, b in shapes)


def num_pads(program: Program) -> int:
    return builders.count(program, aten.constant_pad_nd.default)


def whole_numbers(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Of one digit, in half precision: all sums of a step are exact in float32, whatever their order."""
    draw = torch.Generator().manual_seed(len(shapes))
    return [torch.randint(-2, 3, shape, generator=draw).bfloat16() for shape in shapes]


def assert_same(before: Program, after: Program, given: list[Tensor]) -> None:
    wanted, found = (builders.execute(one, given)[0] for one in (before, after))
    assert builders.same(wanted, found)
    assert [one.stride() for one in wanted] == [one.stride() for one in found]


def two_layers(*, bias: bool) -> Callable[..., tuple[Tensor, ...]]:
    """(2, 4, 13) -> 21 -> 13, with all gradients."""

    def step(x: Tensor, up: Tensor, down: Tensor, up_bias: Tensor, down_bias: Tensor) -> tuple[Tensor, ...]:
        leaves = [one.detach().requires_grad_() for one in (x, up, down, *((up_bias, down_bias) if bias else ()))]
        x, up, down, *biases = leaves
        up_bias, down_bias = biases or (None, None)
        out = F.linear(F.linear(x, up, up_bias).relu(), down, down_bias)
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)

    return step


def layers() -> list[Tensor]:
    return whole_numbers((2, 4, 13), (21, 13), (13, 21), (21,), (13,))


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_two_layers_of_odd_sizes_have_the_same_bits(bias, dtype):
    given = [one.to(dtype) for one in layers()]
    before, after = padded(two_layers(bias=bias), given)
    assert sizes(before) == sorted([(8, 13, 21), (8, 21, 13), (13, 8, 21), (8, 13, 21), (21, 8, 13), (8, 21, 13)])
    assert sizes(after) == sorted([(8, 16, 24), (8, 24, 16), (16, 8, 24), (8, 16, 24), (24, 8, 16), (8, 24, 16)])
    assert_same(before, after, given)


def test_zeros_are_put_behind_a_tensor_once():
    """Two weights, what the two layers read, and the gradients of what they give; two biases."""
    _, after = padded(two_layers(bias=True), layers())
    (note,) = after.history[-1].notes
    assert note == "6 products of odd sizes are padded with zeros, and 8 tensors for them"
    assert num_pads(after) == 8
    _, after = padded(two_layers(bias=False), layers())
    assert num_pads(after) == 6


def test_zeros_are_put_behind_a_tensor_as_it_is_written():
    """Else right before the product that wants them: nothing is held for long, and nothing waited for."""
    _, after = padded(language_model(), words())
    (weight, _) = pads = after.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    assert weight.args[0].target is aten._to_copy.default
    assert all(pad.prev is pad.args[0] for pad in pads)
    _, after = padded(lambda x, w: (x.sin() @ w.t()).sin(), whole_numbers((8, 16), (13, 16)))
    (pad,) = after.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    assert [pad.next.target, pad.next.next.target] == [aten.t.default, aten.mm.default]


def test_zeros_are_not_held_from_the_forward_to_the_backward():
    program = cleaned(lambda x, w: (x.sin() @ w.t(), x.cos()), whole_numbers((8, 13), (16, 13)))
    for node in program.graph.nodes:
        region = node_meta.Region.BACKWARD if node.target is aten.mm.default else node_meta.Region.FORWARD
        node_meta.set_origin(node, node_meta.Origin(region))
    after = run_passes(program, [ALWAYS])
    (product,) = after.graph.find_nodes(op="call_function", target=aten.mm.default)
    assert [product.prev.prev.prev.target, product.prev.prev.target] == [aten.constant_pad_nd.default] * 2


def test_a_number_that_is_not_finite_stays_in_its_row():
    given = layers()
    given[0][0, 1, 2], given[0][1, 2, 3] = float("inf"), float("nan")
    before, after = padded(two_layers(bias=True), given)
    wanted, found = (builders.execute(one, given)[0] for one in (before, after))
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0, equal_nan=True)
    assert 0 < wanted[0].isfinite().sum() < wanted[0].numel()


def test_a_weight_that_lies_the_other_way():
    def step(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        out = x @ weight
        return out.detach(), *torch.autograd.grad(out.square().sum(), (x, weight))

    given = whole_numbers((8, 13), (13, 21))
    before, after = padded(step, given)
    assert sizes(after) == sorted([(8, 16, 24), (16, 8, 24), (8, 24, 16)])
    assert num_pads(after) == 3
    assert_same(before, after, given)


def language_model(**options: Any) -> Callable[..., tuple[Tensor, ...]]:
    """Loss, best words and gradients of a head over 517 words, in half precision as autocast has it."""

    def step(x: Tensor, weight: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        logits = F.linear(x.to(torch.bfloat16), weight.to(torch.bfloat16)).to(x.dtype)
        loss = F.cross_entropy(logits.flatten(0, 1), y, **options) + 1e-3 * logits.logsumexp(-1).square().mean()
        return loss.detach(), logits.detach().argmax(-1), *torch.autograd.grad(loss, (x, weight))

    return step


def words() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [
        torch.randn(2, 4, 16, generator=draw), torch.randn(517, 16, generator=draw),
        torch.randint(517, (8,), generator=draw),
    ]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
def test_a_loss_of_any_kind_reads_a_part_of_wide_logits(options):
    """What is computed is as far from float64 as it was: products round once, and add up in another order."""
    given, step = words(), language_model(**options)
    before, after = padded(step, given)
    assert sizes(after) == sorted([(8, 16, 576), (576, 8, 16), (8, 576, 16)])
    assert num_pads(after) == 2  # the weight and the gradient of the logits, each for two products
    assert builders.count(after, aten.clone.default) == 0
    exact = step(given[0].double(), given[1].double(), given[2])
    wanted, found = (builders.execute(one, given)[0] for one in (before, after))
    assert wanted[1].equal(found[1])
    for one, other, right in zip(wanted, found, exact, strict=True):
        assert (one.shape, one.stride()) == (other.shape, other.stride())
        errors = [(given.double() - right).abs().max().item() for given in (one, other)]
        assert errors[1] <= 1.1 * errors[0] + 1e-6


# ---- who reads a part ----------------------------------------------------------------------------------------------


def readers(of: Callable[[Tensor], Any]) -> Callable[..., tuple[Tensor, ...]]:
    def step(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return of(x @ weight.t())

    return step


VIEWED = {
    "in three dimensions": lambda out: out.view(2, 4, 13).sin(),
    "transposed": lambda out: out.t().sum(1),
    "heads": lambda out: out.view(2, 4, 13).transpose(0, 1).exp(),
    "parts": lambda out: out.split([5, 8], 1)[1].sin(),
    "rows": lambda out: out[2:5].sin(),
    "another product": lambda out: out @ out.t(),
}
COPIED = {
    "given back": lambda out: out,
    "a view given back": lambda out: out.view(2, 4, 13),
    "flat": lambda out: out.view(-1).sin(),
    "by places in memory": lambda out: out.as_strided((4, 3), (3, 1)).sin(),
    "changed at places in memory": lambda out: torch.as_strided_scatter(out, out.new_ones(3), (3,), (13,)),
    "by a kernel that wants it so": lambda out: F.group_norm(out.view(2, 4, 13), 2),
    "random": lambda out: F.dropout(out, 0.0, True),
}


@pytest.mark.parametrize("name", VIEWED)
def test_views_are_made_of_the_part(name):
    given = whole_numbers((8, 16), (13, 16))
    before, after = padded(readers(VIEWED[name]), given)
    assert (8, 16, 16) in sizes(after)
    assert builders.count(after, aten.clone.default) == builders.count(before, aten.clone.default)
    assert_same(before, after, given)


@pytest.mark.parametrize("name", COPIED)
def test_who_needs_rows_in_one_piece_reads_a_copy(name):
    given = whole_numbers((8, 16), (13, 16))
    before, after = padded(readers(COPIED[name]), given)
    assert sizes(after) == [(8, 16, 16)]
    assert builders.count(after, aten.clone.default) == 1 + builders.count(before, aten.clone.default)
    if name != "random":
        assert_same(before, after, given)


@pytest.mark.parametrize("of", [torch.zeros_like, lambda out: out.t().sin(), lambda out: out[2:3].t().float()])
def test_what_is_computed_of_a_part_keeps_its_layout(of):
    given = whole_numbers((8, 16), (13, 16))
    before, after = padded(readers(of), given)
    assert sizes(after) == [(8, 16, 16)]
    assert_same(before, after, given)


def test_one_reads_the_part_and_another_one_a_copy():
    given = whole_numbers((8, 16), (13, 16))
    before, after = padded(readers(lambda out: (out, out.sin(), out.view(-1), out.argmax(1))), given)
    (cut,) = after.graph.find_nodes(op="call_function", target=aten.slice.Tensor)
    (copy,) = after.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert {user.target for user in cut.users} == {copy.target, aten.sin.default, aten.argmax.default}
    assert {user.target for user in copy.users} == {"output", aten.view.default}
    assert_same(before, after, given)


def test_values_of_views_share_the_memory_of_what_they_view():
    """`reinplace` sees by them whose memory may be overwritten."""
    given = whole_numbers((8, 16), (13, 16))
    _, after = padded(readers(lambda out: (out.view(2, 4, 13).sin(), out.view(-1).sin())), given)
    views = [node for node in after.graph.nodes if op_info.is_view(node)]
    assert {view.target for view in views} >= {aten.slice.Tensor, aten.view.default}
    for view in views:
        own, seen = (node_meta.tensor(one).untyped_storage()._cdata for one in (view, view.all_input_nodes[0]))
        assert own == seen, view.format_node()


def with_gradient(of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Also where the gradient that comes back is a part, of a product with ones and zeros."""

    def step(out: Tensor) -> tuple[Tensor, ...]:
        leaf = out.detach().requires_grad_()
        given = of(leaf)
        back = given.detach() @ torch.eye(given.shape[1], dtype=given.dtype)
        return given.detach() + 1, *torch.autograd.grad(given, leaf, back)

    return step


def norm(out: Tensor) -> tuple[Tensor, ...]:
    leaves = [one.requires_grad_() for one in (out.detach(), out[0].detach(), out[1].detach())]
    given = F.layer_norm(leaves[0], (13,), *leaves[1:])
    return given.detach() + 1, *torch.autograd.grad(given, leaves, given.detach() @ torch.eye(13, dtype=given.dtype))


READ_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "softmax": with_gradient(lambda out: out.softmax(1)),
    "log_softmax": with_gradient(lambda out: out.log_softmax(1)),
    "softmax of columns": with_gradient(lambda out: out.softmax(0)),
    "norm": norm,
    # Far from zero a kernel with AVX-512 gives other bits for a whole vector than for what is left of a row.
    "gelu": lambda out: with_gradient(F.gelu)(out.clamp(-2, 2)),
    "hardtanh": with_gradient(F.hardtanh),
    "transposed": with_gradient(lambda out: out.t().sigmoid()),
    "sums": lambda out: (out.sum(), out.sum(0), out.mean(), out.mean(1), out.logsumexp(1)),
    "extrema": lambda out: (out.amax(0), out.amin(1), *out.max(1), *out.min(0), out.max(), out.min()),
    "places of extrema": lambda out: (out.argmax(), out.argmin(1)),
    "spread": lambda out: (*torch.var_mean(out, 1), out.norm(), out.norm(dim=0)),
    "numbers from rows": lambda out: (out[:, 2] + 1, out[torch.tensor([1, 2])], out.gather(1, out.argmax(1)[:, None])),
    "put together": lambda out: (torch.cat([out, out]), torch.cat([out.t(), out.t()], 1), F.pad(out, (1, 1))),
    "copies": lambda out: (out.t().clone(), out.float(), out.t().contiguous()),
    "batches": lambda out: out.view(2, 4, 13) @ out.view(2, 4, 13).mT,
    "in order": lambda out: out.sort(1),
    "an image": lambda out: F.conv2d(out.view(2, 2, 2, 13).permute(0, 3, 1, 2), torch.ones(3, 13, 1, 1).bfloat16()),
    "attention": lambda out: F.scaled_dot_product_attention(*(out.view(2, 4, 1, 13).transpose(1, 2),) * 3),
    "lists": lambda out: (*torch._foreach_mul([out, out], 2.0), *torch._foreach_norm([out])),
}


@pytest.mark.parametrize("name", READ_ROWS)
def test_whoever_reads_a_part_gives_the_same(name):
    given = whole_numbers((8, 16), (13, 16))
    before, after = padded(readers(READ_ROWS[name]), given)
    assert (8, 16, 16) in sizes(after)
    assert_same(before, after, given)


def test_operators_in_place_keep_layouts():
    given = whole_numbers((8, 16), (13, 16))
    before, after = padded(readers(lambda out: out.sin().cos().exp() + out.sin()), given)
    after = run_passes(after, [reinplace])
    builders.Layouts(after.module).run(*given)
    assert_same(before, after, given)


# ---- which products ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "more"),
    [
        (8, 13, 16, (8, 16, 16)), (8, 16, 13, (8, 16, 16)), (9, 16, 16, None), (8, 16, 1022, (8, 16, 1024)),
        (8, 16, 515, (8, 16, 576)), (8, 16, 505, (8, 16, 512)), (8, 16, 1032, None), (1, 13, 13, None),
        (8, 13, 1, None),
    ],
)  # fmt: skip
def test_sizes(rows, inner, columns, more):
    given = whole_numbers((rows, inner), (columns, inner))
    before, after = padded(readers(lambda out: out.sin()), given)
    assert sizes(after) == [more or (rows, inner, columns)]
    assert (printer.diff(before, after) == "") == (more is None)


def test_a_size_that_is_no_row_in_memory_stays():
    """The gradient of a weight adds up over the rows of a batch, and rows of both factors are other sizes."""
    given = whole_numbers((9, 16), (9, 24))
    before, after = padded(lambda x, grad: (grad.t() @ x).sin(), given)
    assert printer.diff(before, after) == ""


OTHERS = {
    "float32": lambda x, w: (x.float() @ w.float().t()).sin(),
    "a matrix in the place of a bias": lambda x, w: torch.addmm(x[:, :1], x, w.t()).sin(),
    "batches": lambda x, w: torch.bmm(x[None], w.t()[None]).sin(),
    "columns that stand apart": lambda x, w: (x @ w.t().as_strided((8, 5), (2, 16))).sin(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_such_product_stays(name):
    given = whole_numbers((8, 16), (13, 16))
    if name == "columns that stand apart":
        given[0] = given[0][:, :8].contiguous()
    before, after = padded(OTHERS[name], given)
    assert printer.diff(before, after) == ""


def test_a_device_that_does_not_mind_is_asked_about_odd_products_alone():
    asked = []
    given = layers()
    before = cleaned(two_layers(bias=False), given)
    after = run_passes(before, [partial(pad_matmul, pads=lambda node: asked.append(node), rates=FOR_NOTHING)])
    assert printer.diff(before, after) == ""
    assert len(asked) == 6
    before = cleaned(readers(torch.sin), whole_numbers((8, 16), (24, 16)))
    run_passes(before, [partial(pad_matmul, pads=lambda node: pytest.fail("it is even"))])


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "pays"),
    [
        (8192, 1022, 1022, True), (8192, 768, 50257, True), (256, 1022, 10, False), (8192, 16, 1023, False),
        (65536, 61, 256, False),
    ],
)  # fmt: skip
def test_it_pays_where_a_product_is_large_against_its_tensors(rows, inner, columns, pays):
    """Nothing is computed here. To pad (8192, 1022) takes 10 us, and the product 51 us less."""
    given = [torch.empty(rows, inner, dtype=torch.bfloat16), torch.empty(columns, inner, dtype=torch.bfloat16)]
    before = cleaned(readers(torch.sin), given)
    after = run_passes(before, [DEFAULT])
    assert (num_pads(after) > 0) == pays
    assert (printer.diff(before, after) == "") == (not pays)


def test_a_copy_costs_what_it_moves():
    given = [torch.empty(8192, 64, dtype=torch.bfloat16), torch.empty(1023, 64, dtype=torch.bfloat16)]
    assert num_pads(run_passes(cleaned(readers(torch.sin), given), [DEFAULT])) == 1
    assert num_pads(run_passes(cleaned(readers(lambda out: out), given), [DEFAULT])) == 0


def test_what_is_padded_already_costs_nothing():
    """A product that would not pay for padded factors reads those of a larger one."""
    a, b, c = (torch.empty(size, 1022, dtype=torch.bfloat16) for size in (8192, 1024, 256))

    def small(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return ((b @ c.t()).sin(),)

    def both(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return (a @ b.t()).sin(), (c @ a.t()).sin(), (b @ c.t()).sin()

    assert num_pads(run_passes(cleaned(small, [a, b, c]), [DEFAULT])) == 0
    assert sizes(run_passes(cleaned(both, [a, b, c]), [DEFAULT])) == [
        (256, 1024, 8192), (1024, 1024, 256), (8192, 1024, 1024)
    ]  # fmt: skip


def test_a_second_time_changes_nothing_and_a_scheduled_program_stays():
    before, once = padded(two_layers(bias=True), layers())
    assert printer.diff(run_passes(once, [ALWAYS]), once) == ""
    scheduled = run_passes(before, [reinplace])
    assert printer.diff(run_passes(scheduled, [ALWAYS]), scheduled) == ""


def test_what_is_computed_again_is_padded_as_it_was():
    """A repeat of a product finds the zeros that the first one was too small for, and stays as it is."""
    a, b, c = (torch.empty(size, 1022, dtype=torch.bfloat16) for size in (256, 1024, 8192))

    def step(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return (a @ b.t()).sin(), (c @ b.t()).sin(), (c @ a.t()).sin(), (a @ b.t()).cos()

    before = builders.without_gradients(builders.capture(step, [a, b, c]))
    products = before.graph.find_nodes(op="call_function", target=aten.mm.default)
    assert len(products) == 4
    assert sizes(run_passes(before, [DEFAULT])).count((256, 1024, 1024)) == 1
    node_meta.set_repeats(products[3], products[0].name)
    assert sizes(run_passes(before, [DEFAULT])).count((256, 1022, 1024)) == 2


# ---- beside other passes -------------------------------------------------------------------------------------------


def reduced(given: list[Tensor], *, forward: Callable[[Tensor, Tensor], Tensor]) -> tuple[Program, Program]:
    """A step whose gradient of its one weight, of half precision, is cast to float32 and reduced, before and after."""

    def step(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        of_x, of_weight = torch.autograd.grad(forward(x, weight).square().sum(), (x, weight))
        return of_x, builders.gradient(of_weight.float(), "weight")

    before = run_passes(builders.place(builders.capture(step, given)), [eliminate_dead_code])
    after = run_passes(before, [ALWAYS])
    builders.Layouts(after.module).run(*given)
    return before, after


def of_weight(program: Program) -> fx.Node:
    """The product that is reduced."""
    (start,) = (node for node in program.graph.nodes if op_info.is_collective(node))
    node = start
    while node.target not in PRODUCTS:
        node = node.all_input_nodes[0]
    return node


@pytest.mark.parametrize("inner", [16, 13])
def test_a_gradient_that_is_reduced_keeps_its_size(inner):
    """Of 517 words: its rows are read out of those that the gradient of x adds up, if nothing else is odd."""
    given = whole_numbers((8, inner), (517, inner))
    before, after = reduced(given, forward=lambda x, weight: x @ weight.t())
    product = of_weight(after)
    assert node_meta.tensor(product).shape == (517, inner)
    assert node_meta.tensor(product.args[0]).stride() == ((1, 576) if inner == 16 else (1, 517))
    assert sizes(after) == sorted([(8, 16, 576), (517, 8, inner), (8, 576, 16)])
    assert after.history[-1].notes[1:] == (
        ("1 gradients to be reduced are products of rows that stand apart",) if inner == 16 else ()
    )
    assert_same(before, after, given)


def test_zeros_that_come_later_are_not_read():
    def step(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return builders.gradient((grad.t() @ x).float(), "weight"), (grad @ weight).sin()

    given = whole_numbers((8, 517), (8, 16), (517, 16))
    before = run_passes(builders.place(builders.capture(step, given)), [eliminate_dead_code])
    after = run_passes(before, [ALWAYS])
    assert sizes(after) == [(8, 576, 16), (517, 8, 16)]
    assert node_meta.tensor(of_weight(after).args[0]).stride() == (1, 517)
    assert_same(before, after, given)


def test_a_gradient_that_is_reduced_may_add_up_zeros():
    """Where the weight is the left factor its gradient adds up rows of both factors in memory."""
    given = whole_numbers((16, 13), (24, 16))
    before, after = reduced(given, forward=lambda x, weight: weight @ x)
    assert sizes(before) == sorted([(24, 16, 13), (24, 13, 16), (16, 24, 13)])
    assert sizes(after) == sorted([(24, 16, 16), (24, 16, 16), (16, 24, 16)])
    assert node_meta.tensor(of_weight(after)).shape == (24, 16)
    assert_same(before, after, given)


class Net(nn.Module):
    """Tokens of 517 -> an embedding of 13 -> linear layers of 64, with GELU, 13 and 517."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(517, 13)
        self.up, self.down, self.head = nn.Linear(13, 64), nn.Linear(64, 13), nn.Linear(13, 517, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.down(F.gelu(self.up(self.tokens(tokens)), approximate="tanh")))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(tokens).float(), tokens, label_smoothing=0.1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def planned(*first: Pass) -> Program:
    """A whole step around DDP with the passes of a backend, of which `first` are the first."""
    torch.manual_seed(0)
    model = Net()
    found = captured(train, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.arange(40))
    lowering = [
        *first,
        partial(fuse_gelu, fuses=lambda product: True),
        partial(fold_mean, averages=lambda group, device: True),
        partial(widen_matmul_out_dtype, widens=lambda product: True),
        partial(form_segments, compiles=segment_compiler.compiles, may_postpone=segment_compiler.may_follow),
    ]
    placed = place(found.program, DDP(), (MeshAxis(name="data", size=2, group="0"),))
    return run_passes(placed, passes_of(cost=COST, bucket_bytes=1 << 20, lowering=lowering))


def test_what_other_passes_look_for_is_still_there():
    before, after = planned(), planned(ALWAYS)
    notes = [{record.name: record.notes for record in program.history} for program in (before, after)]
    assert notes[1]["pad_matmul"] == (
        "6 products of odd sizes are padded with zeros, and 8 tensors for them",
        "1 gradients to be reduced are products of rows that stand apart",
    )
    for name in ("fuse_gelu", "fold_mean", "widen_matmul_out_dtype", "grads_as_bucket_views"):
        assert notes[0][name] == notes[1][name] != ()
