"""reinplace on random programs: not a bit of a result changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit import builders
from tests.unit.builders import aten
from tests.unit.passes.memory.reinplaced import assert_results_last, reduce
from wholestep.ir.program import OutputKind
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.rewrites.dead_code import eliminate_dead_code


@dataclass(frozen=True)
class Instruction:
    """One step of a random program; `a`, `b`, `c` choose values, `kind` what is done with them."""

    kind: str
    a: int
    b: int
    c: int


KINDS = [
    "relu", "scale", "add", "mul", "addcmul", "lerp", "view", "transpose", "halves", "row", "foreach", "foreach2",
    "copy", "mul_", "add_view_", "matmul", "clone", "reduce", "sum",
]  # fmt: skip
instructions = st.lists(
    st.builds(Instruction, st.sampled_from(KINDS), *(st.integers(0, 30) for _ in range(3))), min_size=1, max_size=14
)


def interpret(program: list[Instruction], inputs: list[torch.Tensor], kept: list[int]) -> tuple[torch.Tensor, ...]:
    """Runs the instructions on a growing pool of 4x4 values; the inputs come first and may be written to."""
    pool = list(inputs)
    for one in program:
        a, b, c = (pool[index % len(pool)] for index in (one.a, one.b, one.c))
        pool += step_of(one.kind, a, b, c, inputs[one.c % len(inputs)])
    return tuple(pool[index % len(pool)] for index in kept)


def step_of(kind: str, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    match kind:
        case "relu":
            return [a.relu()]
        case "scale":
            return [a * 0.5]
        case "add":
            return [a + b]
        case "mul":
            return [a * b]
        case "addcmul":
            return [torch.addcmul(a, b, c, value=0.5)]
        case "lerp":
            return [torch.lerp(a, b, 0.25)]
        case "view":
            return [a.reshape(16).view(4, 4)]
        case "transpose":
            return [a.t()]
        case "halves":
            return [torch.cat([a[:2].mul(0.5), b[2:].sigmoid()])]
        case "row":
            return [a + b[1]]
        case "foreach":
            return list(torch._foreach_mul([a, b], 0.5))
        case "foreach2":
            return list(torch._foreach_add([a, b], [b, c]))
        case "copy":
            target.copy_(a)
        case "mul_":
            a.mul_(0.5)
        case "add_view_":
            a[1:3].add_(b[:2])
        case "matmul":
            return [(a @ b) * 0.1]
        case "clone":
            return [a.clone()]
        case "reduce":
            return [reduce(a)]
        case "sum":
            return [a + b.sum()]
    return []


@settings(max_examples=100, derandomize=True, suppress_health_check=list(HealthCheck))
@given(instructions, st.lists(st.integers(0, 40), max_size=3), st.integers(1, 3))
def test_any_program_gives_the_same_bits(program, kept, num_inputs):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(4, 4, generator=generator) for _ in range(num_inputs)]
    before = builders.place(builders.capture(lambda *inputs: interpret(program, list(inputs), kept), tensors))
    after = run_passes(before, [eliminate_dead_code, reinplace])
    assert builders.same(builders.execute(after, tensors), builders.execute(before, tensors))
    assert_results_last(after, [tensor.clone() for tensor in tensors])
    written = {output.target for output in after.outputs if output.kind is OutputKind.WRITE}
    assert builders.count(after, aten.copy_.default) <= len(written)
