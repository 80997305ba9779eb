"""compress: other tensors travel in the place of gradients; what they are, where they stand, what is remembered."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

import wholestep as ws
from tests.unit import builders
from tests.unit.builders import aten, c10d, gradient
from wholestep.config import Compress
from wholestep.cost.cost_model import CostModel
from wholestep.ir import node_meta, op_info
from wholestep.ir.program import InputKind, OutputKind, Program, Stage
from wholestep.passes.comm.bucketing import bucket_gradients
from wholestep.passes.compress.compress import compress
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import run_passes

COST = CostModel.default("cpu+gloo")
HALF = ws.CastCompress(torch.bfloat16)
RANK_2 = ws.PowerSGD(rank=2, start_iter=2)
FROM_ELSEWHERE = torch.ones(397)
SHAPES = {"a": (16, 12), "b": (5,), "c": (10, 20)}


def tensors() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw) for shape in SHAPES.values()]


def three(a, b, c):
    return gradient(a * 2, "a"), gradient(b * 2, "b"), gradient(c * 2, "c")


def turned(a, b, c):
    """The gradient of c lies transposed in memory, as it does where a weight is used transposed."""
    return gradient(a * 2, "a"), gradient(b * 2, "b"), gradient((c.t().contiguous() * 2).t(), "c")


def bucketed(fn=three, *, bucket_bytes: int = 1 << 20, mean: bool = True, dtype=torch.float32) -> Program:
    found = builders.capture(fn, [one.to(dtype) for one in tensors()], names=list(SHAPES), kinds=[InputKind.PARAM] * 3)
    return run_passes(
        builders.place(found, mean=mean),
        [partial(bucket_gradients, cost=COST, bucket_bytes=bucket_bytes, aligned=False)],
    )


def compressed(how: Compress, program: Program) -> Program:
    return run_passes(program, [partial(compress, how=how)])


def run(program: Program, memory: list[Tensor] | None = None) -> tuple[list, list[Tensor]]:
    """What the program returns, and its COMM inputs afterwards. The group has one rank, whatever the mesh says."""
    fresh = torch.Generator().manual_seed(1)
    wanted = [one for one in program.inputs if one.kind is InputKind.COMM]
    memory = memory or [torch.randn(one.shape, generator=fresh) for one in wanted]
    returned, inputs = builders.execute(program, [*tensors(), *memory])
    return returned, inputs[3:]


def sent(program: Program) -> list[tuple[str, torch.dtype, int, tuple[str, ...]]]:
    starts = [node for node in program.graph.nodes if op_info.is_collective(node)]
    found = [(node_meta.bucket(node), node_meta.tensor(node)) for node in starts]
    return [(record.reason.split(";")[0], one.dtype, record.num_bytes, record.members) for record, one in found]


def test_a_cast_halves_the_bytes_and_divides_behind_the_cast():
    before, after = bucketed(), compressed(HALF, bucketed())
    num_bytes = sent(before)[0][2]
    assert sent(after) == [("cast to bfloat16", torch.bfloat16, num_bytes // 2, ("a", "b", "c"))]
    called = builders.calls(after)
    start, end = (called.index(f"_c10d_functional.{name}.default") for name in ("all_reduce", "wait_tensor"))
    assert called[start - 2 : start] == ["aten._to_copy.default", "aten.div.Tensor"]
    assert called[end + 1] == "aten._to_copy.default"
    assert builders.count(after, aten.mul.Tensor) == 3  # those of the step; none with 1/2
    for found, x in zip(run(after)[0], tensors(), strict=True):
        assert torch.equal(found, ((x * 2).to(torch.bfloat16) / 2).float())
    assert after.history[-1].notes == (f"bucket 0: {num_bytes // 2} B travel for 1.6 KiB of gradients",)


def test_a_sum_is_not_divided():
    after = compressed(HALF, bucketed(mean=False))
    assert builders.count(after, aten.div.Tensor) == 0
    assert torch.equal(run(after)[0][1], (tensors()[1] * 2).to(torch.bfloat16).float())


def test_low_rank_sends_factors_and_remembers():
    after = compressed(RANK_2, bucketed())
    factors = {"P": (16 + 10) * 2, "Q": (12 + 20) * 2}
    assert sent(after) == [
        ("uncompressed", torch.float32, 4 * 5, ("b",)),
        ("P", torch.float32, 4 * factors["P"], ("a", "c")),
        ("Q", torch.float32, 4 * factors["Q"], ("a", "c")),
    ]
    memory = [(one.name, one.shape, one.bucket) for one in after.inputs if one.kind is InputKind.COMM]
    assert memory == [
        *((f"powersgd.error.{name}", shape, 0) for name, shape in SHAPES.items()),
        ("powersgd.q.a", (12, 2), 0), ("powersgd.q.c", (20, 2), 0),
    ]  # fmt: skip
    writes = [(one.name, one.target) for one in after.outputs if one.kind is OutputKind.WRITE]
    assert writes == [(name, 3 + index) for index, (name, _, _) in enumerate(memory)]


@pytest.mark.parametrize(
    ("how", "names"),
    [
        (replace(RANK_2, error_feedback=False), ["powersgd.q.a", "powersgd.q.c"]),
        (replace(RANK_2, warm_start=False), [f"powersgd.error.{name}" for name in SHAPES]),
        (replace(RANK_2, warm_start=False, error_feedback=False), []),
    ],
)
def test_what_is_not_kept_is_not_written(how, names):
    after = compressed(how, bucketed())
    assert [one.name for one in after.outputs if one.kind is OutputKind.WRITE] == names
    inputs = [one.name for one in after.inputs if one.kind is InputKind.COMM]
    assert set(names) | {"powersgd.q.a", "powersgd.q.c"} == set(inputs)


def test_a_transposed_gradient_is_the_same_matrix():
    """It lies in the bucket in another order; the numbers are those of the matrix it is."""
    plain, other = run(compressed(RANK_2, bucketed())), run(compressed(RANK_2, bucketed(turned)))
    assert builders.same(plain, other)
    assert other[0][2].stride() == (1, 10)


def test_every_rank_of_a_group_of_one_gets_its_own_gradient_less_the_error():
    program = compressed(RANK_2, bucketed(mean=False))
    nothing = [torch.zeros(shape) for shape in SHAPES.values()]
    qs = [torch.randn(12, 2), torch.randn(20, 2)]
    returned, memory = run(program, [*nothing, *qs])
    # The mesh says 2 ranks, so means are half of what arrives here, and sums are twice the means.
    for found, error, x in zip(returned, memory, tensors(), strict=False):
        assert torch.equal(error, x * 2 - found / 2)


def test_parts_are_read_without_a_copy_of_the_bucket():
    after = compressed(RANK_2, bucketed())
    cats = [node for node in after.graph.nodes if node.target is aten.cat.default]
    assert not [cat for cat in cats if any(user.target is aten.split_with_sizes.default for user in cat.users)
                and cat.args[0][0].target is not aten.reshape.default]  # fmt: skip


def test_messages_start_with_the_bucket_and_are_awaited_with_it():
    def fn(a, b, c):
        one = gradient(a * 2, "a")
        behind = b.sin().cos()
        return one, behind, one * 2, c

    after = compressed(RANK_2, bucketed(fn))
    called = builders.calls(after)
    assert called.index("_c10d_functional.all_reduce.default") < called.index("aten.sin.default")
    assert called.index("aten.cos.default") < called.index("_c10d_functional.wait_tensor.default")


@pytest.mark.parametrize("how", [HALF, RANK_2], ids=["cast", "low rank"])
def test_compressed_buckets_are_left_alone(how):
    once = compressed(how, bucketed())
    assert builders.calls(compressed(how, once)) == builders.calls(once)
    assert compressed(how, once).inputs == once.inputs


@pytest.mark.parametrize("how", [HALF, RANK_2], ids=["cast", "low rank"])
def test_behind_the_last_pass_memory_is_written_and_numbers_stay(how):
    before = compressed(how, bucketed())
    after = run_passes(before, [reinplace])
    assert after.stage is Stage.SCHEDULED
    assert builders.same(run(after), run(before))


def test_two_gradients_of_one_parameter_take_turns():
    """The second reduction goes on from what the first one leaves; inputs are there once."""

    def fn(a, b, c):
        one = gradient(a * 2, "a")
        return one, gradient(one * 3, "a"), b, c

    after = compressed(RANK_2, bucketed(fn))
    assert [one.name for one in after.inputs if one.kind is InputKind.COMM] == ["powersgd.error.a", "powersgd.q.a"]
    assert len([one for one in after.outputs if one.kind is OutputKind.WRITE]) == 2
    assert builders.count(after, c10d.all_reduce.default) == 4
    single = compressed(RANK_2, bucketed(lambda a, b, c: (gradient(a * 2, "a"), b, c)))
    memory = [torch.randn(16, 12), torch.randn(12, 2)]
    (first, *_), state = run(single, memory)
    again = compressed(RANK_2, bucketed(lambda a, b, c: (gradient(a * 3, "a"), b, c)))
    inputs = [first, *tensors()[1:], *state]
    (second, *_), expected = builders.execute(again, inputs)
    found, kept = run(after, memory)
    assert builders.same(found[:2], [first, second])
    assert builders.same(kept, expected[3:])


def test_what_cannot_be_compressed_travels_as_it_is():
    both = bucketed(lambda a, b, c: (gradient(a * 2, "a"), gradient(a * 3, "a"), b, c))
    assert compressed(RANK_2, both).history[-1].notes == (
        "bucket 0 travels as it is: a parameter has two gradients in it",
    )
    complex_one = bucketed(dtype=torch.complex64)
    after = compressed(HALF, complex_one)
    assert after.history[-1].notes == ("bucket 0 travels as it is: torch.complex64 is no real floating-point type",)
    assert builders.calls(after) == builders.calls(complex_one)


def test_before_the_start_gradients_travel_as_they_are():
    before = bucketed()
    after = run_passes(before, [partial(compress, how=RANK_2, started=False)])
    assert builders.calls(after) == builders.calls(before)
    assert after.history[-1].notes == (
        "the first 2 calls reduce gradients as they are; then PowerSGD of rank 2 takes 2 of 3 gradients",
    )


class EverySecond:
    """Keeps every second element."""

    def compress(self, flat: Tensor) -> Tensor:
        return flat[::2]

    def decompress(self, wire: Tensor, size: int) -> Tensor:
        return wire.repeat_interleave(2, output_size=2 * wire.numel())[:size]


def test_a_compressor_gets_a_share_of_the_mean():
    after = compressed(EverySecond(), bucketed())
    assert sent(after) == [("EverySecond", torch.float32, 4 * 199, ("a", "b", "c"))]
    flat = torch.cat([one.reshape(-1) for one in tensors()])  # 2 * 1/2
    expected = flat[::2].repeat_interleave(2)[: flat.numel()]
    assert torch.equal(torch.cat([one.reshape(-1) for one in run(after)[0]]), expected)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"compress": lambda flat: None}, "compress has to give one tensor, got NoneType"),
        ({"decompress": lambda wire, size: wire[1:]}, r"decompress\(wire, 397\) has .* elements, got \[396\]"),
        ({"compress": lambda flat: flat if flat.max() > 0 else -flat}, "cannot become part of the graph"),
        ({"compress": lambda flat: flat * FROM_ELSEWHERE}, "a tensor from elsewhere"),
    ],
)  # fmt: skip
def test_a_compressor_that_cannot_be_is_explained(fault, message):
    parts = {"compress": lambda flat: flat, "decompress": lambda wire, size: wire, **fault}
    how = type("Own", (), {name: staticmethod(one) for name, one in parts.items()})()
    with pytest.raises(ws.ConfigError, match=message):
        compressed(how, bucketed())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ws.CastCompress(torch.int8), "wants a type such as torch.bfloat16, got torch.int8"),
        (lambda: ws.CastCompress("bfloat16"), "got 'bfloat16'"),
        (lambda: ws.PowerSGD(rank=0), r"rank=...\) wants a whole number of at least 1, got 0"),
        (lambda: ws.PowerSGD(rank=True), "got True"),
        (lambda: ws.PowerSGD(seed=2**32), r"less than 2\*\*32"),
        (lambda: ws.PowerSGD(min_compression_rate=-1), "at least 0, got -1"),
        (lambda: ws.PowerSGD(orthogonalization_epsilon=float("nan")), "at least 0, got nan"),
        (lambda: ws.DDP(compress=torch.bfloat16), r"wants CastCompress\(dtype\), PowerSGD"),
    ],
)
def test_options_that_cannot_be_are_refused(make, message):
    with pytest.raises(ws.ConfigError, match=message):
        make()


@pytest.mark.parametrize("start_iter", [0, 1])
@pytest.mark.parametrize(("error_feedback", "warm_start"), [(True, True), (True, False), (False, True)])
def test_memory_needs_two_calls_before_it(start_iter, error_feedback, warm_start):
    with pytest.raises(ValueError, match="wants more than 1 with error_feedback or warm_start"):
        ws.PowerSGD(start_iter=start_iter, error_feedback=error_feedback, warm_start=warm_start)
    ws.PowerSGD(start_iter=start_iter, error_feedback=False, warm_start=False)
    ws.PowerSGD(start_iter=2, error_feedback=error_feedback, warm_start=warm_start)
