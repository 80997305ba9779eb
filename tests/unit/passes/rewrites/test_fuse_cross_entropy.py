"""fuse_cross_entropy: the same loss and gradient up to rounding, fewer bytes kept, and what it does not touch."""

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
from tests.unit.passes.rewrites.cross_entropy import FUSE, fused, lean
from wholestep.ir import graph_edit, node_meta, op_info, printer
from wholestep.ir.program import Program
from wholestep.lower.base import eager_backend
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.rewrites.dead_code import eliminate_dead_code
from wholestep.passes.rewrites.fuse_cross_entropy import CROSS_ENTROPY, fuse_cross_entropy

ROWS, CLASSES = 6, 11
IGNORED = 3
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-9}
"""Largest relative error of one rounding."""


def margin(logits: Tensor) -> float:
    """How far apart the two forms may be in a log-probability, by roundings of the type they compute in.

    Both round x - max, the sum of CLASSES exponentials, its logarithm, and what they put together of those: values no
    larger than the span of the logits and log(CLASSES); the new form also rounds lse, as large as the largest logit.
    """
    largest = float(logits.abs().max())
    values = 4 * (2 * largest + torch.tensor(float(CLASSES)).log().item()) + 2 * CLASSES
    return 2 * UNIT[logits.dtype] * values


