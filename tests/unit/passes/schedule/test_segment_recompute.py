"""carry_less: what backward segments compute again, what stays in memory for them, and the bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz.random_steps import random_step
from tests.unit import builders
from tests.unit.builders import aten
from tests.unit.capture.steps import captured
from wholestep.ir import node_meta, op_info
from wholestep.ir.node_meta import Region
from wholestep.ir.program import Program
from wholestep.ir.segment import Segment
from wholestep.lower.inductor import segment_compiler
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.schedule import segment_recompute
from wholestep.passes.schedule.form_segments import form_segments
from wholestep.passes.schedule.pack_scalars import pack_scalars

ROWS, WIDTH = 64, 96


@pytest.fixture(autouse=True)
def _little_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_recompute, "LEAST_BYTES", 1)


class Gated(nn.Module):
    """A norm by hand, a product on each side of a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class ByHand(nn.Module):
    """GELU as its authors write it down."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        pre = self.up(x)
        hidden = 0.5 * pre * (1 + torch.tanh(math.sqrt(2 / math.pi) * (pre + 0.044715 * torch.pow(pre, 3))))
        return x + self.down(hidden)


class Dropped(nn.Module):
    """Dropout, whose mask is random, before functions that can be computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sin(torch.tanh(self.up(torch.exp(F.dropout(x, 0.3))))))


def stack(block: Callable[[], nn.Module], layers: int = 4) -> Program:
    """A training step of equal blocks, scheduled up to segments."""
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(layers)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return builders.place(captured(step, torch.randn(ROWS, WIDTH)).program)


def formed(program: Program, *, again: bool) -> Program:
    says = {"is_pointwise": segment_compiler.is_pointwise} if again else {}
    form = partial(
        form_segments,
        compiles=segment_compiler.compiles,
        by_library=segment_compiler.is_library_call,
        cuts_repeats=True,
        **says,
    )
    return run_passes(program, [partial(pack_scalars, reads=segment_compiler.reads_packed), form])


def segments(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if isinstance(node.target, Segment)]


def region(node: fx.Node) -> set[Region]:
    return {node_meta.origin(call).region for call in node.target.calls if not op_info.is_view(call)}


def readers(node: fx.Node) -> set[fx.Node]:
    found = set()
    for user in node.users:
        found |= readers(user) if op_info.is_view(user) else {user}
    return found


def handed_on(program: Program) -> list[fx.Node]:
    """What forward segments give to backward ones."""
    forward = [node for node in segments(program) if Region.FORWARD in region(node)]
    return [
        item
        for node in forward
        for item in node.users
        if any(isinstance(one.target, Segment) and one not in forward for one in readers(item))
    ]


def large(program: Program) -> list[list[int]]:
    """Shapes of activations that forward segments give to backward ones."""
    return [list(node_meta.tensor(item).shape) for item in handed_on(program)]


def num_bytes(program: Program) -> int:
    return sum(map(node_meta.num_bytes, handed_on(program)))


def again(program: Program) -> list[str]:
    """What backward segments compute again."""
    calls = (call for node in segments(program) for call in node.target.calls)
    return sorted(
        call.target._schema.name.split("::")[1]
        for call in calls
        if node_meta.origin(call).region is Region.RECOMPUTE and not op_info.is_view(call)
    )


