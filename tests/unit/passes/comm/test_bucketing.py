"""bucket merges gradient reductions: fewer collectives, the same bits, no cycle, no random operator moved."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.unit import builders
from tests.unit.builders import aten, c10d, gradient
from wholestep.cost.cost_model import CostModel
from wholestep.ir import node_meta, op_info
from wholestep.ir.program import Program
from wholestep.passes.comm.bucket_planner import DEPENDS, END, FULL
from wholestep.passes.comm.bucketing import bucket_gradients
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import run_passes

COST = CostModel.default("cpu+gloo")


def bucketed(fn, tensors: list[torch.Tensor], bucket_bytes: int = 1 << 20, *, mean: bool = True) -> Program:
    """The program of `fn` with buckets, which gives the same bits as without."""
    before = builders.place(builders.capture(fn, tensors), mean=mean)
    after = run_passes(before, [partial(bucket_gradients, cost=COST, bucket_bytes=bucket_bytes)])
    results = []
    for one in (before, after, run_passes(after, [reinplace])):
        torch.manual_seed(0)
        results.append(builders.execute(one, tensors))
    assert builders.same(results[1], results[0])
    assert builders.same(results[2], results[0])
    return after


def starts(program: Program) -> list[node_meta.Bucket | None]:
    return [node_meta.bucket(node) for node in program.graph.nodes if op_info.is_collective(node)]


def three(a, b, c):
    return tuple(gradient(x * 2, name) for x, name in ((a, "a"), (b, "b"), (c, "c")))


THREE = [torch.randn(4, 3), torch.randn(5), torch.randn(())]


@pytest.mark.parametrize("mean", [True, False])
def test_one_reduction_for_all(mean):
    after = bucketed(three, THREE, mean=mean)
    assert starts(after) == [node_meta.Bucket(0, ("a", "b", "c"), 4 * (12 + 5 + 1), END)]
    called = builders.calls(after)
    assert called.count("aten.cat.default") == 1
    assert called.count("aten.mul.Tensor") == 3 + mean
    assert called.count("_c10d_functional.wait_tensor.default") == 1
    assert after.history[-1].notes == (f"bucket 0: 3 gradients, 72 B; {END}",)


def test_gradients_lie_as_aligned_as_sizes_allow():
    """In falling order of the power of two in their sizes; the reduction starts where the last one to come is ready."""

    def fn(a, b, c, d):
        grads = tuple(gradient(x * 2, name) for x, name in ((a, "a"), (b, "b"), (c, "c"), (d, "d")))
        return *grads, d.sin()

    after = bucketed(fn, [torch.randn(5), torch.randn(6), torch.randn(4, 3), torch.randn(3)])
    assert [one.members for one in starts(after)] == [("c", "b", "a", "d")]
    (cat,) = after.graph.find_nodes(op="call_function", target=aten.cat.default)
    assert [node_meta.tensor(one).numel() for one in cat.args[0]] == [12, 6, 5, 3]
    called = builders.calls(after)
    assert called.index("aten.cat.default") > max(i for i, one in enumerate(called) if one == "aten.reshape.default")
    assert called.index("_c10d_functional.all_reduce.default") < called.index("aten.sin.default")


def test_order_does_not_move_gradients_of_whole_vectors():
    sizes = [torch.randn(64), torch.randn(16), torch.randn(48), torch.randn(32, 2)]

    def fn(*tensors):
        return tuple(gradient(x * 2, f"p{number}") for number, x in enumerate(tensors))

    assert [one.members for one in starts(bucketed(fn, sizes))] == [("p0", "p1", "p2", "p3")]


def test_after_reinplace_the_bucket_costs_one_copy():
    after = run_passes(bucketed(three, THREE), [reinplace])
    called = builders.calls(after)
    assert "_c10d_functional.all_reduce_.default" in called
    assert called[called.index("aten.cat.default") + 1] == "aten.mul_.Tensor"
    assert called.count("aten.clone.default") == 0


def test_a_factor_of_the_users_own_splits_no_bucket():
    def fn(a, b):
        return gradient(a * 2, "a"), gradient(b * 3, "b")

    assert len(starts(bucketed(fn, [torch.randn(3), torch.randn(3)], mean=False))) == 1


def test_a_bucket_is_closed_once_it_holds_as_many_bytes():
    after = bucketed(three, THREE, bucket_bytes=48)
    assert [(one.members, one.reason) for one in starts(after)] == [(("a",), FULL), (("b", "c"), END)]
    assert builders.count(after, aten.cat.default) == 1


def test_a_single_gradient_is_reduced_as_it_is():
    after = bucketed(lambda a: gradient(a * 2, "a"), [torch.randn(4, 3)])
    assert builders.calls(after) == [
        "aten.mul.Tensor",
        "aten.mul.Tensor",
        "_c10d_functional.all_reduce.default",
        "_c10d_functional.wait_tensor.default",
    ]
    assert starts(after) == [node_meta.Bucket(0, ("a",), 48, END)]


def test_types_do_not_mix():
    def fn(a, b, c):
        return gradient(a * 2, "a"), gradient(b * 2, "b"), gradient(c * 2, "c")

    after = bucketed(fn, [torch.randn(3), torch.randn(3).double(), torch.randn(3)])
    assert [one.members for one in starts(after)] == [("b",), ("a", "c")]


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[:2].t(),
        lambda x: x.expand(2, 4, 6).permute(1, 0, 2),
        lambda x: x[:0],
        lambda x: x.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last) + 0,
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_gradients_that_are_not_contiguous(layout, alone):
    def fn(x, y):
        grads = gradient(layout(x * 2), "x"), *(() if alone else (gradient(y * 2, "y"),))
        return tuple(grad * 1 for grad in grads)

    after = bucketed(fn, [torch.randn(4, 6), torch.randn(3)])
    (collective,) = after.graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    assert node_meta.tensor(collective).is_contiguous()


def test_a_dense_gradient_keeps_its_strides_and_is_not_copied():
    after = bucketed(lambda x: gradient((x * 2).t(), "x"), [torch.randn(4, 6)])
    assert node_meta.tensor(after.results[0]).stride() == (1, 6)
    assert builders.count(after, aten.clone.default, aten.contiguous.default) == 0


def test_the_reduction_starts_when_its_last_member_is_ready():
    def fn(a, b):
        first = gradient(a * 2, "a")
        second = gradient(b * 2, "b")
        meanwhile = (a @ a.t()).sum()
        return first, second, meanwhile

    called = builders.calls(bucketed(fn, [torch.randn(4, 3), torch.randn(5)]))
    start, wait = (called.index(f"_c10d_functional.{name}.default") for name in ("all_reduce", "wait_tensor"))
    assert start < called.index("aten.mm.default") < called.index("aten.sum.default") < wait


def test_the_wait_stands_before_the_first_reader():
    def fn(a, b):
        first, second = gradient(a * 2, "a"), gradient(b * 2, "b")
        meanwhile = a.exp()
        norm = first.norm()
        return meanwhile.sin(), norm, second

    called = builders.calls(bucketed(fn, [torch.randn(4, 3), torch.randn(5)]))
    wait = called.index("_c10d_functional.wait_tensor.default")
    assert called.index("aten.exp.default") < wait < called.index("aten.linalg_vector_norm.default")


def test_a_reader_that_stood_before_the_last_member_moves():
    def fn(a, b):
        first = gradient(a * 2, "a") + 1
        return first, gradient(b * 2, "b")

    assert len(starts(bucketed(fn, [torch.randn(3), torch.randn(3)]))) == 1


def test_a_gradient_that_depends_on_a_reduction_is_not_in_its_bucket():
    def fn(a, b):
        first = gradient(a * 2, "a")
        return first, gradient(b * first, "b")

    after = bucketed(fn, [torch.randn(3), torch.randn(3)])
    assert [(one.members, one.reason) for one in starts(after)] == [(("a",), DEPENDS), (("b",), END)]


def test_buckets_of_two_types_do_not_depend_on_each_other():
    """a1 -> b1 (double), b2 (double) needs a1, a2 needs b1: merging by type alone would make a cycle."""

    def fn(x, y):
        a1 = gradient(x * 2, "a1")
        b1 = gradient(y * 2, "b1")
        b2 = gradient(y * a1, "b2")
        a2 = gradient(x * b1.float(), "a2")
        return a1, a2, b1, b2

    after = bucketed(fn, [torch.randn(3), torch.randn(3).double()])
    assert len(starts(after)) == 3


def test_random_operators_keep_their_order():
    def fn(a, b):
        first = gradient(a * 2, "a")
        noise = torch.rand_like(first)  # would be delayed with its bucket, past the next one
        other = torch.rand(3)
        return first + noise, gradient(b * 2, "b"), other

    after = bucketed(fn, [torch.randn(3), torch.randn(3)])
    assert [one.members for one in starts(after)] == [("a",), ("b",)]


def test_other_collectives_are_left_alone():
    def fn(a, b):
        loss = op_info.WAIT(c10d.all_reduce.default(a.sum(), "sum", builders.world_group()))
        return loss, gradient(a * 2, "a"), gradient(b * 2, "b")

    after = bucketed(fn, [torch.randn(3), torch.randn(3)])
    assert starts(after)[0] is None
    assert len(starts(after)) == 2


def test_buckets_are_numbered_as_they_start():
    def fn(*xs):
        return tuple(gradient(x * 2, str(index)) for index, x in enumerate(xs))

    tensors = [torch.randn(8) if index % 2 else torch.randn(8).double() for index in range(10)]
    after = bucketed(fn, tensors, bucket_bytes=100)
    assert [one.index for one in starts(after)] == list(range(len(starts(after))))
    assert sorted(name for one in starts(after) for name in one.members) == sorted(map(str, range(10)))


def test_a_product_that_someone_else_reads_stays_for_them():
    def fn(a, b):
        return gradient(a * 2, "a"), gradient(b * 2, "b")

    program = builders.place(builders.capture(fn, [torch.randn(3), torch.randn(3)]))
    scaled = program.graph.find_nodes(op="call_function", target=c10d.all_reduce.default)[0].args[0]
    program.graph.output_node().args = ((*program.results, scaled),)
    program = replace(program, outputs=(*program.outputs, replace(program.outputs[0], name="scaled")))
    after = run_passes(program, [partial(bucket_gradients, cost=COST, bucket_bytes=1 << 20)])
    tensors = [torch.randn(3), torch.randn(3)]
    assert builders.same(builders.execute(after, tensors), builders.execute(program, tensors))
    assert len(starts(after)) == 1


def test_nothing_to_do():
    program = builders.without_gradients(builders.capture(lambda x: x + 1, [torch.randn(3)]))
    assert run_passes(program, [partial(bucket_gradients, cost=COST, bucket_bytes=1)]).history[-1].notes == ()