def loss_and_gradient(**options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def step(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        leaf = logits.detach().requires_grad_()
        loss = F.cross_entropy(leaf, target, **options)
        (grad,) = torch.autograd.grad(loss * 3, leaf)
        return loss.detach(), grad

    return step


def tensors(dtype: torch.dtype = torch.float32, *, scale: float = 3.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(ROWS, CLASSES, generator=generator)).to(dtype)
    return [logits, torch.tensor([0, IGNORED, 10, 5, IGNORED, 7])]


def rewritten(program: Program) -> bool:
    return bool(program.history[-1].notes)


def assert_close(before: Program, after: Program, given: list[Tensor]) -> None:
    wanted, came = (builders.execute(program, given) for program in (before, after))
    assert builders.same(wanted[1], came[1])  # inputs stay
    room = margin(given[0])
    for one, other, atol in zip(wanted[0], came[0], (room, 3 * room), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        torch.testing.assert_close(other, one, rtol=2 * UNIT[one.dtype], atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"ignore_index": IGNORED}], ids=str)
def test_loss_and_gradient_stay_within_rounding(options, dtype):
    given = tensors(dtype)
    before, after = lean(loss_and_gradient(**options), given)
    assert rewritten(after)
    gone = (aten._log_softmax.default, aten.nll_loss_forward.default, aten.nll_loss_backward.default)
    assert builders.count(before, *gone) == 3
    assert builders.count(after, *gone, aten._log_softmax_backward_data.default) == 0
    assert_close(before, after, given)


def test_large_logits_do_not_overflow():
    given = tensors(scale=3e4)
    before, after = lean(loss_and_gradient(), given)
    assert_close(before, after, given)
    assert all(one.isfinite().all() for one in builders.execute(after, given)[0])


def test_classes_that_are_masked_out():
    given = tensors()
    given[0][:, 4] = float("-inf")
    before, after = lean(loss_and_gradient(), given)
    finite = [given[0].masked_fill(given[0].isinf(), 0.0), given[1]]
    wanted, came = (builders.execute(program, given)[0] for program in (before, after))
    room = margin(finite[0])
    for one, other in zip(wanted, came, strict=True):
        torch.testing.assert_close(other, one, rtol=2 * UNIT[torch.float32], atol=3 * room)
    assert not came[1][:, 4].any()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_rows_ignored_give_what_eager_code_gives(reduction):
    given = tensors()
    given[1] = torch.full((ROWS,), -100)
    before, after = lean(loss_and_gradient(reduction=reduction), given)
    wanted, came = (builders.execute(program, given)[0] for program in (before, after))
    assert wanted[0].isnan() == came[0].isnan() == (reduction == "mean")
    assert not came[1].nan_to_num().any()
    torch.testing.assert_close(came, wanted, rtol=0.0, atol=0.0, equal_nan=True)


def test_a_loss_without_a_backward():
    given = tensors()
    before, after = lean(lambda logits, target: (F.cross_entropy(logits, target),), given)
    assert rewritten(after)
    (wanted,), (came,) = (builders.execute(program, given)[0] for program in (before, after))
    torch.testing.assert_close(came, wanted, rtol=0.0, atol=margin(given[0]))


def test_two_losses_are_two_rewrites():
    def fn(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        loss, grad = loss_and_gradient()(logits, target)
        other, second = loss_and_gradient(reduction="sum")(logits * 0.5, target)
        return loss + other, grad + second

    given = tensors()
    before, after = lean(fn, given)
    note = f"2 cross-entropies without {2 * 4 * ROWS * CLASSES:,} B of logarithms for their backward"
    assert after.history[-1].notes == (note,)
    wanted, came = (builders.execute(program, given)[0] for program in (before, after))
    room = margin(given[0])
    torch.testing.assert_close(came, wanted, rtol=4 * UNIT[torch.float32], atol=(ROWS + 1) * 3 * room)


def logs_read_elsewhere(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    logs = F.log_softmax(leaf, dim=1)
    (grad,) = torch.autograd.grad(F.nll_loss(logs, target), leaf)
    return logs.detach(), grad


def two_losses_of_the_same_logs(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    logs = F.log_softmax(leaf, dim=1)
    loss = F.nll_loss(logs, target) + F.nll_loss(logs, target.flip(0))
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad


def gradient_of_the_logs(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    logs = F.log_softmax(leaf, dim=1)
    loss = F.nll_loss(logs, target)
    grad, of_logs = torch.autograd.grad(loss, (leaf, logs))
    return grad, of_logs


def reduced_by_hand(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    loss = F.cross_entropy(leaf, target, reduction="none").mean()
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad


def along_the_rows(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    loss = F.nll_loss(F.log_softmax(leaf, dim=0), target)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad


def losses_of_the_same_logs(logits: Tensor, target: Tensor) -> Tensor:
    logs = F.log_softmax(logits, dim=1)
    return F.nll_loss(logs, target) + F.nll_loss(logs, target.flip(0))


UNTOUCHED = {
    "label smoothing": loss_and_gradient(label_smoothing=0.1),
    "no reduction": reduced_by_hand,
    "logs returned": logs_read_elsewhere,
    "logs in two losses": losses_of_the_same_logs,
    "logs in two losses with gradients": two_losses_of_the_same_logs,
    "the gradient of the logs returned": gradient_of_the_logs,
    "softmax along the rows": along_the_rows,
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_what_is_not_matched_stays_as_it_is(name):
    before, after = lean(UNTOUCHED[name], tensors())
    assert not rewritten(after)
    assert printer.diff(before, after) == ""


def test_a_loss_with_weights_stays_as_it_is():
    def fn(logits: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return loss_and_gradient(weight=weight)(logits, target)

    before, after = lean(fn, [*tensors(), torch.rand(CLASSES)])
    assert printer.diff(before, after) == ""


def test_a_loss_of_images_stays_as_it_is():
    """One answer per pixel: four dimensions, ``nll_loss2d``."""
    given = [torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))]
    before, after = lean(loss_and_gradient(), given)
    assert printer.diff(before, after) == ""


def test_a_second_time_changes_nothing_and_a_scheduled_program_stays():
    before, once = lean(loss_and_gradient(), tensors())
    assert printer.diff(run_passes(once, [fuse_cross_entropy]), once) == ""
    scheduled = run_passes(before, [reinplace])
    assert printer.diff(run_passes(scheduled, [fuse_cross_entropy]), scheduled) == ""


def language_model() -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], list[Tensor]]:
    """A step under autocast: a buffer that counts, logits in bfloat16, a loss in float32, plain SGD."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES, bias=False))
    model.register_buffer("seen", torch.zeros(CLASSES))

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.seen.add_(torch.ones(()))
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(0.1 * param.grad)
                param.grad = None
        return loss.detach()

    return model, step, [torch.randint(CLASSES, (ROWS,)), torch.randint(CLASSES, (ROWS,))]


def whole_step() -> tuple[Program, Program, list[Any]]:
    _, step, batch = language_model()
    found = captured(step, *batch)
    before = run_passes(builders.without_gradients(found.program), [eliminate_dead_code])
    return before, run_passes(before, [fuse_cross_entropy]), [*found.binding.fill(batch)]


def assert_close_in_bfloat16(before: Program, after: Program, inputs: list[Any]) -> None:
    """The gradient of the logits goes through bfloat16: where the float32 values lie on two sides of a border between
    two of its values, those are neighbours, 2 ** -8 apart; the product with the rate 0.1 takes that to the weights."""
    wanted, came = (builders.execute(program, inputs) for program in (before, after))
    torch.testing.assert_close(came[0], wanted[0], rtol=0.0, atol=1e-5)
    for one, other, given in zip(wanted[1], came[1], inputs, strict=True):
        if one.is_floating_point():
            change = (one - given).abs().max().item()
            torch.testing.assert_close(other, one, rtol=0.0, atol=2.0**-7 * change)
            assert change > 0


def test_bfloat16_logits_under_autocast():
    before, after, inputs = whole_step()
    assert rewritten(after)
    assert_close_in_bfloat16(before, after, inputs)


def kept(program: Program) -> list[fx.Node]:
    """What the forward computes and the backward reads, behind views and casts, which are made again for nothing."""
    found: dict[fx.Node, None] = {}
    for node in program.graph.nodes:
        if (
            node.op == "call_function"
            and node_meta.origin(node).region is node_meta.Region.BACKWARD
            and not is_free(node)
        ):
            for arg in node.all_input_nodes:
                while is_free(arg):
                    (arg,) = arg.all_input_nodes
                if arg.op == "call_function" and node_meta.origin(arg).region is node_meta.Region.FORWARD:
                    found[arg] = None
    return list(found)


def is_free(node: fx.Node) -> bool:
    return node.op == "call_function" and (op_info.is_view(node) or node.target is aten._to_copy.default)


def test_the_backward_reads_the_logits_as_the_product_gave_them():
    before, after, _ = whole_step()
    large = [
        [node for node in kept(program) if node_meta.tensor(node).shape == (ROWS, CLASSES)]
        for program in (before, after)
    ]
    assert [str(node.target) for node in large[0]] == ["aten._log_softmax.default"]
    assert [str(node.target) for node in large[1]] == ["aten.mm.default"]
    assert [node_meta.num_bytes(node) for (node,) in large] == [4 * ROWS * CLASSES, 2 * ROWS * CLASSES]
    # What else is kept are numbers per row.
    rest = [node_meta.tensor(node).numel() for node in kept(after) if node not in large[1]]
    assert max(rest) <= max(ROWS, 8 * ROWS)
    (note,) = after.history[-1].notes
    assert note == f"1 cross-entropies without {4 * ROWS * CLASSES:,} B of logarithms for their backward"


@pytest.mark.parametrize("wrong", [CLASSES, -1])
def test_an_answer_out_of_range_raises_and_leaves_state_as_it_was(wrong):
    _, after, inputs = whole_step()
    run = eager_backend.lower(run_passes(after, [reinplace]))
    own = [one.detach().clone() if isinstance(one, Tensor) else one for one in inputs]
    own[-1][2] = wrong
    before = [one.clone() if isinstance(one, Tensor) else one for one in own]
    with torch.no_grad(), pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        run(list(own))
    assert builders.same(own, before)


def in_float32(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of logits in half precision, with all of it in float32."""
    leaf = logits.detach().requires_grad_()
    loss = F.cross_entropy(leaf.float(), target)
    (grad,) = torch.autograd.grad(loss * 3, leaf)
    return loss.detach(), grad


def with_casts_inside(program: Program) -> Program:
    """The same as a GPU has it under autocast: logarithms in float32 of logits in half precision. No CPU runs that."""
    program = graph_edit.copy(program)
    (logs,) = program.graph.find_nodes(op="call_function", target=aten._log_softmax.default)
    (grad,) = program.graph.find_nodes(op="call_function", target=aten._log_softmax_backward_data.default)
    wide, (narrow,) = logs.args[0], grad.users
    assert (wide.target, narrow.target) == (aten._to_copy.default, aten._to_copy.default)
    logs.args = (wide.args[0], logs.args[1], True)
    grad.args = (*grad.args[:3], torch.bfloat16)
    node_meta.set_value(grad, node_meta.value(narrow))
    graph_edit.replace_node(narrow, grad)
    graph_edit.remove_dead_code(program.graph)
    return program


def with_rounded_logs(program: Program) -> Program:
    """The same as ``cross_entropy`` has it on a GPU under autocast: logarithms in half precision, their loss not."""
    program = with_casts_inside(program)
    (logs,) = program.graph.find_nodes(op="call_function", target=aten._log_softmax.default)
    (grad,) = program.graph.find_nodes(op="call_function", target=aten._log_softmax_backward_data.default)
    half = {"dtype": torch.bfloat16}
    with program.graph.inserting_before(logs):
        rounded = graph_edit.emit(program.graph, logs.target, *logs.args[:2], False, like=logs)
        wide = graph_edit.emit(program.graph, aten._to_copy.default, rounded, dtype=torch.float32, like=logs)
    graph_edit.replace_node(logs, wide)
    with program.graph.inserting_before(grad):
        narrow = graph_edit.emit(program.graph, aten._to_copy.default, grad.args[0], like=grad, **half)
    grad.args = (narrow, rounded, *grad.args[2:])
    return program


@pytest.mark.parametrize("rewrite", [fuse_cross_entropy, partial(fuse_cross_entropy, fuses=lambda product: True)])
@pytest.mark.parametrize("reads_rounded", [False, True])
def test_a_loss_of_rounded_logs_is_computed_without_the_rounding(rewrite, reads_rounded, kernel):
    given = tensors(torch.bfloat16)
    before, _ = lean(in_float32, given)
    rounded = with_rounded_logs(before)
    assert builders.count(rounded, aten._to_copy.default) == 2
    builders.execute(rounded, given)  # it is a program
    if reads_rounded:  # by somebody else, who wants them
        (logs,) = rounded.graph.find_nodes(op="call_function", target=aten._log_softmax.default)
        end = rounded.graph.output_node()
        end.args = ((*end.args[0][:1], logs),)
    after = run_passes(rounded, [rewrite])
    gone = (aten._log_softmax.default, aten._log_softmax_backward_data.default)
    assert builders.count(after, *gone) == (2 if reads_rounded else 0)
    if not reads_rounded:
        wanted, found = (builders.execute(one, given) for one in (run_passes(before, [rewrite]), after))
        assert builders.same(wanted[0], found[0])


@pytest.mark.parametrize("rewrite", [fuse_cross_entropy, partial(fuse_cross_entropy, fuses=lambda product: True)])
def test_a_cast_may_be_a_part_of_the_logarithms(rewrite, kernel):
    given = tensors(torch.bfloat16)
    before, _ = lean(in_float32, given)
    inside = with_casts_inside(before)
    assert builders.count(inside, aten._to_copy.default) == 0
    after = run_passes(inside, [rewrite])
    assert builders.count(after, aten._log_softmax.default, aten._log_softmax_backward_data.default) == 0
    wanted, found = (builders.execute(one, given) for one in (run_passes(before, [rewrite]), after))
    assert builders.same(wanted[0], found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"ignore_index": IGNORED}], ids=str)
def test_one_kernel_gives_loss_and_gradient(options, dtype, kernel):
    given = tensors(dtype)
    before, _ = lean(loss_and_gradient(**options), given)
    assert_close(before, fused(before), given)


def test_one_kernel_with_all_rows_ignored(kernel):
    given = [tensors()[0], torch.full((ROWS,), -100)]
    before, _ = lean(loss_and_gradient(), given)
    loss, gradient = builders.execute(fused(before), given)[0]
    assert loss.isnan()
    assert not gradient.nan_to_num().any()


def float_before_view(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x.view(2, -1)).float().view(-1, CLASSES), y)


def float_behind_view(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x.view(2, -1)).flatten(0, 1), y)


def in_other_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float().view(CLASSES, ROWS), y.repeat(2)[:CLASSES] % ROWS)