def ran(program: Program) -> Any:
    """What the program gives for made-up inputs, and what it leaves of them."""
    draw = torch.Generator().manual_seed(0)

    def made(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return 0.1
        if value.dtype is torch.int64:
            return torch.randint(3, value.shape, generator=draw)
        return torch.rand(value.shape, generator=draw).to(value.dtype)

    inputs = [made(node_meta.value(node)) for node in program.placeholders]
    torch.manual_seed(0)
    return builders.execute(program, inputs)


BLOCKS = {"gated": Gated, "by hand": ByHand, "dropped": Dropped}


@pytest.mark.parametrize("name", BLOCKS)
def test_less_is_handed_on_and_the_bits_are_the_same(name: str) -> None:
    program = stack(BLOCKS[name])
    plain, less = formed(program, again=False), formed(program, again=True)
    assert num_bytes(less) <= num_bytes(plain) - (0 if name == "dropped" else 100_000)
    assert again(less)
    assert not again(plain)
    assert builders.same(ran(plain), ran(less))


def test_a_gelu_by_hand_keeps_what_its_product_gives() -> None:
    """The five values that autograd asks for follow from one; the other is what the next product takes."""
    program = stack(ByHand)
    hidden = [ROWS, 4 * WIDTH]
    plain, less = formed(program, again=False), formed(program, again=True)
    assert large(plain).count(hidden) > 4 * 4
    assert large(less).count(hidden) == 2 * 4
    assert again(less).count("tanh") == 4


def test_a_gate_and_a_norm_keep_what_products_and_sums_give() -> None:
    program = stack(Gated)
    plain, less = formed(program, again=False), formed(program, again=True)
    inner = [ROWS, 2 * WIDTH]
    # Of both products and what the third one takes; before that of the gate's function, too.
    assert (large(plain).count(inner), large(less).count(inner)) == (4 * 4, 3 * 4)
    assert not {"rsqrt", "mean"} & set(again(less))  # sums are small


def test_what_is_equal_stays_so() -> None:
    def different(program: Program) -> int:
        return len({node.target.likeness for node in segments(program)})

    for block in (ByHand, Gated):
        program = stack(block, 6)
        assert different(formed(program, again=True)) == different(formed(program, again=False)) < 6 * 3


def test_random_numbers_are_drawn_once() -> None:
    less = formed(stack(Dropped), again=True)
    assert "sin" in again(less) or "tanh" in again(less)
    drawn = [node for node in less.graph.nodes if op_info.is_op(node) and op_info.is_random(node.target)]
    assert len(drawn) == 4
    assert not any(op_info.is_random(call.target) for node in segments(less) for call in node.target.calls)


def test_a_segment_that_computes_again_is_of_the_backward() -> None:
    late = [node for node in segments(formed(stack(ByHand), again=True)) if Region.RECOMPUTE in region(node)]
    assert len(late) == 4
    assert {node_meta.origin(node).region for node in late} == {Region.BACKWARD}


def test_the_note_says_how_many_bytes_that_is() -> None:
    plain, less = (formed(stack(ByHand), again=flag) for flag in (False, True))
    (before,), (after,) = (
        [note for note in one.history[-1].notes if "segments" in note] for one in (plain, less)
    )  # fmt: skip
    assert "computed again" not in before
    # Four of the six values of each block: written once, read once, each by one kernel.
    gone = 4 * sum(1 for shape in large(plain) if shape == [ROWS, 4 * WIDTH]) * ROWS * 4 * WIDTH
    left = 4 * sum(1 for shape in large(less) if shape == [ROWS, 4 * WIDTH]) * ROWS * 4 * WIDTH
    assert f"; {2 * (gone - left):,} bytes less to write and read, computed again" in after


def in_two(fn: Callable[..., Any], *tensors: Tensor) -> tuple[list[str], list[str]]:
    """The operators of the early and of the late segment of a function, which has ``ones_like`` between them.

    What is computed again gives the same bits.
    """
    program = builders.capture(fn, list(tensors))
    part = Region.FORWARD
    for node in program.graph.nodes:
        part = Region.BACKWARD if node.target is aten.ones_like.default else part
        node_meta.set_origin(node, node_meta.Origin(part))
    form: Any = partial(
        form_segments, by_library=segment_compiler.is_library_call,
        compiles=lambda node: segment_compiler.compiles(node) and node.target is not aten.ones_like.default,
    )  # fmt: skip
    less = run_passes(program, [partial(form, is_pointwise=segment_compiler.is_pointwise)])
    assert builders.same(ran(run_passes(program, [form])), ran(less))
    early, late = segments(less)
    return calls(early), calls(late)


def calls(segment: fx.Node) -> list[str]:
    return [call.target._schema.name.split("::")[1] for call in segment.target.calls if not op_info.is_view(call)]


SQUARE = 40


def test_what_a_product_gives_is_read_and_the_rest_computed_again() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        found = torch.sin(torch.tanh(product))
        return torch.cos(torch.ones_like(product) * found)

    assert in_two(step, *torch.randn(2, SQUARE, SQUARE)) == (["mm"], ["tanh", "sin", "mul", "cos"])


def test_an_input_is_not_read_later_than_it_was() -> None:
    """A parameter would have to keep its old value until the backward is through."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        product, found = x @ w, torch.sin(torch.tanh(x))
        return torch.cos(torch.ones_like(product) * found)

    def reads_it(x: Tensor, w: Tensor) -> Tensor:
        return step(x, w) + x

    given = torch.randn(2, SQUARE, SQUARE)
    assert in_two(step, *given) == (["mm", "tanh", "sin"], ["mul", "cos"])
    assert in_two(reads_it, *given) == (["mm"], ["tanh", "sin", "mul", "cos", "add"])


def test_more_memory_is_no_price_for_less_traffic() -> None:
    """Two products, 6 bytes together, would be read in the place of a sum for which 4 are written and read."""

    def step(x: Tensor, w: Tensor, narrow: Tensor) -> Tensor:
        product = x @ w
        found = torch.sin(product + narrow @ narrow)
        return torch.cos(torch.ones_like(product) * found)

    x, w = torch.randn(2, SQUARE, SQUARE)
    early, late = in_two(step, x, w, torch.randn(SQUARE, SQUARE).bfloat16())
    assert (early, late) == (["mm", "mm", "add", "sin"], ["mul", "cos"])


def test_what_a_library_takes_stays_in_memory() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        found = torch.tanh(product)
        return torch.cos(torch.ones_like(product) @ found)

    assert in_two(step, *torch.randn(2, SQUARE, SQUARE)) == (["mm", "tanh"], ["mm", "cos"])


def test_each_kernel_computes_again_what_it_reads() -> None:
    """From one to the next it would be written and read: there is a product between them."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        found = torch.tanh(product)
        return ((torch.ones_like(product) * found) @ w) * found

    early, late = in_two(step, *torch.randn(2, SQUARE, SQUARE))
    assert (early, sorted(late)) == (["mm"], ["mm", "mul", "mul", "tanh", "tanh"])


def test_what_one_kernel_takes_is_there_for_the_next() -> None:
    """The sum costs as much as its two summands, so it is kept; for the second kernel it need not be written."""

    def step(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        both = product + v @ w
        found = torch.sin(both)
        return ((torch.ones_like(product) * both) @ w) * found

    early, late = in_two(step, *torch.randn(3, SQUARE, SQUARE))
    assert (early, sorted(late)) == (["mm", "mm", "add"], ["mm", "mul", "mul", "sin"])


def test_little_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    program = stack(ByHand)
    monkeypatch.setattr(segment_recompute, "LEAST_BYTES", 1 << 30)
    assert not again(formed(program, again=True))


@pytest.mark.parametrize("seed", range(12))
def test_random_steps_keep_their_bits_and_their_memory(seed: int) -> None:
    made = random_step(seed)
    program = builders.place(captured(made.run, *made.batch(seed)).program)
    plain, less = formed(program, again=False), formed(program, again=True)
    assert num_bytes(less) <= num_bytes(plain)
    assert len(again(less)) >= len(again(plain)) == 0
    assert builders.same(ran(plain), ran(less))
