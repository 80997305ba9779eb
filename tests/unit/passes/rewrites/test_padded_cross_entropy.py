"""pad_cross_entropy: logits of an odd vocabulary in whole rows, and gradients written with their zeros."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.unit import builders
from tests.unit.builders import aten
from tests.unit.passes.rewrites.cross_entropy import fused, lean
from wholestep.ir import node_meta, printer
from wholestep.ir.program import Program
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.rewrites.fuse_cross_entropy import CROSS_ENTROPY
from wholestep.passes.rewrites.pad_matmul import Rates, pad_matmul
from wholestep.passes.rewrites.padded_cross_entropy import pad_cross_entropy


def assert_same_layouts_and_values(before: Program, after: Program, given: list[Tensor]) -> None:
    """Results have the layouts that are recorded, and differ by what another order of adding up does."""
    builders.Layouts(after.module).run(*given)
    wanted, found = (builders.execute(one, given)[0] for one in (before, after))
    for one, other in zip(wanted, found, strict=True):
        assert (one.shape, one.stride()) == (other.shape, other.stride())
        torch.testing.assert_close(other, one, rtol=2.0**-6, atol=2.0**-7)


def of_a_head(*, bias: bool, turned: bool, classes: int) -> Callable[..., Any]:
    """Loss and gradients of a linear layer in half precision; its weight lies either way."""

    def step(x: Tensor, weight: Tensor, offset: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x, weight, offset = (one.detach().requires_grad_() for one in (x, weight, offset))
        used = weight if turned else weight.t()
        hidden = x.view(2, -1, x.shape[1])
        flat = hidden.flatten(0, 1)
        logits = torch.addmm(offset, flat, used) if bias else flat @ used
        loss = F.cross_entropy(logits.view(2, -1, classes).float().view(-1, classes), y)
        leaves = (x, weight, offset) if bias else (x, weight)
        return loss.detach(), *torch.autograd.grad(loss * 3, leaves)

    return step


def head_tensors(classes: int, *, turned: bool) -> list[Tensor]:
    draw = torch.Generator().manual_seed(classes)
    x, weight, offset = (
        torch.randn(shape, generator=draw).bfloat16() for shape in ((8, 16), (classes, 16), (classes,))
    )
    return [x, weight.t().contiguous() if turned else weight, offset, torch.randint(classes, (8,), generator=draw)]


PAD = partial(pad_matmul, pads=lambda product: True, rates=Rates(num_bytes=1e30, launch_s=0.0))


def in_whole_rows(before: Program) -> Program:
    return run_passes(fused(before), [PAD, pad_cross_entropy])


def note_of(program: Program) -> tuple[str, ...]:
    return program.history[-1].notes


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_vocabulary_of_an_odd_size_is_read_in_whole_rows(bias, turned, kernel):
    classes, wide = 517, 576
    given = head_tensors(classes, turned=turned)
    before, _ = lean(of_a_head(bias=bias, turned=turned, classes=classes), given)
    after = in_whole_rows(before)
    (node,) = after.graph.find_nodes(op="call_function", target=CROSS_ENTROPY)
    assert (tuple(node_meta.tensor(node.args[0]).shape), node.args[4]) == ((8, wide), classes)
    assert node.args[0].target in (aten.mm.default, aten.addmm.default)
    assert builders.count(after, aten.constant_pad_nd.default) == 1 + bias  # the weight, for both of its products
    products = after.graph.find_nodes(op="call_function", target=aten.mm.default)
    sizes = sorted((*node_meta.tensor(one.args[0]).shape, node_meta.tensor(one).shape[1]) for one in products)
    # The gradients of x, for which all of a row is added up, and of the weight, of which the rest is cut off.
    of_weight = (16, 8, wide) if turned else (wide, 8, 16)
    assert sizes == sorted([(8, wide, 16), of_weight] + ([] if bias else [(8, 16, wide)]))
    assert note_of(after) == ("1 cross-entropies have logits in whole rows, with zeros after the classes",)
    assert_same_layouts_and_values(before, after, given)


@pytest.mark.parametrize(("classes", "dtype"), [(576, torch.bfloat16), (517, torch.float32)])
def test_rows_that_are_whole_or_wide_stay_as_they_are(classes, dtype, kernel):
    given = [one.to(dtype) if one.is_floating_point() else one for one in head_tensors(classes, turned=False)]
    before, _ = lean(of_a_head(bias=False, turned=False, classes=classes), given)
    assert printer.diff(in_whole_rows(before), fused(before)) == ""


def test_logits_that_somebody_else_reads_are_read_in_whole_rows_as_well(kernel):
    def step(x: Tensor, weight: Tensor, offset: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        logits = x @ weight.t()
        loss = F.cross_entropy(logits.float(), y)
        best = logits.detach().argmax(1)
        return loss.detach(), logits.detach(), best, *torch.autograd.grad(loss, (x, weight))

    given = head_tensors(517, turned=False)
    before, _ = lean(step, given)
    after = in_whole_rows(before)
    (node,) = after.graph.find_nodes(op="call_function", target=CROSS_ENTROPY)
    assert node.args[4] == 517
    assert_same_layouts_and_values(before, after, given)


def test_zeros_that_the_kernel_writes_cost_nothing(kernel):
    """Zeros at the end of 512 rows of a gradient would take longer than they save. For the weight they pay."""
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(512, 16, generator=draw).bfloat16(), *head_tensors(517, turned=False)[1:3]]
    given.append(torch.randint(517, (512,), generator=draw))
    before, lean_alone = lean(of_a_head(bias=False, turned=False, classes=517), given)
    pad = partial(pad_matmul, pads=lambda product: True, rates=Rates(launch_s=0.0))
    after = run_passes(fused(before), [pad, pad_cross_entropy])
    products = after.graph.find_nodes(op="call_function", target=aten.mm.default)
    assert (512, 576) in [tuple(node_meta.tensor(one.args[0]).shape) for one in products]
    assert builders.count(after, aten.constant_pad_nd.default) == 1
    alone = partial(
        pad, pads=lambda product: node_meta.tensor(product.args[0]).shape[1] == 517
    )  # logits stay as they are
    assert printer.diff(run_passes(fused(before), [alone, pad_cross_entropy]), fused(before)) == ""
    apart = run_passes(lean_alone, [pad, pad_cross_entropy])
    products = apart.graph.find_nodes(op="call_function", target=aten.mm.default)
    assert (512, 576) not in [tuple(node_meta.tensor(one.args[0]).shape) for one in products]
    assert builders.count(apart, aten.constant_pad_nd.default) == 1


def test_a_gradient_that_no_product_wants_padded_has_no_zeros(kernel):
    """It is returned, and the loss reads a part of wide logits."""

    def step(x: Tensor, weight: Tensor, offset: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        logits = (x @ weight.t()).detach().requires_grad_()
        loss = F.cross_entropy(logits.float(), y)
        return loss.detach(), *torch.autograd.grad(loss, logits)

    given = head_tensors(517, turned=False)
    before, _ = lean(step, given)
    after = in_whole_rows(before)
    (node,) = after.graph.find_nodes(op="call_function", target=CROSS_ENTROPY)
    assert len(node.args) == 4
    assert node_meta.tensor(node.args[0]).stride() == (576, 1)
    assert_same_layouts_and_values(before, after, given)


@pytest.mark.parametrize("view", [lambda grad: grad.view(-1), lambda grad: grad.split(4)[0]], ids=["flat", "parts"])
def test_a_gradient_that_is_seen_otherwise_as_well(view, kernel):
    def step(x: Tensor, weight: Tensor, offset: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        weight = weight.detach().requires_grad_()
        logits = x @ weight.t()
        loss = F.cross_entropy(logits.float(), y)
        of_weight, of_logits = torch.autograd.grad(loss, (weight, logits))
        return loss.detach(), of_weight, view(of_logits).sin()

    given = head_tensors(517, turned=False)
    before, _ = lean(step, given)
    after = in_whole_rows(before)
    assert len(note_of(after)) == 1
    assert_same_layouts_and_values(before, after, given)