def autocast_step(loss_of: Callable[..., Tensor]) -> tuple[Program, list[Any]]:
    model, _, batch = language_model()

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, x, y)
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(0.1 * param.grad)
                param.grad = None
        return loss.detach()

    found = captured(step, *batch)
    return run_passes(builders.without_gradients(found.program), [eliminate_dead_code]), [*found.binding.fill(batch)]


@pytest.mark.parametrize("loss_of", [float_before_view, float_behind_view, in_other_rows])
def test_the_kernel_reads_and_writes_what_products_give_and_take(loss_of, kernel):
    before, inputs = autocast_step(loss_of)
    after = fused(before)
    (node,) = after.graph.find_nodes(op="call_function", target=CROSS_ENTROPY)
    assert node_meta.tensor(node.args[0]).dtype is torch.bfloat16
    large = [
        one for node in after.graph.nodes if node.target is not CROSS_ENTROPY for one in node_meta.tensors(node)
        if one.numel() == ROWS * CLASSES and one.dtype is torch.float32
    ]  # fmt: skip
    assert not large
    assert_close_in_bfloat16(before, after, inputs)


def gradient_of_the_square(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """It depends on the loss."""
    leaf = logits.detach().requires_grad_()
    loss = F.cross_entropy(leaf, target)
    (grad,) = torch.autograd.grad(loss * loss, leaf)
    return loss.detach(), grad


def gradient_in_float32(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """It is returned as well, before it is cast back."""
    leaf = logits.detach().requires_grad_()
    wide = leaf.float()
    loss = F.cross_entropy(wide, target)
    return loss.detach(), *torch.autograd.grad(loss, (leaf, wide))


@pytest.mark.parametrize(
    ("fn", "dtype"), [(gradient_of_the_square, torch.float32), (gradient_in_float32, torch.bfloat16)]
)
def test_where_the_kernel_would_not_do(fn, dtype):
    before, lean_alone = lean(fn, tensors(dtype))
    after = run_passes(before, [FUSE])
    assert rewritten(after)
    assert printer.diff(after, lean_alone) == ""


def test_logits_that_a_kernel_does_not_read(kernel):
    """`fuses` is asked about what gives the logits, behind views and casts."""
    asked = []
    before, _ = autocast_step(float_before_view)
    after = run_passes(before, [partial(fuse_cross_entropy, fuses=lambda product: asked.append(product.target))])
    assert asked == [aten.mm.default]
    assert builders.count(after, CROSS_ENTROPY) == 0
    assert rewritten(after)


def test_a_kernel_is_put_in_once(kernel):
    before, _ = lean(loss_and_gradient(), tensors())
    once = fused(before)
    assert printer.diff(run_passes(once, [FUSE]), once) == ""
